"""Offsets in one slab: no two live tensors share a byte, and the slab is near the bytes live at once."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.errors import ConfigError, TrainmuxError
from trainmux.simulate import Lifetime, Placement, check, max_live_bytes, place
from trainmux.simulate._offsets import _place_in_order


def overlaps(placement: Placement) -> list[tuple[int, int]]:
    """Pairs that are live together and share bytes, found by trying every pair."""
    found = []
    for i, (a, at) in enumerate(zip(placement.lifetimes, placement.offsets, strict=True)):
        for j in range(i):
            b, there = placement.lifetimes[j], placement.offsets[j]
            in_time = a.start < b.end and b.start < a.end
            in_space = at < there + b.size_bytes and there < at + a.size_bytes
            if in_time and in_space and a.size_bytes and b.size_bytes:
                found.append((j, i))
    return found


def test_what_does_not_live_together_shares_its_place() -> None:
    placement = place([Lifetime(0, 2, 1000), Lifetime(2, 4, 1000), Lifetime(4, 5, 600)])
    assert placement.offsets == (0, 0, 0)
    assert placement.total_bytes == placement.lower_bound_bytes == 1024


def test_what_lives_together_lies_side_by_side() -> None:
    placement = place([Lifetime(0, 3, 512), Lifetime(1, 2, 1024), Lifetime(2, 4, 100)])
    assert placement.total_bytes == placement.lower_bound_bytes == 1536
    assert overlaps(placement) == []


def test_the_smallest_gap_that_fits_is_taken() -> None:
    # Largest first, they pile up as they stand here. The second and the fourth are gone when the last one
    # comes, which fits into the place of either.
    spans = [(0, 9, 10), (0, 3, 9), (0, 9, 8), (0, 3, 7), (0, 9, 6), (4, 5, 5)]
    placement = place([Lifetime(start, end, size * 512) for start, end, size in spans])
    assert [offset // 512 for offset in placement.offsets] == [0, 10, 19, 27, 34, 27]
    assert placement.total_bytes == placement.lower_bound_bytes == 40 * 512


@pytest.mark.parametrize(
    ("spans", "largest_first", "longest_first"),
    [
        ([(0, 2, 4), (2, 5, 2), (4, 6, 2), (0, 3, 2)], 6, 8),
        ([(2, 3, 4), (0, 4, 4), (3, 6, 5), (0, 3, 2)], 11, 10),
    ],
)
def test_the_better_of_both_orders_is_kept(
    spans: list[tuple[int, int, int]], largest_first: int, longest_first: int
) -> None:
    lifetimes = [Lifetime(*span) for span in spans]
    sizes = [lifetime.size_bytes for lifetime in lifetimes]
    by_size = sorted(range(4), key=lambda i: -sizes[i])
    by_span = sorted(range(4), key=lambda i: (lifetimes[i].start - lifetimes[i].end, -sizes[i]))
    assert _place_in_order(lifetimes, sizes, by_size)[0] == largest_first
    assert _place_in_order(lifetimes, sizes, by_span)[0] == longest_first
    placement = place(lifetimes, alignment=1)
    assert placement.total_bytes == placement.lower_bound_bytes == min(largest_first, longest_first)


def test_nothing_and_no_bytes() -> None:
    assert place([]).total_bytes == place([]).lower_bound_bytes == 0
    placement = place([Lifetime(0, 9, 0), Lifetime(1, 2, 1)])
    assert (placement.offsets, placement.total_bytes) == ((0, 0), 512)
    check(placement)


def test_alignment() -> None:
    placement = place([Lifetime(0, 2, 1), Lifetime(0, 2, 3), Lifetime(0, 2, 2)], alignment=1)
    assert (sorted(placement.offsets), placement.total_bytes) == ([0, 3, 5], 6)
    assert place([Lifetime(0, 2, 1)] * 2, alignment=256).offsets == (0, 256)
    with pytest.raises(ConfigError, match="alignment"):
        place([], alignment=0)


@pytest.mark.parametrize(("start", "end", "size"), [(1, 1, 1), (2, 1, 1), (0, 1, -1)])
def test_impossible_lifetimes_are_refused(start: int, end: int, size: int) -> None:
    with pytest.raises(ConfigError, match="lifetime"):
        Lifetime(start, end, size)


def test_the_most_live_bytes() -> None:
    lifetimes = [Lifetime(0, 2, 10), Lifetime(1, 3, 20), Lifetime(2, 4, 25)]
    assert max_live_bytes(lifetimes) == 45
    assert max_live_bytes(lifetimes, alignment=512) == 1024


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offsets": (0, 512)}, "lifetimes 0 and 1"),
        ({"offsets": (0, 0)}, "must not share"),
        ({"offsets": (0, 1500)}, "multiple of 512"),
        ({"offsets": (-512, 1024)}, "must lie in the slab"),
        ({"total_bytes": 1024}, "must lie in the slab"),
        ({"offsets": (0,)}, "one offset per lifetime"),
    ],
)
def test_a_wrong_placement_is_found(change: dict[str, object], said: str) -> None:
    right = place([Lifetime(0, 5, 1024), Lifetime(4, 6, 512)])
    check(right)
    with pytest.raises(TrainmuxError, match=said):
        check(dataclasses.replace(right, **change))  # type: ignore[arg-type]


LIFETIMES = st.lists(
    st.builds(
        lambda start, span, size: Lifetime(start, start + span, size),
        st.integers(0, 30),
        st.integers(1, 20),
        st.one_of(st.integers(0, 5000), st.sampled_from([512, 1024, 4096])),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(LIFETIMES, st.sampled_from([1, 16, 512]))
def test_placements_are_sound(lifetimes: list[Lifetime], alignment: int) -> None:
    placement = place(lifetimes, alignment)
    assert overlaps(placement) == []
    check(placement)
    padded = [-(-lifetime.size_bytes // alignment) * alignment for lifetime in lifetimes]
    live = [
        sum(size for size, other in zip(padded, lifetimes, strict=True) if other.start <= time < other.end)
        for time in range(51)
    ]
    assert placement.lower_bound_bytes == max(live)
    assert placement.lower_bound_bytes <= placement.total_bytes <= sum(padded)
    assert place(lifetimes, alignment) == placement


@settings(deadline=None)
@given(LIFETIMES, st.lists(st.integers(0, 10), min_size=40, max_size=40))
def test_the_check_agrees_with_trying_every_pair(lifetimes: list[Lifetime], offsets: list[int]) -> None:
    chosen = tuple(512 * offset for offset in offsets[: len(lifetimes)])
    placement = Placement(tuple(lifetimes), chosen, total_bytes=10**6, lower_bound_bytes=0, alignment=512)
    if overlaps(placement):
        with pytest.raises(TrainmuxError, match="share"):
            check(placement)
    else:
        check(placement)
