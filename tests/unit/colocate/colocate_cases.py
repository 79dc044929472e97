"""Random jobs and runs of them, from a seed; light enough for ten thousand."""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulated_gpu import Contention, Run, SimulatedGpu

from trainmux.colocate._demand import JobDemand, Segment, SegmentRef
from trainmux.colocate._layout import MemoryLayout, smallest_budget
from trainmux.colocate._scheduler import ScroogeScheduler

REGION = 1 << 20
JITTER = 0.3


def random_job(rng: random.Random, name: str, steps: int, is_measured: bool) -> JobDemand:
    """A job that grows and shrinks, beefy or lean, sometimes with several peaks or with one segment."""
    num_segments = rng.choice((1, 2, 3, 5, 8, 12))
    peak = rng.randint(1, 40)
    beef = rng.choice((0.3, 0.7, 1.0, 2.0))
    noise = rng.choice((0.0, 0.0, 0.3, 1.0))
    heights = []
    for number in range(num_segments):
        place = (number + 0.5) / num_segments
        distance = abs(place - 0.5) * 2
        height = peak * (1 - distance ** (1 / beef)) * (1 - noise * rng.random())
        heights.append(max(0, round(height)))
    if max(heights) == 0:
        heights[num_segments // 2] = peak
    unit = 10 ** rng.uniform(-3, -1)
    segments = []
    for number, height in enumerate(heights):
        following = heights[number + 1] if number + 1 < num_segments else 0
        hold = min(height, following)
        hold = rng.choice((hold, hold, rng.randint(0, hold)))
        segments.append(Segment(1, height * REGION, hold * REGION, unit * rng.uniform(0.5, 2.0)))
    return JobDemand(
        name=name,
        fingerprint=f"{name}-{peak}-{num_segments}",
        region_bytes=REGION,
        local_bytes=rng.randint(0, 10) * REGION,
        segments=tuple(segments),
        steps=steps,
        share=rng.choice((1.0, 1.0, 2.0)),
        is_measured=is_measured,
    )


@dataclass(frozen=True)
class Case:
    """Jobs, a budget, and a device; ``durations`` by job, iteration and segment."""

    demands: tuple[JobDemand, ...]
    budget_bytes: int
    durations: dict[str, list[list[float]]]
    contention: Contention

    @property
    def temporal_seconds(self) -> float:
        """All iterations one after the other."""
        return sum(sum(map(sum, rows)) for rows in self.durations.values())

    @property
    def sum_of_peaks(self) -> int:
        return sum(demand.local_bytes + demand.peak_bytes for demand in self.demands)

    def seconds_of(self, ref: SegmentRef) -> float:
        return self.durations[ref.job][ref.iteration][ref.segment]

    def scheduler(self, budget_bytes: int | None = None) -> ScroogeScheduler:
        return ScroogeScheduler(
            self.demands,
            self.budget_bytes if budget_bytes is None else budget_bytes,
        )

    def run(self, scheduler: ScroogeScheduler | None = None) -> Run:
        return SimulatedGpu(scheduler or self.scheduler(), self.seconds_of, self.contention).run()


def random_case(seed: int, *, steps: int = 3, jitter: float = JITTER) -> Case:
    """Two or three jobs and a budget between the smallest that works and more than enough.

    Jobs at once do at least as much work as one alone: what turns would win is another test's concern.
    """
    rng = random.Random(seed)
    is_measured = rng.random() < 0.5
    names = ["a", "b", "c"][: rng.choice((2, 2, 3))]
    demands = tuple(random_job(rng, name, rng.randint(1, 2 * steps - 1), is_measured) for name in names)
    return case_of(rng, demands, jitter=jitter)


def case_of(rng: random.Random, demands: tuple[JobDemand, ...], *, jitter: float) -> Case:
    """Jobs with a budget between the smallest that works and more than enough, and how long each lasts."""
    least = smallest_budget(demands)
    most = sum(demand.local_bytes + demand.peak_bytes for demand in demands)
    budget = least + int((most - least) * rng.choice((0.0, 0.1, 0.3, 0.5, 0.8, 1.1)))
    durations = {
        demand.name: [
            [segment.solo_seconds * rng.uniform(1 - jitter, 1 + jitter) for segment in demand.segments]
            for _ in range(demand.steps or 0)
        ]
        for demand in demands
    }
    contention = Contention({demand.name: rng.choice((0.3, 0.6, 0.85, 1.0)) for demand in demands})
    return Case(demands, budget, durations, contention)


def violations(case: Case, run: Run) -> list[str]:
    """What is wrong with a run, found without the scheduler: from the log of what ran when, and the jobs."""
    found = []
    demands = {demand.name: demand for demand in case.demands}
    ran = dict.fromkeys(demands, 0)
    ends: dict[SegmentRef, float] = {}
    order = sorted(run.executed, key=lambda row: (row.started_at, row.ended_at, row.ref))
    for row in run.executed:
        ends[row.ref] = row.ended_at
        ran[row.ref.job] += row.ref.segment == len(demands[row.ref.job].segments) - 1
    for name, demand in demands.items():
        if ran[name] != demand.steps:
            found.append(f"{name} ran {ran[name]} of {demand.steps} iterations")
    for row in order:
        found += [f"{row.ref} before {other}" for other in row.after if ends[other] > row.started_at]
    found += [f"over budget: {remap.layout}" for _, remap in run.remaps if _over(case, remap.layout)]
    return found + overlaps(demands, run)


def overlaps(demands: dict[str, JobDemand], run: Run) -> list[str]:
    """Moments at which two jobs held the same bytes."""
    found = []
    held = _held(run, demands)
    for number, (_, end, layout, name, height) in enumerate(held):
        for later_start, later_end, later_layout, other, later_height in held[number + 1 :]:
            if later_start >= end:
                break
            if other == name or not height or not later_height or min(end, later_end) <= later_start:
                continue
            if _overlap(_bytes(layout, name, height), _bytes(later_layout, other, later_height)):
                found.append(f"{name} and {other} overlap at {later_start}")
    return found


def _over(case: Case, layout: MemoryLayout) -> bool:
    named = {name for arena in layout.arenas for name in arena.names}
    local = sum(demand.local_bytes for demand in case.demands if demand.name in named)
    return local + sum(arena.capacity_bytes for arena in layout.arenas) > case.budget_bytes


def _held(run: Run, demands: dict[str, JobDemand]) -> list[tuple[float, float, MemoryLayout, str, int]]:
    """Spans of time with the height that a job holds: each segment, and the time from it to the next."""
    spans = []
    last: dict[str, float] = {}
    for row in sorted(run.executed, key=lambda row: (row.started_at, row.ended_at, row.ref)):
        segment = demands[row.ref.job].segments[row.ref.segment]
        before = last.get(row.ref.job)
        if before is not None and row.ref.segment > 0:
            hold = demands[row.ref.job].segments[row.ref.segment - 1].hold_bytes
            spans.append((before, row.started_at, row.layout, row.ref.job, hold))
        spans.append((row.started_at, row.ended_at, row.layout, row.ref.job, segment.height_bytes))
        last[row.ref.job] = row.ended_at
    return sorted(spans, key=lambda span: (span[0], span[1], span[3], span[4]))


def _bytes(layout: MemoryLayout, name: str, height: int) -> tuple[int, int, int]:
    """The arena's number and the bytes in it that a height is."""
    for number, arena in enumerate(layout.arenas):
        if name in arena.base:
            return number, 0, height
        if name in arena.top:
            return number, arena.capacity_bytes - height, arena.capacity_bytes
    raise AssertionError(f"{name} has no place")


def _overlap(one: tuple[int, int, int], two: tuple[int, int, int]) -> bool:
    return one[0] == two[0] and one[1] < two[2] and two[1] < one[2]
