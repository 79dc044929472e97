"""Numbers of members' code are followed into one graph: further members cost no trace, and are right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fleet_cases import coded, count_work, mlp, mse, vectors
from torch import Tensor

import trainmux as tm

EXAMPLE = vectors()
Code = Callable[[Any, Tensor], Tensor]


def member_of(code: Code, value: Any, loss: Any = None) -> tm.Member:
    model = coded(code, layer=mlp(), s=value, settings={"scale": value, "kept": 0.25})
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)


def assert_right(fleet: tm.Fleet, members: Sequence[tm.Member]) -> None:
    """Compare losses and gradients, as the updates show them, with plain torch's."""
    for _ in range(2):
        losses = fleet.step(EXAMPLE)
        for ours, member in zip(losses, members, strict=True):
            member.optimizer.zero_grad()
            value = (member.loss or mse)(member.model, EXAMPLE)
            value.backward()
            member.optimizer.step()
            torch.testing.assert_close(ours, value.detach(), rtol=1e-12, atol=1e-14)


class Scaled(torch.autograd.Function):
    """Reads its number in the backward pass, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


def by_case(model: Any, x: Tensor) -> Tensor:
    return model.layer(x) * (model.s if model.s > 0.5 else 2 * model.s + 1)


def by_kind(model: Any, x: Tensor) -> Tensor:
    return model.layer(x) * (model.s if isinstance(model.s, float) else 3.0)


def averaged(model: Any, x: Tensor) -> Tensor:
    mean, variance = x.new_zeros(2), x.new_ones(2)
    out = F.batch_norm(model.layer(x), mean, variance, training=True, momentum=model.s, eps=model.s)
    return out * variance + mean


def halves(model: Any, x: Tensor) -> Tensor:
    return model.layer(x)[:, : model.s] * 2


SOME = (0.1, 0.2, 0.35, 0.45)
FOLLOWED: dict[str, tuple[Code, Sequence[Any], int]] = {
    "arithmetic": (lambda m, x: m.layer(x) * (1 - m.s / 3) ** 2 + -abs(m.s), SOME, 2),
    "twice": (lambda m, x: m.layer(x).mul(m.s) + m.settings["scale"], SOME, 2),
    "slope": (lambda m, x: F.leaky_relu(m.layer(x), m.s).clamp(-m.s, 1 + m.s), SOME, 2),
    "power": (lambda m, x: m.layer(x).exp() ** m.s, SOME, 2),
    "epsilon": (lambda m, x: F.layer_norm(m.layer(x), (2,), eps=m.s), SOME, 2),
    "momentum": (averaged, SOME, 2),
    "norms": (lambda m, x: F.group_norm(F.rms_norm(m.layer(x), (2,), eps=m.s), 1, eps=m.s), SOME, 2),
    "threshold": (lambda m, x: F.pad(F.threshold(m.layer(x), m.s - 1, m.s), (1, -1), value=m.s), SOME, 2),
    "whole numbers": (lambda m, x: m.layer(x) * (m.s / 8), (4, 2, 16, 32), 2),
    "the smaller": (lambda m, x: m.layer(x) * min(m.s, 0.9), SOME, 2),
    "branches": (by_case, (0.1, 0.2, 0.7, 0.8, 0.3, 0.9), 4),
    "special": (lambda m, x: m.layer(x) * m.s, (1.0, 0.1, 0.2, 0.3, 2.0), 3),
}
"""Code, values of its number, and traces that they need: one as it is, and one that follows it."""

OTHERWISE: dict[str, tuple[Code, Sequence[Any]]] = {
    "math": (lambda m, x: m.layer(x) * math.sqrt(m.s), SOME),
    "math that decides": (lambda m, x: m.layer(x) * (2.0 if math.exp(m.s) > 1.3 else 3.0), SOME),
    "numpy": (lambda m, x: m.layer(x) * float(np.exp(m.s)), SOME),
    "rounding": (lambda m, x: m.layer(x) * round(m.s, 1), SOME),
    "text": (lambda m, x: m.layer(x) * float(f"{m.s:.1f}"), SOME),
    "key": (lambda m, x: m.layer(x) * {0.1: 2.0, 0.2: 3.0}.get(m.s, 4.0), SOME),
    "kind": (by_kind, SOME),
    "chance": (lambda m, x: m.layer(x) * (2.0 if 3 * m.s > 1 else m.s), (0.1, 0.4, 0.2, 0.45, 0.3)),
    "order of a norm": (lambda m, x: F.normalize(m.layer(x), p=1 + m.s), SOME),
    "size": (lambda m, x: F.interpolate(m.layer(x)[None], scale_factor=10 * m.s).mean((0, 2))[:, None], SOME),
    "slice": (halves, (2, 3, 5)),
    "tensor": (lambda m, x: m.layer(x) * torch.tensor(m.s, dtype=x.dtype), SOME),
    "backward": (lambda m, x: Scaled.apply(m.layer(x), m.s), SOME),
}
"""Code whose numbers cannot be followed, or not that far."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_members_that_differ_in_numbers_need_one_more_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, values, num_traces = FOLLOWED[name]
    work = count_work(monkeypatch)
    fleet = tm.Fleet([member_of(code, value) for value in values], mse, EXAMPLE)
    assert work["traces"] == num_traces
    assert_right(fleet, [member_of(code, value) for value in values])


@pytest.mark.filterwarnings("ignore:member")
@pytest.mark.parametrize("name", OTHERWISE)
def test_numbers_that_cannot_be_followed_are_traced_each(name: str) -> None:
    code, values = OTHERWISE[name]
    fleet = tm.Fleet([member_of(code, value) for value in values], mse, EXAMPLE)
    assert_right(fleet, [member_of(code, value) for value in values])


def test_numbers_of_a_loss_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its closure; smoothing is taken apart by torch itself."""

    def make(smoothing: float) -> tm.Member:
        def loss(model: Any, batch: Any) -> Tensor:
            targets = (batch[1][:, 0] > 0).long()
            return F.cross_entropy(model(batch[0]), targets, label_smoothing=smoothing) * (1 + smoothing)

        return member_of(lambda m, x: m.layer(x), 1.0, loss)

    work = count_work(monkeypatch)
    fleet = tm.Fleet([make(value) for value in SOME], None, EXAMPLE)
    assert work["traces"] == 2
    assert_right(fleet, [make(value) for value in SOME])


def test_a_newcomer_with_another_number_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, which draws: its results are those of a fleet with nobody else."""

    def make(rate: float, name: str) -> tm.Member:
        model = mlp(dropout=rate)
        return tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name, seed=7)

    fleet = tm.Fleet([make(rate, f"m{rate}") for rate in SOME], mse, EXAMPLE)
    fleet.step(EXAMPLE)
    work = count_work(monkeypatch)
    fleet.replace("m0.2", make(0.6, "new"))
    fleet.drop("m0.1")
    fleet.add(make(0.7, "newer"))
    fleet.members[0].model[2].p = 0.15
    fleet.refresh("new")
    assert work.total() == 0
    losses = dict(zip(fleet.names, fleet.step(EXAMPLE), strict=True))
    assert work.total() == 0
    for rate, name in ((0.15, "new"), (0.7, "newer")):
        (alone,) = tm.Fleet([make(rate, "alone")], mse, EXAMPLE).step(EXAMPLE)
        torch.testing.assert_close(losses[name], alone, rtol=1e-12, atol=1e-14)


def test_a_second_place_that_differs_is_followed_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(first: float, second: float) -> tm.Member:
        member = member_of(lambda m, x: m.layer(x) * m.s + m.settings["kept"], first)
        member.model.settings["kept"] = second  # type: ignore[index, operator]
        return member

    settings = [(0.1, 0.3), (0.2, 0.3), (0.4, 0.3), (0.2, 0.6), (0.7, 0.8), (0.1, 0.2)]
    work = count_work(monkeypatch)
    fleet = tm.Fleet([make(*setting) for setting in settings], mse, EXAMPLE)
    assert work["traces"] == 3
    assert_right(fleet, [make(*setting) for setting in settings])
