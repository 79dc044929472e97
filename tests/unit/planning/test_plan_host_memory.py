"""Swaps stay within what the host has for them, and a refusal says so where that is the reason."""

from __future__ import annotations

import pytest
from tests.random_steps import random_profile

from trainmux.errors import BudgetError
from trainmux.planning import Group, Planner

SEED = 11


def planner(host_bytes: int) -> Planner:
    return Planner(
        [Group("g", tuple(f"m{number}" for number in range(4)))],
        profile_of=lambda _, width: random_profile(SEED, width),
        policy="auto",
        evaluations=10,
        host_bytes=host_bytes,
    )


def test_host_memory_is_counted_and_said() -> None:
    plenty = planner(1 << 40)
    with pytest.raises(BudgetError) as refused:
        plenty.plan(1)
    assert "host" not in str(refused.value)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    needed = plenty.plan(smallest).host_bytes
    assert needed > 0
    little = planner(needed // 2)
    with pytest.raises(BudgetError, match=r"held down by the host, which has .* for them") as caught:
        little.plan(smallest)
    larger = caught.value.smallest_bytes
    assert larger is not None
    assert larger > smallest
    assert little.plan(larger).host_bytes <= needed // 2
