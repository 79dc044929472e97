"""Two jobs in an arena of hardly more than one peak: what they keep of the gain, and what lets them."""

from __future__ import annotations

import random
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


def test_what_only_gives_memory_back_is_enqueued_at_once() -> None:
    """Segments may be so short that the host could not launch in time what begins behind them."""
    heights = (2, 4, 8, 8, 4, 0)
    holds = (*(min(two) for two in pairwise(heights)), 0)
    segments = tuple(Segment(1, *row, 1.0) for row in zip(heights, holds, strict=True))
    scheduler = ScroogeScheduler([JobDemand("a", "a", 1, 0, segments, is_measured=True)], 10)
    enqueued: list[SegmentRef] = []
    in_flight = []
    for ended in (None, *(SegmentRef("a", 0, number) for number in range(5))):
        if ended is not None:
            scheduler.complete(ended, float(ended.segment), ended.segment + 1.0)
        while not isinstance(action := scheduler.next_action(len(in_flight)), Idle):
            enqueued += [action.ref] if isinstance(action, Enqueue) else []
        in_flight.append([(ref.iteration, ref.segment) for ref in enqueued[len(in_flight) :]])
    assert in_flight == [
        [(0, 0), (0, 1)],
        [(0, number) for number in range(1, 6)],
        [(0, number) for number in range(2, 6)],
        [(0, 3), (0, 4), (0, 5)],
        [(0, 4), (0, 5)],
        [(0, 5), (1, 0)],
    ]
