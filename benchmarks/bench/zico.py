"""Two jobs on one device in one process: in turn or at once, eagerly or as graphs, in budgets.

Every way trains the same two jobs for some seconds; `zico_jobs` says what is counted.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

import trainmux as tm

from .job import BenchError
from .zico_cases import machine_bytes
from .zico_jobs import (
    LEAST_STEPS,
    BenchJob,
    Failure,
    PairNames,
    PairResult,
    WayResult,
    ZicoOptions,
    endless_jobs,
    is_lost,
    release_cached,
    searched_convolutions,
    sizes_of,
    train_for,
    used_bytes,
    wait_for,
)
from .zico_watch import Stay, run_watched

TEMPORAL = "temporal"
UNLIMITED = "two streams, unlimited"
ROOMY = "co-located, all memory"
EAGER_TEMPORAL = "eager temporal"
EAGER_THREADS = "two eager threads"
CHANGES = ("co-located, 70%", "co-located, 50%", "co-located, 70% again")
"""Figure 10's budgets, as shares of what both jobs need at their peaks, as far as they can work."""
_LEAST_CHANGE = 1.1


def excess_way(excess: float) -> str:
    """The name of a budget that both jobs' peaks exceed so many times."""
    return f"co-located, {excess:g}x"


def machine_way(names: PairNames) -> str:
    """The name of the budget that the paper's machine for these jobs has."""
    return f"co-located, {machine_bytes(names) >> 30} GiB"


def budgets_of(
    names: PairNames,
    sizes: tuple[int, int],
    excesses: Sequence[float],
    *,
    has_machine: bool,
    changes: bool,
) -> list[Stay]:
    """The budgets to run a pair in, from ``sizes``: what both need at their peaks, and at least."""
    whole, least = sizes
    stays = [Stay(ROOMY, whole)]
    stays += [Stay(excess_way(excess), max(least, int(whole / excess)), True) for excess in excesses]
    if has_machine:
        stays.append(Stay(machine_way(names), min(whole, machine_bytes(names)), True))
    if changes:
        # Where 50% is raised to the least that can work, 70% may be too near to it to be a change.
        low, high = max(least, whole // 2), int(0.7 * whole)
        if high < _LEAST_CHANGE * low:
            high = (low + whole) // 2
        stays += [Stay(way, size, True) for way, size in zip(CHANGES, (high, low, high), strict=True)]
    return stays


class PairBench:
    """Two jobs, trained by one way after another. A way gives its result or raises what stopped it."""

    def __init__(self, jobs: tuple[BenchJob, BenchJob], options: ZicoOptions) -> None:
        self.jobs = jobs
        self.names: PairNames = (jobs[0].case.name, jobs[1].case.name)
        self._options = options
        self._device = options.where
        self.sizes: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
        """Bytes of each job's own, and of the arena at its peak, once they were co-located."""

    def result(self, rows: Sequence[WayResult]) -> PairResult:
        """What is known of the pair, with ``rows`` of the ways that were measured."""
        first, second = self.jobs
        solo = (first.solo_seconds * 1e3, second.solo_seconds * 1e3)
        return PairResult(self.names, solo, *self.sizes, tuple(rows))

    # ---- as graphs ---------------------------------------------------------------------------------

    def temporal(self) -> WayResult:
        """One iteration of each in turn, the host ahead of the device."""

        def both(number: int) -> None:
            for job in self.jobs:
                job.step(number)

        both(0)
        wait_for(self._device)
        num, taken = train_for(both, self._options.seconds, self._device)
        return self.counted(TEMPORAL, (num, num), taken)

    def unlimited(self) -> WayResult:
        """Each on a stream of its own with memory of its own: whole steps, at most two of each in flight."""
        streams = [torch.cuda.Stream(self._device) for _ in range(2)]
        in_flight: list[list[torch.cuda.Event]] = [[], []]
        done = [0, 0]
        begun = [0, 0]

        def look() -> bool:
            ended = False
            for index in range(2):
                while in_flight[index] and in_flight[index][0].query():
                    in_flight[index].pop(0)
                    done[index] += 1
                    ended = True
            return ended

        for index in range(2):
            with torch.cuda.stream(streams[index]):
                self.jobs[index].step(0)
        wait_for(self._device)
        begin = time.perf_counter()
        while time.perf_counter() - begin < self._options.seconds:
            for index in range(2):
                if len(in_flight[index]) < 2:
                    with torch.cuda.stream(streams[index]):
                        self.jobs[index].step(begun[index])
                        event = torch.cuda.Event()
                        event.record()
                    begun[index] += 1
                    in_flight[index].append(event)
            if not look():
                time.sleep(10e-6)
        taken = time.perf_counter() - begin
        counted = (done[0], done[1])
        wait_for(self._device)
        return self.counted(UNLIMITED, counted, taken)

    def colocated(
        self, excesses: Sequence[float], known: Sequence[str], *, changes: bool
    ) -> tuple[list[WayResult], list[Failure]]:
        """By `trainmux.colocate`, in one budget after another, without those ways that are ``known`` already.

        One run goes through all budgets. Where one of them fails, the run begins anew behind it; where the
        first fails, nothing else is tried.
        """
        rows: list[WayResult] = []
        failures: list[Failure] = []
        skipped = set(known)
        while True:
            try:
                found, failed, is_broken = self._colocated_once(excesses, skipped, changes)
            except Exception as error:
                return rows, [*failures, Failure.of(self.names, "co-located", error)]
            rows += found
            failures += failed
            skipped |= {row.way for row in found} | {failure.way for failure in failed}
            if not is_broken or not found or is_lost(self._device):
                return rows, failures

    def _colocated_once(
        self, excesses: Sequence[float], skipped: set[str], changes: bool
    ) -> tuple[list[WayResult], list[Failure], bool]:
        """Results, what failed, and whether the run broke off before its last budget."""
        failures: list[Failure] = []
        if all(stay.way in skipped for stay in self._budgets(excesses, (1, 1), changes)):
            return [], failures, False
        colocation = tm.colocate(endless_jobs(self.jobs))
        least = 0

        def choose(result: tm.ColocationResult) -> list[Stay]:
            nonlocal least
            first, second = result.jobs.values()
            self.sizes = (first.local_bytes, second.local_bytes), (first.peak_bytes, second.peak_bytes)
            sizes = sizes_of(result)
            least = sizes[1]
            stays = []
            for stay in self._budgets(excesses, sizes, changes):
                if stay.way in skipped:
                    continue
                if stay.budget_bytes < least:
                    problem = BenchError(
                        f"the two jobs need at least {least} bytes, by turns; take smaller batches"
                    )
                    failures.append(Failure.of(self.names, stay.way, problem))
                else:
                    stays.append(stay)
            return stays

        watched = run_watched(colocation, choose, self._options.seconds, self._device)
        stays, stayed, error = watched.stays, watched.stayed, watched.error
        is_broken = error is not None and (stays is None or len(stayed) < len(stays))
        if error is not None and is_broken:
            way = stays[len(stayed)].way if stays else "co-located"
            failures.append(Failure.of(self.names, way, error))
        del colocation
        gc.collect()
        release_cached(self._device)
        # The fleets have their own tensors again, which they had not while they were co-located.
        outside = used_bytes(self._device) - sum(job.state_bytes for job in self.jobs)
        num_segments = (
            [] if watched.result is None else [row.num_segments for row in watched.result.jobs.values()]
        )
        rows = []
        for row in stayed:
            detail = {
                "budget_bytes": row.stay.budget_bytes,
                "smallest_budget_bytes": least,
                "device_bytes": max(0, row.most_bytes - outside),
                "num_segments": num_segments,
                **row.detail,
            }
            rows.append(self.counted(row.stay.way, (row.counted[0], row.counted[1]), row.seconds, detail))
        return rows, failures, is_broken

    def _budgets(self, excesses: Sequence[float], sizes: tuple[int, int], changes: bool) -> list[Stay]:
        has_machine = self._options.has_machine
        return budgets_of(self.names, sizes, excesses, has_machine=has_machine, changes=changes)

    # ---- eagerly -----------------------------------------------------------------------------------

    def eager_temporal(self) -> WayResult:
        """Plain torch, one iteration of each in turn."""
        steps = [job.eager_step() for job in self.jobs]

        def both(number: int) -> None:
            for step in steps:
                step(number)

        with searched_convolutions():
            for _ in range(2):
                both(0)
            wait_for(self._device)
            num, taken = train_for(both, self._options.seconds, self._device)
        return self.counted(EAGER_TEMPORAL, (num, num), taken)

    def eager_threads(self) -> WayResult:
        """Plain torch, each in a thread and on a stream of its own."""
        steps = [job.eager_step() for job in self.jobs]
        wait_for(self._device)  # the models are there before other streams read them
        counted = [0, 0]
        is_over = threading.Event()
        ready = threading.Barrier(3)
        problems: list[BaseException] = []

        def train(index: int) -> None:
            stream = torch.cuda.Stream(self._device)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        steps[index](0)
                    stream.synchronize()
                    ready.wait()
                    while not is_over.is_set():
                        steps[index](counted[index])
                        if counted[index] % LEAST_STEPS == 0:
                            stream.synchronize()
                        counted[index] += 1
                    stream.synchronize()
            except BaseException as error:
                problems.append(error)
                ready.abort()  # or the others would wait for this thread

        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        begin = 0.0
        with searched_convolutions():
            for thread in threads:
                thread.start()
            try:
                ready.wait()
                begin = time.perf_counter()
                time.sleep(self._options.seconds)
            except threading.BrokenBarrierError:
                pass  # a thread has the reason
            finally:
                is_over.set()
                for thread in threads:
                    thread.join()
        taken = time.perf_counter() - begin
        causes = [error for error in problems if not isinstance(error, threading.BrokenBarrierError)]
        if causes:
            raise BenchError(f"a thread ended with {type(causes[0]).__name__}: {causes[0]}")
        return self.counted(EAGER_THREADS, (counted[0], counted[1]), taken)

    # ---- inside ------------------------------------------------------------------------------------

    def counted(
        self, way: str, counted: tuple[int, int], seconds: float, detail: dict[str, Any] | None = None
    ) -> WayResult:
        """A result from iterations in the same ``seconds``."""
        return self.rated(way, (counted[0] / seconds, counted[1] / seconds), detail)

    def rated(self, way: str, rates: tuple[float, float], detail: dict[str, Any] | None = None) -> WayResult:
        """A result from iterations per second."""
        work = sum(rate * job.solo_seconds for rate, job in zip(rates, self.jobs, strict=True))
        return WayResult(way, rates, work, detail or {})
