"""An evaluation by a plan: the bits of one without, nothing changed by it, the budget kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import states_of
from torch import Tensor, nn

import trainmux as tm
from trainmux.engine import ForwardProgram
from trainmux.errors import BudgetError
from trainmux.fleet._other_steps import PlannedPrograms
from trainmux.fleet._planned_runner import PlannedRunner
from trainmux.fleet._planning import FIXED_BYTES
from trainmux.ir import Prefetch

pytestmark = pytest.mark.usefixtures("built_once")

DEVICE = "a100-40gb"
"""Plans are worked out for it: measuring takes longer, and may have another outcome each time."""

WIDTH = 64
SIZES = (4, 4, 3)


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))


class Normed(nn.Module):
    """Batch norm and dropout, and where ``doubles`` is set another graph in evaluation."""

    def __init__(self, *, doubles: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, WIDTH)
        self.doubles = doubles

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.drop(self.norm(self.first(x)).relu()))
        return 2 * y if self.doubles and not self.training else y


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch(number: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(
        0, WIDTH, (size,), generator=generator
    )


LOADER = [batch(number, size) for number, size in enumerate(SIZES)]


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def fleet_of(builders: list[Any], make_optimizer: Any = torch.optim.AdamW, **options: Any) -> tm.Fleet:
    members = []
    for number, build in enumerate(builders):
        torch.manual_seed(number)
        model = build().train()
        optimizer = make_optimizer(model.parameters(), lr=1e-2 * (number + 1))
        members.append(tm.Member(model, optimizer, name=f"m{number}", seed=number))
    return tm.Fleet(members, loss, batch(0), deterministic=True, **options)


def plan_for(fleet: tm.Fleet, policy: str, slab_bytes: int = 8 << 20) -> tm.Plan:
    plan = fleet.plan(FIXED_BYTES + slab_bytes, policy, device=DEVICE, max_partitions=2)
    fleet.use(plan)
    return plan


def tight(fleet: tm.Fleet, more_bytes: int) -> tm.Plan:
    """By a budget that is so much larger than the smallest."""
    with pytest.raises(BudgetError) as caught:
        plan_for(fleet, "auto", 1000)
    assert caught.value.smallest_bytes is not None
    return plan_for(fleet, "auto", caught.value.smallest_bytes - FIXED_BYTES + more_bytes)


def num_states_in_slab(fleet: tm.Fleet) -> int:
    """Tensors of optimizer state that are on the device."""
    slab = active(fleet)._slab.untyped_storage().data_ptr()
    states = [state for group in active(fleet).groups for state in group.state.states.values()]
    return sum(state.untyped_storage().data_ptr() == slab for state in states)


def active(fleet: tm.Fleet) -> PlannedRunner:
    found = fleet._plans._active
    assert found is not None
    return found


def forwards(fleet: tm.Fleet) -> list[PlannedPrograms]:
    known = [steps for steps, _ in active(fleet)._engines.values()]
    return [steps for steps in known if isinstance(steps.steps[0], ForwardProgram)]


def state_of(fleet: tm.Fleet) -> list[Tensor]:
    return [tensor for state in states_of(fleet).values() for tensor in state.values()]


Metrics = dict[str, dict[str, float]]


def undisturbed(fleet: tm.Fleet, path: Path, evaluate: Callable[[], Metrics]) -> Metrics:
    """What ``evaluate`` returns, once training has been seen to go on as if it had not been called."""

    def goes_on() -> list[Tensor]:
        for number in range(20, 22):
            fleet.step(batch(number))
        return state_of(fleet)

    fleet.save(path)
    before, expected = state_of(fleet), goes_on()
    fleet.restore(path)
    found = evaluate()
    assert all(torch.equal(a, b) for a, b in zip(state_of(fleet), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(goes_on(), expected, strict=True))
    fleet.restore(path)
    return found


def without_plan(fleet: tm.Fleet) -> Metrics:
    fleet.use(None)
    return fleet.evaluate(LOADER)


def first_weight(model: nn.Module, _: Any) -> dict[str, Tensor]:
    """A metric that nothing has to be computed for: a view of the state."""
    return {"weight": next(model.parameters()).flatten()[0]}


def test_a_planned_evaluation_has_the_same_bits_and_disturbs_nothing(tmp_path: Path) -> None:
    fleet = fleet_of([mlp, Normed], momentum)
    plan = plan_for(fleet, "none")
    fleet.step(batch(10))
    slab, metrics = active(fleet)._slab, fleet.metrics
    places = [tensor.data_ptr() for group in active(fleet).groups for tensor in group.state.stacked()]
    found = fleet.evaluate(LOADER)
    assert len(forwards(fleet)) == len(set(SIZES))
    assert [t.data_ptr() for group in active(fleet).groups for t in group.state.stacked()] == places
    assert torch.equal(fleet.metrics["grad_norm"], metrics["grad_norm"])
    assert undisturbed(fleet, tmp_path / "a", lambda: fleet.evaluate(LOADER)) == found
    weights = fleet.evaluate(LOADER[:1], first_weight)
    assert active(fleet)._slab is slab, "an evaluation needs no more than a step"
    assert active(fleet).slab_bytes <= plan.budget_bytes - FIXED_BYTES
    assert without_plan(fleet) == found
    assert fleet.evaluate(LOADER[:1], first_weight) == weights


@pytest.mark.parametrize("swaps", [False, True], ids=["parameters fit", "parameters do not fit"])
def test_state_that_the_slab_has_no_room_for_waits_on_the_host(swaps: bool, tmp_path: Path) -> None:
    """Optimizer state stays there; where not even the parameters fit, they come in as they are needed."""
    fleet = fleet_of([deep] * 4, torch.optim.SGD if swaps else torch.optim.Adagrad, width=1)
    plan = tight(fleet, 0 if swaps else 170_000)  # with so much, some optimizer state is on the device
    fleet.step(batch(10))
    planned = active(fleet)
    state = [tensor for group in planned.groups for tensor in group.state.stacked()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in state) > planned.slab_bytes
    assert (num_states_in_slab(fleet) > 0) != swaps

    def evaluate() -> Metrics:
        with pytest.raises(BudgetError, match="evaluate on smaller batches"):
            fleet.evaluate([batch(0, 4096)])
        found = fleet.evaluate(LOADER)
        assert num_states_in_slab(fleet) == 0
        return found

    found = undisturbed(fleet, tmp_path / "a", evaluate)
    assert len(forwards(fleet)) == len(set(SIZES))
    for each in forwards(fleet):
        assert all(program.carried is None for program in each.steps)
        assert any(isinstance(i, Prefetch) for i in each.program.body.instructions) == swaps
    assert planned.slab_bytes <= plan.budget_bytes - FIXED_BYTES
    assert without_plan(fleet) == found


def test_members_that_differ_in_evaluation_run_their_own_graphs_by_a_plan_that_is_wanted() -> None:
    """Before the first step, beside a group with one graph; and where a sub-array has lost its member."""
    fleet = fleet_of([Normed, lambda: Normed(doubles=True), mlp], momentum)
    expected = fleet.evaluate(LOADER)
    plan_for(fleet, "none")
    assert fleet.evaluate(LOADER[:1]) != expected
    assert len(forwards(fleet)) == 2
    assert fleet.evaluate(LOADER) == expected
    fleet._plans._request = None  # no other plan is made, which would take a measurement
    fleet.drop("m2")
    assert fleet.evaluate(LOADER) == {name: expected[name] for name in ("m0", "m1")}
    assert not fleet._plans.is_active
