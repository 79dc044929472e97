"""Static placement: offsets in one slab for tensors whose lifetimes are known (D8 a).

The problem is dynamic storage allocation, NP-hard in general. Two greedy orders are tried, largest first and
longest-lived first; each tensor goes to the smallest gap that fits between those it is alive with, and the
lower of the two slabs is kept. The bytes live at once are a lower bound, given beside the result.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.errors import ConfigError, TrainmuxError


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``size``."""
    return -(-size // unit) * unit


@dataclass(frozen=True)
class Lifetime:
    """``size_bytes`` that are needed from time ``start`` on and no more at time ``end``.

    Refused with `ConfigError`: an end that is not after the start, a negative size.
    """

    start: int
    end: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.end <= self.start:
            raise ConfigError(
                f"a lifetime must end after it starts, but got start {self.start} and end {self.end}; "
                "end is the first moment at which the bytes are free again"
            )
        if self.size_bytes < 0:
            raise ConfigError(
                f"a lifetime must have zero bytes or more, but got {self.size_bytes}; "
                "pass the size of the tensor's storage"
            )


@dataclass(frozen=True)
class Placement:
    """Where each lifetime lies in a slab of ``total_bytes``; no slab can be below ``lower_bound_bytes``."""

    lifetimes: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    total_bytes: int
    lower_bound_bytes: int
    alignment: int


def place(intervals: Sequence[Lifetime], alignment: int = 512) -> Placement:
    """Offsets for ``intervals``, multiples of ``alignment`` bytes, in the order of ``intervals``.

    Sizes are rounded up to the alignment, in the total and in the lower bound too. Both orders are tried,
    and the same input gives the same placement. An alignment below 1 is refused with `ConfigError`.
    """
    if alignment < 1:
        raise ConfigError(f"alignment must be at least 1 byte, but got {alignment}; 512 suits every kernel")
    sizes = [round_up(interval.size_bytes, alignment) for interval in intervals]
    spans = [interval.end - interval.start for interval in intervals]
    numbers = range(len(intervals))
    largest_first = sorted(numbers, key=lambda i: (-sizes[i], -spans[i], i))
    longest_first = sorted(numbers, key=lambda i: (-spans[i], -sizes[i], i))
    candidates = [_place_in_order(intervals, sizes, order) for order in (largest_first, longest_first)]
    total, offsets = min(candidates, key=lambda candidate: candidate[0])
    bound = max_live_bytes(intervals, alignment)
    return Placement(tuple(intervals), tuple(offsets), total, bound, alignment)


def max_live_bytes(intervals: Sequence[Lifetime], alignment: int = 1) -> int:
    """The most bytes that are live at one time, each size rounded up to ``alignment``."""
    changes = []
    for interval in intervals:
        size = round_up(interval.size_bytes, alignment)
        changes += [(interval.start, size), (interval.end, -size)]
    live = highest = 0
    for _, change in sorted(changes):  # at one time what ends sorts before what starts
        live += change
        highest = max(highest, live)
    return highest


def _place_in_order(
    intervals: Sequence[Lifetime], sizes: Sequence[int], order: Sequence[int]
) -> tuple[int, list[int]]:
    """The total and the offsets when the intervals are placed one by one in ``order``."""
    offsets = [0] * len(intervals)
    placed: list[tuple[int, int, int, int]] = []  # offset, end of the bytes, start, end; by offset
    for i in order:
        if sizes[i] == 0:
            continue
        offset = _best_gap(placed, intervals[i], sizes[i])
        offsets[i] = offset
        insort(placed, (offset, offset + sizes[i], intervals[i].start, intervals[i].end))
    return max((top for _, top, _, _ in placed), default=0), offsets


def _best_gap(placed: Sequence[tuple[int, int, int, int]], interval: Lifetime, size: int) -> int:
    """The offset of the smallest gap of ``size`` bytes beside what is alive with ``interval``, or the top."""
    best: tuple[int, int] | None = None
    top = 0
    for offset, end_offset, start, end in placed:
        if start >= interval.end or end <= interval.start:
            continue
        gap = offset - top
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, top)
        top = max(top, end_offset)
    return top if best is None else best[1]


def check(placement: Placement) -> None:
    """Prove that a placement can be used, without the code that made it.

    Walks through time and keeps the bytes in use sorted: two that touch the same byte at the same time, an
    offset outside the slab or off the alignment raise `TrainmuxError`, naming the lifetimes.
    """
    lifetimes, offsets = placement.lifetimes, placement.offsets
    if len(lifetimes) != len(offsets):
        raise TrainmuxError(
            f"a placement needs one offset per lifetime ({len(lifetimes)}), got {len(offsets)}"
        )
    for i, (lifetime, offset) in enumerate(zip(lifetimes, offsets, strict=True)):
        if offset < 0 or offset % placement.alignment or offset + lifetime.size_bytes > placement.total_bytes:
            raise TrainmuxError(
                f"lifetime {i} must lie in the slab of {placement.total_bytes} bytes at a multiple of "
                f"{placement.alignment}, but has {lifetime.size_bytes} bytes at {offset}; place it anew"
            )
    nonempty = [i for i, lifetime in enumerate(lifetimes) if lifetime.size_bytes]
    changes = [(lifetimes[i].start, True, i) for i in nonempty]
    changes += [(lifetimes[i].end, False, i) for i in nonempty]
    in_use: list[tuple[int, int]] = []  # offset, number
    for _, starts, i in sorted(changes):  # at one time what ends sorts before what starts
        position = bisect_left(in_use, (offsets[i], i))
        if not starts:
            del in_use[position]
            continue
        for _, other in in_use[max(0, position - 1) : position + 1]:
            first, second = sorted((i, other), key=lambda j: offsets[j])
            if offsets[first] + lifetimes[first].size_bytes > offsets[second]:
                raise TrainmuxError(
                    f"lifetimes {first} and {second} must not share bytes while both are live, but lie at "
                    f"{offsets[first]} and {offsets[second]}; place them anew"
                )
        in_use.insert(position, (offsets[i], i))
