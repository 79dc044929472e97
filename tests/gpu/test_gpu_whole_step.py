"""Steps that are whole, evaluations that draw, and default devices, with captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainmux as tm
from trainmux.engine import CudaGraphEngine
from trainmux.errors import BudgetError


class Noisy(nn.Module):
    """Draws in training and evaluation, and makes a tensor where torch's default says."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, hidden), nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh())
        return y + torch.randn_like(y) + torch.ones(2, device=x.device)


class Shifted(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh())
        return y + torch.ones(2)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 4, generator=generator, device="cpu")
    return inputs, torch.randn(8, 2, generator=generator, device="cpu")


def fleet_of(kind: type[Noisy] = Noisy, engine: str = "cuda_graphs", **options: Any) -> tm.Fleet:
    members = []
    for i in range(4):
        torch.manual_seed(i)
        model = kind(5 + i % 2)  # two groups
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        members.append(tm.Member(model, optimizer, name=f"m{i}", seed=i))
    options = {"device": "cuda", "deterministic": True, "lowering": "aten", **options}
    return tm.Fleet(members, loss, batch(0), engine=engine, **options)


def states(fleet: tm.Fleet) -> list[Tensor]:
    fleet.sync()
    return [value.clone() for member in fleet.members for value in member.model.state_dict().values()]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, got, expected))


def test_all_groups_are_captured_before_any_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second group's capture finds no memory: the first has not changed, and both go on later."""
    fleet, other = fleet_of(), fleet_of()
    before = states(fleet)
    captures = 0
    capture = CudaGraphEngine._capture

    def failing(*arguments: Any) -> Any:
        nonlocal captures
        captures += 1
        if captures == 2:
            raise torch.OutOfMemoryError("no more")
        return capture(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(CudaGraphEngine, "_capture", failing)
        with pytest.raises(BudgetError):
            fleet.step(batch(0))
    assert captures == 2
    assert_same(states(fleet), before)
    for number in range(3):
        assert torch.equal(fleet.step(batch(number)), other.step(batch(number)))
    assert_same(states(fleet), states(other))


def test_replays_of_an_evaluation_draw_by_its_batches() -> None:
    graphs, reference = fleet_of(), fleet_of(engine="reference")
    loader = [batch(number) for number in range(3)]
    first = graphs.evaluate(loader)
    assert first == reference.evaluate(loader)
    graphs.step(batch(0))
    reference.step(batch(0))
    again = graphs.evaluate(loader)
    assert again == reference.evaluate(loader) == graphs.evaluate(loader)
    one = [found["loss"] for found in graphs.evaluate([batch(0)]).values()]
    two = [found["loss"] for found in graphs.evaluate([batch(0)] * 2).values()]
    assert all(abs(a - b) > 1e-6 for a, b in zip(one, two, strict=True))


def test_code_that_makes_tensors_on_the_default_device_trains_on_it() -> None:
    with torch.device("cuda"):
        inside = fleet_of(Shifted)
        losses = [inside.step(batch(number)) for number in range(2)]
    assert all(value.isfinite().all() for value in losses)
    inside.step(batch(2))  # outside of it, and on a batch of another size: traced anew
    inside.step(tuple(leaf[:3] for leaf in batch(3)))


@pytest.mark.parametrize("name", ["autocast", "inference mode"])
def test_a_captured_fleet_is_the_same_inside(name: str) -> None:
    surroundings = torch.autocast("cuda", torch.bfloat16) if name == "autocast" else torch.inference_mode()
    outside = fleet_of()
    losses = [outside.step(batch(number)) for number in range(3)]
    inside = fleet_of()
    with surroundings:
        got = [inside.step(batch(number)) for number in range(3)]
    assert_same(got, losses)
    assert_same(states(inside), states(outside))
