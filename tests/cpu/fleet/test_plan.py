"""Plans of a fleet: asked for in many ways, shown, kept in files, refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from short_workloads import SHORT
from tests.record_files import edit

import trainmux as tm
from trainmux.errors import BudgetError, ConfigError, PlanError
from trainmux.fleet import _program_store
from trainmux.fleet._planning import FIXED_BYTES
from trainmux.ir import Multiplexing, verify
from trainmux.lowering import KernelCache

pytestmark = pytest.mark.usefixtures("traced_once")

DEVICE = tm.Device("toy", 1 << 30, 1 << 32, 8, 1e12, 1e12, 1e11, 1e10, 1e10)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lowered steps of all tests here: every width would be built again and again."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: Path) -> None:
    monkeypatch.setattr(KernelCache, "compile", lambda self, kernels: None)
    monkeypatch.setattr(_program_store, "cache_folder", lambda: steps)
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))


def fleet_of(name: str = "cnn", num_members: int = 2, *, lr: float = 1e-3, **options: Any) -> tm.Fleet:
    workload = SHORT[name]
    models = [workload.build(number).train() for number in range(num_members)]
    members = [
        tm.Member(model, torch.optim.AdamW(model.parameters(), lr=lr), name=f"m{number}", seed=number)
        for number, model in enumerate(models)
    ]
    return tm.Fleet(members, workload.loss, workload.batch(0, torch.float32), **options)


@pytest.fixture(scope="module")
def roomy(steps: Path) -> tm.Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelCache, "compile", lambda self, kernels: None)
        patch.setattr(_program_store, "cache_folder", lambda: steps)
        return fleet_of().plan(device=DEVICE, num_members=4)


def test_a_plan_without_pressure_fuses_everything(roomy: tm.Plan) -> None:
    assert [len(sub_array.members) for sub_array in roomy.partition] == [4]
    assert not roomy.swaps
    assert not roomy.recomputes
    assert roomy.budget_bytes == DEVICE.memory_bytes
    assert FIXED_BYTES < roomy.peak_bytes < roomy.budget_bytes
    assert roomy.step_seconds == pytest.approx(sum(node.seconds for node in roomy.profiles[0].nodes))
    assert roomy.bound_seconds == pytest.approx(roomy.step_seconds)


@pytest.mark.parametrize("policy", ["capuchin", "mutwo", "auto"])
def test_a_policy_keeps_to_a_budget_or_names_one_that_works(policy: str, roomy: tm.Plan) -> None:
    static = sum(t.size_bytes for t in roomy.profiles[0].tensors if t.byte_class.is_static)
    budget = FIXED_BYTES + static + (roomy.peak_bytes - FIXED_BYTES - static) * 2 // 3
    fleet = fleet_of()
    try:
        plan = fleet.plan(budget, policy, device=DEVICE, num_members=4)
    except BudgetError as error:
        plan = fleet.plan(error.smallest_bytes, policy, device=DEVICE, num_members=4)
        assert plan.budget_bytes > budget
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.step_seconds >= roomy.step_seconds
    assert roomy.bound_seconds <= plan.bound_seconds * (1 + 1e-9) <= plan.step_seconds * (1 + 2e-9)
    profiles = [plan.profiles[sub_array.profile] for sub_array in plan.partition]
    verify(plan.program, profiles, budget_bytes=plan.budget_bytes, fixed_bytes=FIXED_BYTES)
    assert plan.timeline.seconds == pytest.approx(plan.step_seconds)


def test_bad_arguments_are_refused() -> None:
    fleet = fleet_of("mlp")
    for budget in ("-1", "0", "20 GiBs", "", "much", "2GiB", -5, 0, True, 1.5):
        with pytest.raises(BudgetError):
            fleet.plan(budget, device=DEVICE)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        fleet.plan("1GiB", "best", device=DEVICE)
    with pytest.raises(ConfigError):
        fleet.plan("1GiB", device="b300")
    for wrong in (0, True, 1.5):
        with pytest.raises(ConfigError):
            fleet.plan("1GiB", device=DEVICE, num_members=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        fleet.plan("1GiB", num_members=5)


def test_steps_are_measured_here_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import trainmux.fleet._planning as planning

    measured: list[int] = []
    original = planning.measure_profile

    def measure(*args: Any, **kwargs: Any) -> Any:
        measured.append(kwargs["width"])
        return original(*args, **kwargs)

    monkeypatch.setattr(planning, "measure_profile", measure)
    plan = fleet_of("mlp").plan("1GiB")
    assert sorted(measured) == [1, 2]
    assert {profile.source for profile in plan.profiles} == {"measured"}
    again = fleet_of("mlp").plan("1GiB")
    assert sorted(measured) == [1, 2]
    assert again.record == plan.record
    # Other kernels of the same step: what was measured is not taken for them.
    fleet_of("mlp", deterministic=True).plan("1GiB")
    assert len(measured) == 4


def test_several_architectures_are_planned_together() -> None:
    mlp, cnn = SMALL["mlp"], SMALL["cnn"]
    members = []
    for number, workload in enumerate((mlp, mlp, cnn)):
        model = workload.build(number).train()
        members.append(
            tm.Member(
                model,
                torch.optim.AdamW(model.parameters()),
                name=f"m{number}",
                loss=workload.loss,
                example_batch=workload.batch(0, torch.float32),
            )
        )
    plan = tm.Fleet(members).plan(device=DEVICE)
    assert sorted(tuple(sub_array.members) for sub_array in plan.partition) == [("m0", "m1"), ("m2",)]
    assert len(plan.profiles) == 2


def test_a_plan_is_saved_and_loaded_whole(roomy: tm.Plan, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    roomy.save(path)
    loaded = tm.Plan.load(path)
    assert loaded.record == roomy.record
    assert loaded.profiles == roomy.profiles
    assert loaded.explain() == roomy.explain()
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]


def test_damaged_plan_files_are_refused(roomy: tm.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    roomy.save(path)
    text = path.read_text()
    for damaged in (text[: len(text) // 2], text.replace(str(roomy.peak_bytes), "1"), "[]"):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(PlanError):
            tm.Plan.load(path)
    with pytest.raises(PlanError):
        tm.Plan.load(tmp_path / "nothing.json")


def test_a_plan_file_with_other_profiles_is_refused(roomy: tm.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    roomy.save(path)
    edit(path, ["profiles", "rows", 0, 0], "another fingerprint")
    with pytest.raises(PlanError):
        tm.Plan.load(path)


def test_a_plan_is_used_by_its_own_fleet_only(tmp_path: Path) -> None:
    fleet = fleet_of("mlp")
    plan = fleet.plan(device=DEVICE)
    path = tmp_path / "plan.json"
    fleet.plan(device="a100-40gb").save(path)
    other = fleet_of("mlp", lr=0.5)  # another learning rate is the same step
    other.use(tm.Plan.load(path))
    plain = fleet_of("mlp", lr=0.5)
    for number in range(2):
        batch = SMALL["mlp"].batch(number, torch.float32)
        torch.testing.assert_close(other.step(batch), plain.step(batch))
    with pytest.raises(PlanError):
        fleet_of("mlp", num_members=3).use(plan)
    with pytest.raises(PlanError):
        fleet_of("cnn").use(tm.Plan.load(path))
    with pytest.raises(PlanError):
        fleet_of("mlp", precision="bf16").use(tm.Plan.load(path))


@pytest.mark.parametrize("write", ["save", "report", "trace"])
def test_a_place_that_cannot_be_written_to_is_refused(write: str, roomy: tm.Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "plan", tmp_path, "bad\0name", None):
        with pytest.raises(PlanError):
            getattr(roomy, write)(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_plan_shows_itself(roomy: tm.Plan, tmp_path: Path) -> None:
    assert "partitions tried" in roomy.explain()
    assert repr(roomy).startswith("<Plan auto: 1 sub-arrays")
    roomy.report(tmp_path / "plan.html")
    roomy.trace(tmp_path / "trace.json")
    assert "<html" in (tmp_path / "plan.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_what_other_budgets_cost_and_the_page_of_a_ring(roomy: tm.Plan, tmp_path: Path) -> None:
    plan = fleet_of("mlp").plan(None, "mutwo", device=DEVICE, num_members=4, num_budgets=3)
    assert plan.record.schedule.multiplexing is Multiplexing.RING
    times = [cost.step_seconds for cost in plan.curve]
    assert 1 <= len(times) <= 3
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(plan.step_seconds)
    for shown, has_around in ((plan, True), (roomy, False)):  # what runs before and after its steps
        shown.report(tmp_path / "plan.html")
        page = (tmp_path / "plan.html").read_text()
        assert ('id="prologue"' in page, 'id="epilogue"' in page) == (has_around, has_around)


def test_progress_is_told_and_can_interrupt() -> None:
    seen: list[Any] = []
    fleet_of("mlp").plan(device=DEVICE, progress=seen.append)
    stages = {progress.stage for progress in seen}
    assert {"profiling", "scheduling by auto", "scheduling by mutwo"} <= stages
    assert all(0 <= progress.done <= progress.total for progress in seen)

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    fleet = fleet_of("mlp")
    with pytest.raises(KeyboardInterrupt):
        fleet.plan(device=DEVICE, progress=interrupt)
    assert fleet.plan(device=DEVICE).peak_bytes


@pytest.mark.parametrize("stage", ["compiling", "measuring", "scheduling by none"])
def test_measuring_is_told_node_by_node_and_can_be_interrupted_anywhere(stage: str) -> None:
    """What was interrupted has changed nothing: the fleet trains on, and can be planned for again."""
    fleet, other = fleet_of("mlp", lowering="inductor"), fleet_of("mlp", lowering="inductor")
    told: list[Any] = []

    def interrupt(progress: Any) -> None:
        told.append(progress)
        if progress.stage == stage and progress.done == progress.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fleet.plan("1GiB", "none", progress=interrupt)
    if stage == "measuring":
        measured = [progress for progress in told if progress.stage == stage]
        assert [progress.done for progress in measured] == list(range(1, measured[0].total + 1))
    batch = SMALL["mlp"].batch(1, torch.float32)
    assert torch.equal(fleet.step(batch), other.step(batch))
    assert fleet.plan("1GiB", "none").peak_bytes
    torch.testing.assert_close(fleet.step(batch), other.step(batch))
