"""A fleet under a plan behaves as one without: in turns, in a ring, side by side, through everything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_fleets import batch, fleet_of, member, same, train, with_momentum
from torch import nn

import trainmux as tm
from trainmux.errors import BudgetError, PlanError, TrainmuxWarning
from trainmux.fleet import _planning
from trainmux.fleet._planned_runner import PlannedRunner
from trainmux.ir import Free, Multiplexing, Profile, Wait

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.fixture(autouse=True, scope="module")
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured here is measured once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield


@pytest.fixture
def quick_side_by_side(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Profiles by which two members side by side take hardly longer than one, for ways that have them."""
    if "side by side" not in request.node.callspec.params.get("way", "side by side"):
        return
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))
    measure: Callable[..., Profile] = _planning.measure_profile

    def measured(*arguments: Any, branches: Any = (), **options: Any) -> Profile:
        found = measure(*arguments, branches=branches, **options)
        taken = sum(node.seconds for node in found.nodes)
        return replace(found, seconds_beside=tuple((number, 0.01 * taken) for number in branches))

    monkeypatch.setattr(_planning, "measure_profile", measured)


def ring(fleet: tm.Fleet) -> tm.Plan:
    plan = fleet.plan(policy="mutwo")
    assert plan.record.schedule.multiplexing is Multiplexing.RING
    return plan


WAYS: dict[str, tuple[int, str, list[int], int]] = {
    # By name: members, policy, members of each sub-array, branches.
    "turns": (2, "none", [2], 1),
    "ring": (2, "mutwo", [1, 1], 1),
    "side by side": (4, "mutwo", [2, 2], 2),
    "unevenly side by side": (5, "mutwo", [2, 3], 3),
}


def planned_and_plain(way: str, **options: Any) -> tuple[tm.Fleet, tm.Fleet, tm.Plan]:
    """The same members by a plan, and without one as the plan has them."""
    num_members, policy, widths, num_branches = WAYS[way]
    planned = fleet_of(num_members, **options)
    plain = fleet_of(num_members, **options, width=1 if num_branches > 1 else None)
    plan = planned.plan(policy=policy, max_partitions=5)
    assert sorted(len(part.members) for part in plan.partition) == widths
    assert plan.record.num_branches == num_branches
    return planned, plain, plan


@pytest.mark.usefixtures("quick_side_by_side")
@pytest.mark.parametrize("way", WAYS)
def test_everything_in_the_life_of_a_fleet_has_the_bits_of_one_without_a_plan(
    way: str, tmp_path: Path
) -> None:
    """Clipping, schedules, accumulation, evaluation, stops, newcomers, checkpoints, some steps unplanned."""
    planned, plain, plan = planned_and_plain(way, clips=True, accumulate=2)
    train(planned, plain, steps=range(3))
    places = [tensor.data_ptr() for group in planned._groups for tensor in group.state.stacked()]
    train(planned, plain, steps=[3])
    if WAYS[way][3] > 1:
        found = [tensor.data_ptr() for group in planned._groups for tensor in group.state.stacked()]
        assert found == places, "expected state to stay where it is between micro-batches"
    assert torch.equal(planned.metrics["grad_norm"], plain.metrics["grad_norm"])
    assert same(planned, plain)
    assert planned.evaluate([batch(7)]) == plain.evaluate([batch(7)])
    train(planned, plain, steps=[4, 5])  # after a sync a new flight begins
    planned.save(tmp_path / "saved")
    planned.step(batch(6))  # which the checkpoint does not have
    for fleet in (planned, plain):
        fleet.restore(tmp_path / "saved")
        fleet.stop("m0")
        fleet.replace("m1", member(7))
    train(planned, plain, steps=range(4))
    planned.use(None)
    train(planned, plain, steps=range(2))
    planned.plan(policy=plan.record.policy, max_partitions=5)
    train(planned, plain, steps=range(2))
    assert planned.stopped() == plain.stopped() != {}
    assert same(planned, plain)


@pytest.mark.usefixtures("quick_side_by_side")
@pytest.mark.parametrize("way", ["ring", "unevenly side by side"])
def test_a_step_can_be_watched_and_a_plan_is_kept_and_read_again(way: str, tmp_path: Path) -> None:
    planned, plain, plan = planned_and_plain(way)
    assert ("side by side" in plan.explain()) == (WAYS[way][3] > 1)
    with pytest.raises(PlanError):
        plain.watch(batch(0))
    told: list[str] = []
    planned.plan(policy="mutwo", max_partitions=5, progress=lambda step: told.append(step.current))
    assert told == ["a plan that was kept"]
    plan.save(tmp_path / "plan.json")
    other = fleet_of(WAYS[way][0])
    other.use(tm.Plan.load(tmp_path / "plan.json"))
    train(planned, plain, steps=range(2))
    train(other, fleet_of(WAYS[way][0], width=1), steps=range(2))
    with pytest.raises(tm.TrainmuxError):
        planned.watch({"not": "a batch"})
    train(planned, plain, steps=[2])
    seen = planned.watch(batch(3))
    plain.step(batch(3))
    assert same(planned, plain), "a watched step is a step"
    assert seen.source == "measured"
    body = plan.program.body.instructions
    expected = {position for position, item in enumerate(body) if not isinstance(item, Free | Wait)}
    assert {span.instruction for span in seen.spans} == expected
    assert 0 < seen.compute_seconds <= seen.seconds
    assert all(0 <= span.start <= span.end <= seen.seconds for span in seen.spans)
    plan.report(tmp_path / "plan.html", measured=seen)
    assert "measured" in (tmp_path / "plan.html").read_text()
    with pytest.raises(PlanError):
        planned.watch(batch(4, 3))


def test_micro_batches_train_where_optimizer_state_has_no_room_beside_them() -> None:
    fleets = [fleet_of(4, accumulate=2), fleet_of(4, accumulate=2)]
    with pytest.raises(BudgetError) as refused:
        fleets[0].plan(1000, max_partitions=2)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    fleets[0].plan(smallest + 2000, max_partitions=2)
    for number in range(4):
        torch.testing.assert_close(*[fleet.step(batch(number)) for fleet in fleets])
    active = fleets[0]._plans._active
    assert active is not None
    carried = [steps.steps[0].state_keys() for steps, _ in active._engines.values()]
    assert () in carried, "expected a budget that is too small for all of it"


def test_batches_of_other_shapes_run_in_the_same_memory() -> None:
    fleets = [fleet_of(3), fleet_of(3)]
    plan = ring(fleets[0])
    for number, size in enumerate((None, 3, None, 3, 5)):
        losses = [fleet.step(batch(number, size)) for fleet in fleets]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    active = fleets[0]._plans._active
    assert active is not None
    assert active.slab_bytes <= plan.budget_bytes


def test_a_member_that_is_not_finite_freezes_alone() -> None:
    fleets = [fleet_of(), fleet_of()]
    ring(fleets[0])
    for fleet in fleets:
        fleet.members[0].optimizer.param_groups[0]["lr"] = 1e38
    train(*fleets, steps=range(4))
    assert fleets[0].stopped() == fleets[1].stopped() != {}
    assert same(*fleets)


def test_members_come_and_go_and_the_plan_is_made_anew_where_it_must() -> None:
    fleets = [fleet_of(4), fleet_of(4)]
    budget = 1 << 20
    fleets[0].plan(budget, "none")
    train(*fleets, steps=range(2))
    taken = fleets[0].members[2]
    for fleet in fleets:
        fleet.replace("m1", member(7))
        fleet.drop("m2")
    kept = copy.deepcopy(taken.model.state_dict())
    first = fleets[0]._plans.plan
    train(*fleets, steps=[2])
    assert fleets[0]._plans.plan is first, "a free slot needs no other plan"
    assert all(torch.equal(value, kept[name]) for name, value in taken.model.state_dict().items())
    for fleet in fleets:
        fleet.add(member(8))
        fleet.add(member(9))
        fleet.replace("m8", with_momentum(8))  # of another group, and the same name
    train(*fleets, steps=[3])
    second = fleets[0]._plans.plan
    assert second is not None
    assert second is not first
    assert second.budget_bytes == budget
    assert sorted(name for part in second.partition for name in part.members) == sorted(fleets[0].names)
    for fleet in fleets:
        for name in ("m0", "m3", "m8"):
            fleet.drop(name)
    train(*fleets, steps=[4])
    assert same(*fleets)


def test_members_that_change_before_a_plan_is_used_train_by_one_made_anew() -> None:
    fleets = fleet_of(3), fleet_of(3)
    fleets[0].plan(budget="1GiB", policy="none")
    for each in fleets:
        each.add(member(3))
        each.drop("m0")
        each.replace("m1", with_momentum(4))
    train(*fleets, steps=range(3))
    assert same(*fleets)
    assert fleets[0].names == fleets[1].names == ("m4", "m2", "m3")
    assert fleets[0].plan(budget="1GiB", policy="none").partition  # no group without members is left over


def test_fit_trains_by_the_plan() -> None:
    fleets = [fleet_of(), fleet_of()]
    ring(fleets[0])
    for fleet in fleets:
        fleet.fit([batch(0), batch(1), batch(2)], epochs=2, validation=[batch(8)], progress=False)
    assert same(*fleets)


def test_a_budget_that_nothing_keeps_to_leaves_the_fleet_as_it_was() -> None:
    fleets = [fleet_of(), fleet_of()]
    ring(fleets[0])
    train(*fleets, steps=[0])
    with pytest.raises(BudgetError) as caught:
        fleets[0].plan(1000, "none")
    train(*fleets, steps=[1])
    assert caught.value.smallest_bytes is not None
    fleets[0].plan(caught.value.smallest_bytes, "none")
    train(*fleets, steps=[2])
    assert same(*fleets)


def test_a_plan_that_holds_more_than_its_budget_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fleets = [fleet_of(), fleet_of()]
    budget = 64 << 20
    fleets[0].plan(budget, "none")
    held = PlannedRunner._held_bytes
    monkeypatch.setattr(PlannedRunner, "_held_bytes", lambda self: held(self) + budget)
    with pytest.warns(TrainmuxWarning, match="more than its budget"):
        train(*fleets, steps=[0])
    monkeypatch.setattr(PlannedRunner, "_held_bytes", held)
    first = fleets[0]._plans.plan
    train(*fleets, steps=[1])
    second = fleets[0]._plans.plan
    assert first is not None
    assert second is not None
    assert second.record.fixed_bytes > first.record.fixed_bytes
    assert second.budget_bytes == budget
    assert same(*fleets)


# ---- constants under a plan with branches ---------------------------------------------------------------


class Scaled(nn.Module):
    """With a constant that members may share."""

    def __init__(self, seed: int, scale: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(6, 4)
        self.register_buffer("scale", torch.full((4,), scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def scaled(number: int, scale: float = 1.0) -> tm.Member:
    model = Scaled(number, scale)
    return tm.Member(model, torch.optim.AdamW(model.parameters(), lr=0.01), name=f"m{number}", seed=number)


def scaled_fleet(scales: Sequence[float], **options: Any) -> tm.Fleet:
    members = [scaled(number, scale) for number, scale in enumerate(scales)]
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    return tm.Fleet(members, loss, torch.randn(5, 6), deterministic=True, **options)


@pytest.mark.usefixtures("quick_side_by_side")
@pytest.mark.parametrize("scales", [(3.0,) * 4, (1.0, 2.0, 3.0, 4.0)], ids=["shared", "of each"])
def test_constants_of_checkpoints_and_newcomers_reach_every_branch(
    scales: Sequence[float], tmp_path: Path
) -> None:
    scaled_fleet(scales, width=1).save(tmp_path / "saved")
    fleets = scaled_fleet((1.0,) * 4), scaled_fleet((1.0,) * 4, width=1)
    plan = fleets[0].plan(max_partitions=5)
    assert plan.record.num_branches == 4
    for num_branches in (1, 2, 3):
        with pytest.raises(PlanError, match="branches with one member each"):
            fleets[0].use(tm.Plan(replace(plan.record, num_branches=num_branches), plan.profiles))
    batch = torch.randn(5, 6)
    fleets[0].step(batch)
    for fleet in fleets:
        fleet.restore(tmp_path / "saved")
    for _ in range(2):
        torch.testing.assert_close(*[fleet.step(batch) for fleet in fleets])
    for fleet in fleets:
        fleet.replace("m1", scaled(7, 2.0))
    for _ in range(2):
        torch.testing.assert_close(*[fleet.step(batch) for fleet in fleets])


class OneSmall(nn.Module):
    """A large parameter, and one of a single element, which is updated by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(130, 130, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).mean(1, keepdim=True) * self.scale


def test_a_parameter_of_one_element_is_updated_under_a_plan() -> None:
    """Its update wrote through a view that looked like a copy, and was left out of planned steps."""

    def fleet() -> tm.Fleet:
        members = []
        for seed in range(2):
            torch.manual_seed(seed)
            model = OneSmall()
            members.append(tm.Member(model, torch.optim.AdamW(model.parameters(), lr=0.1), seed=seed))
        return tm.Fleet(members, lambda model, x: (model(x) - 1).square().mean(), example, deterministic=True)

    example = torch.randn(4, 130, generator=torch.Generator().manual_seed(0))
    plain, planned = fleet(), fleet()
    planned.use(planned.plan(policy="mutwo", device="a100-40gb", max_partitions=3))
    for _ in range(2):
        plain.step(example)
        planned.step(example)
    assert same(plain, planned)
