"""The exact solver: its schedules are proved, take what it says, and no policy of its kind is quicker."""

from __future__ import annotations

import pytest
from exact import solve
from tests.random_steps import Shape, random_profile

from trainmux.ir import Multiplexing, Schedule, verify
from trainmux.planning import Infeasible, Task, lane_times, peak_live_bytes, policy_named, rewrite

SHAPE = Shape(num_layers=2, duplex_slowdown=1.0)


def test_no_policy_is_quicker_than_the_optimum() -> None:
    assert sum(number_decided(seed) for seed in range(12)) >= 3


def number_decided(seed: int) -> int:
    """Compares at three limits; says at how many of them something was swapped or recomputed."""
    profile = random_profile(seed, 1, SHAPE)
    order = tuple((0, rank) for rank in range(len(profile.nodes)))
    plain = rewrite([profile], Schedule(Multiplexing.TURNS, order, (), ()))
    static = sum(tensor.size_bytes for tensor in profile.tensors if tensor.byte_class.is_static)
    high = peak_live_bytes(plain.body)
    decided = 0
    for share in (0.9, 0.8, 0.7):
        limit = static + int(share * (high - static))
        best = solve([profile], Multiplexing.TURNS, order, limit, seconds=20.0)
        if best is None:
            continue
        program = rewrite([profile], best.schedule)
        verify(program, [profile], budget_bytes=program.slab_bytes)
        assert peak_live_bytes(program.body) <= limit
        assert lane_times(program.body, [profile]).seconds == pytest.approx(best.seconds, rel=1e-6)
        task = Task((profile,), Multiplexing.TURNS, limit, 1 << 50)
        decided += bool(best.schedule.swaps or best.schedule.recomputes)
        for name in ("swap_only", "recompute_only", "capuchin", "mutwo"):
            try:
                schedule = policy_named(name).policy.schedule(task)
            except Infeasible:
                continue
            taken = lane_times(rewrite([profile], schedule).body, [profile]).seconds
            assert taken >= best.bound_seconds * (1 - 1e-6), (name, share)
    return decided


def test_with_room_for_everything_nothing_is_decided() -> None:
    profile = random_profile(1, 1, SHAPE)
    order = tuple((0, rank) for rank in range(len(profile.nodes)))
    high = peak_live_bytes(rewrite([profile], Schedule(Multiplexing.TURNS, order, (), ())).body)
    best = solve([profile], Multiplexing.TURNS, order, high)
    assert best is not None
    assert not best.schedule.swaps
    assert not best.schedule.recomputes
    assert best.seconds == pytest.approx(sum(node.seconds for node in profile.nodes))
    assert solve([profile], Multiplexing.TURNS, order, 1) is None
