"""Plans of a fleet: asked for in many ways, shown, kept in files, refused in words."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from fleet_cases import EXAMPLE, TOY, adam, mlp, mse, short_fleet
from tests.record_files import edit

import trainmux as tm
from trainmux.errors import BudgetError, PlanError
from trainmux.ir import Multiplexing, verify

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))


@pytest.fixture(scope="module")
def roomy() -> tm.Plan:
    return short_fleet().plan(device=TOY, num_members=4)


def test_a_plan_without_pressure_fuses_everything(roomy: tm.Plan) -> None:
    assert [len(sub_array.members) for sub_array in roomy.partition] == [4]
    assert not roomy.swaps
    assert not roomy.recomputes
    assert roomy.budget_bytes == TOY.memory_bytes
    assert roomy.record.fixed_bytes < roomy.peak_bytes < roomy.budget_bytes
    assert roomy.step_seconds == pytest.approx(sum(node.seconds for node in roomy.profiles[0].nodes))
    assert roomy.bound_seconds == pytest.approx(roomy.step_seconds)


@pytest.mark.parametrize("policy", ["mutwo", "auto"])
def test_a_policy_keeps_to_a_budget_or_names_one_that_works(policy: str, roomy: tm.Plan) -> None:
    static = sum(t.size_bytes for t in roomy.profiles[0].tensors if t.byte_class.is_static)
    fixed = roomy.record.fixed_bytes + static
    budget = fixed + (roomy.peak_bytes - fixed) * 2 // 3
    fleet = short_fleet()
    try:
        plan = fleet.plan(budget, policy, device=TOY, num_members=4)
    except BudgetError as error:
        plan = fleet.plan(error.smallest_bytes, policy, device=TOY, num_members=4)
        assert plan.budget_bytes > budget
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.step_seconds >= roomy.step_seconds
    assert roomy.bound_seconds <= plan.bound_seconds * (1 + 1e-9) <= plan.step_seconds * (1 + 2e-9)
    profiles = [plan.profiles[sub_array.profile] for sub_array in plan.partition]
    verify(plan.program, profiles, budget_bytes=plan.budget_bytes, fixed_bytes=plan.record.fixed_bytes)
    assert plan.timeline.seconds == pytest.approx(plan.step_seconds)


def test_steps_are_measured_here_once() -> None:
    told: list[str] = []

    def plan(**options: Any) -> tm.Plan:
        told.clear()
        return short_fleet(**options).plan("1GiB", progress=lambda progress: told.append(progress.stage))

    first = plan()
    assert "measuring" in told
    assert {profile.source for profile in first.profiles} == {"measured"}
    shutil.rmtree(os.environ["TRAINMUX_PLAN_DIR"])
    assert plan().record == first.record
    assert "measuring" not in told
    plan(deterministic=True)  # other kernels of the same step: what was measured is not taken for them
    assert "measuring" in told


def test_several_architectures_are_planned_together() -> None:
    members = [adam(mlp(number, hidden=hidden), f"m{number}") for number, hidden in enumerate((4, 4, 7))]
    plan = tm.Fleet(members, mse, EXAMPLE).plan(device=TOY)
    assert sorted(tuple(sub_array.members) for sub_array in plan.partition) == [("m0", "m1"), ("m2",)]
    assert len(plan.profiles) == 2


def test_a_plan_is_saved_and_loaded_whole_or_refused(roomy: tm.Plan, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    roomy.save(path)
    loaded = tm.Plan.load(path)
    assert loaded.record == roomy.record
    assert loaded.profiles == roomy.profiles
    assert loaded.explain() == roomy.explain()
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]
    text = path.read_text()
    edit(path, ["profiles", "rows", 0, 0], "another fingerprint")  # with a checksum that fits
    for damaged in (path.read_text(), text[: len(text) // 2], text.replace(str(roomy.peak_bytes), "1"), "[]"):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(PlanError):
            tm.Plan.load(path)
    with pytest.raises(PlanError):
        tm.Plan.load(tmp_path / "nothing.json")


def test_a_plan_is_used_by_its_own_fleet_only(tmp_path: Path) -> None:
    fleet = short_fleet()
    plan = fleet.plan(device=TOY)
    path = tmp_path / "plan.json"
    fleet.plan(device="a100-40gb").save(path)
    short_fleet(lr=0.5).use(tm.Plan.load(path))  # another learning rate is the same step
    other = tm.Fleet([adam(mlp(number), f"m{number}") for number in range(2)], mse, EXAMPLE)
    for stranger in (short_fleet(num_members=3), other, short_fleet(precision="bf16")):
        for each in (plan, tm.Plan.load(path)):
            with pytest.raises(PlanError):
                stranger.use(each)


@pytest.mark.parametrize("write", ["save", "report", "trace"])
def test_a_place_that_cannot_be_written_to_is_refused(write: str, roomy: tm.Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "plan", tmp_path, "bad\0name", None):
        with pytest.raises(PlanError):
            getattr(roomy, write)(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_plan_shows_itself_and_what_other_budgets_cost(roomy: tm.Plan, tmp_path: Path) -> None:
    assert "partitions tried" in roomy.explain()
    assert repr(roomy).startswith("<Plan auto: 1 sub-arrays")
    roomy.trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    plan = short_fleet().plan(None, "mutwo", device=TOY, num_members=4, num_budgets=3)
    assert plan.record.schedule.multiplexing is Multiplexing.RING
    times = [cost.step_seconds for cost in plan.curve]
    assert 1 <= len(times) <= 3
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(plan.step_seconds)
    plan.report(tmp_path / "plan.html")
    assert 'id="prologue"' in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize("stage", ["profiling", "measuring"])
def test_planning_tells_its_progress_and_can_be_interrupted(stage: str) -> None:
    """What was interrupted has changed nothing: the fleet trains on, and can be planned for again."""
    fleet, other = short_fleet(), short_fleet()
    told: list[Any] = []

    def interrupt(progress: Any) -> None:
        told.append(progress)
        if progress.stage == stage and progress.done == progress.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fleet.plan("1GiB", "none", progress=interrupt)
    assert all(0 <= progress.done <= progress.total for progress in told)
    if stage == "measuring":
        measured = [progress for progress in told if progress.stage == stage]
        assert [progress.done for progress in measured] == list(range(1, measured[0].total + 1))
    batch = SMALL["mlp"].batch(1, torch.float32)
    assert torch.equal(fleet.step(batch), other.step(batch))
    assert fleet.plan("1GiB", "none").peak_bytes
    torch.testing.assert_close(fleet.step(batch), other.step(batch))


def test_an_interrupted_search_ends_with_the_best_plan_so_far() -> None:
    def interrupt(progress: Any) -> None:
        if progress.best_seconds < float("inf"):
            raise KeyboardInterrupt

    fleet = short_fleet()
    plan = fleet.plan("1GiB", progress=interrupt)
    assert plan.step_seconds >= plan.bound_seconds > 0
    assert plan.gap >= 0
    assert plan.peak_bytes <= 1 << 30
