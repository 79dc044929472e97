"""What co-location would do: a job's memory over an iteration, and a simulated run of two."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from benchmarks.workloads import SMALL, mlp

import trainmux as tm
from trainmux.errors import BudgetError, ConfigError

foresight = pytest.importorskip("benchmarks.zico._foresight")

pytestmark = pytest.mark.usefixtures("built_once")


def fleet_of(name: str, seed: int = 0) -> tuple[tm.Fleet, object]:
    workload = SMALL[name]
    model, batch = workload.build(seed), workload.batch(0, torch.float32)
    member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=1e-3), name=name)
    fleet = tm.Fleet([member], workload.loss, batch, device="cpu", precision="fp32", lowering="aten")
    return fleet, batch


@cache
def memory_of(name: str) -> foresight.IterationMemory:
    return foresight.iteration_memory(*fleet_of(name))


def test_an_iteration_holds_what_its_tensors_hold() -> None:
    memory = memory_of("residual")
    curve, spans = memory.curve(), memory.spans()
    assert len(curve) == memory.num_kernels + 1
    assert [moment for moment, _ in curve] == sorted(moment for moment, _ in curve)
    resident = curve[-1][1]
    model = SMALL["residual"].build(0)
    assert resident >= sum(parameter.nbytes for parameter in model.parameters())
    for moment, size in curve[:: len(curve) // 10]:
        live = sum(
            span.size_bytes for span in spans if span.begin_seconds <= moment and moment < span.end_seconds
        )
        assert size == pytest.approx(resident + live, abs=1)
    peak = max(size for _, size in curve)
    assert peak > 2 * resident
    kept = {span.tensor_class for span in spans}
    assert {"feature map", "gradient map", "temporary"} <= kept


def test_feature_maps_live_longer_than_the_rest() -> None:
    spans = memory_of("residual").spans()

    def mean(is_kept: bool) -> float:
        found = [
            span.end_seconds - span.begin_seconds
            for span in spans
            if (span.tensor_class == "feature map") is is_kept and span.tensor_class != "resident"
        ]
        return sum(found) / len(found)

    assert mean(True) > 2 * mean(False)


def test_times_are_scaled_and_bytes_are_not() -> None:
    memory = memory_of("residual")
    longer = memory.lasting(0.25)
    assert longer.seconds == pytest.approx(0.25)
    assert [size for _, size in longer.curve()] == [size for _, size in memory.curve()]


def test_a_run_stays_within_its_budget_and_pays_with_shifts() -> None:
    jobs = {"a": memory_of("residual").lasting(1e-3), "b": memory_of("bottleneck").lasting(1e-3)}
    given = {"seconds": 0.02, "tracking_bytes": 0, "region_bytes": 512}
    roomy = foresight.foresee(jobs, **given)  # type: ignore[arg-type]
    assert roomy.shift_seconds == {"a": 0.0, "b": 0.0}
    assert roomy.budget_bytes == roomy.sum_of_peaks_bytes
    assert roomy.num_iterations == {"a": 20, "b": 20}
    tight = foresight.foresee(jobs, roomy.smallest_budget_bytes, **given)  # type: ignore[arg-type]
    assert sum(tight.shift_seconds.values()) > 0
    assert tight.seconds > roomy.seconds
    for run in (roomy, tight):
        most = max(sum(held.values()) for _, held in run.held())
        assert run.smallest_budget_bytes - 512 < most <= run.budget_bytes
        assert {"an iteration begins", "wait"} <= set(run.decision_us)
        assert all(0 < middle <= high for middle, high in run.decision_us.values())
    with pytest.raises(BudgetError):
        foresight.foresee(jobs, roomy.smallest_budget_bytes - 512, **given)  # type: ignore[arg-type]


def test_a_budget_that_changes_is_kept_to() -> None:
    jobs = {"a": memory_of("residual").lasting(1e-3), "b": memory_of("residual").lasting(1e-3)}
    given = {"seconds": 0.03, "tracking_bytes": 0, "region_bytes": 512}
    whole = foresight.foresee(jobs, **given)  # type: ignore[arg-type]
    low = whole.smallest_budget_bytes
    run = foresight.foresee(jobs, budget_changes=[(0.02, low)], **given)  # type: ignore[arg-type]
    assert max(sum(held.values()) for moment, held in run.held() if moment < 0.02) > low
    assert max(sum(held.values()) for moment, held in run.held() if moment > 0.025) <= low


def test_a_fleet_of_two_groups_is_refused() -> None:
    workload = SMALL["mlp"]
    batch = workload.batch(0, torch.float32)
    models = [mlp(16, width, 4) for width in (8, 24)]
    members = [
        tm.Member(model, torch.optim.SGD(model.parameters(), lr=1e-3), name=str(number))
        for number, model in enumerate(models)
    ]
    fleet = tm.Fleet(members, workload.loss, batch, device="cpu", lowering="aten")
    with pytest.raises(ConfigError, match="one group"):
        foresight.iteration_memory(fleet, batch)
