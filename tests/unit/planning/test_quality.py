"""How good `auto` is on small random problems, beside the exact optimum and the other policies."""

from __future__ import annotations

import random

import pytest
from exact import solve
from steps import TURNS, decide, plain_peak, prove, static_bytes
from tests.random_steps import Shape, random_profile

from trainmux.ir import Profile
from trainmux.planning import lane_times

NEAR_OPTIMUM, NEAR_OTHERS = 1.03, 1.01
OTHERS = ("mutwo", "capuchin", "swap_only", "recompute_only")
NUM_PROBLEMS = 250
EVALUATIONS = 25
"""Fewer than `auto` takes by default, which is four times as long and no better here."""


def seconds(policy: str, profile: Profile, limit_bytes: int) -> float | None:
    """How long a policy's schedule takes, which is proved; ``None`` where it finds none."""
    schedule = decide(policy, [profile], TURNS, limit_bytes, evaluations=EVALUATIONS)
    if schedule is None:
        return None
    return lane_times(prove([profile], schedule, limit_bytes).body, [profile]).seconds


@pytest.mark.parametrize("first", [0, pytest.param(NUM_PROBLEMS, marks=pytest.mark.extensive)])
def test_auto_is_near_the_optimum_and_not_above_the_other_policies(first: int) -> None:
    """Every schedule is proved. The optimum is that of feature maps in the plain order."""
    to_optimum, to_others = [], []
    for seed in range(first, first + NUM_PROBLEMS):
        rng = random.Random(seed)
        profile = random_profile(seed, 1, Shape(num_layers=rng.randint(2, 3), duplex_slowdown=1.0))
        static = static_bytes([profile])
        limit = static + int(rng.uniform(0.8, 0.99) * (plain_peak([profile], TURNS) - static))
        taken = [seconds(policy, profile, limit) for policy in OTHERS]
        others = [each for each in taken if each is not None]
        best = solve(profile, limit)
        if best is None and not others:
            continue  # feature maps alone are not enough: there is nothing to compare with
        auto = seconds("auto", profile, limit)
        if best is not None:
            assert auto is not None
            to_optimum.append(auto / best.seconds)
        if others:
            assert auto is not None
            to_others.append(auto / min(others))
    assert len(to_optimum) > NUM_PROBLEMS // 5
    assert sum(ratio <= NEAR_OPTIMUM for ratio in to_optimum) >= 0.95 * len(to_optimum)
    assert sum(ratio <= NEAR_OTHERS for ratio in to_others) >= 0.99 * len(to_others)
