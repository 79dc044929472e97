"""Jobs for the scheduler, made by hand or from a seed, and the checks of what became of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulated_gpu import Run, SimulatedGpu

from trainmux.colocate._demand import JobDemand, Segment, SegmentRef
from trainmux.colocate._layout import MemoryLayout, smallest_budget
from trainmux.colocate._scheduler import ScroogeScheduler

REGION = 1 << 20
JITTER = 0.3


def job_of(
    name: str, heights: Sequence[int], seconds: float | Sequence[float], *, region: int = 1, **options: Any
) -> JobDemand:
    """A measured job with these heights in regions; it holds no more than its next segment needs.

    ``seconds`` are those of each segment.
    """
    each = [seconds] * len(heights) if isinstance(seconds, float) else list(seconds)
    holds = [min(two) for two in zip(heights, (*heights[1:], 0), strict=True)]
    segments = tuple(
        Segment(1, height * region, hold * region, taken)
        for height, hold, taken in zip(heights, holds, each, strict=True)
    )
    given: dict[str, Any] = {"fingerprint": name, "local_bytes": 0, "is_measured": True, **options}
    return JobDemand(name, region_bytes=region, segments=segments, **given)


def wave(name: str, peak: int, seconds: float = 1.0, *, num_segments: int = 20, **options: Any) -> JobDemand:
    """A job that rises to its peak for a third of its iteration and falls for the rest; ten steps."""
    places = [(number + 0.5) / num_segments for number in range(num_segments)]
    heights = [round(peak * min(place / 0.35, (1 - place) / 0.65)) for place in places]
    heights[heights.index(max(heights))] = peak
    return job_of(name, heights, seconds / num_segments, **{"steps": 10, **options})


def gpu_of(
    scheduler: ScroogeScheduler,
    demands: Sequence[JobDemand],
    compute_demand: float = 0.5,
    seconds_of: Callable[[SegmentRef], float] | None = None,
) -> SimulatedGpu:
    """A device on which segments last as long as their jobs say, unless ``seconds_of`` says otherwise."""
    seconds = {demand.name: [segment.solo_seconds for segment in demand.segments] for demand in demands}
    demanded = {demand.name: compute_demand for demand in demands}
    return SimulatedGpu(scheduler, seconds_of or (lambda ref: seconds[ref.job][ref.segment]), demanded)


def run_for(seconds: float, demands: Sequence[JobDemand], budget: int, compute_demand: float) -> Run:
    """Run jobs without an end for some time."""
    scheduler = ScroogeScheduler(demands, budget)
    gpu = gpu_of(scheduler, demands, compute_demand)
    for demand in demands:
        gpu.at(seconds, lambda name=demand.name: scheduler.remove(name))  # type: ignore[misc]
    return gpu.run()


def random_job(rng: random.Random, name: str, steps: int, is_measured: bool) -> JobDemand:
    """A job that grows and shrinks, beefy or lean, sometimes with several peaks or with one segment."""
    num_segments = rng.choice((1, 2, 3, 5, 8, 12))
    peak, beef, noise = rng.randint(1, 40), rng.choice((0.3, 0.7, 1.0, 2.0)), rng.choice((0.0, 0.0, 0.3, 1.0))
    distances = [abs((number + 0.5) / num_segments - 0.5) * 2 for number in range(num_segments)]
    heights = [round(peak * (1 - far ** (1 / beef)) * (1 - noise * rng.random())) for far in distances]
    if max(heights) == 0:
        heights[num_segments // 2] = peak
    unit = 10 ** rng.uniform(-3, -1)
    made = job_of(
        name,
        heights,
        [unit * rng.uniform(0.5, 2.0) for _ in heights],
        region=REGION,
        local_bytes=rng.randint(0, 10) * REGION,
        steps=steps,
        share=rng.choice((1.0, 1.0, 2.0)),
        is_measured=is_measured,
    )
    held = [rng.choice((1, 1, 0)) * segment.hold_bytes for segment in made.segments]
    segments = (replace(row, hold_bytes=hold) for row, hold in zip(made.segments, held, strict=True))
    return replace(made, segments=tuple(segments))


@dataclass(frozen=True)
class Case:
    """Jobs, a budget, and a device; ``durations`` by job, iteration and segment."""

    demands: tuple[JobDemand, ...]
    budget_bytes: int
    durations: dict[str, list[list[float]]]
    compute_demands: dict[str, float]

    @property
    def temporal_seconds(self) -> float:
        """All iterations one after the other."""
        return sum(sum(map(sum, rows)) for rows in self.durations.values())

    @property
    def sum_of_peaks(self) -> int:
        return sum(demand.local_bytes + demand.peak_bytes for demand in self.demands)

    def scheduler(self, budget_bytes: int | None = None) -> ScroogeScheduler:
        return ScroogeScheduler(self.demands, self.budget_bytes if budget_bytes is None else budget_bytes)

    def gpu(self, scheduler: ScroogeScheduler) -> SimulatedGpu:
        def seconds_of(ref: SegmentRef) -> float:
            return self.durations[ref.job][ref.iteration][ref.segment]

        return SimulatedGpu(scheduler, seconds_of, self.compute_demands)

    def run(self, scheduler: ScroogeScheduler | None = None) -> Run:
        return self.gpu(scheduler or self.scheduler()).run()


def random_case(seed: int, *, steps: int = 3, jitter: float = JITTER) -> Case:
    """Two to four jobs and a budget between the smallest that works and more than enough."""
    rng = random.Random(seed)
    is_measured = rng.random() < 0.5
    names = ["a", "b", "c", "d"][: rng.choice((2, 2, 2, 3, 3, 4))]
    demands = tuple(random_job(rng, name, rng.randint(1, 2 * steps - 1), is_measured) for name in names)
    least = smallest_budget(demands)
    most = sum(demand.local_bytes + demand.peak_bytes for demand in demands)
    budget = least + int((most - least) * rng.choice((0.0, 0.1, 0.3, 0.5, 0.8, 1.1)))
    durations = jittered(rng, demands, jitter)
    return Case(demands, budget, durations, {name: rng.choice((0.3, 0.6, 0.85, 1.0)) for name in names})


def jittered(rng: random.Random, demands: Sequence[JobDemand], jitter: float) -> dict[str, list[list[float]]]:
    """Durations of all segments that differ from what is known of them."""
    return {
        demand.name: [
            [segment.solo_seconds * rng.uniform(1 - jitter, 1 + jitter) for segment in demand.segments]
            for _ in range(demand.steps or 0)
        ]
        for demand in demands
    }


def violations(case: Case, run: Run) -> list[str]:
    """The faults of a run, found without the scheduler: from the log of what ran when, and the jobs."""
    demands = {demand.name: demand for demand in case.demands}
    found = [
        f"{name} ran {ran} of {demand.steps} iterations"
        for name, demand in demands.items()
        if (ran := num_ended(run, demand)) != demand.steps
    ]
    ends = {row.ref: row.ended_at for row in run.executed}
    for row in run.executed:
        found += [f"{row.ref} before {other}" for other in row.after if ends[other] > row.started_at]
    return found + over_budget(demands, run) + overlaps(demands, run)


def num_ended(run: Run, demand: JobDemand) -> int:
    """The iterations of a job that ran to their ends."""
    last = len(demand.segments) - 1
    return sum(row.ref.job == demand.name and row.ref.segment == last for row in run.executed)


def over_budget(demands: dict[str, JobDemand], run: Run) -> list[str]:
    """Layouts that need more than the budget in force."""

    def size_of(layout: MemoryLayout) -> int:
        local = sum(demands[name].local_bytes for name in layout.names)
        return local + sum(arena.capacity_bytes for arena in layout.arenas)

    return [f"over budget: {row}" for _, row in run.remaps if size_of(row.layout) > row.budget_bytes]


def overlaps(demands: dict[str, JobDemand], run: Run) -> list[str]:
    """Moments at which two jobs held the same bytes."""
    spans: list[tuple[float, float, str, tuple[int, int, int]]] = []
    last: dict[str, float] = {}
    for row in sorted(run.executed, key=lambda row: (row.started_at, row.ended_at, row.ref)):
        name, number = row.ref.job, row.ref.segment
        segments = demands[name].segments
        if number > 0:  # from the end of the last segment on it holds what that one left
            held = _bytes(row.layout, name, segments[number - 1].hold_bytes)
            spans.append((last[name], row.started_at, name, held))
        used = _bytes(row.layout, name, segments[number].height_bytes)
        spans.append((row.started_at, row.ended_at, name, used))
        last[name] = row.ended_at
    spans.sort()
    found = []
    for number, (_, end, name, one) in enumerate(spans):
        for start, later_end, other, two in spans[number + 1 :]:
            if start >= end:
                break
            is_same_time = other != name and min(end, later_end) > start
            if is_same_time and one[0] == two[0] and one[1] < two[2] and two[1] < one[2]:
                found.append(f"{name} and {other} overlap at {start}")
    return found


def _bytes(layout: MemoryLayout, name: str, height: int) -> tuple[int, int, int]:
    """The number of an arena, and the first and last byte of a height in it."""
    for number, arena in enumerate(layout.arenas):
        if name in arena.base:
            return number, 0, height
        if name in arena.top:
            return number, arena.capacity_bytes - height, arena.capacity_bytes
    raise AssertionError(f"{name} has no place")
