"""Bounds hold for everything that policies find, and say more than the time of the nodes alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from exact import solve
from tests.random_steps import Shape, random_profile

from trainmux.ir import Multiplexing, Schedule
from trainmux.planning import Infeasible, Task, lane_times, peak_live_bytes, policy_named, rewrite
from trainmux.planning._bound import least_seconds
from trainmux.planning._facts import facts_of
from trainmux.planning._policy import live_bytes, plain_order
from trainmux.planning._remember import remembered


@pytest.mark.parametrize(
    ("count", "multiplexing"),
    [(1, Multiplexing.TURNS), (2, Multiplexing.TURNS), (2, Multiplexing.RING)],
)
def test_no_policy_is_quicker_than_the_bound(count: int, multiplexing: Multiplexing) -> None:
    num_tight = 0
    for seed in range(12):
        profile = random_profile(seed, 1, Shape(num_layers=4))
        all_facts = [facts_of(profile)] * count
        seconds = sum(facts.start_seconds[-1] for facts in all_facts)
        plain = Task((profile,) * count, multiplexing, 0, 1 << 50)
        high = max(live_bytes(plain, plain_order(plain.profiles, multiplexing)))
        for share in (0.75, 0.9):
            limit = int(share * high)
            for name, swaps_static in (("recompute_only", False), ("capuchin", False), ("auto", True)):
                bound = least_seconds(all_facts, multiplexing, limit, swaps_static=swaps_static)
                task = replace(plain, limit_bytes=limit)
                try:
                    schedule = policy_named(name, evaluations=4).policy.schedule(task)
                except Infeasible:
                    continue
                taken = lane_times(rewrite(task.profiles, schedule).body, task.profiles).seconds
                assert bound <= taken * (1 + 1e-9), (seed, share, name)
                num_tight += bound > seconds * (1 + 1e-6)
    assert num_tight >= 3


def test_the_optimum_is_not_below_the_bound_and_the_bound_is_near_it_at_times() -> None:
    ratios = []
    for seed in range(8):
        profile = random_profile(seed, 1, Shape(num_layers=2, duplex_slowdown=1.0))
        order = tuple((0, rank) for rank in range(len(profile.nodes)))
        plain = Schedule(Multiplexing.TURNS, order, (), ())
        limit = int(0.85 * peak_live_bytes(rewrite([profile], plain).body))
        best = solve([profile], Multiplexing.TURNS, order, limit, seconds=10.0)
        if best is None:
            continue
        bound = least_seconds([facts_of(profile)], Multiplexing.TURNS, limit, swaps_static=False)
        assert bound <= best.seconds * (1 + 1e-6)
        ratios.append(bound / best.seconds)
    assert max(ratios) > 0.95


def test_what_cannot_fit_takes_forever_and_more_room_never_takes_longer() -> None:
    facts = facts_of(random_profile(3, 1, Shape(num_layers=4)))
    assert least_seconds([facts], Multiplexing.TURNS, 0, swaps_static=True) == math.inf
    bounds = [
        least_seconds([facts, facts], Multiplexing.TURNS, limit, swaps_static=True)
        for limit in range(0, 1 << 20, 1 << 14)
    ]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == pytest.approx(2 * facts.start_seconds[-1])


def test_a_remembered_function_is_called_once_for_each_object_not_for_each_value() -> None:
    calls = []

    @remembered
    def length(row: list[int]) -> int:
        calls.append(row)
        return len(row)

    first, second = [1, 2], [1, 2]
    assert [length(first), length(second), length(first)] == [2, 2, 2]
    assert len(calls) == 2
    for _ in range(100):
        length([])
    length(first)
    assert len(calls) == 103
