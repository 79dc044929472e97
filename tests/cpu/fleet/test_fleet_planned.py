"""A fleet under a plan behaves as one without: accumulation, clipping, slots, short batches, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_fleets import batch, fleet_of, member, parameters, same

import trainmux as tm
from trainmux.errors import BudgetError, PlanError, TrainmuxWarning
from trainmux.fleet._planned_runner import PlannedRunner
from trainmux.ir import Multiplexing

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))


def ring(fleet: tm.Fleet) -> tm.Plan:
    plan = fleet.plan(policy="mutwo")
    assert plan.record.schedule.multiplexing is Multiplexing.RING
    return plan


def test_losses_come_with_the_step_and_updates_are_not_lost() -> None:
    planned, plain = fleet_of(), fleet_of()
    ring(planned)
    for number in range(4):
        assert torch.equal(planned.step(batch(number)), plain.step(batch(number)))
    assert same(planned, plain)
    # The first step after a sync begins a new flight.
    assert torch.equal(planned.step(batch(9)), plain.step(batch(9)))
    assert torch.equal(planned.metrics["grad_norm"], plain.metrics["grad_norm"])
    assert same(planned, plain)


def test_everything_a_member_may_want_works_in_a_ring() -> None:
    def wants(number: int) -> dict[str, Any]:
        return {"clip_norm": 0.1} if number == 0 else {"clip_value": 0.01}

    fleets = [fleet_of(3, wants, accumulate=2) for _ in range(2)]
    for fleet in fleets:
        for m in fleet.members:
            m.scheduler = torch.optim.lr_scheduler.StepLR(m.optimizer, 2, 0.5)
    planned, plain = fleets
    ring(planned)
    for number in range(5):
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    assert planned.evaluate([batch(7)]) == plain.evaluate([batch(7)])
    planned.stop("m0")
    plain.stop("m0")
    for number in range(3):
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    assert planned.stopped() == plain.stopped()
    assert same(planned, plain)


def test_micro_batches_train_where_optimizer_state_has_no_room_beside_them() -> None:
    fleets = [fleet_of(4, accumulate=2), fleet_of(4, accumulate=2)]
    with pytest.raises(BudgetError) as refused:
        fleets[0].plan(1000)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    fleets[0].plan(smallest + 2000)
    for number in range(4):
        torch.testing.assert_close(*[fleet.step(batch(number)) for fleet in fleets])
    active = fleets[0]._plans._active
    assert active is not None
    carried = [steps.steps[0].state_keys() for steps, _ in active._engines.values()]
    assert () in carried, "expected a budget that is too small for all of it"
    for a, b in zip(*map(parameters, fleets), strict=True):
        torch.testing.assert_close(a, b)


def test_batches_of_other_shapes_run_in_the_same_memory() -> None:
    fleets = [fleet_of(3), fleet_of(3)]
    plan = ring(fleets[0])
    for number, size in enumerate((None, 3, 2, None, 3, 1, 4, 5, None)):
        losses = [fleet.step(batch(number, size)) for fleet in fleets]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    active = fleets[0]._plans._active
    assert active is not None
    assert active.slab_bytes <= plan.budget_bytes
    for a, b in zip(*map(parameters, fleets), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_member_that_is_not_finite_freezes_alone() -> None:
    fleets = [fleet_of(), fleet_of()]
    ring(fleets[0])
    for fleet in fleets:
        fleet.members[0].optimizer.param_groups[0]["lr"] = 1e38
    for number in range(4):
        losses = [fleet.step(batch(number)) for fleet in fleets]
        assert torch.equal(losses[0].nan_to_num(), losses[1].nan_to_num())
    assert fleets[0].stopped() == fleets[1].stopped() != {}
    assert same(*fleets)


def test_members_come_and_go_and_the_plan_is_made_anew_where_it_must() -> None:
    fleets = [fleet_of(4), fleet_of(4)]
    budget = 1 << 20
    fleets[0].plan(budget, "none")
    for number in range(2):
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    for fleet in fleets:
        fleet.replace("m1", member(7))
        fleet.drop("m2")
    first = fleets[0]._plans.plan
    assert torch.equal(*[fleet.step(batch(2)) for fleet in fleets])
    assert fleets[0]._plans.plan is first, "a free slot needs no other plan"
    for fleet in fleets:
        fleet.add(member(8))
        fleet.add(member(9))
    assert torch.equal(*[fleet.step(batch(3)) for fleet in fleets])
    second = fleets[0]._plans.plan
    assert second is not None
    assert second is not first
    assert second.budget_bytes == budget
    assert sorted(name for part in second.partition for name in part.members) == sorted(fleets[0].names)
    for fleet in fleets:
        for name in ("m0", "m3", "m8"):
            fleet.drop(name)
    assert torch.equal(*[fleet.step(batch(4)) for fleet in fleets])
    assert same(*fleets)


def with_momentum(number: int) -> tm.Member:
    made = member(number)
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1, momentum=0.9)
    return made


def test_a_member_of_a_planned_fleet_can_be_replaced_by_one_of_another_group() -> None:
    fleet, other = fleet_of(3), fleet_of(3)
    fleet.plan(budget="1GiB", policy="none")
    for each in (fleet, other):
        each.step(batch(0))
        each.replace("m1", with_momentum(1))  # of the same name
        each.replace("m2", with_momentum(4))
    assert torch.equal(fleet.step(batch(1)), other.step(batch(1)))
    assert same(fleet, other)
    for each in (fleet, other):
        assert sorted(name for group in each.summary() for name in group.members) == ["m0", "m1", "m4"]


def test_members_that_change_before_a_plan_is_used_train_by_one_made_anew() -> None:
    fleet, other = fleet_of(3), fleet_of(3)
    fleet.plan(budget="1GiB", policy="none")
    for each in (fleet, other):
        each.add(member(3))
        each.drop("m0")
        each.replace("m1", with_momentum(4))  # of another group
    for number in range(3):
        assert torch.equal(fleet.step(batch(number)), other.step(batch(number)))
    assert same(fleet, other)
    assert fleet.names == other.names == ("m4", "m2", "m3")
    assert fleet.plan(budget="1GiB", policy="none").partition  # no group without members is left over


def test_a_fleet_goes_on_without_its_plan_and_with_another() -> None:
    fleets = [fleet_of(), fleet_of()]
    ring(fleets[0])
    for number in range(8):
        if number == 2:
            fleets[0].use(None)
        if number == 4:
            fleets[0].plan(policy="none")
        if number == 6:
            ring(fleets[0])
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    assert same(*fleets)


def test_a_checkpoint_holds_what_was_in_flight(tmp_path: Path) -> None:
    fleet, other = fleet_of(), fleet_of()
    ring(fleet)
    for number in range(3):
        fleet.step(batch(number))
    fleet.save(tmp_path / "a")
    other.restore(tmp_path / "a")
    ring(other)
    assert torch.equal(fleet.step(batch(5)), other.step(batch(5)))
    assert same(fleet, other)
    other.restore(tmp_path / "a")
    assert not same(fleet, other)


def test_fit_trains_by_the_plan() -> None:
    fleets = [fleet_of(), fleet_of()]
    ring(fleets[0])
    loader = [batch(0), batch(1), batch(2)]
    histories = [
        fleet.fit(loader, epochs=2, validation=[batch(8)], progress=False, log_every=1) for fleet in fleets
    ]
    assert len(histories) == 2
    assert same(*fleets)


def test_saved_plans_are_used_by_an_equal_fleet_only(tmp_path: Path) -> None:
    fleet = fleet_of()
    plan = ring(fleet)
    plan.save(tmp_path / "plan.json")
    loaded = tm.Plan.load(tmp_path / "plan.json")
    other, plain = fleet_of(), fleet_of()
    other.use(loaded)
    for number in range(3):
        assert torch.equal(other.step(batch(number)), plain.step(batch(number)))
    with pytest.raises(PlanError, match="plan for the members"):
        fleet_of(3).use(loaded)


def test_a_budget_that_nothing_keeps_to_leaves_the_fleet_as_it_was() -> None:
    fleets = [fleet_of(), fleet_of()]
    ring(fleets[0])
    assert torch.equal(*[fleet.step(batch(0)) for fleet in fleets])
    with pytest.raises(BudgetError) as caught:
        fleets[0].plan(1000, "none")
    assert torch.equal(*[fleet.step(batch(1)) for fleet in fleets])
    assert caught.value.smallest_bytes is not None
    fleets[0].plan(caught.value.smallest_bytes, "none")
    assert torch.equal(*[fleet.step(batch(2)) for fleet in fleets])
    assert same(*fleets)


def test_a_member_can_be_copied_out_of_a_planned_fleet() -> None:
    fleet = fleet_of()
    ring(fleet)
    fleet.step(batch(0))
    taken = fleet.drop("m0")
    kept = copy.deepcopy(taken.model.state_dict())
    fleet.step(batch(1))
    assert all(torch.equal(value, kept[name]) for name, value in taken.model.state_dict().items())


def test_a_plan_that_holds_more_than_its_budget_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fleets = [fleet_of(), fleet_of()]
    budget = 64 << 20
    fleets[0].plan(budget, "none")
    held = PlannedRunner._held_bytes
    monkeypatch.setattr(PlannedRunner, "_held_bytes", lambda self: held(self) + budget)
    with pytest.warns(TrainmuxWarning, match="more than its budget"):
        losses = [fleet.step(batch(0)) for fleet in fleets]
    assert torch.equal(*losses)
    monkeypatch.setattr(PlannedRunner, "_held_bytes", held)
    first = fleets[0]._plans.plan
    assert torch.equal(*[fleet.step(batch(1)) for fleet in fleets])
    second = fleets[0]._plans.plan
    assert first is not None
    assert second is not None
    assert second.record.fixed_bytes > first.record.fixed_bytes
    assert second.budget_bytes == budget
    assert same(*fleets)


def test_a_step_can_be_watched(tmp_path: Path) -> None:
    fleets = [fleet_of(), fleet_of()]
    plan = ring(fleets[0])
    with pytest.raises(PlanError, match="trains by a plan"):
        fleets[1].watch(batch(0))
    for number in range(3):
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    seen = fleets[0].watch(batch(3))
    fleets[1].step(batch(3))
    assert same(*fleets), "a watched step is a step"
    assert seen.source == "measured"
    assert [(span.lane, span.instruction) for span in seen.spans] == [
        (span.lane, span.instruction) for span in plan.timeline.spans
    ]
    assert 0 < seen.compute_seconds <= seen.seconds
    assert all(0 <= span.start <= span.end <= seen.seconds for span in seen.spans)
    plan.report(tmp_path / "plan.html", measured=seen)
    assert "measured" in (tmp_path / "plan.html").read_text()
    with pytest.raises(PlanError, match="like the example batch"):
        fleets[0].watch(batch(4, 3))
