"""Members that differ only in numbers of their code: one more trace, one group, the results of each alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fleet_cases import (
    EXAMPLE,
    assert_same_states,
    assert_trains_alone,
    coded,
    count_work,
    mlp,
    mse,
    states_of,
    train_alone,
)
from torch import Tensor, nn

import trainmux as tm

Code = Callable[[Any, Tensor], Tensor]

# ---- traces ----------------------------------------------------------------------------------------------


def coded_member(code: Code, value: Any, loss: Any = None) -> tm.Member:
    model = coded(code, layer=mlp(), s=value, settings={"scale": value, "kept": 0.25})
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)


def num_groups(fleet: tm.Fleet) -> int:
    return len(fleet.summary())


def assert_right(fleet: tm.Fleet, make: Callable[..., tm.Member], values: Sequence[Any]) -> None:
    assert_trains_alone(fleet, lambda i: make(values[i]), [EXAMPLE] * 2)


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
    fleet = tm.Fleet([coded_member(code, value) for value in values], mse, EXAMPLE)
    assert work["traces"] == num_traces
    assert num_traces > 2 or num_groups(fleet) == 1
    assert_right(fleet, partial(coded_member, code), values)


@pytest.mark.filterwarnings("ignore:member")
@pytest.mark.parametrize("name", OTHERWISE)
def test_numbers_that_cannot_be_followed_are_traced_each(name: str) -> None:
    code, values = OTHERWISE[name]
    fleet = tm.Fleet([coded_member(code, value) for value in values], mse, EXAMPLE)
    assert_right(fleet, partial(coded_member, code), values)


def test_numbers_of_a_loss_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its closure: a temperature, a weight, a limit, and a smoothing, which torch itself takes apart."""

    def make(number: float) -> tm.Member:
        def loss(model: Any, batch: Any) -> Tensor:
            targets = (batch[1][:, 0] > 0).long()
            penalty = model.layer[0].weight.clamp(-number, number).square().sum()
            error = F.cross_entropy(model(batch[0]) / number, targets, label_smoothing=number)
            return error * (1 + number) + number * penalty

        return coded_member(lambda m, x: m.layer(x), 1.0, loss)

    work = count_work(monkeypatch)
    fleet = tm.Fleet([make(value) for value in SOME], None, EXAMPLE)
    assert (work["traces"], num_groups(fleet)) == (2, 1)
    assert_right(fleet, make, SOME)


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
    steps = [dict(zip(fleet.names, fleet.step(EXAMPLE), strict=True)) for _ in range(3)]
    assert work.total() == 0
    assert len({steps[0][name].item() for name in ("new", "newer")}) == 2
    for rate, name in ((0.15, "new"), (0.7, "newer")):
        alone = tm.Fleet([make(rate, "alone")], mse, EXAMPLE)
        for losses in steps:
            torch.testing.assert_close(losses[name], alone.step(EXAMPLE)[0], rtol=1e-12, atol=1e-14)


def test_a_second_place_that_differs_is_followed_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(setting: tuple[float, float]) -> tm.Member:
        first, second = setting
        member = coded_member(lambda m, x: m.layer(x) * m.s + m.settings["kept"], first)
        member.model.settings["kept"] = second  # type: ignore[index, operator]
        return member

    settings = [(0.1, 0.3), (0.2, 0.3), (0.4, 0.3), (0.2, 0.6), (0.7, 0.8), (0.1, 0.2)]
    work = count_work(monkeypatch)
    fleet = tm.Fleet(list(map(make, settings)), mse, EXAMPLE)
    assert work["traces"] == 3
    assert_right(fleet, make, settings)


# ---- a network with numbers that users search over -------------------------------------------------------

INPUTS, WIDTH, CLASSES = 6, 12, 5


def batch_of(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


BATCHES = [batch_of(seed) for seed in range(4)]


class Net(nn.Module):
    """A network with a number of each kind that users search over."""

    def __init__(
        self, dropout: float = 0.0, alpha: float = 1.0, slope: float = 0.1, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.down, self.up = nn.Linear(INPUTS, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.alpha, self.slope = alpha, slope

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.up(self.down(x)) * (self.alpha / 2)
        return self.last(self.dropout(self.norm(F.leaky_relu(hidden, self.slope))))


def loss_of(smoothing: float = 0.1, weight: float = 1.0, temperature: float = 1.0, limit: float = 1.0) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0]) / temperature
        penalty = model.first.weight.clamp(-limit, limit).square().sum()
        return F.cross_entropy(logits, batch[1], label_smoothing=smoothing) + weight * penalty

    return loss


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def member_of(number: int, loss: Any = None, seed: int = 0, **settings: float) -> tm.Member:
    torch.manual_seed(number)
    model = Net(**settings).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (number + 1))
    return tm.Member(model, optimizer, name=f"m{number}", seed=seed + number, loss=loss or loss_of())


def fleet_of(members: Iterable[tm.Member], **options: Any) -> tm.Fleet:
    return tm.Fleet(list(members), None, BATCHES[0], precision="fp64", **options)


class Frozen(nn.BatchNorm1d):
    """Batch norm that keeps its statistics while it trains."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


class Layered(nn.Module):
    """Layers with a number each: ``names`` has where."""

    names = ("eps", "momentum", *("eps",) * 6, "max_val", "threshold", "value", "lambd")

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 8), nn.Linear(16, CLASSES)
        self.layers = nn.Sequential(
            nn.BatchNorm1d(4, eps=value),
            nn.BatchNorm1d(4, momentum=value),
            nn.BatchNorm1d(4, eps=value, affine=False, track_running_stats=False),
            Frozen(4, eps=value).eval(),
            nn.InstanceNorm1d(4, eps=value, affine=True),
            nn.GroupNorm(2, 4, eps=value),
            nn.RMSNorm(2, eps=value),
            nn.LayerNorm(2, eps=value),
            nn.Hardtanh(-1.0, value * 3),
            nn.Threshold(value - 1, value - 1.1),
            nn.ConstantPad1d(1, value),
            nn.Softshrink(value / 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x).reshape(-1, 4, 2)).flatten(1))


@pytest.mark.usefixtures("built_once")
def test_layers_that_differ_in_numbers_train_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in plain torch, in training and evaluation. A number that changes while they train is used from the
    next step on, without another program: bitwise as in a fleet that is built with it."""

    def make(number: int) -> tm.Member:
        torch.manual_seed(number)
        model = Layered(0.1 * (number + 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (number + 1))
        return tm.Member(model, optimizer, name=f"m{number}", loss=plain_loss)

    fleet = fleet_of(map(make, range(3)))
    assert num_groups(fleet) == 1
    alone = [make(number) for number in range(3)]
    losses = torch.tensor([train_alone(member, BATCHES) for member in alone], dtype=torch.float64)
    found = torch.stack([fleet.step(batch) for batch in BATCHES], 1)
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-13)
    fleet.sync()
    for ours, theirs in zip(fleet.members, alone, strict=True):  # some biases have no gradient but rounding
        states = (member.model.state_dict() for member in (ours, theirs))
        torch.testing.assert_close(*states, rtol=1e-11, atol=1e-12)
    scores = fleet.evaluate(BATCHES[:1])
    for member in fleet.members:
        member.model.eval()
        assert scores[str(member.name)]["loss"] == pytest.approx(plain_loss(member.model, BATCHES[0]).item())
        member.model.train()

    live, built = fleet_of(map(make, range(3))), [make(number) for number in range(3)]
    for model in (live.members[1].model, built[1].model):
        for layer, name in zip(model.layers, Layered.names, strict=True):
            setattr(layer, name, 0.45)
    other = fleet_of(built)
    work = count_work(monkeypatch)
    with pytest.raises(tm.MemberChangedError):
        live.step(BATCHES[0])
    live.refresh("m1")
    for batch in BATCHES:
        assert torch.equal(live.step(batch), other.step(batch))
    assert work["fusions"] == 0
    assert_same_states(states_of(live), states_of(other))


@pytest.mark.usefixtures("built_once")
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.extensive), "bf16"])
def test_numbers_as_inputs_round_as_literals_do(precision: str) -> None:
    """A fleet of one has literals; its results in lower precision are those of a fleet with inputs."""

    def make(number: int) -> tm.Member:
        member = member_of(
            number, loss_of(smoothing=0.1 * (number + 1), weight=0.3 + number), alpha=3 + number
        )
        member.model.float()
        return member

    batches = [(inputs.float(), targets) for inputs, targets in BATCHES]
    together = tm.Fleet([make(number) for number in range(2)], None, batches[0], precision=precision)
    alone = [tm.Fleet([make(number)], None, batches[0], precision=precision) for number in range(2)]
    assert num_groups(together) == 1
    for batch in batches[:2]:
        single = torch.cat([one.step(batch) for one in alone])
        torch.testing.assert_close(together.step(batch), single, rtol=3e-6, atol=1e-6)


def test_a_number_in_which_all_agreed_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more program, and none after that."""
    fleet = fleet_of([member_of(number, dropout=0.1) for number in range(2)])
    fleet.step(BATCHES[0])
    work = count_work(monkeypatch)
    for rate, num_fusions in ((0.2, 1), (0.3, 1), (0.1, 1)):
        fleet.members[0].model.dropout.p = rate
        fleet.refresh("m0")
        fleet.step(BATCHES[1])
        assert work["fusions"] == num_fusions


@pytest.mark.usefixtures("built_once")
def test_members_come_go_and_evaluate_with_numbers_of_their_own() -> None:
    def make(number: int) -> tm.Member:
        return member_of(number, loss_of(temperature=1.0 + number), alpha=1.0 + number)

    fleet = fleet_of([make(0), make(1)])
    fleet.add(make(2))
    fleet.replace("m0", make(3))
    fleet.drop("m1")
    fleet.add(make(4))
    assert num_groups(fleet) == 1
    assert_trains_alone(fleet, lambda i: make(int(fleet.names[i][1:])), BATCHES)
    scores = fleet.evaluate(BATCHES)
    for member in fleet.members:
        member.model.eval()
        with torch.no_grad():
            assert member.loss is not None
            plain = sum(member.loss(member.model, batch).item() for batch in BATCHES) / len(BATCHES)
        member.model.train()
        assert scores[str(member.name)]["loss"] == pytest.approx(plain, rel=1e-12)


@pytest.mark.usefixtures("built_once")
def test_with_and_without_a_plan_batches_of_any_size_use_the_members_numbers() -> None:
    def make(number: int) -> tm.Member:
        loss = loss_of(smoothing=0.1 * (number + 1), weight=0.1 * (number + 1))
        return member_of(number, loss, alpha=1.0 + number)

    batches = [*BATCHES, batch_of(9, size=3), BATCHES[0], batch_of(10, size=3)]
    fleet, reference = (fleet_of(map(make, range(2))) for _ in range(2))
    fleet.plan(policy="none")
    for each in (fleet, reference):
        assert_trains_alone(each, make, batches)
        each.step(BATCHES[1])
        each.members[0].model.alpha = 7.0
        each.refresh("m0")
    torch.testing.assert_close(fleet.step(BATCHES[0]), reference.step(BATCHES[0]), rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("built_once")
def test_a_checkpoint_of_members_with_numbers_is_restored(tmp_path: Path) -> None:
    def make() -> list[tm.Member]:
        return [member_of(number, dropout=0.1 * (number + 1)) for number in range(2)]

    fleet, other = fleet_of(make()), fleet_of(make())
    fleet.step(BATCHES[0])
    fleet.save(tmp_path)
    other.restore(tmp_path)
    assert torch.equal(fleet.step(BATCHES[1]), other.step(BATCHES[1]))


def test_explain_says_what_is_free_and_what_splits() -> None:
    members = [
        member_of(0, dropout=0.1),
        member_of(1, dropout=0.2),
        member_of(2, dropout=0.0),
    ]
    wide = nn.Sequential(nn.Linear(INPUTS, 3), nn.Linear(3, CLASSES)).double()
    other = tm.Member(
        wide, torch.optim.SGD(wide.parameters(), lr=0.1), loss=lambda m, b: F.cross_entropy(m(b[0]), b[1])
    )
    with pytest.warns(tm.TrainmuxWarning, match="m2 have parameters .* explain"):
        fleet = fleet_of([*members, other])
    first, second, third = fleet.summary()
    assert first.members == ("m0", "m1")
    assert [sorted(number.values) for number in first.numbers if "mul" in number.locations[0]] == [
        sorted((1 / 0.9, 1 / 0.8))
    ]
    assert "test_fleet_numbers.py" in second.split_because
    assert "parameter 0.weight" in third.split_because
    text = fleet.explain()
    assert "per member: " in text
    assert second.split_because in text
