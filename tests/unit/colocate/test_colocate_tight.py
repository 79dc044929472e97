"""Two jobs in an arena of hardly more than one peak: what they keep of the gain, and what lets them."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest
from colocate_cases import Case, violations

from trainmux.colocate import (
    Allocation,
    Contention,
    Enqueue,
    Idle,
    Iteration,
    JobDemand,
    ScroogeScheduler,
    Segment,
    SegmentRef,
    TensorClass,
    demand_of_iteration,
    smallest_budget,
)
from trainmux.colocate._job import JobState
from trainmux.colocate._lane import Lane
from trainmux.colocate._tenant import Tenant


def equal_jobs(num_layers: int = 24, size: int = 4 << 20) -> list[JobDemand]:
    """Two jobs of one shape, as transformers are: a forward pass of a third of the iteration, an output that
    is a quarter of the peak, a backward pass, and an update of a tenth."""
    maps = [(size, layer, 2 * num_layers - layer) for layer in range(num_layers)]
    maps.append((num_layers * size // 3, num_layers - 1, num_layers + 1))
    seconds = (0.3 / num_layers,) * num_layers + (0.6 / (num_layers + 1),) * (num_layers + 1) + (0.05,) * 2
    rows = tuple(Allocation("map", *row, TensorClass.FEATURE_MAP) for row in maps)
    iteration = Iteration("equal", seconds, rows)
    return [
        demand_of_iteration(
            name, iteration, tracking_bytes=4 * size, region_bytes=size, steps=30, is_measured=True
        )
        for name in "ab"
    ]


def gain_of(demands: list[JobDemand], budget_bytes: int, jitter: float) -> float:
    """Turns over sharing, less one, where both at once do a fourth more work than one."""
    rng = random.Random(3)
    durations = {
        demand.name: [
            [segment.solo_seconds * rng.uniform(1 - jitter, 1 + jitter) for segment in demand.segments]
            for _ in range(demand.steps or 0)
        ]
        for demand in demands
    }
    contention = Contention({demand.name: 0.8 for demand in demands})
    case = Case(tuple(demands), budget_bytes, durations, contention, 2)
    run = case.run()
    assert violations(case, run) == []
    return case.temporal_seconds / run.ended_at - 1


@pytest.mark.parametrize(("jitter", "least"), [(0.0, 0.6), (0.05, 0.6), (0.3, 0.55)])
def test_equal_jobs_share_an_arena_of_one_peak(jitter: float, least: float) -> None:
    """The backward pass of one beside the forward pass of the other, and the update beside anything."""
    demands = equal_jobs()
    tight = gain_of(demands, smallest_budget(demands), jitter)
    unlimited = gain_of(demands, 2 * smallest_budget(demands), jitter)
    assert tight > least * unlimited


def lane_of(name: str, heights: tuple[int, ...]) -> tuple[Lane, JobState]:
    holds = (*(min(two) for two in pairwise(heights)), 0)
    segments = tuple(Segment(1, *row, 1.0) for row in zip(heights, holds, strict=True))
    job = JobState(JobDemand(name, name, 1, 0, segments, is_measured=True), in_flight_limit=2)
    lane = Lane(0.0)
    lane.jobs.append(job)
    return lane, job


def taken_at_once(lane: Lane, job: JobState, *, fits_all: bool = False) -> list[int]:
    """For each number of complete segments, how many are in flight."""
    counts = []
    for _ in job.heights:
        while lane.next_segment < job.num_segments and (
            lane.takes_another(job) or lane.takes_more(job, fits_all=fits_all)
        ):
            lane.push(job, lane.next_segment, SegmentRef(job.demand.name, 0, lane.next_segment), 0.0)
        counts.append(len(lane.in_flight))
        lane.in_flight.popleft()
    return counts


def test_what_only_gives_memory_back_is_enqueued_at_once() -> None:
    """Segments may be so short that the host could not launch in time what begins behind them."""
    assert taken_at_once(*lane_of("a", (2, 4, 8, 8, 4, 0))) == [2, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(("num_segments", "first"), [(6, 6), (16, 16), (40, 16)])
def test_where_both_peaks_fit_an_iteration_is_enqueued_at_once(num_segments: int, first: int) -> None:
    """But no more than a host launches in a moment."""
    heights = (*tuple(range(1, num_segments)), 0)
    assert taken_at_once(*lane_of("a", heights), fits_all=True)[0] == first
    assert taken_at_once(*lane_of("a", heights))[0] == 2


def test_the_limit_holds_while_it_is_looked_for() -> None:
    lane, job = lane_of("a", (2, 4, 8, 8, 4, 0))
    job.needs_profiling = True
    assert taken_at_once(lane, job, fits_all=True) == [2, 2, 2, 2, 2, 1]


def test_nothing_within_a_limit_waits_for_what_is_beyond_one() -> None:
    """Two jobs for which there is room: each has its two segments before either has a third."""
    lanes = [lane_of(name, (*tuple(range(1, 9)), 0))[1].demand for name in "ab"]
    scheduler = ScroogeScheduler(lanes, 100)
    enqueued = []
    while not isinstance(action := scheduler.next_action(0.0), Idle):
        enqueued += [action.ref.job] if isinstance(action, Enqueue) else []
    assert sorted(enqueued[:4]) == ["a", "a", "b", "b"]
    assert sorted(enqueued) == ["a"] * 9 + ["b"] * 9


def test_a_job_holds_what_its_running_segment_needs() -> None:
    """However many are on their way behind it."""
    tenant = object.__new__(Tenant)
    tenant.heights, tenant._on_their_way = [0, 7], [deque(), deque()]
    held = []
    for height, hold in ((2, 2), (8, 4), (4, 0)):
        tenant.began(0, height, hold)
        held.append(tenant.heights[0])
    for _ in range(4):
        tenant.ended(0)
        held.append(tenant.heights[0])
    assert held == [2, 2, 2, 8, 4, 0, 0]
    tenant.began(0, 3, 1)
    tenant.ended(0)
    assert tenant.heights == [1, 7]
