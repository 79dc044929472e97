"""Who shares with whom: pairs with budgets of their own, one arena for all, and the choice between them."""

from __future__ import annotations

import random

import pytest
from colocate_cases import REGION, random_job
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.colocate import (
    Contention,
    JobDemand,
    Layout,
    ScroogeScheduler,
    Segment,
    SimulatedGpu,
    choose_layout,
    layout_by_rule,
    layouts,
    smallest_budget,
)


def block(name: str, peak: int, seconds: float, *, local: int = 0, steps: int = 12) -> JobDemand:
    """A job that rises and falls in five segments."""
    heights = [round(peak * part) for part in (0.3, 0.7, 1.0, 0.6, 0.3)]
    holds = [min(one, two) for one, two in zip(heights, (*heights[1:], 0), strict=True)]
    segments = tuple(
        Segment(1, height * REGION, hold * REGION, seconds / 5)
        for height, hold in zip(heights, holds, strict=True)
    )
    return JobDemand(name, name, REGION, local * REGION, segments, steps, is_measured=True)


def seconds_with(layout: Layout, demands: list[JobDemand], budget: int) -> float:
    seconds = {demand.name: [segment.solo_seconds for segment in demand.segments] for demand in demands}
    scheduler = ScroogeScheduler(
        demands, budget, choose_layout=lambda rows, _: layout.only({demand.name for demand in rows})
    )
    contention = Contention({demand.name: demand.compute_demand for demand in demands})
    return SimulatedGpu(scheduler, lambda ref: seconds[ref.job][ref.segment], contention).run().ended_at


def test_two_jobs_share_one_arena_from_its_ends() -> None:
    demands = [block("a", 10, 1.0, local=2), block("b", 20, 1.0, local=3)]
    (layout,) = layouts(demands, 30 * REGION)
    (arena,) = layout.arenas
    assert (arena.base, arena.top, arena.capacity_bytes) == (("a",), ("b",), 25 * REGION)


def test_an_arena_never_takes_more_than_both_peaks() -> None:
    demands = [block("a", 10, 1.0), block("b", 20, 1.0)]
    assert layout_by_rule(demands, 1000 * REGION).arenas[0].capacity_bytes == 30 * REGION


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9), num_jobs=st.integers(1, 7), spare=st.floats(0.0, 1.2))
def test_every_layout_fits_and_places_every_job_once(seed: int, num_jobs: int, spare: float) -> None:
    rng = random.Random(seed)
    demands = [random_job(rng, str(number), 2, True) for number in range(num_jobs)]
    least = smallest_budget(demands)
    budget = least + int(spare * sum(demand.peak_bytes for demand in demands))
    found = list(layouts(demands, budget))
    assert found
    local = sum(demand.local_bytes for demand in demands)
    peaks = {demand.name: demand.peak_bytes for demand in demands}
    for layout in [*found, layout_by_rule(demands, budget)]:
        names = [name for arena in layout.arenas for name in arena.names]
        assert sorted(names) == sorted(peaks)
        assert local + sum(arena.capacity_bytes for arena in layout.arenas) <= budget
        for arena in layout.arenas:
            assert arena.capacity_bytes >= max(peaks[name] for name in arena.names)
            assert arena.capacity_bytes % REGION == 0


def test_pairs_need_the_largest_of_each_at_once() -> None:
    demands = [block(name, 20, 1.0) for name in "abcd"]
    assert {len(layout.arenas) for layout in layouts(demands, 39 * REGION)} == {1}
    assert {len(layout.arenas) for layout in layouts(demands, 40 * REGION)} == {1, 2}


def test_the_choice_is_the_fastest_in_simulation() -> None:
    """Three jobs, one of them large: in one arena all overlap; as pairs the large one is alone or cramped."""
    demands = [block("small", 8, 1.0, steps=24), block("other", 8, 1.0, steps=24), block("large", 30, 2.0)]
    budget = 38 * REGION
    seconds = {layout: seconds_with(layout, demands, budget) for layout in layouts(demands, budget)}
    chosen = choose_layout(demands, budget)
    assert seconds[chosen] == pytest.approx(min(seconds.values()), rel=0.01)
    assert min(seconds.values()) < 0.98 * max(seconds.values())


def test_one_arena_gains_where_pairs_do_not_fit() -> None:
    demands = [block(name, 20, 1.0) for name in "abc"]
    budget = 32 * REGION
    chosen = choose_layout(demands, budget)
    assert len(chosen.arenas) == 1
    in_turns = sum(12 * demand.solo_seconds for demand in demands)
    assert seconds_with(chosen, demands, budget) < 0.95 * in_turns
