"""All that runs jobs on a CUDA device, on a CPU (`fake_cuda`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from colocation_cases import (
    SMALL_CUTS,
    assert_same_state,
    batches_of,
    cut_by,
    cycled,
    mse,
    small_fleet,
    smallest_budget,
    state_of,
    sum_of_peaks,
    tiny_batches,
    tiny_model,
    tiny_optimizer,
)
from tests.fake_cuda import PAGE, PaperRoom, SystemDriver, install
from torch import Tensor

import trainmux as tm
from trainmux.colocate import _fused_work, _segment_graphs
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.colocate._fused_work import _SCRATCH_BYTES, _SPARE_BYTES
from trainmux.colocate._segment_graphs import GRAPHS_BYTES, SegmentSet
from trainmux.colocate._step_layout import StepKernels
from trainmux.errors import BatchError, BudgetError, ConfigError, PlanError
from trainmux.fleet._feed import BatchFeed
from trainmux.fleet._group import Group
from trainmux.runtime import MATRIX_LIBRARIES_BYTES

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's shared memory files"),
    pytest.mark.usefixtures("built_once"),
]


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> SystemDriver:
    return install(monkeypatch)


def test_jobs_that_share_regions_are_as_alone(driver: SystemDriver, tmp_path: Path) -> None:
    names = ("residual", "transformer_with_dropout")
    fleets = {name: small_fleet(name) for name in names}
    expected = {}
    for name, fleet in fleets.items():
        fleet.save(tmp_path / name)
        losses = torch.stack([fleet.step(batch).clone() for batch in cycled(batches_of(name), 2)])
        expected[name] = (losses, state_of(fleet))
    for tightness in (1.0, 0.5):
        for name, fleet in fleets.items():
            fleet.restore(tmp_path / name)
        jobs = [tm.Job(name, fleet=fleets[name], loader=batches_of(name), steps=2) for name in names]
        colocation = tm.colocate(jobs, "4GiB", tracking_bytes=SMALL_CUTS, poisons=True)
        least, most = smallest_budget(colocation), sum_of_peaks(colocation)
        assert most - least >= 4 * PAGE  # there is something to share
        colocation.set_budget(round(tightness * least + (1 - tightness) * most))
        result = colocation.run()
        assert [repr(job.error) for job in result.jobs.values() if job.error] == []
        for name in names:
            assert torch.equal(result[name].losses, expected[name][0]), (name, tightness)
            assert_same_state(state_of(fleets[name]), expected[name][1], f"{name} at {tightness}")
        assert driver.held_bytes == 0  # all jobs have left


# ---- jobs with some pages of feature maps ---------------------------------------------------------------


def page_fleet(seed: int, **options: Any) -> tm.Fleet:
    model = tiny_model(seed, hidden=128)
    member = tm.Member(model, tiny_optimizer(model), name=f"m{seed}")
    return tm.Fleet([member], mse, page_batches(seed)[0], deterministic=True, **options)


def page_batches(seed: int, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    return tiny_batches(seed, num_batches=3, size=size)


def trained(fleet: tm.Fleet, batches: Sequence[Any], steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    losses = torch.stack([fleet.step(batch).clone() for batch in cycled(batches, steps)])
    return losses, state_of(fleet)


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
        beside = sum(one.need.local_bytes - one.need.area_bytes for one in device._placed.values())
        seen.append((event.colocation.budget_bytes, device.reserved_bytes, driver.held_bytes + beside))
        captured.append(captures_of(event.colocation))

    fleets = [page_fleet(seed) for seed in (0, 1)]
    jobs = [tm.Job(str(n), fleet=fleet, loader=page_batches(n), steps=9) for n, fleet in enumerate(fleets)]
    colocation = tm.colocate(jobs, "4GiB", tracking_bytes=0, callbacks=[squeeze], poisons=True)
    budgets += [smallest_budget(colocation) + PAGE, sum_of_peaks(colocation)]
    assert budgets[1] - budgets[0] >= 4 * PAGE
    colocation.set_budget(budgets[1])
    result = colocation.run()
    assert result.failed == ()
    assert {budget for budget, _, _ in seen} == set(budgets)
    assert all(held == reserved <= budget for budget, reserved, held in seen)
    both = [row for row in captured if len(row) == 2]
    assert all(row == both[0] for row in both)
    for number, fleet in enumerate(fleets):
        losses, state = trained(page_fleet(number), page_batches(number), 9)
        assert torch.equal(result[str(number)].losses, losses)
        assert_same_state(state_of(fleet), state, str(number))


def finer_once_measured(kernels: StepKernels, seconds: float) -> int:
    """A step in one piece, until its duration was measured."""
    return 1 << 40 if seconds == kernels.estimated_seconds else 0


def test_a_step_that_was_misjudged_is_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts are chosen for what kernels take on an H200; a step that took otherwise is captured once more."""
    asked: list[float] = []

    def tracking_bytes(kernels: StepKernels, seconds: float) -> int:
        asked.append(seconds)
        return finer_once_measured(kernels, seconds)

    cut_by(monkeypatch, tracking_bytes)
    fleets = [page_fleet(0), page_fleet(1)]
    jobs = [tm.Job(str(n), fleet=fleet, loader=page_batches(n), steps=8) for n, fleet in enumerate(fleets)]
    colocation = tm.colocate(jobs, "4GiB", poisons=True)
    before = [admitted.result(None).num_segments for admitted in colocation._jobs.values()]
    colocation.set_budget(smallest_budget(colocation))
    captured: list[dict[str, int]] = []
    run_segment = colocation._run_segment

    def watched(ref: Any) -> None:
        captured.append(captures_of(colocation))
        run_segment(ref)

    monkeypatch.setattr(colocation, "_run_segment", watched)
    result = colocation.run()
    assert result.failed == ()
    for number, fleet in enumerate(fleets):
        own = result[str(number)]
        assert own.num_segments > 4 * before[number]
        assert captured[-1].get(str(number), own.num_segments) >= own.num_segments
        losses, state = trained(page_fleet(number), page_batches(number), 8)
        assert torch.equal(own.losses, losses)
        assert_same_state(state_of(fleet), state, str(number))
    assert len(asked) >= 4  # estimated, and measured


def rooms_made(monkeypatch: pytest.MonkeyPatch) -> list[PaperRoom]:
    """Fills with what graphs are captured in: one for each capture of a job's step."""
    made: list[PaperRoom] = []

    def make(*arguments: Any, **options: Any) -> PaperRoom:
        made.append(PaperRoom(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(_segment_graphs, "CaptureRoom", make)
    return made


def test_what_was_learned_of_a_job_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut as it was, captured once, and runs beside the other from its first iteration on."""
    cut_by(monkeypatch, lambda kernels, seconds: 0 if seconds > 0.5 else 1 << 40)
    made = rooms_made(monkeypatch)
    slowness = 1.0

    def run() -> tuple[tm.ColocationResult, list[bool], int]:
        made.clear()
        fleets = [page_fleet(seed) for seed in (0, 1)]
        jobs = [
            tm.Job(str(n), fleet=fleet, loader=page_batches(n), steps=6) for n, fleet in enumerate(fleets)
        ]
        monkeypatch.setattr(SegmentSet, "replay_seconds", lambda self: slowness)
        colocation = tm.colocate(jobs, "4GiB", profiles=tmp_path / "profiles")
        known = [admitted.demand.is_measured for admitted in colocation._jobs.values()]
        result = colocation.run()
        assert result.failed == ()
        for number, fleet in enumerate(fleets):
            losses, state = trained(page_fleet(number), page_batches(number), 6)
            assert torch.equal(result[str(number)].losses, losses)
            assert_same_state(state_of(fleet), state, str(number))
        return result, known, len(made)

    first, known, num_captured = run()
    assert (known, num_captured) == ([False, False], 4)
    again, known, num_captured = run()
    assert (known, num_captured) == ([True, True], 2)
    assert [job.num_segments for job in again.jobs.values()] == [
        job.num_segments for job in first.jobs.values()
    ]
    slowness = 1e-3  # the device is much faster now: jobs are cut anew, and profiled
    changed, known, num_captured = run()
    assert (known, num_captured) == ([True, True], 4)
    assert changed["0"].num_segments < first["0"].num_segments
    again, known, num_captured = run()
    assert (known, num_captured) == ([True, True], 2)
    assert again["0"].num_segments == changed["0"].num_segments
    for path in (tmp_path / "profiles").iterdir():
        path.write_text("{}")
    assert run()[1] == [False, False]


def test_other_steps_run_once_and_are_captured_then() -> None:
    def batches(seed: int) -> list[Any]:
        long, short = page_batches(seed), page_batches(seed, size=24)
        return [long[0], long[1], short[0], long[2]]

    captured: dict[str, list[int]] = {"0": [], "1": []}

    def count(event: tm.JobStep) -> None:
        """At each job's own steps: how far the other one has come is the system's business."""
        captured[event.job].append(captures_of(event.colocation)[event.job])

    fleets = [page_fleet(seed, accumulate=2) for seed in (0, 1)]
    jobs = [tm.Job(str(n), fleet=fleet, loader=batches(n), steps=12) for n, fleet in enumerate(fleets)]
    colocation = tm.colocate(
        jobs,
        "4GiB",
        tracking_bytes=0,
        callbacks=[count],
        poisons=True,
    )
    colocation.set_budget(smallest_budget(colocation) + PAGE)
    result = colocation.run()
    assert result.failed == ()
    for number, fleet in enumerate(fleets):
        losses, state = trained(page_fleet(number, accumulate=2), batches(number), 12)
        assert torch.equal(result[str(number)].losses, losses)
        assert_same_state(state_of(fleet), state, str(number))
    for row in captured.values():
        assert row[-1] > row[0]
        assert row[-1] == row[len(row) * 3 // 4]


# ---- memory that runs out --------------------------------------------------------------------------------


def test_a_newcomer_that_a_full_device_has_no_memory_for_ends_alone(driver: SystemDriver) -> None:
    """The budget would allow it, but other programs hold the memory."""

    def come(event: tm.JobStep) -> None:
        if event.step == 2:
            driver.capacity_bytes = driver.held_bytes
            event.colocation.add(tm.Job("guest", fleet=guest_fleet, loader=page_batches(1), steps=2))

    stays_fleet, guest_fleet = page_fleet(0), page_fleet(1)
    before = state_of(guest_fleet)
    stays = tm.Job("stays", fleet=stays_fleet, loader=page_batches(0), steps=5, callbacks=[come])
    result = tm.colocate([stays], "4GiB", poisons=True).run()
    assert result.failed == ("guest",)
    assert isinstance(result["guest"].error, BudgetError)
    assert result["guest"].num_steps == 0
    assert_same_state(state_of(guest_fleet), before, "guest")
    losses, state = trained(page_fleet(0), page_batches(0), 5)
    assert torch.equal(result["stays"].losses, losses)
    assert_same_state(state_of(stays_fleet), state, "stays")
    assert driver.held_bytes == 0


def test_a_run_that_is_broken_off_holds_nothing(
    driver: SystemDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = page_fleet(0)
    colocation = tm.colocate([tm.Job("a", fleet=fleet, loader=page_batches(0), steps=9)], "4GiB")

    def break_off(*arguments: Any) -> None:
        raise PlanError("broken")

    monkeypatch.setattr(colocation._scheduler, "complete", break_off)
    with pytest.raises(PlanError, match="broken"):
        colocation.run()
    assert driver.held_bytes == 0
    with pytest.raises(ConfigError, match="make another"):
        colocation.run()
    fleet.step(page_batches(0)[0])  # its weights are its own again


def test_a_fleet_goes_by_the_host_where_the_device_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are the fleet's own again when its job ends, and on its device with its next step."""
    restack, refused = Group.restack, []

    def full(group: Group, device: torch.device) -> None:
        if not refused:
            refused.append(device)
            raise torch.OutOfMemoryError("full")
        restack(group, device)

    fleet = page_fleet(0)
    monkeypatch.setattr(Group, "restack", full)
    result = tm.colocate([tm.Job("a", fleet=fleet, loader=page_batches(0), steps=3)], "4GiB").run()
    assert result.failed == ()
    assert len(refused) == 1
    assert fleet._plans._is_left
    expected = page_fleet(0)
    losses, state = trained(expected, page_batches(0), 3)
    assert torch.equal(result["a"].losses, losses)
    assert_same_state(state_of(fleet), state, "a")
    batch = page_batches(0)[0]
    assert torch.equal(fleet.step(batch), expected.step(batch))
    assert not fleet._plans._is_left


def test_a_job_whose_state_finds_no_room_at_all_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fleets = [page_fleet(seed) for seed in (0, 1)]
    restack = Group.restack

    def full(group: Group, device: torch.device) -> None:
        if group in fleets[0]._groups:
            raise torch.OutOfMemoryError("full")
        restack(group, device)

    monkeypatch.setattr(Group, "restack", full)
    jobs = [tm.Job(str(n), fleet=fleet, loader=page_batches(n), steps=2) for n, fleet in enumerate(fleets)]
    result = tm.colocate(jobs, "4GiB").run()
    assert result.failed == ("0",)
    assert isinstance(result["0"].error, torch.OutOfMemoryError)
    losses, state = trained(page_fleet(1), page_batches(1), 2)
    assert torch.equal(result["1"].losses, losses)
    assert_same_state(state_of(fleets[1]), state, "1")


def test_a_job_whose_graphs_take_more_than_usual_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 3 * GRAPHS_BYTES
    monkeypatch.setattr(PaperRoom, "graph_bytes", taken)
    fleet = page_fleet(0)
    colocation = tm.colocate([tm.Job("a", fleet=fleet, loader=page_batches(0), steps=2)], "4GiB")
    before = colocation.results()["a"].local_bytes
    result = colocation.run()
    assert result.failed == ()
    assert result["a"].local_bytes == before + taken
    losses, state = trained(page_fleet(0), page_batches(0), 2)
    assert torch.equal(result["a"].losses, losses)
    assert_same_state(state_of(fleet), state, "a")


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_job_does_not_need_in_the_end_is_for_all(
    driver: SystemDriver, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """In a budget for one peak at a time: once both are captured there is room for both peaks, unless others
    have it."""
    monkeypatch.setattr(_fused_work, "_SPARE_BYTES", _SPARE_BYTES)
    fleets = [page_fleet(number) for number in (0, 1)]
    arenas: list[int] = []

    def look(step: tm.JobStep) -> None:
        device = step.colocation._device
        assert isinstance(device, CudaDevice)
        arenas.append(sum(block.size_bytes for blocks in device._arenas.values() for block in blocks))

    jobs = [
        tm.Job(str(number), fleet=fleet, loader=page_batches(number), steps=3, callbacks=[look])
        for number, fleet in enumerate(fleets)
    ]
    colocation = tm.colocate(jobs, "4GiB")
    asked = {name: row.local_bytes for name, row in colocation.results().jobs.items()}
    peaks = [row.peak_bytes for row in colocation.results().jobs.values()]
    least = smallest_budget(colocation)
    assert least == sum(asked.values()) + max(peaks)
    colocation.set_budget(least)
    if not is_there:
        driver.capacity_bytes = driver.held_bytes + 16 * max(peaks)
    result = colocation.run()
    assert result.failed == ()
    assert arenas[-1] == (sum(peaks) if is_there else max(peaks))
    for number, fleet in enumerate(fleets):
        row = result[str(number)]
        assert row.local_bytes == asked[str(number)] - _SCRATCH_BYTES + MATRIX_LIBRARIES_BYTES + _SPARE_BYTES
        losses, state = trained(page_fleet(number), page_batches(number), 3)
        assert torch.equal(row.losses, losses)
        assert_same_state(state_of(fleet), state, str(number))


def test_a_batch_with_no_room_is_refused_before_it_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = page_fleet(0)
    fed: list[int] = []
    tensors = BatchFeed.tensors

    def noting(feed: BatchFeed, feeds: Any, *rest: Any) -> Any:
        fed.extend(leaf.parts[0].shape[0] for row in feeds for leaf in row.leaves)
        return tensors(feed, feeds, *rest)

    monkeypatch.setattr(BatchFeed, "tensors", noting)
    batches = [*page_batches(0)[:2], page_batches(0, size=65)[0]]
    result = tm.colocate([tm.Job("a", fleet=fleet, loader=batches, steps=3)], "4GiB").run()
    assert isinstance(result["a"].error, BatchError)
    assert result["a"].num_steps == 2
    assert set(fed) == {64}
