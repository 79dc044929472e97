"""Partitions: the paper's own, rules beyond it, the bound, several groups."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.errors import ConfigError
from trainmux.planning.partition import (
    Group,
    Partition,
    equal_partitions,
    filled_partitions,
    find_partitions,
    paper_partitions,
)


def test_the_papers_four_partitions_of_eight() -> None:
    assert paper_partitions(8) == ((4, 4), (3, 3, 1, 1), (2, 2, 2, 2), (1,) * 8)


def test_odd_counts_pair_one_more_with_one_less() -> None:
    assert paper_partitions(7) == ((4, 3), (2, 2, 2, 1), (2, 1, 1, 1, 1, 1))
    assert paper_partitions(9)[0] == (5, 4)
    assert paper_partitions(3) == ((2, 1),)


def test_one_member_has_no_partner() -> None:
    assert paper_partitions(1) == ((1,),)
    assert find_partitions([1]).partitions == (Partition(((1,),)),)


@given(st.integers(2, 70))
def test_every_rule_keeps_the_members(num_members: int) -> None:
    for rule in (paper_partitions, equal_partitions, filled_partitions):
        for widths in rule(num_members):
            assert sum(widths) == num_members
            assert min(widths) >= 1
            assert list(widths) == sorted(widths, reverse=True)
    for widths in paper_partitions(num_members):
        assert len(widths) % 2 == 0
        pairs = zip(widths[::2], widths[1::2], strict=True)
        assert all(0 <= first - second <= 1 for first, second in pairs)
    assert all(max(widths) - min(widths) <= 1 for widths in equal_partitions(num_members))


def test_as_wide_as_fits_and_the_rest() -> None:
    assert filled_partitions(5) == ((5,), (4, 1), (3, 2), (2, 2, 1), (1,) * 5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(2, 20))
def test_the_search_is_bounded_without_repeats_and_counts_what_it_leaves_out(
    sizes: list[int], bound: int
) -> None:
    search = find_partitions(sizes, max_partitions=bound)
    everything = find_partitions(sizes, max_partitions=10**9)
    assert everything.num_left_out == 0
    assert search.partitions == everything.partitions[:bound]
    assert len(search.partitions) + search.num_left_out == len(everything.partitions)
    assert len(set(everything.partitions)) == len(everything.partitions)
    assert Partition(tuple((size,) for size in sizes)) in search.partitions
    assert Partition(tuple((1,) * size for size in sizes)) in search.partitions
    for partition in everything.partitions:
        assert [sum(widths) for widths in partition.widths] == sizes


def test_sixty_four_members_are_bounded_and_the_rest_is_counted() -> None:
    search = find_partitions([64])
    widths = [partition.widths[0] for partition in search.partitions]
    assert len(widths) == 16
    assert {(64,), (32, 32), (16,) * 4, (8,) * 8, (4,) * 16, (2,) * 32, (1,) * 64} <= set(widths)
    assert search.num_left_out == 127


def test_sixty_four_groups_of_two_are_quick() -> None:
    begin = time.perf_counter()
    search = find_partitions([2] * 64)
    assert time.perf_counter() - begin < 1
    assert len(search.partitions) == 16
    assert search.num_left_out == 2**64 - 16


def test_groups_are_split_alike_first() -> None:
    first = find_partitions([4, 2]).partitions[:3]
    assert [partition.widths for partition in first] == [
        ((4,), (2,)),
        ((1, 1, 1, 1), (1, 1)),
        ((2, 2), (1, 1)),
    ]


def test_sub_arrays_never_mix_groups() -> None:
    groups = (Group("a", ("a0", "a1", "a2")), Group("b", ("b0", "b1")))
    partition = Partition(((2, 1), (2,)))
    assert partition.members(groups) == ((0, ("a0", "a1")), (0, ("a2",)), (1, ("b0", "b1")))
    assert partition.num_sub_arrays == 3


def test_which_partitions_are_whose() -> None:
    assert Partition(((4,), (2,))).is_complete_fusion
    assert not Partition(((4,), (1, 1))).is_complete_fusion
    assert Partition(((3, 3, 1, 1), (1,))).is_in_pairs
    assert not Partition(((5, 3),)).is_in_pairs


@pytest.mark.parametrize(
    ("sizes", "bound", "said"),
    [
        ([], 16, "at least one group"),
        ([3, 0], 16, "at least 1 member, but got 0"),
        ([3], 1, "max_partitions must be at least 2, but got 1"),
    ],
)
def test_what_is_refused(sizes: list[int], bound: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_partitions(sizes, max_partitions=bound)
