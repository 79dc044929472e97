"""Jobs side by side on a GPU give bit for bit what each gives alone, at every budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from colocation_cases import SMALL_CUTS, batches_of, small_fleet, smallest_budget, sum_of_peaks
from torch import Tensor
from wide_jobs import (
    BATCH_SIZE,
    MIB,
    REGION,
    assert_as_alone,
    assert_wide_as_alone,
    captures_of,
    run_beside,
    trained_alone,
    wide_batches,
    wide_fleet,
    wide_job,
)

import trainmux as tm
from trainmux.colocate import _fused_work
from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._protocols import Ended
from trainmux.colocate._segment_graphs import SegmentGraphs

pytestmark = pytest.mark.usefixtures("jobs_keep_what_they_asked_for")

STEPS = 12


def jobs_in_flight(colocation: tm.Colocation) -> list[int]:
    """Fills, whenever a segment is enqueued, with how many jobs have one whose end was not told."""
    device: Any = colocation._device
    enqueue, next_ended = device.enqueue, device.next_ended
    flying: list[str] = []
    found: list[int] = []

    def noting_begin(ref: SegmentRef, *rest: Any) -> None:
        enqueue(ref, *rest)
        flying.append(ref.job)
        found.append(len(set(flying)))

    def noting_end(*until: Any) -> Ended | None:
        ended: Ended | None = next_ended(*until)
        if ended is not None:
            flying.remove(ended.ref.job)
        return ended

    device.enqueue, device.next_ended = noting_begin, noting_end
    return found


@pytest.mark.parametrize(
    ("names", "tightness", "options"),
    [
        (("mlp", "residual"), (1.0, 0.0), {}),
        (("transformer_with_dropout", "lstm"), (1.0, 0.0), {"num_members": 2, "accumulate": 3}),
        (("mlp", "transformer_with_dropout", "residual"), (1.0, 0.5), {}),
        (("mlp", "transformer_with_dropout"), (1.0, 0.0), {"lowering": "inductor"}),
    ],
)
def test_jobs_are_as_alone(
    tmp_path: Path, names: Sequence[str], tightness: Sequence[float], options: dict[str, Any]
) -> None:
    fleets = {name: small_fleet(name, device="cuda", **{"lowering": "aten", **options}) for name in names}
    expected = {}
    for name, fleet in fleets.items():
        fleet.save(tmp_path / name)
        expected[name] = trained_alone(fleet, batches_of(name), STEPS)
    for tight in tightness:
        for name in names:
            fleets[name].restore(tmp_path / name)
        jobs = [tm.Job(name, fleet=fleets[name], loader=batches_of(name), steps=STEPS) for name in names]
        colocation = tm.colocate(jobs, "20GiB", tracking_bytes=SMALL_CUTS, region_bytes=REGION, poisons=True)
        least, most = smallest_budget(colocation), sum_of_peaks(colocation)
        colocation.set_budget(round(tight * least + (1 - tight) * most))
        at_once = jobs_in_flight(colocation)
        result = colocation.run()
        assert [repr(job.error) for job in result.jobs.values() if job.error] == []
        if tight == 0:
            assert max(at_once) == len(names), f"{names}: one iteration after the other"
        for job in jobs:
            assert_as_alone(result, job, expected[job.name])


def test_other_batches_and_micro_batches() -> None:
    """Run kernel by kernel the first time, captured the second time: the bits stay."""

    def batches(seed: int) -> list[Tensor]:
        long, short = wide_batches(seed), wide_batches(seed, BATCH_SIZE // 2)
        return [long[0], long[1], short[0], long[2]]

    def fleet(seed: int) -> tm.Fleet:
        return wide_fleet(seed, num_layers=3, accumulate=2)

    captured: list[dict[str, int]] = []
    jobs = [tm.Job(str(seed), fleet=fleet(seed), loader=batches(seed), steps=16) for seed in (0, 1)]
    note = [lambda event: captured.append(captures_of(event.colocation))]
    options: dict[str, Any] = {"tracking_bytes": 4 * MIB, "callbacks": note, "poisons": True}
    result = run_beside(jobs, spare_bytes=4 * REGION, **options)
    for seed, job in enumerate(jobs):
        assert_as_alone(result, job, trained_alone(fleet(seed), batches(seed), 16))
    both = [row for row in captured if len(row) == 2]
    assert both[-1]["0"] > both[0]["0"]  # further steps were captured
    assert both[-1] == both[len(both) * 3 // 4]  # and none of them twice


# ---- jobs that fail, need more, or are known ------------------------------------------------------------


def test_a_job_that_runs_out_of_memory_ends_alone() -> None:
    def hog(event: tm.JobStep) -> None:
        if event.step == 3:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    jobs = [wide_job("a", 0, 9, callbacks=[hog]), wide_job("b", 1, 8)]
    result = tm.colocate(jobs, "20GiB", region_bytes=REGION, poisons=True).run()
    assert result.failed == ("a",)
    assert isinstance(result["a"].error, torch.OutOfMemoryError)
    assert_wide_as_alone(result, jobs[1])


@pytest.mark.alone  # jobs that take another time than was measured are cut anew
@pytest.mark.usefixtures("without_workspaces")
def test_a_job_that_needs_more_than_it_knew_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def first_gets_nothing(device: torch.device, *, scratch_bytes: int, **options: Any) -> SegmentGraphs:
        limits.append(scratch_bytes)
        return SegmentGraphs(device, scratch_bytes=scratch_bytes if len(limits) > 1 else 0, **options)

    monkeypatch.setattr(_fused_work, "SegmentGraphs", first_gets_nothing)
    jobs = [wide_job("a", 0, 4), wide_job("b", 1, 4)]
    result = run_beside(jobs, tracking_bytes=4 * MIB)
    assert len(limits) == 3
    assert limits[2] > limits[0]
    assert_wide_as_alone(result, *jobs)


@pytest.mark.alone
def test_jobs_that_are_known_begin_beside_each_other(tmp_path: Path) -> None:
    """What was learned of a job is kept in a folder: the next like it needs no iteration to itself."""
    segments = []
    for is_known in (False, True):
        jobs = [wide_job("a", 0, 12), wide_job("b", 1, 12)]
        colocation = tm.colocate(jobs, "20GiB", region_bytes=REGION, profiles=tmp_path / "profiles")
        demands = [admitted.demand for admitted in colocation._jobs.values()]
        assert [demand.is_measured for demand in demands] == [is_known] * 2
        colocation.set_budget(smallest_budget(colocation) + 5 * REGION)
        result = colocation.run()
        assert result.failed == ()
        assert_wide_as_alone(result, *jobs)
        segments.append([job.num_segments for job in result.jobs.values()])
    assert segments[0] == segments[1]
