"""Many members: planning time is bounded, and bodies too large to decide on keep the contract.

Processor time, as the machine may have other work. `benchmarks/planning_many.py` has the same for BERTs.
"""

from __future__ import annotations

import functools
import time

import pytest
from tests.random_steps import Shape, random_profile

from trainmux.errors import BudgetError
from trainmux.ir import Plan, Profile
from trainmux.planning import Group, Planner, _candidates

SHAPE = Shape(num_layers=8)


@functools.cache
def profile_of(group: Group, width: int) -> Profile:
    return random_profile(1, width, SHAPE)


def members(count: int) -> Group:
    return Group("members", tuple(f"member {number}" for number in range(count)))


def budgets(count: int, *shares: float) -> list[int]:
    """Static memory plus shares of what complete fusion needs beyond that."""
    tensors = profile_of(members(count), count).tensors
    static = sum(tensor.size_bytes for tensor in tensors if tensor.byte_class.is_static)
    fused = Planner([members(count)], profile_of=profile_of, policy="capuchin", max_partitions=2)
    peak = fused.plan(1 << 60).peak_bytes
    return [int(static + share * (peak - static)) for share in shares]


def plan(count: int, budget: int, policy: str = "auto", max_partitions: int = 16) -> Plan:
    planner = Planner([members(count)], profile_of=profile_of, policy=policy, max_partitions=max_partitions)
    return planner.plan(budget)


def test_64_members_are_planned_in_bounded_time() -> None:
    times = []
    for budget in budgets(64, 1 / 100, 1 / 3):
        begin = time.process_time()
        found = plan(64, budget, max_partitions=8)
        assert time.process_time() - begin < 60
        assert sum(len(sub_array.members) for sub_array in found.partition) == 64
        assert found.peak_bytes <= budget
        times.append(found.step_seconds)
    assert times[0] >= times[1]


@pytest.mark.parametrize("policy", ["mutwo", "auto"])
def test_bodies_too_large_to_decide_on_are_taken_as_they_are(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = len(profile_of(members(8), 1).nodes)
    monkeypatch.setattr(_candidates, "_HUGE_BODY", nodes)
    monkeypatch.setattr(_candidates, "_MOST_NODES", 2 * nodes)
    previous = float("inf")
    smallest = smallest_that_works(8, policy)
    for budget in (smallest, *budgets(8, 0.2, 0.6)):
        if budget < smallest:
            continue
        found = plan(8, budget, policy)
        assert found.peak_bytes <= budget
        assert found.step_seconds <= previous * (1 + 1e-9)
        previous = found.step_seconds
        decided = found.schedule.swaps or found.schedule.recomputes
        # All can still be swapped where nothing else fits: each member alone, as few bytes as can be.
        assert len(found.partition) <= 2 or not decided or len(found.partition) == 8


def smallest_that_works(count: int, policy: str) -> int:
    """What the refusal of a budget names."""
    with pytest.raises(BudgetError) as refused:
        plan(count, 1, policy)
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes
