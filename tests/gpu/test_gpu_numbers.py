"""Numbers of the members' code as inputs of captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainmux as tm
from trainmux.engine import CudaGraphEngine

RATES = (0.1, 0.2, 0.3, 0.4)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)


def member(number: int, rate: float) -> tm.Member:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(rate), nn.Linear(64, 4))
    smoothing = 0.05 * (number + 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tm.Member(model, optimizer, name=f"m{number}", seed=number, loss=loss)


def fleet_of(rates: tuple[float, ...], precision: str, lowering: str) -> tm.Fleet:
    members = [member(number, rate) for number, rate in enumerate(rates)]
    return tm.Fleet(members, None, batch(0), device="cuda", precision=precision, lowering=lowering)


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_number_changes_without_another_capture(
    monkeypatch: pytest.MonkeyPatch, precision: str, lowering: str
) -> None:
    """The next step uses it, bit for bit as a fleet that was built with it."""
    changed, built = (
        fleet_of(RATES, precision, lowering),
        fleet_of((0.1, 0.45, 0.3, 0.4), precision, lowering),
    )
    assert len(changed.summary()) == 1
    captures = []
    capture = CudaGraphEngine._capture
    monkeypatch.setattr(
        CudaGraphEngine, "_capture", lambda *args, **kw: (captures.append(1), capture(*args, **kw))[1]
    )
    built.step(batch(0))
    changed.members[1].model[2].p = 0.45
    changed.refresh("m1")
    first = changed.step(batch(0))
    num_captures = len(captures)
    assert num_captures
    changed.members[1].model[2].p = 0.2
    changed.refresh("m1")
    changed.step(batch(1))
    changed.members[1].model[2].p = 0.45
    changed.refresh("m1")
    for number in range(2, 5):
        changed.step(batch(number))
    assert len(captures) == num_captures
    other = fleet_of((0.1, 0.45, 0.3, 0.4), precision, lowering)
    assert torch.equal(first, other.step(batch(0)))


def test_a_planned_fleet_follows_a_changed_number() -> None:
    planned, plain = (fleet_of(RATES, "fp32", "aten") for _ in range(2))
    planned.plan(time_limit=5)
    for number in range(4):
        if number == 2:
            for fleet in (planned, plain):
                fleet.members[0].model[2].p = 0.6
                fleet.refresh("m0")
        ours, theirs = planned.step(batch(number)), plain.step(batch(number))
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    scores = [
        fleet.evaluate([batch(9)], lambda model, b: F.cross_entropy(model(b[0]), b[1]))
        for fleet in (planned, plain)
    ]
    for name, score in scores[0].items():
        assert score["loss"] == pytest.approx(scores[1][name]["loss"], rel=2e-5)
