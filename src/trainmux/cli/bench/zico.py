"""Two jobs on one device, in every way that there is: in turn or at once, eagerly or as graphs, in a budget.

Every way trains the same two jobs for some seconds. What it does per second is counted in *solo seconds*: an
iteration of a job counts as much as it takes alone, as a graph. In turns, as graphs, that is 1 but for what
changing over costs; it is the paper's Temporal. A way that runs twice as many iterations of both has 2.
"""

from __future__ import annotations

import functools
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

import trainmux as tm

from .zico_cases import optimizer_of, zico_case

NUM_BATCHES = 2
_LEAST_STEPS = 4
_NUM_BLOCKS = 5
_WARM_SHARE = 0.4
"""Of the time given to co-located jobs that is not counted."""
_SECONDS_BETWEEN_LOOKS = 2e-3


@dataclass(frozen=True)
class WayResult:
    """One way to run a pair: iterations per second of each job, and solo seconds of work per second."""

    way: str
    iterations_per_second: tuple[float, ...]
    work: float
    detail: dict[str, Any] = field(default_factory=dict)


Way = Callable[[], WayResult]

_EXPECTED = (tm.errors.TrainmuxError, RuntimeError, ImportError)
"""What a way may fail with without the others: refusals, no memory, a package that is not there."""


@dataclass(frozen=True)
class PairResult:
    """A pair of jobs: what each takes alone and needs in memory, and what came of every way."""

    names: tuple[str, str]
    solo_ms: tuple[float, float]
    local_bytes: tuple[int, int]
    peak_bytes: tuple[int, int]
    ways: tuple[WayResult, ...]

    def work(self, way: str) -> float | None:
        """Of one way; ``None`` where it was not measured."""
        return next((row.work for row in self.ways if row.way == way), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ZicoOptions:
    """``lowering`` and ``precision`` are as of `trainmux.Fleet`; every way runs for ``seconds``."""

    device: str
    lowering: str
    precision: str
    seconds: float
    has_eager: bool = True


class BenchJob:
    """A model to train: its fleet, its batches on the device, and what an iteration takes alone."""

    def __init__(self, name: str, seed: int, options: ZicoOptions) -> None:
        self.case = zico_case(name)
        self.seed = seed
        self._device = torch.device(options.device)
        self._seconds = options.seconds
        made = [self.case.batch(NUM_BATCHES * seed + number) for number in range(NUM_BATCHES)]
        self.batches = [
            pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._device), batch) for batch in made
        ]
        model = self.case.build(seed).train()
        member = tm.Member(model, optimizer_of(model), name=f"{name} {seed}", seed=seed)
        self.fleet = tm.Fleet(
            [member],
            self.case.loss,
            self.batches[0],
            device=options.device,
            precision=options.precision,
            lowering=options.lowering,
        )
        tensors = [*model.parameters(), *model.buffers()]
        self.state_bytes = sum(tensor.nbytes for tensor in tensors)  # plain SGD has no state of its own

    def batch(self, number: int) -> Any:
        """One of a few, again and again."""
        return self.batches[number % NUM_BATCHES]

    def step(self, number: int) -> None:
        """An iteration by the fleet itself, as a graph where the device has them."""
        self.fleet.step(self.batch(number))

    @functools.cached_property
    def solo_seconds(self) -> float:
        """What an iteration takes with nothing beside it."""
        for number in range(3):
            self.step(number)
        wait_for(self._device)
        blocks = []
        for _ in range(_NUM_BLOCKS):
            begin, num = time.perf_counter(), 0
            while time.perf_counter() - begin < self._seconds / 10 or num < _LEAST_STEPS:
                self.step(num)
                num += 1
                if num % 4 == 0:
                    wait_for(self._device)
            wait_for(self._device)
            blocks.append((time.perf_counter() - begin) / num)
        return statistics.median(blocks)


class _Watch(threading.Thread):
    """Counts the iterations of two jobs for a while, once both are under way, and lets both go then.

    A part of the time is not counted: profiling, and the ramp of the budget.
    """

    def __init__(self, colocation: tm.Colocation, seconds: float, device: torch.device) -> None:
        super().__init__(daemon=True)
        self._colocation, self._wanted_seconds, self._device = colocation, seconds, device
        self.counted = (0, 0)
        self.seconds = 0.0
        self.most_bytes = 0

    def run(self) -> None:
        try:
            self._until((1, 1), 0.0)
            first, since = self._until((1, 1), _WARM_SHARE * self._wanted_seconds)
            least = (first[0] + _LEAST_STEPS, first[1] + _LEAST_STEPS)
            last, now = self._until(least, (1 - _WARM_SHARE) * self._wanted_seconds)
            self.counted, self.seconds = (last[0] - first[0], last[1] - first[1]), now - since
        finally:
            for name in ("0", "1"):
                self._colocation.remove(name)

    def _until(self, least: tuple[int, int], seconds: float) -> tuple[tuple[int, int], float]:
        """Wait that long, and until both jobs have done so many steps; how many, and when that was."""
        begin = time.perf_counter()
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            self.most_bytes = max(self.most_bytes, used_bytes(self._device))
            rows = self._colocation.usage()
            now = time.perf_counter()
            steps = (rows[0].num_steps, rows[1].num_steps)
            is_over = any(row.state in ("done", "failed") for row in rows)
            if is_over or (now - begin >= seconds and all(map(int.__ge__, steps, least))):
                return steps, now


class PairBench:
    """Two jobs, trained by one way after another."""

    def __init__(self, jobs: tuple[BenchJob, BenchJob], options: ZicoOptions) -> None:
        self.jobs = jobs
        self._options = options
        self._device = torch.device(options.device)
        self._sizes: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))

    def phases(self, excesses: Sequence[float]) -> tuple[list[Way], list[Way], list[Way]]:
        """All ways that the device has: by the fleets themselves, co-located, and eagerly.

        What a fleet has captured is gone once it was co-located, so the first kind comes first.
        """
        is_cuda = self._device.type == "cuda"
        by_fleets = [self.temporal, *([self.unlimited] if is_cuda else [])]
        colocated = [lambda: self.colocated("co-located, all memory", None)]
        for excess in excesses:
            colocated.append(lambda excess=excess: self.colocated(f"co-located, {excess}x", excess))  # type: ignore[misc]
        eager = [self.eager_temporal, *([self.eager_threads] if is_cuda else [])]
        return by_fleets, colocated, eager if self._options.has_eager else []

    def result(self, rows: Sequence[WayResult]) -> PairResult:
        """What is known of the pair, with ``rows`` of the ways that were measured."""
        first, second = self.jobs
        names = (first.case.name, second.case.name)
        solo = (first.solo_seconds * 1e3, second.solo_seconds * 1e3)
        return PairResult(names, solo, *self._sizes, tuple(rows))

    # ---- as graphs ---------------------------------------------------------------------------------

    def temporal(self) -> WayResult:
        """One iteration of each in turn, the host ahead of the device."""
        for job in self.jobs:
            job.step(0)
        self._wait()
        begin, num = time.perf_counter(), 0
        while time.perf_counter() - begin < self._options.seconds or num < _LEAST_STEPS:
            for index in range(2):
                self.jobs[index].step(num)
            num += 1
            if num % 4 == 0:
                self._wait()
        self._wait()
        return self._result("temporal", (num, num), time.perf_counter() - begin)

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
        self._wait()
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
        self._wait()
        return self._result("two streams, unlimited", counted, taken)

    def colocated(self, way: str, excess: float | None) -> WayResult:
        """By `trainmux.colocate`, in a budget that the two jobs together exceed by ``excess``.

        Looked at from another thread: jobs with callbacks wait for these between two iterations.
        """
        jobs = [
            tm.Job(str(index), fleet=job.fleet, loader=job.batches, steps=10**9)
            for index, job in enumerate(self.jobs)
        ]
        colocation = tm.colocate(jobs)
        rows = colocation.results().jobs
        local = (rows["0"].local_bytes, rows["1"].local_bytes)
        peaks = (rows["0"].peak_bytes, rows["1"].peak_bytes)
        self._sizes = (local, peaks)
        whole, least = sum(local) + sum(peaks), sum(local) + max(peaks)
        budget = whole if excess is None else max(least, int(whole / excess))
        colocation.set_budget(budget)
        watch = _Watch(colocation, self._options.seconds, self._device)
        watch.start()
        try:
            result = colocation.run()
        finally:
            watch.join()
        for row in result.jobs.values():
            if row.error is not None:
                raise row.error
        gc.collect()
        release_cached(self._device)
        # The fleets have their own tensors again, which they had not while they were co-located.
        outside = used_bytes(self._device) - sum(job.state_bytes for job in self.jobs)
        detail = {
            "budget_bytes": budget,
            "smallest_budget_bytes": least,
            "laid_out_bytes": result.peak_bytes,
            "device_bytes": watch.most_bytes - outside,
            "num_segments": [row.num_segments for row in result.jobs.values()],
            "mispredicted": [row.num_mispredicted for row in result.jobs.values()],
            "shift_seconds": [row.shift_seconds for row in result.jobs.values()],
            "iterations": [row.num_steps for row in result.jobs.values()],
        }
        return self._result(way, watch.counted, watch.seconds, detail)

    # ---- eagerly -----------------------------------------------------------------------------------

    def eager_temporal(self) -> WayResult:
        """Plain torch, one iteration of each in turn."""
        steps = [self._eager(index) for index in range(2)]
        for _ in range(2):
            for step in steps:
                step()
        self._wait()
        begin, num = time.perf_counter(), 0
        while time.perf_counter() - begin < self._options.seconds or num < _LEAST_STEPS:
            for step in steps:
                step()
            self._wait()
            num += 1
        return self._result("eager temporal", (num, num), time.perf_counter() - begin)

    def eager_threads(self) -> WayResult:
        """Plain torch, each in a thread and on a stream of its own."""
        steps = [self._eager(index) for index in range(2)]
        counted = [0, 0]
        is_over = threading.Event()
        ready = threading.Barrier(3)

        def train(index: int) -> None:
            stream = torch.cuda.Stream(self._device)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        steps[index]()
                    stream.synchronize()
                    ready.wait()
                    while not is_over.is_set():
                        steps[index]()
                        stream.synchronize()
                        counted[index] += 1
            except BaseException:
                ready.abort()  # or the others would wait for this thread
                raise

        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        ready.wait()
        begin = time.perf_counter()
        time.sleep(self._options.seconds)
        is_over.set()
        done, taken = (counted[0], counted[1]), time.perf_counter() - begin
        for thread in threads:
            thread.join()
        return self._result("two eager threads", done, taken)

    def _eager(self, index: int) -> Callable[[], None]:
        job = self.jobs[index]
        case = job.case
        layout = {"memory_format": torch.channels_last} if case.is_image else {}
        model = case.build(job.seed).train().to(self._device, **layout)  # type: ignore[call-overload]
        optimizer = optimizer_of(model)
        half = self._options.precision == "bf16"

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=half):
                loss = case.loss(model, job.batch(0))
            loss.backward()
            optimizer.step()

        return step

    # ---- inside ------------------------------------------------------------------------------------

    def _result(
        self, way: str, counted: tuple[int, int], seconds: float, detail: dict[str, Any] | None = None
    ) -> WayResult:
        work = sum(num * job.solo_seconds for num, job in zip(counted, self.jobs, strict=True)) / seconds
        return WayResult(way, (counted[0] / seconds, counted[1] / seconds), work, detail or {})

    def _wait(self) -> None:
        wait_for(self._device)


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_cached(device: torch.device) -> None:
    """Give back to the device what torch keeps for later."""
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def used_bytes(device: torch.device) -> int:
    """What is in use on the device, by anybody; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def run_pairs(
    pairs: Sequence[tuple[str, str]],
    options: ZicoOptions,
    excesses: Sequence[float],
    tell: Callable[[str], object],
) -> Iterator[PairResult | tuple[tuple[str, str], Exception]]:
    """Each pair's result anew with each way that was measured, or what a way failed with.

    Jobs are made once; two of one name are two.
    """
    made: dict[tuple[str, int], BenchJob] = {}

    def job(name: str, seed: int) -> BenchJob:
        if (name, seed) not in made:
            began = time.perf_counter()
            made[name, seed] = BenchJob(name, seed, options)
            built = time.perf_counter() - began
            tell(f"{name}: built in {built:.0f} s")
        return made[name, seed]

    benches: dict[tuple[str, str], PairBench] = {}
    for names in pairs:
        try:
            jobs = (job(names[0], 0), job(names[1], int(names[0] == names[1])))
            benches[names] = PairBench(jobs, options)
        except _EXPECTED as error:
            yield names, error
    for (name, _), one in made.items():
        tell(f"{name}: {one.solo_seconds * 1e3:.2f} ms an iteration alone")
    rows: dict[tuple[str, str], list[WayResult]] = {names: [] for names in benches}
    for phase in range(3):
        for names, bench in benches.items():
            for way in bench.phases(excesses)[phase]:
                gc.collect()
                release_cached(torch.device(options.device))
                try:
                    row = way()
                except _EXPECTED as error:
                    yield names, error
                    continue
                rows[names].append(row)
                tell(f"{'+'.join(names)}, {row.way}: {row.work:.3f}")
                yield bench.result(rows[names])
