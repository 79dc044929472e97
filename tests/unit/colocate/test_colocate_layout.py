"""Which jobs share memory: pairs with arenas of their own, or one arena for all."""

from __future__ import annotations

import random

from colocate_cases import REGION, random_job
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_gpu import Contention, SimulatedGpu

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._layout import choose_layout, smallest_budget
from trainmux.colocate._scheduler import ScroogeScheduler


def block(name: str, peak: int, seconds: float, *, local: int = 0, steps: int = 12) -> JobDemand:
    """A job that rises and falls in five segments."""
    heights = [round(peak * part) for part in (0.3, 0.7, 1.0, 0.6, 0.3)]
    holds = [min(one, two) for one, two in zip(heights, (*heights[1:], 0), strict=True)]
    segments = tuple(
        Segment(1, height * REGION, hold * REGION, seconds / 5)
        for height, hold in zip(heights, holds, strict=True)
    )
    return JobDemand(name, name, REGION, local * REGION, segments, steps, is_measured=True)


def test_two_jobs_share_one_arena_from_its_ends() -> None:
    demands = [block("a", 10, 1.0, local=2), block("b", 20, 1.0, local=3)]
    (arena,) = choose_layout(demands, 30 * REGION).arenas
    assert (arena.base, arena.top, arena.capacity_bytes) == (("a",), ("b",), 25 * REGION)
    assert choose_layout(demands, 1000 * REGION).arenas[0].capacity_bytes == 30 * REGION


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9), num_jobs=st.integers(1, 7), spare=st.floats(0.0, 1.2))
def test_a_layout_fits_and_places_every_job_once(seed: int, num_jobs: int, spare: float) -> None:
    rng = random.Random(seed)
    demands = [random_job(rng, str(number), 2, True) for number in range(num_jobs)]
    budget = smallest_budget(demands) + int(spare * sum(demand.peak_bytes for demand in demands))
    local = sum(demand.local_bytes for demand in demands)
    peaks = {demand.name: demand.peak_bytes for demand in demands}
    layout = choose_layout(demands, budget)
    names = [name for arena in layout.arenas for name in arena.names]
    assert sorted(names) == sorted(peaks)
    assert local + sum(arena.capacity_bytes for arena in layout.arenas) <= budget
    for arena in layout.arenas:
        assert arena.capacity_bytes >= max(peaks[name] for name in arena.names)
        assert arena.capacity_bytes % REGION == 0


def test_pairs_need_the_largest_of_each_at_once() -> None:
    demands = [block(name, 20, 1.0) for name in "abcd"]
    assert len(choose_layout(demands, 39 * REGION).arenas) == 1
    assert len(choose_layout(demands, 40 * REGION).arenas) == 2


def test_one_arena_gains_where_pairs_do_not_fit() -> None:
    demands = [block(name, 20, 1.0) for name in "abc"]
    budget = 32 * REGION
    assert len(choose_layout(demands, budget).arenas) == 1
    seconds = {demand.name: [segment.solo_seconds for segment in demand.segments] for demand in demands}
    gpu = SimulatedGpu(
        ScroogeScheduler(demands, budget),
        lambda ref: seconds[ref.job][ref.segment],
        Contention(dict.fromkeys("abc", 0.85)),
    )
    assert gpu.run().ended_at < 0.95 * sum(12 * demand.solo_seconds for demand in demands)
