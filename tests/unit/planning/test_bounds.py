"""Bounds: no policy is quicker than the linear relaxation or the exact optimum allow."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from exact import solve
from steps import (
    PLENTY,
    RING,
    TURNS,
    Builder,
    bound_seconds,
    decide,
    plain_order,
    plain_peak,
    prove,
    static_bytes,
)
from tests.random_steps import Shape, random_profile

from trainmux.ir import ByteClass, Multiplexing, Phase, Profile
from trainmux.planning import lane_times, rewrite

TIGHT = 1 + 1e-6


@pytest.mark.parametrize(
    ("count", "multiplexing"),
    [
        *((1, TURNS), (2, RING)),
        *(pytest.param(*case, marks=pytest.mark.extensive) for case in ((2, TURNS), (3, RING))),
    ],
)
def test_no_policy_is_quicker_than_the_bounds(count: int, multiplexing: Multiplexing) -> None:
    num_found = num_above = 0
    for seed in range(2):
        profile = random_profile(seed, 1, Shape(num_layers=4, optimizer_states=2))
        profiles = (replace(profile, slowdown_by_copies=1 + 0.2 * (seed % 2)),) * count
        nodes = count * sum(node.seconds for node in profile.nodes)
        high = plain_peak(profiles, multiplexing)
        for share in (0.6, 0.8, 0.9):
            limit = int(share * high)
            bound = bound_seconds(profiles, multiplexing, limit)
            for policy in ("auto", "recompute_only", *(["mutwo"] if count < 3 else [])):
                schedule = decide(policy, profiles, multiplexing, limit)
                if schedule is None:
                    continue
                if schedule.order != plain_order(profiles, multiplexing):
                    continue  # the bound is that of the plain order
                taken = lane_times(rewrite(profiles, schedule).body, profiles).seconds
                assert bound <= taken * TIGHT, (seed, share, policy)
                num_found += 1
                num_above += bound > nodes * TIGHT
    assert num_found >= 6
    assert num_above >= num_found // 4


def test_the_optimum_is_above_the_bounds_and_below_every_policy() -> None:
    """The solver's schedules are proved and take what it says; the bound is near them at times."""
    num_decided, ratios = 0, []
    for seed in range(12):
        profile = random_profile(seed, 1, Shape(num_layers=2, duplex_slowdown=1.0))
        static = static_bytes([profile])
        for share in (1.0, 0.9, 0.8, 0.7):
            limit = static + int(share * (plain_peak([profile], TURNS) - static))
            best = solve(profile, limit)
            if best is None:
                continue
            program = prove([profile], best.schedule, limit)
            assert lane_times(program.body, [profile]).seconds == pytest.approx(best.seconds, rel=1e-6)
            is_decided = bool(best.schedule.swaps or best.schedule.recomputes)
            assert not is_decided or share < 1.0  # there is room for everything
            num_decided += is_decided
            bound = bound_seconds([profile], TURNS, limit)
            assert bound <= best.seconds * TIGHT
            ratios.append(bound / best.seconds)
            for policy in ("swap_only", "recompute_only", "capuchin", "mutwo"):
                schedule = decide(policy, [profile], TURNS, limit)
                if schedule is not None:
                    taken = lane_times(rewrite([profile], schedule).body, [profile]).seconds
                    assert taken >= best.bound_seconds * (1 - 1e-6), (policy, share)
    assert num_decided >= 3
    assert max(ratios) > 0.95


def test_what_cannot_fit_takes_forever_and_more_room_never_takes_longer() -> None:
    profiles = [random_profile(3, 1, Shape(num_layers=4))] * 2
    seconds = [bound_seconds(profiles, TURNS, limit) for limit in range(0, 1 << 20, 1 << 16)]
    assert seconds[0] == math.inf
    assert all(more <= less * TIGHT for less, more in pairwise(seconds))
    assert seconds[-1] == pytest.approx(2 * sum(node.seconds for node in profiles[0].nodes))


def three_maps() -> Profile:
    """Three maps of 40 KiB, made in 1 ms and copied in 4; then a node that takes 100 KiB; long after that the
    backward pass needs the maps."""
    builder = Builder()
    builder.tensor("batch", ByteClass.BATCH, 1024)
    for name in "abc":
        builder.tensor(name, ByteClass.FEATURE_MAP, 40 * 1024, 4e-3, 4e-3)
        builder.node(name, Phase.FORWARD, ["batch"], [name], 1e-3, repeatable=False)
    builder.node("large", Phase.FORWARD, ["batch"], [], 1e-3, workspace=100 * 1024)
    for number in range(30):
        builder.node(f"between {number}", Phase.BACKWARD, ["batch"], [], 1e-3)
    for name in "cba":
        builder.node(f"∇{name}", Phase.BACKWARD, [name], [], 1e-3)
    return builder.profile("three maps")


@pytest.mark.parametrize(("spare_kib", "at_least_ms"), [(120, 0.0), (80, 0.0), (40, 4.0), (0, 8.0)])
def test_what_has_to_leave_before_a_node_is_waited_for(spare_kib: int, at_least_ms: float) -> None:
    """In 4 ms a map of 40 KiB is copied; three are made in 3 ms, and copies may begin at once."""
    profile = three_maps()
    limit = (1 + 100 + spare_kib) * 1024
    seconds = bound_seconds([profile], TURNS, limit)
    assert seconds * 1e3 == pytest.approx(len(profile.nodes) + at_least_ms, abs=1.0)


@pytest.mark.parametrize("policy", ["auto", "capuchin"])
@pytest.mark.parametrize(("spare_kib", "waited_ms"), [(120, 0), (80, 2), (40, 6), (30, 10)])
def test_compute_waits_for_no_more_copies_than_memory_demands(
    policy: str, spare_kib: int, waited_ms: int
) -> None:
    """Copies that end first give their bytes; what is behind them in the lane stays where there is room."""
    profile = three_maps()
    limit = (1 + 100 + spare_kib) * 1024
    schedule = decide(policy, [profile], TURNS, limit, PLENTY, evaluations=20)
    assert schedule is not None
    taken = lane_times(prove([profile], schedule, limit).body, [profile]).seconds
    assert taken * 1e3 == pytest.approx(len(profile.nodes) + waited_ms, abs=0.01)


def test_compute_that_copies_slow_down_takes_longer() -> None:
    """The room lacks one map of 40 KiB, which is copied out and back; that takes 4 ms each way."""
    profile = three_maps()
    alone, slowed = (
        bound_seconds([replace(profile, slowdown_by_copies=slow)], TURNS, 181 * 1024) for slow in (1.0, 1.25)
    )
    assert alone * 1e3 == pytest.approx(len(profile.nodes), abs=0.1)
    assert (slowed - alone) * 1e3 == pytest.approx(0.2 * 8, rel=0.3)
