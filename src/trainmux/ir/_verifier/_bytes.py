"""Byte ranges of the slab, kept sorted by address: what is live now, and who had the bytes before."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

Owner = tuple[int, int]
"""Sub-array and tensor; tensor -1 is a workspace."""


class LiveBytes:
    """The ranges in use. A range of zero bytes takes none and is not kept."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, Owner]] = []

    def take(self, offset: int, size_bytes: int, owner: Owner) -> Owner | None:
        """Put a range into use; returns the owner of one that it overlaps, if there is one."""
        if size_bytes <= 0:
            return None
        entry = (offset, offset + size_bytes, owner)
        at = bisect_left(self._ranges, entry)
        met = None
        if at < len(self._ranges) and self._ranges[at][0] < offset + size_bytes:
            met = self._ranges[at][2]
        elif at > 0 and self._ranges[at - 1][1] > offset:
            met = self._ranges[at - 1][2]
        self._ranges.insert(at, entry)
        return met

    def give_back(self, offset: int, size_bytes: int, owner: Owner) -> None:
        """Undo a `take` with the same arguments."""
        if size_bytes <= 0:
            return
        del self._ranges[bisect_left(self._ranges, (offset, offset + size_bytes, owner))]


@dataclass(frozen=True, slots=True)
class FormerTenant:
    """Who had bytes last, and the last instructions that touched them there (-1: none of this part)."""

    owner: Owner
    last_compute: int
    last_offload: int


class FormerTenants:
    """Disjoint ranges of bytes that were given back in this part, each with its last tenant.

    Only the last tenant of a byte is kept: it touched the byte after the one before it was done, so who
    waits for it waits for all before it.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, FormerTenant]] = []

    def _span(self, start: int, end: int) -> tuple[int, int]:
        """Positions of the ranges that share a byte with ``start`` to ``end``."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[first][1] <= start:
            first += 1
        return first, bisect_left(self._starts, end)

    def retire(self, offset: int, size_bytes: int, tenant: FormerTenant) -> None:
        """``tenant`` gave these bytes back."""
        if size_bytes <= 0:
            return
        end = offset + size_bytes
        first, last = self._span(offset, end)
        new = []
        if first < last and self._ranges[first][0] < offset:
            new.append((self._ranges[first][0], offset, self._ranges[first][2]))
        new.append((offset, end, tenant))
        if first < last and self._ranges[last - 1][1] > end:
            new.append((end, self._ranges[last - 1][1], self._ranges[last - 1][2]))
        self._ranges[first:last] = new
        self._starts[first:last] = [start for start, _, _ in new]

    def of(self, offset: int, size_bytes: int) -> Iterator[FormerTenant]:
        """Those who had any of these bytes last."""
        if size_bytes <= 0:
            return
        first, last = self._span(offset, offset + size_bytes)
        for _, _, tenant in self._ranges[first:last]:
            yield tenant
