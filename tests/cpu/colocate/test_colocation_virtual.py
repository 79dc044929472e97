"""All that runs jobs on a CUDA device, on a CPU (`fake_cuda`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from colocation_cases import (
    assert_members_as_alone,
    assert_same_state,
    cut_by,
    mse,
    smallest_budget,
    state_of,
    sum_of_peaks,
    tiny_batches,
    tiny_model,
    tiny_optimizer,
)
from tests.fake_cuda import PAGE, PaperRoom, SystemDriver, install

import trainmux as tm
from trainmux.colocate import _fused_work, _segment_graphs
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.colocate._fused_work import _SCRATCH_BYTES, _SPARE_BYTES
from trainmux.colocate._segment_graphs import GRAPHS_BYTES, SegmentSet
from trainmux.errors import BatchError, BudgetError, ConfigError, PlanError
from trainmux.fleet._feed import BatchFeed
from trainmux.fleet._group import Constants, Group
from trainmux.runtime import MATRIX_LIBRARIES_BYTES

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's shared memory files"),
    pytest.mark.usefixtures("built_once"),
]


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> SystemDriver:
    return install(monkeypatch)


def page_fleet(seed: int, **options: Any) -> tm.Fleet:
    model = tiny_model(seed, hidden=128)
    member = tm.Member(model, tiny_optimizer(model), name=f"m{seed}")
    return tm.Fleet([member], mse, page_batches(seed)[0], deterministic=True, **options)


def page_batches(seed: int, size: int = 64) -> list[Any]:
    return tiny_batches(seed, num_batches=3, size=size)


def page_jobs(*names: str, steps: int, **options: Any) -> list[tm.Job]:
    """Jobs of new fleets, by default with the seeds that they are named by."""
    return [
        tm.Job(name, fleet=page_fleet(int(name)), loader=page_batches(int(name)), steps=steps, **options)
        for name in names
    ]


def assert_pages_as_alone(result: tm.ColocationResult, jobs: Sequence[tm.Job], **options: Any) -> None:
    """Jobs of `page_fleet` bit for bit as if each had trained alone."""
    for job in jobs:
        assert_members_as_alone(result[job.name], job, page_fleet(int(job.name), **options))


def captures_of(colocation: tm.Colocation) -> dict[str, int]:
    return {name: admitted.work.num_captures for name, admitted in colocation._inside.items()}  # type: ignore[attr-defined]


def test_regions_are_exchanged_under_running_jobs(driver: SystemDriver) -> None:
    budgets: list[int] = []
    seen: list[tuple[int, int, int]] = []
    captured: list[dict[str, int]] = []

    def squeeze(event: tm.JobStep) -> None:
        if event.job == "0" and event.step in (3, 6):
            event.colocation.set_budget(budgets[0] if event.step == 3 else budgets[1])
        device: Any = event.colocation._device
        demands = [placed.demand for placed in device._placed.values()]
        scratch = sum(demand.local_bytes - demand.area_bytes for demand in demands)
        seen.append((event.colocation.budget_bytes, device.reserved_bytes, driver.held_bytes + scratch))
        captured.append(captures_of(event.colocation))

    jobs = page_jobs("0", "1", steps=9)
    colocation = tm.colocate(jobs, "4GiB", tracking_bytes=0, callbacks=[squeeze], poisons=True)
    budgets += [smallest_budget(colocation) + PAGE, sum_of_peaks(colocation)]
    assert budgets[1] - budgets[0] >= 4 * PAGE
    colocation.set_budget(budgets[1])
    result = colocation.run()
    assert {budget for budget, _, _ in seen} == set(budgets)
    assert all(held == reserved <= budget for budget, reserved, held in seen)
    both = [row for row in captured if len(row) == 2]
    assert all(row == both[0] for row in both)
    assert_pages_as_alone(result, jobs)


def test_a_step_that_was_misjudged_is_cut_anew_and_so_known_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then captured once, and runs beside the other from its first iteration on."""
    cut_by(monkeypatch, lambda kernels, seconds: 0 if seconds > 0.5 else 1 << 40)
    made: list[PaperRoom] = []

    def make_room(*arguments: Any, **options: Any) -> PaperRoom:
        made.append(PaperRoom(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(_segment_graphs, "CaptureRoom", make_room)

    def run(slowness: float) -> tuple[int, list[bool], int]:
        """The segments of a job, whether durations were known, and how often steps were captured."""
        made.clear()
        monkeypatch.setattr(SegmentSet, "replay_seconds", lambda self: slowness)
        jobs = page_jobs("0", "1", steps=4)
        colocation = tm.colocate(jobs, "4GiB", profiles=tmp_path / "profiles", poisons=True)
        known = [admitted.demand.is_measured for admitted in colocation._jobs.values()]
        result = colocation.run()
        assert_pages_as_alone(result, jobs)
        return result["0"].num_segments, known, len(made)

    num_segments, known, num_captured = run(1.0)
    assert num_segments > 4
    assert (known, num_captured) == ([False, False], 4)
    assert run(1.0) == (num_segments, [True, True], 2)
    num_fewer, known, num_captured = run(1e-3)  # the device is much faster now
    assert num_fewer < num_segments
    assert (known, num_captured) == ([True, True], 4)
    assert run(1e-3) == (num_fewer, [True, True], 2)
    for path in (tmp_path / "profiles").iterdir():
        path.write_text("{}")
    assert run(1e-3)[1] == [False, False]


def test_other_steps_run_once_and_are_captured_then_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short batch, and micro-batches without an update. Beyond the limit they run kernel by kernel."""

    def num_captured(most: int, steps: int) -> list[int]:
        """The graphs of other steps that each job's steps have led to."""
        monkeypatch.setattr(_fused_work, "_MAX_OTHER_STEPS", most)
        captured: dict[str, list[int]] = {"0": [], "1": []}

        def count(event: tm.JobStep) -> None:
            """At each job's own steps: how far the other one has come is the system's business."""
            captured[event.job].append(captures_of(event.colocation)[event.job])

        jobs = []
        for seed in (0, 1):
            long, short = page_batches(seed), page_batches(seed, size=24)
            loader = [long[0], long[1], short[0], long[2]]
            fleet = page_fleet(seed, accumulate=2)
            jobs.append(tm.Job(str(seed), fleet=fleet, loader=loader, steps=steps))
        colocation = tm.colocate(jobs, "4GiB", tracking_bytes=0, callbacks=[count], poisons=True)
        colocation.set_budget(smallest_budget(colocation) + PAGE)
        assert_pages_as_alone(colocation.run(), jobs, accumulate=2)
        assert steps <= 9 or all(row[-1] == row[9] for row in captured.values())
        return [row[-1] - row[0] for row in captured.values()]

    few, many = num_captured(1, steps=8), num_captured(8, steps=12)
    assert all(0 < one < both for one, both in zip(few, many, strict=True))


# ---- memory that runs out --------------------------------------------------------------------------------


def test_a_newcomer_that_a_full_device_has_no_memory_for_ends_alone(driver: SystemDriver) -> None:
    """The budget would allow it, but other programs hold the memory."""
    (guest,) = page_jobs("1", steps=2)

    def come(event: tm.JobStep) -> None:
        if event.step == 2:
            driver.capacity_bytes = driver.held_bytes
            event.colocation.add(guest)

    stays = page_jobs("0", steps=5, callbacks=[come])
    result = tm.colocate(stays, "4GiB", poisons=True).run()
    assert isinstance(result["1"].error, BudgetError)
    assert result["1"].num_steps == 0
    assert guest.fleet is not None
    assert_same_state(state_of(guest.fleet), state_of(page_fleet(1)), "guest")
    assert_pages_as_alone(result, stays)
    assert driver.held_bytes == 0


def test_a_run_that_is_broken_off_holds_nothing(
    driver: SystemDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = page_jobs("0", steps=9)
    colocation = tm.colocate(jobs, "4GiB")

    def break_off(*arguments: Any) -> None:
        raise PlanError("broken")

    monkeypatch.setattr(colocation._scheduler, "complete", break_off)
    with pytest.raises(PlanError):
        colocation.run()
    assert driver.held_bytes == 0
    with pytest.raises(ConfigError):
        colocation.run()
    assert jobs[0].fleet is not None
    jobs[0].fleet.step(page_batches(0)[0])  # its weights are its own again


@pytest.mark.parametrize("has_host", [True, False])
def test_weights_go_by_the_host_where_the_device_has_no_room(
    monkeypatch: pytest.MonkeyPatch, has_host: bool
) -> None:
    """They are on the fleet's device again with its next step. Without room anywhere the job ends alone."""
    jobs = page_jobs("0", "1", steps=2)
    fleet = jobs[0].fleet
    assert fleet is not None
    restack, refused = Group.restack, []

    def full(group: Group, device: torch.device, known: Constants) -> None:
        if group in fleet._groups and not (has_host and refused):
            refused.append(device)
            raise torch.OutOfMemoryError("full")
        restack(group, device, known)

    monkeypatch.setattr(Group, "restack", full)
    result = tm.colocate(jobs, "4GiB").run()
    assert refused
    assert_pages_as_alone(result, jobs[0 if has_host else 1 :])
    if not has_host:
        assert isinstance(result["0"].error, torch.OutOfMemoryError)
        return
    alone = page_fleet(0)
    *first, last = page_batches(0)
    for batch in first:
        alone.step(batch)
    assert torch.equal(fleet.step(last), alone.step(last))
    assert not fleet._plans._is_left


def test_a_job_whose_graphs_take_more_than_usual_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 3 * GRAPHS_BYTES
    monkeypatch.setattr(PaperRoom, "graph_bytes", taken)
    jobs = page_jobs("0", steps=2)
    colocation = tm.colocate(jobs, "4GiB")
    before = colocation.results()["0"].local_bytes
    result = colocation.run()
    assert result["0"].local_bytes == before + taken
    assert_pages_as_alone(result, jobs)


@pytest.mark.parametrize("is_there", [True, False])
def test_memory_that_a_job_does_not_need_in_the_end_is_for_all(
    driver: SystemDriver, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """In a budget for one peak at a time: once both are captured there is room for both peaks, unless others
    have it."""
    monkeypatch.setattr(_fused_work, "_SPARE_BYTES", _SPARE_BYTES)
    arenas: list[int] = []

    def look(step: tm.JobStep) -> None:
        device = step.colocation._device
        assert isinstance(device, CudaDevice)
        arenas.append(sum(block.size_bytes for blocks in device._arenas.values() for block in blocks))

    jobs = page_jobs("0", "1", steps=3, callbacks=[look])
    colocation = tm.colocate(jobs, "4GiB")
    asked = {name: row.local_bytes for name, row in colocation.results().jobs.items()}
    peaks = [row.peak_bytes for row in colocation.results().jobs.values()]
    colocation.set_budget(sum(asked.values()) + max(peaks))
    if not is_there:
        driver.capacity_bytes = driver.held_bytes + 16 * max(peaks)
    result = colocation.run()
    assert arenas[-1] == (sum(peaks) if is_there else max(peaks))
    for name, row in result.jobs.items():
        assert row.local_bytes == asked[name] - _SCRATCH_BYTES + MATRIX_LIBRARIES_BYTES + _SPARE_BYTES
    assert_pages_as_alone(result, jobs)


def test_a_batch_with_no_room_is_refused_before_it_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    tensors = BatchFeed.tensors

    def noting(feed: BatchFeed, feeds: Any, *rest: Any) -> Any:
        fed.extend(leaf.parts[0].shape[0] for row in feeds for leaf in row.leaves)
        return tensors(feed, feeds, *rest)

    monkeypatch.setattr(BatchFeed, "tensors", noting)
    batches = [*page_batches(0)[:2], page_batches(0, size=65)[0]]
    result = tm.colocate([tm.Job("a", fleet=page_fleet(0), loader=batches, steps=3)], "4GiB").run()
    assert isinstance(result["a"].error, BatchError)
    assert result["a"].num_steps == 2
    assert set(fed) == {64}
