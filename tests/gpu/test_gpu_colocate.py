"""Bytes of the device under jobs side by side: within the budget, without a second capture, given back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from colocation_cases import cut_by, smallest_budget, sum_of_peaks
from held_memory import MemoryWatch
from settled import settle
from torch import nn
from wide_jobs import (
    MIB,
    REGION,
    assert_wide_as_alone,
    captures_of,
    cuda,
    mean_square,
    run_beside,
    used_bytes,
    wide_batches,
    wide_job,
)

import trainmux as tm
from trainmux.colocate import _fused_work
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._layout import ArenaLayout, MemoryLayout

pytestmark = [
    pytest.mark.alone,
    pytest.mark.usefixtures("jobs_keep_what_they_asked_for", "without_workspaces"),
]

NUM_GUESTS = 6


def demand(name: str, area_bytes: int, peak_bytes: int) -> JobDemand:
    """A job's memory: its area, and its peak in the arena."""
    segments = (Segment(1, peak_bytes, 0, 1.0),)
    return JobDemand(name, name, REGION, area_bytes, segments, area_bytes=area_bytes)


def test_what_is_laid_out_is_what_the_device_has_less() -> None:
    device = CudaDevice(cuda(), region_bytes=REGION)
    needs = {"a": demand("a", 4 * MIB, 6 * REGION), "b": demand("b", 2 * MIB, 3 * REGION)}
    both = [ArenaLayout(("a",), ("b",), count * REGION) for count in (9, 6, 8)]
    layouts = [MemoryLayout((arena,)) for arena in (*both, ArenaLayout(("b",), (), 3 * REGION))]
    for layout in (layouts[0], MemoryLayout(())):
        device.arrange(layout, needs)  # the first time loads code
    settle()
    before = used_bytes()
    for layout in (*layouts, MemoryLayout(())):
        device.arrange(layout, needs)
        assert used_bytes() - before == device.reserved_bytes


def two_wide_jobs() -> tuple[MemoryWatch, list[tm.Job]]:
    """Jobs of twelve steps, and a watch that began before they were made."""
    return MemoryWatch(), [wide_job("a", 0, 12), wide_job("b", 1, 12)]


def run_within_budget(
    watch: MemoryWatch, jobs: Sequence[tm.Job], **options: Any
) -> tuple[tm.ColocationResult, list[int]]:
    """Run wide jobs in little more than the smallest budget, which the device never exceeds.

    Also returns how many segments each job had before it ran.
    """
    options["callbacks"] = [lambda event: watch.look(event.colocation)]
    colocation = tm.colocate(jobs, "20GiB", region_bytes=REGION, **options)
    before = [job.num_segments for job in colocation.results().jobs.values()]
    budget = smallest_budget(colocation) + 5 * REGION
    assert "tracking_bytes" not in options or budget < sum_of_peaks(colocation)
    colocation.set_budget(budget)
    result = colocation.run()
    assert [repr(job.error) for job in result.jobs.values() if job.error] == []
    assert result.peak_bytes <= budget
    assert max(watch.held) <= budget, watch.report()
    return result, before


@pytest.mark.parametrize("has_stepped", [False, True], ids=["new fleets", "fleets that have stepped"])
def test_the_device_never_holds_more_than_the_budget(has_stepped: bool) -> None:
    watch, jobs = two_wide_jobs()
    for seed, job in enumerate(jobs if has_stepped else ()):  # graphs and a pool of the fleet's own
        assert job.fleet is not None
        job.fleet.step(wide_batches(seed)[0])
    result, _ = run_within_budget(watch, jobs, tracking_bytes=4 * MIB)
    if not has_stepped:
        assert_wide_as_alone(result, *jobs)


def test_jobs_that_are_cut_anew_keep_bits_and_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured once more when they were found to take another time than their cuts were chosen for."""
    cut_by(monkeypatch, lambda kernels, seconds: 1 << 40 if seconds == kernels.estimated_seconds else 4 * MIB)
    monkeypatch.setattr(_fused_work, "_MISJUDGED", 1.0)  # whatever it was, it was wrong
    watch, jobs = two_wide_jobs()
    result, before = run_within_budget(watch, jobs)
    assert all(result[job.name].num_segments > 4 * few for job, few in zip(jobs, before, strict=True))
    assert_wide_as_alone(result, *jobs)


def test_segments_last_as_long_as_meant() -> None:
    """Of convolutions too, whose times are underestimated before they have run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [
            layer
            for _ in range(6)
            for layer in (nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU())
        ]
        model = nn.Sequential(nn.Conv2d(3, 48, 1), *layers)
    batch = torch.randn(128, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    fleet = tm.Fleet([member], mean_square, batch, device="cuda", lowering="aten")
    colocation = tm.colocate([tm.Job("convolutions", fleet=fleet, loader=[batch], steps=6)], "60GiB")
    before = colocation.results()["convolutions"].num_segments
    result = colocation.run()
    assert [repr(job.error) for job in result.jobs.values() if job.error] == []
    seconds = colocation._scheduler.report("convolutions").solo_seconds
    mean = sum(seconds) / len(seconds)
    # A kernel takes up to 700 us here, and is a segment at least.
    assert 100e-6 < mean < 900e-6, f"{len(seconds)} segments of {1e6 * mean:.0f} us, {before} by estimate"
    assert len(seconds) > before


def test_the_budget_changes_without_a_capture() -> None:
    """Down to where jobs take turns, and up again."""
    watch = MemoryWatch()
    budgets: list[int] = []
    seen: list[tuple[int, int]] = []
    captured: list[dict[str, int]] = []

    def squeeze(event: tm.JobStep) -> None:
        if event.job == "a" and event.step in (8, 16):
            event.colocation.set_budget(budgets[0] if event.step == 8 else budgets[1])
        seen.append((event.colocation.budget_bytes, watch.look(event.colocation)))
        captured.append(captures_of(event.colocation))

    jobs = [wide_job("a", 0, 24), wide_job("b", 1, 24)]
    colocation = tm.colocate(
        jobs, "20GiB", tracking_bytes=4 * MIB, region_bytes=REGION, callbacks=[squeeze], poisons=True
    )
    budgets += [smallest_budget(colocation) + REGION, sum_of_peaks(colocation)]
    colocation.set_budget(budgets[1])
    result = colocation.run()
    assert result.failed == ()
    assert {budget for budget, _ in seen} == set(budgets)
    for number, (budget, used) in enumerate(seen):
        assert used <= budget, watch.report(number)
    largest = {limit: max(used for budget, used in seen if budget == limit) for limit in budgets}
    given_back = budgets[1] - budgets[0]
    # Regions, given back and taken anew:
    assert largest[budgets[1]] - largest[budgets[0]] > 0.5 * given_back, watch.report()
    both = [row for row in captured if len(row) == 2]
    assert all(row == both[0] for row in both)
    assert_wide_as_alone(result, *jobs)


def test_memory_is_flat_while_jobs_come_and_go() -> None:
    watch = MemoryWatch()

    def turn_over(event: tm.JobStep) -> None:
        """Another job comes whenever one has gone."""
        others = [row for row in event.colocation.usage() if row.name != "stays" and row.state != "done"]
        if event.job != "stays" or others or len(watch.seen) == NUM_GUESTS:
            return
        settle()
        watch.look(event.colocation)
        if len(watch.seen) == NUM_GUESTS:
            event.colocation.remove("stays")
        else:
            number = len(watch.seen)
            event.colocation.add(wide_job(f"guest {number}", number % 2, 2))

    stays = wide_job("stays", 2, None, loader=itertools.cycle(wide_batches(2)))
    result = run_beside([stays], callbacks=[turn_over])
    assert len(watch.seen) == NUM_GUESTS
    grown = watch.held[-1] - watch.held[2]
    assert grown <= 2 * MIB, watch.report(-1, since=2)
    assert_wide_as_alone(result, stays)
