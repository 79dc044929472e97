"""Static placement of many tenants, some of which come back to the same bytes (D8 a).

The problem is dynamic storage allocation, NP-hard in general. A tenant may have several spans of time, all at
one offset, as a tensor needs that lies in a slab from one part of a program to the next. Each tenant goes to
the smallest gap that fits between those it shares time with. What matters is which large ones come first:
those that are there when most bytes are in use, or the longest-lived. Then those that ended up too high are
moved forward and it is tried again, until the slab is as good as the bytes in use at once or the tries are
used up. The search through what is placed runs over arrays, for thousands of tenants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainmux.sizes import round_up

_MAX_PLACEMENTS = 24_000
"""Large tenants that are placed in all tries together: bounds the time, 40 to 80 µs each."""
_MIN_TRIES, _MAX_TRIES = 12, 24
_GOOD_ENOUGH = 1000
"""No further try when the slab exceeds the bytes in use at once by less than one part in this many. Tenants
below that size are placed when the tries are over, in what the others leave free."""

_Spans = tuple[tuple[int, int], ...]
_Array = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Tenant:
    """``size_bytes`` that are needed during each of ``spans``: times (start, end), without the end itself.

    Spans follow one another, and each ends after it starts.
    """

    size_bytes: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Slab:
    """The offset of each tenant in ``total_bytes``; no slab can be below ``lower_bound_bytes``."""

    offsets: tuple[int, ...]
    total_bytes: int
    lower_bound_bytes: int


def pack(tenants: Sequence[Tenant], alignment: int = 512, *, enough_bytes: int = 0) -> Slab:
    """Offsets for ``tenants``, multiples of ``alignment``; the same arguments give the same slab.

    The search for a smaller one ends at ``enough_bytes``: who only asks whether that suffices need not wait.
    Tenants that are there all the time lie at the bottom. Sizes count rounded up to the alignment.
    """
    rounded = [Tenant(round_up(tenant.size_bytes, alignment), tenant.spans) for tenant in tenants]
    first = min((tenant.spans[0][0] for tenant in tenants), default=0)
    last = max((tenant.spans[-1][1] for tenant in tenants), default=0)
    offsets = [0] * len(tenants)
    base = 0
    rest = []
    for i, tenant in enumerate(rounded):
        if tenant.spans == ((first, last),):
            offsets[i] = base
            base += tenant.size_bytes
        elif tenant.size_bytes:
            rest.append(i)
    bound, total, placed = _packed([rounded[i] for i in rest], first, last, enough_bytes - base)
    for i, number in enumerate(rest):
        offsets[number] = base + placed[i]
    return Slab(tuple(offsets), base + total, base + bound)


def place_in_order(tenants: Sequence[Tenant], order: Sequence[int]) -> list[int]:
    """Offsets when tenants are placed in this order, each into the smallest gap that fits."""
    _, offsets = _place(tenants, order, {})
    return [offsets[i] for i in range(len(tenants))]


def _packed(
    tenants: Sequence[Tenant], first: int, last: int, enough_bytes: int
) -> tuple[int, int, dict[int, int]]:
    """The bytes in use at once, those of the slab, and the offsets."""
    in_use = _bytes_in_use(tenants, first, last)
    bound = int(in_use.max())
    crowding = [max(int(in_use[s - first : e - first].max()) for s, e in each.spans) for each in tenants]
    order = sorted(range(len(tenants)), key=lambda i: (-crowding[i], *_by_length(tenants[i]), i))
    large = [i for i in order if tenants[i].size_bytes * _GOOD_ENOUGH >= bound]
    bound_of_large = int(_bytes_in_use([tenants[i] for i in large], first, last).max())
    enough = max(bound_of_large + bound // _GOOD_ENOUGH, enough_bytes - 2 * (bound - bound_of_large))
    _, offsets = _best_try(tenants, large, bound_of_large, enough)
    return bound, *_place(tenants, [i for i in order if i not in offsets], offsets)


def _bytes_in_use(tenants: Sequence[Tenant], first: int, last: int) -> _Array:
    """The bytes in use at each time from ``first`` to ``last``."""
    steps = np.zeros(last - first + 1, np.int64)
    for tenant in tenants:
        for start, end in tenant.spans:
            steps[start - first] += tenant.size_bytes
            steps[end - first] -= tenant.size_bytes
    return np.cumsum(steps)


def _by_length(tenant: Tenant) -> tuple[int, int]:
    """Sorts those first that are there for the longest time, and of those the largest."""
    return -sum(end - start for start, end in tenant.spans), -tenant.size_bytes


def _best_try(
    tenants: Sequence[Tenant], by_crowding: Sequence[int], bound: int, enough: int
) -> tuple[int, dict[int, int]]:
    """The lowest total found, the first that is ``enough``, and its offsets.

    There are three rows of tries. In the first, all tenants above the bound move half way forward each time,
    in the others those at the very top come first. The last row begins with the longest-lived.
    """
    num_tries = min(max(_MIN_TRIES, _MAX_PLACEMENTS // max(1, len(by_crowding))), _MAX_TRIES)
    by_length = sorted(by_crowding, key=lambda i: _by_length(tenants[i]))
    best: tuple[int, dict[int, int]] | None = None
    for begin, gently in ((by_crowding, True), (by_crowding, False), (by_length, False)):
        order = list(begin)
        for _ in range(num_tries // 3):
            total, offsets = _place(tenants, order, {})
            if best is None or total < best[0]:
                best = (total, offsets)
            if best[0] <= enough:
                return best
            highest = bound if gently else total - 1
            above = {i for i in order if offsets[i] + tenants[i].size_bytes > highest}
            place = {i: (at / 2 - 1 if gently else -1) if i in above else at for at, i in enumerate(order)}
            order.sort(key=lambda i: place[i])
    assert best is not None
    return best


def _place(
    tenants: Sequence[Tenant], order: Sequence[int], known: Mapping[int, int]
) -> tuple[int, dict[int, int]]:
    """The total and the offsets when tenants are placed one by one in ``order``, among ``known`` ones."""
    placed = _Placed(sum(len(tenant.spans) for tenant in tenants))
    offsets = dict(known)
    total = 0
    for i in (*known, *order):
        size, spans = tenants[i].size_bytes, tenants[i].spans
        if i not in known:
            offsets[i] = placed.lowest_offset(spans, size)
        placed.add(spans, offsets[i], offsets[i] + size)
        total = max(total, offsets[i] + size)
    return total, offsets


class _Placed:
    """Tenants placed so far, one row per span, sorted by offset."""

    def __init__(self, num_rows: int) -> None:
        self._rows = np.empty((4, num_rows), np.int64)
        self._num_rows = 0

    def lowest_offset(self, spans: _Spans, size: int) -> int:
        """The offset of the smallest gap of ``size`` bytes between rows that share time with ``spans``."""
        bottoms, tops, starts, ends = self._rows[:, : self._num_rows]
        meets = _meets(starts, ends, spans).nonzero()[0]
        return _best_gap(bottoms[meets], tops[meets], size) if meets.size else 0

    def add(self, spans: _Spans, bottom: int, top: int) -> None:
        rows, end = self._rows, self._num_rows + len(spans)
        at = int(rows[0, : self._num_rows].searchsorted(bottom))
        rows[:, at + len(spans) : end] = rows[:, at : self._num_rows].copy()
        for number, span in enumerate(spans, start=at):
            rows[:, number] = (bottom, top, *span)
        self._num_rows = end


def _meets(starts: _Array, ends: _Array, spans: _Spans) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of the rows share time with any of ``spans``."""
    start, end = spans[0]
    meets = (starts < end) & (ends > start)
    for start, end in spans[1:]:
        meets |= (starts < end) & (ends > start)
    return meets


def _best_gap(bottoms: _Array, tops: _Array, size: int) -> int:
    """The offset of the smallest gap of ``size`` bytes between rows sorted by offset, or above them all."""
    covered = np.maximum.accumulate(tops)
    gaps = bottoms.copy()
    gaps[1:] -= covered[:-1]
    fitting = (gaps >= size).nonzero()[0]
    if not fitting.size:
        return int(covered[-1])
    chosen = int(fitting[gaps[fitting].argmin()])
    return int(covered[chosen - 1]) if chosen else 0
