"""Two jobs on one device, in one process: by turns or at once, as graphs or eagerly, inside budgets.

Each way is a generator of records: iterations per second of each job, and details. What it raises is recorded
as the reason why it is missing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import trainmux as tm
from benchmarks.processes import Together, mps_daemon, run_together

from .cases import CHANGING, SAMPLED, PairNames, model_of
from .colocated import BudgetPhase, budget_phases, needed_bytes, run_phases
from .jobs import STEPS_AHEAD, BenchJob, ZicoOptions, train_for, wait_for

TEMPORAL = "temporal"
UNLIMITED = "two streams, unlimited"
EAGER_TEMPORAL = "eager temporal"
EAGER_THREADS = "two eager threads"
_START_SECONDS = 300.0
"""Limit for a process to build its job, while the other one waits."""

Record = dict[str, Any]
WayRecords = Iterator[Record]


class PairBench:
    """Two jobs to train in one way after another."""

    def __init__(self, jobs: tuple[BenchJob, BenchJob], options: ZicoOptions) -> None:
        self.jobs = jobs
        self.names: PairNames = (jobs[0].case.name, jobs[1].case.name)
        self._seeds = [job.seed for job in jobs]
        self._options, self._device = options, options.where
        self.local_bytes, self.peak_bytes = [0, 0], [0, 0]
        """Bytes of each job's own, and of the shared arena at its peak, once the jobs were co-located."""

    def ways(
        self, excesses: Sequence[float], *, eager: bool, processes: bool
    ) -> dict[str, Callable[[], WayRecords]]:
        """List the ways by name. Fleets come first: co-locating a fleet discards its captured graphs."""
        is_cuda = self._device.type == "cuda"
        found: dict[str, Callable[[], WayRecords]] = {TEMPORAL: self.temporal}
        if is_cuda:
            found[UNLIMITED] = self.unlimited
        found["co-located"] = lambda: self.colocated(excesses)
        if eager:
            found[EAGER_TEMPORAL] = self.eager_temporal
        if eager and is_cuda:
            found[EAGER_THREADS] = self.eager_threads
        if processes:
            found["two processes"] = lambda: self.in_processes("two processes")
            found["MPS"] = lambda: self.in_processes("MPS")
        return found

    # ---- as graphs ---------------------------------------------------------------------------------

    def temporal(self) -> WayRecords:
        """Alternate between iterations of the two, the host ahead of the device."""
        yield self._in_turn(TEMPORAL, [job.step for job in self.jobs], num_warm_up=1)

    def unlimited(self) -> WayRecords:
        """Run whole steps on two streams with separate memory, at most two of each in flight."""
        streams = [torch.cuda.Stream(self._device) for _ in range(2)]
        in_flight: list[deque[torch.cuda.Event]] = [deque(), deque()]
        begun, done = [0, 0], [0, 0]
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

    def colocated(self, excesses: Sequence[float]) -> WayRecords:
        """Share the device by `trainmux.colocate`, in one run that goes from budget to budget."""
        models = tuple(sorted(map(model_of, self.names)))

        def choose(result: tm.ColocationResult) -> list[BudgetPhase]:
            self.local_bytes = [row.local_bytes for row in result.jobs.values()]
            self.peak_bytes = [row.peak_bytes for row in result.jobs.values()]
            whole, smallest = needed_bytes(result)
            return budget_phases(
                whole, smallest, excesses, samples=models in SAMPLED, changes=models in CHANGING
            )

        yield from run_phases(self.jobs, choose, self._options)

    # ---- eagerly -----------------------------------------------------------------------------------

    def eager_temporal(self) -> WayRecords:
        """Alternate between iterations of the two in plain torch."""
        with _searched_convolutions():
            yield self._in_turn(EAGER_TEMPORAL, [job.eager_step() for job in self.jobs], num_warm_up=2)

    def eager_threads(self) -> WayRecords:
        """Train each in plain torch, in a thread and on a stream of its own."""
        steps = [job.eager_step() for job in self.jobs]
        wait_for(self._device)  # the models must be there before other streams read them
        is_over, ready = threading.Event(), threading.Barrier(3)

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
        with _searched_convolutions(), ThreadPoolExecutor(2) as pool:
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
        """Train each in a process of its own, in plain torch and then as graphs; `MPS` needs its daemon.

        The paper also runs MPS with more memory than the device has, by unified memory. That is left out:
        asking for more managed memory than is free can hang the GPU, and without it a process that finds no
        memory fails.
        """
        jobs = [(name, seed, self._options) for name, seed in zip(self.names, self._seeds, strict=True)]
        with mps_daemon() if way == "MPS" else nullcontext():
            for kind in ("eager", "graphs"):
                found = run_together(_train_in_process, [(*job, kind) for job in jobs], _START_SECONDS)
                rates = [num / taken for num, taken in found]
                yield {"way": f"{way}, {kind}", "iterations_per_second": rates}

    def _in_turn(self, way: str, steps: Sequence[Callable[[int], None]], *, num_warm_up: int) -> Record:
        def both(number: int) -> None:
            for step in steps:
                step(number)

        for _ in range(num_warm_up):
            both(0)
        wait_for(self._device)
        num, taken = train_for(both, self._options.seconds, self._device)
        return _way(way, [num, num], taken)


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
