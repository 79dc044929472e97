"""Which jobs share memory: pairs with arenas of their own, or one arena for all."""

from __future__ import annotations

import random

from colocate_cases import REGION, gpu_of, job_of, random_job
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._layout import choose_layout, smallest_budget
from trainmux.colocate._scheduler import ScroogeScheduler


def block(name: str, peak: int, **options: int) -> JobDemand:
    """A job that rises and falls in five segments."""
    return job_of(name, [round(peak * part) for part in (0.3, 0.7, 1.0, 0.6, 0.3)], 0.2, **options)


def test_two_jobs_share_one_arena_from_its_ends() -> None:
    demands = [block("a", 10, local_bytes=2), block("b", 20, local_bytes=3)]
    (arena,) = choose_layout(demands, 30).arenas
    assert (arena.base, arena.top, arena.capacity_bytes) == (("a",), ("b",), 25)
    assert choose_layout(demands, 1000).arenas[0].capacity_bytes == 30


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), num_jobs=st.integers(1, 7), spare=st.floats(0.0, 1.2))
def test_a_layout_fits_and_places_every_job_once(seed: int, num_jobs: int, spare: float) -> None:
    rng = random.Random(seed)
    demands = [random_job(rng, str(number), 2, True) for number in range(num_jobs)]
    budget = smallest_budget(demands) + int(spare * sum(demand.peak_bytes for demand in demands))
    local = sum(demand.local_bytes for demand in demands)
    peaks = {demand.name: demand.peak_bytes for demand in demands}
    layout = choose_layout(demands, budget)
    assert sorted(name for arena in layout.arenas for name in arena.names) == sorted(peaks)
    assert local + sum(arena.capacity_bytes for arena in layout.arenas) <= budget
    for arena in layout.arenas:
        assert arena.capacity_bytes >= max(peaks[name] for name in arena.names)
        assert arena.capacity_bytes % REGION == 0


def test_pairs_need_the_largest_of_each_at_once_else_one_arena_serves_all() -> None:
    demands = [block(name, 20) for name in "abcd"]
    assert len(choose_layout(demands, 39).arenas) == 1
    assert len(choose_layout(demands, 40).arenas) == 2
    three = [block(name, 20, steps=12) for name in "abc"]
    assert len(choose_layout(three, 32).arenas) == 1
    run = gpu_of(ScroogeScheduler(three, 32), three, 0.85).run()
    assert run.ended_at < 0.95 * sum(12 * demand.solo_seconds for demand in three)
