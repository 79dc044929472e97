"""An independent check of placements in a slab, by a walk through time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.ir import Part


@dataclass(frozen=True)
class Placed:
    """Bytes from ``offset`` on, in use from ``start`` until before ``end``."""

    start: int
    end: int
    offset: int
    size_bytes: int


def check_placement(placed: Sequence[Placed], total_bytes: int, alignment: int) -> None:
    """Fail where two share a byte and a time, or one lies outside the slab or off the alignment."""
    changes = []
    for number, each in enumerate(placed):
        assert each.offset >= 0
        assert each.offset % alignment == 0
        assert each.offset + each.size_bytes <= total_bytes
        if each.size_bytes:
            changes += [(each.start, True, number), (each.end, False, number)]
    in_use: list[tuple[int, int]] = []  # offset, number
    for _, starts, number in sorted(changes):  # at one time what ends sorts before what starts
        entry = (placed[number].offset, number)
        position = bisect_left(in_use, entry)
        if not starts:
            del in_use[position]
            continue
        for _, other in in_use[max(0, position - 1) : position + 1]:
            low, high = sorted((placed[number], placed[other]), key=lambda each: each.offset)
            assert low.offset + low.size_bytes <= high.offset, (low, high)
        in_use.insert(position, entry)


def max_live_bytes(placed: Sequence[Placed], alignment: int = 1) -> int:
    """The most bytes that are live at one time, each size rounded up to ``alignment``."""
    changes = []
    for each in placed:
        size = -(-each.size_bytes // alignment) * alignment
        changes += [(each.start, size), (each.end, -size)]
    live = highest = 0
    for _, change in sorted(changes):
        live += change
        highest = max(highest, live)
    return highest


def peak_live_bytes(part: Part) -> int:
    """The most bytes in use at once in a part of a program, before its first instruction too."""
    spans = [(each.begin, each.end + (each.begin == each.end), each.size_bytes) for each in part.tenancies]
    return max_live_bytes([Placed(begin, end, 0, size) for begin, end, size in spans])
