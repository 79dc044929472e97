"""Jobs on one device: by turns or at once, as graphs or eagerly, inside budgets, in one process or several.

Each way gives records: iterations per second of each job, and details.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch

import trainmux as tm
from benchmarks.processes import Together, run_together

from .cells import (
    ALONE,
    EAGER_TEMPORAL,
    EAGER_THREADS,
    PROCESS_WAYS,
    TEMPORAL,
    TRACKING,
    UNLIMITED,
    Cell,
)
from .colocated import ALL_MEMORY, BudgetPhase, budget_phases, excess_way, needed_bytes, run_phases
from .jobs import STEPS_AHEAD, BenchJob, MeasurementError, ZicoOptions, train_for, wait_for

_START_SECONDS = 300.0
"""Limit for a process to build its job, while the other one waits."""
_REGIONS_EXCESS = 1.3
"""Table 2: how much the peaks exceed the budget while regions are shared."""

Record = dict[str, Any]
WayRecords = Iterator[Record]
Build = Callable[[str, int], BenchJob]


class JobsBench:
    """Jobs to train in one way after another; ``build`` makes one by name and seed when it is needed."""

    def __init__(self, cell: Cell, build: Build, options: ZicoOptions) -> None:
        self._cell, self._build = cell, build
        self._seeds = [cell.names[:number].count(name) for number, name in enumerate(cell.names)]
        self._options, self._device = options, options.where

    @cached_property
    def jobs(self) -> list[BenchJob]:
        return [self._build(*job) for job in zip(self._cell.names, self._seeds, strict=True)]

    def plan(self, ways: Sequence[str]) -> Iterator[tuple[list[str], Callable[[], WayRecords]]]:
        """Group ``ways`` by what measures them. Fleets come first: co-locating one discards its captured
        graphs."""
        single: dict[str, Callable[[], WayRecords]] = {ALONE: self.alone, TEMPORAL: self.temporal}
        single[UNLIMITED] = self.unlimited
        for way in single:
            if way in ways:
                yield [way], single[way]
        eagerly = {EAGER_TEMPORAL: self.eager_temporal, EAGER_THREADS: self.eager_threads}
        together = [way for way in ways if way not in {*single, *eagerly, *PROCESS_WAYS}]
        if together:
            yield together, partial(self.colocated, together)
        for way in ways:
            if way in eagerly:
                yield [way], eagerly[way]
            elif way in PROCESS_WAYS:
                yield [way], partial(self.in_processes, way)

    # ---- as graphs ---------------------------------------------------------------------------------

    def alone(self) -> WayRecords:
        """Time an iteration of each by itself."""
        yield {"way": ALONE, "solo_ms": [1e3 * job.solo_seconds for job in self.jobs]}

    def temporal(self) -> WayRecords:
        """Take turns, an iteration each, the host ahead of the device."""
        yield self._in_turn(TEMPORAL, [job.step for job in self.jobs], num_warm_up=1)

    def unlimited(self) -> WayRecords:
        """Run whole steps, a stream and separate memory for each job, at most two of each in flight."""
        _need_cuda(self._device)
        streams = [torch.cuda.Stream(self._device) for _ in self.jobs]
        in_flight: list[deque[torch.cuda.Event]] = [deque() for _ in self.jobs]
        begun, done = [0] * len(self.jobs), [0] * len(self.jobs)
        for job, stream in zip(self.jobs, streams, strict=True):
            with torch.cuda.stream(stream):
                job.step(0)
        wait_for(self._device)
        begin = time.perf_counter()
        while time.perf_counter() - begin < self._options.seconds:
            has_ended = False
            for index, (job, stream) in enumerate(zip(self.jobs, streams, strict=True)):
                if len(in_flight[index]) < 2:
                    with torch.cuda.stream(stream):
                        job.step(begun[index])
                        event = torch.cuda.Event()
                        event.record()
                    begun[index] += 1
                    in_flight[index].append(event)
                while in_flight[index] and in_flight[index][0].query():
                    in_flight[index].popleft()
                    done[index] += 1
                    has_ended = True
            if not has_ended:
                time.sleep(10e-6)
        taken = time.perf_counter() - begin
        wait_for(self._device)
        yield _way(UNLIMITED, done, taken)

    def colocated(self, ways: Sequence[str]) -> WayRecords:
        """Share the device by `trainmux.colocate`, in one run that goes from budget to budget."""

        def choose(result: tm.ColocationResult) -> list[BudgetPhase]:
            samples = self._cell.jobs in self._options.sampled
            return budget_phases(*needed_bytes(result), ways, samples=samples)

        yield from run_phases(self.jobs, choose, self._options)

    def tracked(self, way: str) -> WayRecords:
        """Run one job by itself in segments of one length (Table 1)."""
        yield from self._with_settings(way, ALL_MEMORY, tracking_bytes=TRACKING[way])

    def in_regions(self, way: str, region_bytes: int) -> WayRecords:
        """Share regions of one size within a tight budget (Table 2)."""
        yield from self._with_settings(way, excess_way(_REGIONS_EXCESS), region_bytes=region_bytes)

    def _with_settings(self, way: str, budget: str, **settings: Any) -> WayRecords:
        def choose(result: tm.ColocationResult) -> list[BudgetPhase]:
            return budget_phases(*needed_bytes(result), [budget], samples=False)

        for record in run_phases(self.jobs, choose, self._options, **settings):
            yield record | {"way": way}

    # ---- eagerly -----------------------------------------------------------------------------------

    def eager_temporal(self) -> WayRecords:
        """Take turns in plain torch."""
        with _searched_convolutions():
            yield self._in_turn(EAGER_TEMPORAL, [job.eager_step() for job in self.jobs], num_warm_up=2)

    def eager_threads(self) -> WayRecords:
        """Train each in plain torch, in a thread and on a stream of its own."""
        _need_cuda(self._device)
        steps = [job.eager_step() for job in self.jobs]
        wait_for(self._device)  # the models must be there before other streams read them
        is_over, ready = threading.Event(), threading.Barrier(len(steps) + 1)

        def train(step: Callable[[int], None]) -> int:
            stream, num = torch.cuda.Stream(self._device), 0
            try:
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        step(0)
                    stream.synchronize()
                    ready.wait()
                    while not is_over.is_set():
                        step(num)
                        if num % STEPS_AHEAD == 0:
                            stream.synchronize()
                        num += 1
                    stream.synchronize()
            except BaseException:
                ready.abort()  # nobody should wait for this thread
                raise
            return num

        begin = 0.0
        with _searched_convolutions(), ThreadPoolExecutor(len(steps)) as pool:
            futures = [pool.submit(train, step) for step in steps]
            try:
                ready.wait()
                begin = time.perf_counter()
                time.sleep(self._options.seconds)
            except threading.BrokenBarrierError:
                pass  # a thread has the reason
            finally:
                is_over.set()
        taken = time.perf_counter() - begin
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        yield _way(EAGER_THREADS, [future.result() for future in futures], taken)

    # ---- in processes ------------------------------------------------------------------------------

    def in_processes(self, way: str) -> WayRecords:
        """Train each in a process of its own, in plain torch or as graphs; for MPS its daemon must run.

        The paper also runs MPS with more memory than the device has, by unified memory. That is left out:
        asking for more managed memory than is free can hang the GPU, and without it a process that finds no
        memory fails.
        """
        kind = way.rpartition(", ")[2]
        work = [(*job, self._options, kind) for job in zip(self._cell.names, self._seeds, strict=True)]
        found = run_together(_train_in_process, work, _START_SECONDS)
        yield {"way": way, "iterations_per_second": [num / taken for num, taken in found]}

    def _in_turn(self, way: str, steps: Sequence[Callable[[int], None]], *, num_warm_up: int) -> Record:
        def both(number: int) -> None:
            for step in steps:
                step(number)

        for _ in range(num_warm_up):
            both(0)
        wait_for(self._device)
        num, taken = train_for(both, self._options.seconds, self._device)
        return _way(way, [num] * len(steps), taken)


def _train_in_process(
    together: Together, name: str, seed: int, options: ZicoOptions, kind: str
) -> tuple[int, float]:
    """Build, warm up, wait for the other, train; the number of steps and the time taken."""
    torch.backends.cudnn.benchmark = kind == "eager"  # a fleet chooses its own algorithms
    job = BenchJob(name, seed, options)
    step = job.eager_step() if kind == "eager" else job.step
    for number in range(3):
        step(number)
    wait_for(options.where)
    together.wait()
    return train_for(step, options.seconds, options.where)


def _need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise MeasurementError(f"expected a CUDA device, got {device}: elsewhere there are no streams")


def _way(way: str, iterations: Sequence[int], seconds: float) -> Record:
    return {"way": way, "iterations_per_second": [count / seconds for count in iterations]}


@contextmanager
def _searched_convolutions() -> Iterator[None]:
    """Let cuDNN search for algorithms, which pays off in plain torch: every shape is fixed."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
