"""Two jobs in an arena of hardly more than one peak: what they keep of the gain, and what lets them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from colocate_cases import Case, violations
from simulated_gpu import Contention

from trainmux.colocate._demand import JobDemand, Segment, cut_segments, segments_between
from trainmux.colocate._feature_maps import Allocation, Iteration, TensorClass, stack_feature_maps
from trainmux.colocate._layout import smallest_budget
from trainmux.colocate._scheduler import Enqueue, Idle, ScroogeScheduler


def equal_jobs(num_layers: int = 24, size: int = 4 << 20) -> list[JobDemand]:
    """Two jobs of one shape, as transformers are: a forward pass of a third of the iteration, an output that
    is a quarter of the peak, a backward pass, and an update of a tenth."""
    maps = [(size, layer, 2 * num_layers - layer) for layer in range(num_layers)]
    maps.append((num_layers * size // 3, num_layers - 1, num_layers + 1))
    seconds = (0.3 / num_layers,) * num_layers + (0.6 / (num_layers + 1),) * (num_layers + 1) + (0.05,) * 2
    rows = tuple(Allocation("map", *row, TensorClass.FEATURE_MAP) for row in maps)
    iteration = Iteration("equal", seconds, rows)
    stack = stack_feature_maps(iteration, region_bytes=size)
    segments = segments_between(cut_segments(iteration, 4 * size), stack, seconds)
    return [JobDemand(name, "equal", size, 0, segments, steps=30, is_measured=True) for name in "ab"]


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
    case = Case(tuple(demands), budget_bytes, durations, contention)
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


@pytest.mark.parametrize(("num_segments", "num_at_once"), [(6, 6), (40, 16)])
def test_where_both_peaks_fit_an_iteration_is_enqueued_at_once(num_segments: int, num_at_once: int) -> None:
    """But no more than a host launches in a moment. Each job has its four segments before either has more."""
    heights = (*range(1, num_segments), 0)
    holds = (*(min(two) for two in pairwise(heights)), 0)
    segments = tuple(Segment(1, *row, 1.0) for row in zip(heights, holds, strict=True))
    demands = [JobDemand(name, name, 1, 0, segments, steps=1, is_measured=True) for name in "ab"]
    scheduler = ScroogeScheduler(demands, 1000)
    enqueued = []
    while not isinstance(action := scheduler.next_action(0.0), Idle):
        enqueued += [action.ref.job] if isinstance(action, Enqueue) else []
    assert sorted(enqueued[:8]) == ["a"] * 4 + ["b"] * 4
    assert sorted(enqueued) == ["a"] * num_at_once + ["b"] * num_at_once
