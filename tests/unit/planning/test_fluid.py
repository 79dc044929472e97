"""The bound by linear programming: nothing that policies find is below it, often above the nodes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from exact import solve
from fluid import fluid_seconds
from test_copies_in_a_layout import three_maps
from tests.random_steps import Shape, random_profile

from trainmux.ir import Multiplexing
from trainmux.planning import Infeasible, Task, lane_times, policy_named, rewrite
from trainmux.planning._policy import live_bytes, plain_order
from trainmux.planning._spread import spread_static

TIGHT = 1 + 1e-6


@pytest.mark.parametrize(
    ("count", "multiplexing"),
    [(1, Multiplexing.TURNS), (2, Multiplexing.TURNS), (2, Multiplexing.RING), (3, Multiplexing.RING)],
)
def test_nothing_is_quicker_in_the_same_order(count: int, multiplexing: Multiplexing) -> None:
    num_found = num_above_nodes = 0
    for seed in range(4):
        profile = random_profile(seed, 1, Shape(num_layers=4, optimizer_states=2))
        profiles = (replace(profile, slowdown_by_copies=1 + 0.2 * (seed % 2)),) * count
        nodes = count * sum(node.seconds for node in profile.nodes)
        plain = Task(profiles, multiplexing, 0, 1 << 50)
        high = max(live_bytes(plain, plain_order(profiles, multiplexing)))
        for share in (0.6, 0.75, 0.9):
            task = Task(profiles, multiplexing, int(share * high), 1 << 50)
            schedules = [spread_static(task)]
            for name in ("auto", "recompute_only", *(["mutwo"] if count < 3 else [])):
                try:
                    schedules.append(policy_named(name, evaluations=4).policy.schedule(task))
                except Infeasible:
                    continue
            for schedule in filter(None, schedules):
                taken = lane_times(rewrite(profiles, schedule).body, profiles).seconds
                bound = fluid_seconds(profiles, multiplexing, schedule.order, task.limit_bytes)
                assert bound <= taken * TIGHT, (seed, share)
                num_found += 1
                num_above_nodes += bound > nodes * TIGHT
    assert num_found >= 8
    assert num_above_nodes >= num_found // 4


def test_it_is_at_most_the_optimum_and_near_it_at_times() -> None:
    ratios = []
    for seed in range(8):
        profile = random_profile(seed, 1, Shape(num_layers=2, duplex_slowdown=1.0))
        order = plain_order([profile], Multiplexing.TURNS)
        task = Task((profile,), Multiplexing.TURNS, 0, 1 << 50)
        limit = int(0.85 * max(live_bytes(task, order)))
        best = solve([profile], Multiplexing.TURNS, order, limit, seconds=10.0)
        if best is None:
            continue
        bound = fluid_seconds([profile], Multiplexing.TURNS, order, limit)
        assert bound <= best.seconds * TIGHT
        ratios.append(bound / best.seconds)
    assert max(ratios) > 0.95


@pytest.mark.parametrize(("spare_kib", "at_least_ms"), [(120, 0.0), (80, 0.0), (40, 4.0), (0, 8.0)])
def test_what_has_to_leave_before_a_node_is_waited_for(spare_kib: int, at_least_ms: float) -> None:
    """In 4 ms a map of 40 KiB is copied; three are made in 3 ms, and copies may begin at once."""
    profile = three_maps()
    order = plain_order([profile], Multiplexing.TURNS)
    limit = (1 + 100 + spare_kib) * 1024
    seconds = fluid_seconds([profile], Multiplexing.TURNS, order, limit)
    assert seconds * 1e3 == pytest.approx(len(profile.nodes) + at_least_ms, abs=1.0)


def test_compute_that_copies_slow_down_takes_longer() -> None:
    """The room lacks one map of 40 KiB, which is copied out and back; that takes 4 ms each way."""
    profile = three_maps()
    order = plain_order([profile], Multiplexing.TURNS)
    alone, slowed = (
        fluid_seconds([replace(profile, slowdown_by_copies=slow)], Multiplexing.TURNS, order, 181 * 1024)
        for slow in (1.0, 1.25)
    )
    assert alone * 1e3 == pytest.approx(len(profile.nodes), abs=0.1)
    assert (slowed - alone) * 1e3 == pytest.approx(0.2 * 8, rel=0.3)


def test_what_cannot_fit_takes_forever_and_more_room_never_takes_longer() -> None:
    profile = random_profile(3, 1, Shape(num_layers=4))
    order = plain_order([profile] * 2, Multiplexing.TURNS)
    seconds = [
        fluid_seconds([profile] * 2, Multiplexing.TURNS, order, limit) for limit in range(0, 1 << 20, 1 << 16)
    ]
    assert seconds[0] == math.inf
    assert all(more <= less * TIGHT for less, more in pairwise(seconds))
    assert seconds[-1] == pytest.approx(2 * sum(node.seconds for node in profile.nodes))
