"""How planning time grows with the number of members."""

from __future__ import annotations

from functools import cache
from time import process_time

from steps import static_bytes
from tests.random_steps import Shape, random_profile

from trainmux.ir import Profile
from trainmux.planning import PlannedGroup, Planner

SHAPE = Shape(num_layers=6, optimizer_states=2)
NUM_PARTITIONS = 5


@cache
def profile(width: int) -> Profile:
    return random_profile(3, width, SHAPE)


def seconds_to_plan(num_members: int) -> float:
    """Processor time of a plan within a third of the activations' memory."""
    group = PlannedGroup("g", tuple(f"m{number}" for number in range(num_members)))

    def planner(policy: str) -> Planner:
        return Planner(
            [group], profile_of=lambda _, width: profile(width), policy=policy, max_partitions=NUM_PARTITIONS
        )

    static = static_bytes([profile(num_members)])
    budget = static + (planner("none").plan(1 << 60).peak_bytes - static) // 3
    begin = process_time()
    assert planner("auto").plan(budget).peak_bytes <= budget
    return process_time() - begin


def test_planning_time_grows_at_most_with_the_square_of_the_members() -> None:
    seconds_to_plan(4)  # imports and caches
    few, many = seconds_to_plan(4), seconds_to_plan(64)
    assert many <= few * (64 / 4) ** 2
