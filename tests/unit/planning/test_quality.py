"""How good `auto` is on small random problems, beside the exact optimum and the other policies."""

from __future__ import annotations

import random

import pytest
from exact import solve
from steps import TURNS, decide, plain_peak, prove, static_bytes
from tests.random_steps import Shape, random_profile

from trainmux.planning import lane_times

NEAR_OPTIMUM, NEAR_OTHERS = 1.03, 1.01


NUM_PROBLEMS = 250
EVALUATIONS = 25
"""Fewer than `auto` takes by default, which is four times as long and no better here."""


@pytest.mark.parametrize("first", [0, NUM_PROBLEMS])
def test_auto_is_near_the_optimum_and_not_above_the_other_policies(first: int) -> None:
    """Every schedule is proved. The optimum is that of feature maps in the plain order."""
    to_optimum, to_others = [], []
    for seed in range(first, first + NUM_PROBLEMS):
        rng = random.Random(seed)
        profile = random_profile(seed, 1, Shape(num_layers=rng.randint(2, 3), duplex_slowdown=1.0))
        static = static_bytes([profile])
        limit = static + int(rng.uniform(0.8, 0.99) * (plain_peak([profile], TURNS) - static))
        taken = {}
        for policy in ("auto", "mutwo", "capuchin", "swap_only", "recompute_only"):
            schedule = decide(policy, [profile], TURNS, limit, evaluations=EVALUATIONS)
            if schedule is not None:
                taken[policy] = lane_times(prove([profile], schedule, limit).body, [profile]).seconds
        best = solve(profile, limit)
        if "auto" not in taken:
            assert best is None
            continue
        auto = taken.pop("auto")
        if best is not None:
            to_optimum.append(auto / best.seconds)
        if taken:
            to_others.append(auto / min(taken.values()))
    assert len(to_optimum) > NUM_PROBLEMS // 5  # feature maps alone are not enough for the others
    assert sum(ratio <= NEAR_OPTIMUM for ratio in to_optimum) >= 0.95 * len(to_optimum)
    assert sum(ratio <= NEAR_OTHERS for ratio in to_others) >= 0.99 * len(to_others)
