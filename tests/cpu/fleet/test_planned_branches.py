"""Plans whose members train side by side: chosen where that was measured to be quicker, and the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_fleets import batch, fleet_of, member, parameters, same
from torch import nn

import trainmux as tm
from trainmux.errors import PlanError
from trainmux.fleet import _planning
from trainmux.ir import Free, Multiplexing, Profile, Wait
from trainmux.profiling import fingerprint_of_one, side_by_side

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Profiles of this test alone, by which two members side by side take hardly longer than one."""
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))
    monkeypatch.setenv("TRAINMUX_PLAN_DIR", str(tmp_path / "plans"))
    measure: Callable[..., Profile] = _planning.measure_profile

    def measured(*arguments: Any, branches: Any = (), **options: Any) -> Profile:
        found = measure(*arguments, branches=branches, **options)
        taken = sum(node.seconds for node in found.nodes)
        return replace(found, seconds_beside=tuple((number, 0.01 * taken) for number in branches))

    monkeypatch.setattr(_planning, "measure_profile", measured)


def planned_and_plain(num_branches: int = 2, **options: Any) -> tuple[tm.Fleet, tm.Fleet]:
    """The same members by a plan that has them side by side, and one by one without a plan."""
    planned, plain = fleet_of(4, **options), fleet_of(4, **options, width=1)
    plan = planned.plan(policy="mutwo" if num_branches == 2 else "auto", max_partitions=5)
    assert plan.record.num_branches == num_branches
    return planned, plain


@pytest.mark.parametrize("num_branches", [2, 4])
def test_the_quickest_way_is_taken_and_said(num_branches: int) -> None:
    planned, plain = planned_and_plain(num_branches)
    plan = planned._plans._wanted
    assert plan is not None
    assert "side by side" in plan.explain()
    assert [len(part.members) for part in plan.partition] == [num_branches] * (4 // num_branches)
    for number in range(3):
        assert torch.equal(planned.step(batch(number)), plain.step(batch(number)))
    assert same(planned, plain)
    seen = planned.watch(batch(3))
    body = plan.program.body.instructions
    expected = {position for position, item in enumerate(body) if not isinstance(item, Free | Wait)}
    assert {span.instruction for span in seen.spans} == expected


def test_everything_a_member_may_want_works_side_by_side() -> None:
    def wants(number: int) -> dict[str, Any]:
        return {"clip_norm": 0.1} if number == 0 else {"clip_value": 0.01}

    fleets = planned_and_plain(options_of=wants, accumulate=2)
    planned, plain = fleets
    plan = planned._plans._wanted
    assert plan is not None
    assert plan.record.schedule.multiplexing is Multiplexing.RING
    for number in range(5):
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    assert planned.evaluate([batch(7)]) == plain.evaluate([batch(7)])
    for fleet in fleets:
        fleet.stop("m0")
        fleet.replace("m1", member(7))
    for number in range(3):
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    for number, size in enumerate((3, None, 3)):
        torch.testing.assert_close(*[fleet.step(batch(number, size)) for fleet in fleets])
    assert planned.stopped() == plain.stopped()
    for a, b in zip(*map(parameters, fleets), strict=True):
        torch.testing.assert_close(a, b)


def uneven_and_plain(**options: Any) -> tuple[tm.Fleet, tm.Fleet]:
    """Five members on three branches, two of them on two only; and one by one without a plan."""
    planned, plain = fleet_of(5, **options), fleet_of(5, **options, width=1)
    plan = planned.plan(policy="mutwo", max_partitions=5)
    assert plan.record.num_branches == 3
    assert [len(part.members) for part in plan.partition] == [3, 2]
    return planned, plain


def test_members_that_cannot_be_shared_out_evenly(tmp_path: Path) -> None:
    fleets = uneven_and_plain(accumulate=2)
    planned, plain = fleets
    for number in range(5):
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    assert planned.evaluate([batch(7)]) == plain.evaluate([batch(7)])
    planned.save(tmp_path / "saved")
    planned.step(batch(5))
    for fleet in fleets:
        fleet.restore(tmp_path / "saved")
    for number in range(3):
        assert torch.equal(*[fleet.step(batch(number)) for fleet in fleets])
    assert same(planned, plain)
    for fleet in fleets:
        fleet.stop("m0")
        fleet.replace("m4", member(7))
    for number, size in enumerate((None, None, 3, None)):
        torch.testing.assert_close(*[fleet.step(batch(number, size)) for fleet in fleets])
    for a, b in zip(*map(parameters, fleets), strict=True):
        torch.testing.assert_close(a, b)


def test_a_plan_with_an_uneven_sub_array_is_kept_and_read_again(tmp_path: Path) -> None:
    first, _ = uneven_and_plain()
    plan = first._plans._wanted
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    other = fleet_of(5)
    other.use(tm.Plan.load(tmp_path / "plan.json"))
    told: list[str] = []
    first.plan(policy="mutwo", max_partitions=5, progress=lambda step: told.append(step.current))
    assert told == ["a plan that was kept"]
    for number in range(2):
        assert torch.equal(first.step(batch(number)), other.step(batch(number)))
    assert same(first, other)


def test_state_stays_where_it_is_between_micro_batches() -> None:
    planned, _ = planned_and_plain(accumulate=2)
    planned.step(batch(0))
    places = [tensor.data_ptr() for group in planned._groups for tensor in group.state.stacked()]
    planned.step(batch(1))
    assert [tensor.data_ptr() for group in planned._groups for tensor in group.state.stacked()] == places


def test_a_plan_is_kept_and_read_again(tmp_path: Path) -> None:
    first = fleet_of(4)
    plan = first.plan(policy="mutwo", max_partitions=5)
    plan.save(tmp_path / "plan.json")
    other = fleet_of(4)
    other.use(tm.Plan.load(tmp_path / "plan.json"))
    told: list[str] = []
    again = first.plan(policy="mutwo", max_partitions=5, progress=lambda step: told.append(step.current))
    assert told == ["a plan that was kept"]
    assert again.record == plan.record
    for number in range(2):
        assert torch.equal(first.step(batch(number)), other.step(batch(number)))
    assert same(first, other)


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
    example = torch.randn(5, 6)
    return tm.Fleet(
        members, lambda model, x: model(x).square().mean(), example, deterministic=True, **options
    )


@pytest.mark.parametrize("scales", [(3.0,) * 4, (1.0, 2.0, 3.0, 4.0)], ids=["shared", "of each"])
def test_constants_of_a_checkpoint_reach_every_branch(scales: Sequence[float], tmp_path: Path) -> None:
    scaled_fleet(scales, width=1).save(tmp_path / "saved")
    planned, plain = scaled_fleet((1.0,) * 4), scaled_fleet((1.0,) * 4, width=1)
    assert planned.plan(max_partitions=5).record.num_branches == 4
    batch = torch.randn(5, 6)
    planned.step(batch)
    for fleet in (planned, plain):
        fleet.restore(tmp_path / "saved")
    for _ in range(2):
        torch.testing.assert_close(planned.step(batch), plain.step(batch))


def test_a_newcomer_with_other_constants_has_them_under_a_plan() -> None:
    planned, plain = scaled_fleet((1.0,) * 4), scaled_fleet((1.0,) * 4, width=1)
    planned.plan(max_partitions=5)
    batch = torch.randn(5, 6)
    assert torch.equal(planned.step(batch), plain.step(batch))
    for fleet in (planned, plain):
        fleet.replace("m1", scaled(7, 2.0))
    for _ in range(2):
        torch.testing.assert_close(planned.step(batch), plain.step(batch))


@pytest.mark.parametrize("num_branches", [1, 2, 3])
def test_a_plan_whose_records_disagree_is_refused(num_branches: int) -> None:
    fleet = scaled_fleet((1.0,) * 4)
    plan = fleet.plan(max_partitions=5)
    assert plan.record.num_branches == 4
    other = tm.Plan(replace(plan.record, num_branches=num_branches), plan.profiles)
    with pytest.raises(PlanError, match="branches with one member each"):
        fleet.use(other)


def test_all_branches_share_one_landing_buffer_of_a_shared_batch() -> None:
    planned, _ = planned_and_plain()
    planned.step(batch(0))
    active = planned._plans._active
    assert active is not None
    engine = active._engines[active._own][1]
    shapes = {tuple(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(batch(0))}
    assert shapes <= {tuple(buffer.shape) for buffer in engine._landing.values()}


def test_a_profile_side_by_side_is_that_of_all_branches() -> None:
    fleet = fleet_of(1)
    alone = fleet.plan(None, "none", device="a100-40gb").profiles[0]
    taken = sum(node.seconds for node in alone.nodes)
    known = replace(alone, seconds_beside=((3, 2 * taken),))
    both = side_by_side(known, 3)
    assert both.width == both.num_branches == 3
    assert sum(node.seconds for node in both.nodes) == pytest.approx(2 * taken)
    assert sum(node.seconds for node in side_by_side(alone, 3).nodes) == pytest.approx(3 * taken)
    assert all(tensor.size_bytes % (3 * 512) == 0 for tensor in both.tensors)
    assert all(a.size_bytes >= 3 * b.size_bytes for a, b in zip(both.tensors, known.tensors, strict=True))
    fewer = side_by_side(replace(known, seconds_beside=((2, 1.5 * taken), (3, 2 * taken))), 3, 2)
    assert (fewer.width, fewer.num_branches) == (2, 3)
    assert sum(node.seconds for node in fewer.nodes) == pytest.approx(1.5 * taken)
    assert [tensor.size_bytes for tensor in fewer.tensors] == [tensor.size_bytes for tensor in both.tensors]
    for a, b in zip(fewer.tensors, known.tensors, strict=True):
        assert a.swap_in_seconds == pytest.approx(2 * b.swap_in_seconds)
    assert sum(node.seconds for node in side_by_side(known, 3, 1).nodes) == pytest.approx(taken)
    names = {profile.fingerprint for profile in (alone, both, fewer, side_by_side(known, 2))}
    assert len(names) == 4
    assert {fingerprint_of_one(profile) for profile in (alone, both, fewer)} == {alone.fingerprint}
