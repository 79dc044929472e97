"""Which partitions are tried with members side by side, on how many branches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.random_steps import Shape, random_profile

from trainmux.errors import BudgetError
from trainmux.ir import Profile
from trainmux.planning import Group, Planner, find_partitions
from trainmux.planning._plan import _branched
from trainmux.profiling import branches_to_measure, side_by_side

SEVEN = [Group("a", tuple(f"a{number}" for number in range(7)))]


@pytest.mark.parametrize(
    ("num_members", "tried"),
    [
        (8, {(8,): 8, (4, 4): 4, (2, 2, 2, 2): 2}),
        (7, {(7,): 7, (4, 3): 4, (2, 2, 2, 1): 2}),
        (5, {(5,): 5, (3, 2): 3, (2, 2, 1): 2}),
        (4, {(4,): 4, (2, 2): 2}),
        (3, {(3,): 3}),
        (1, {}),
    ],
)
def test_only_where_few_places_are_left_unused(num_members: int, tried: dict[tuple[int, ...], int]) -> None:
    group = Group("a", tuple(f"a{number}" for number in range(num_members)))
    profile = random_profile(0, 1, Shape(num_layers=2))
    asked: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for partition in find_partitions([num_members]).partitions:
        (widths,) = partition.widths

        def branched_of(
            group: Group, num_members: int, num_branches: int, widths: tuple[int, ...] = tuple(widths)
        ) -> Profile:
            asked.setdefault(widths, set()).add((num_members, num_branches))
            return side_by_side(profile, num_branches, num_members)

        found = _branched([group], partition, branched_of)
        assert {key: item.width for key, item in found.items()} == {
            (0, width): width for width in set(widths) if found
        }
    assert asked == {
        widths: {(width, num_branches) for width in widths} for widths, num_branches in tried.items()
    }


@pytest.mark.parametrize(
    ("num_members", "numbers"), [(1, ()), (2, (2,)), (3, (2, 3)), (5, (2, 3, 4)), (6, (2, 3, 4)), (8, (2, 4))]
)
def test_three_at_a_time_are_measured_where_they_are_tried(
    num_members: int, numbers: tuple[int, ...]
) -> None:
    assert branches_to_measure(num_members) == numbers


def test_none_where_one_width_is_not_known() -> None:
    profile = random_profile(0, 1, Shape(num_layers=2))
    partition = next(
        partition for partition in find_partitions([7]).partitions if partition.widths == ((4, 3),)
    )

    def branched_of(group: Group, num_members: int, num_branches: int) -> Profile | None:
        return None if num_members == 3 else side_by_side(profile, num_branches, num_members)

    assert _branched(SEVEN, partition, branched_of) == {}


def test_seven_members_use_the_memory_that_there_is() -> None:
    """Branches gain: the more at a time, the quicker, and the more memory they need."""
    alone = random_profile(1, 1, Shape(num_layers=4))
    taken = sum(node.seconds for node in alone.nodes)
    alone = replace(alone, seconds_beside=((2, 1.6 * taken), (3, 2.3 * taken), (4, 3.0 * taken)))
    planner = Planner(
        SEVEN,
        profile_of=lambda group, width: side_by_side(replace(alone, seconds_beside=()), width),
        branched_of=lambda group, members, branches: (
            side_by_side(alone, branches, members) if branches <= 4 else None
        ),
        policy="none",
    )
    chosen = {}
    most = planner.plan(1 << 50).peak_bytes
    for share in range(40, 101, 5):
        try:
            plan = planner.plan(most * share // 100)
        except BudgetError:
            continue
        chosen[tuple(len(part.members) for part in plan.partition)] = plan.num_branches
    assert chosen[4, 3] == 4
    assert chosen[2, 2, 2, 1] == 2
