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
from types import MappingProxyType

import numpy as np

from trainmux.errors import ConfigError
from trainmux.sizes import round_up

_MAX_PLACEMENTS = 24_000
"""Large tenants that are placed in all tries together: bounds the time, 40 to 80 µs each."""
_MIN_TRIES, _MAX_TRIES = 12, 24
_GOOD_ENOUGH = 1000
"""No further try when the slab exceeds the bytes in use at once by less than one part in this many. Tenants
below that size are placed when the tries are over, in what the others leave free."""
_ROWS_PER_STRETCH, _MAX_STRETCHES = 64, 256
"""How finely time is divided to find what shares time with a tenant."""
_NEAR_SHARE = 8
"""Where more than one part in this many of all rows are near a tenant, all of them are looked at: they are
sorted by offset already."""

_Spans = tuple[tuple[int, int], ...]
_Array = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Tenant:
    """``size_bytes`` that are needed during each of ``spans``: times (start, end), without the end itself."""

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
    Tenants that are there all the time lie at the bottom. Sizes count rounded up to the alignment. Refused
    with `ConfigError`: an alignment below 1, a negative size, a tenant without spans or with spans that do
    not end after they start or do not follow one another.
    """
    if alignment < 1:
        raise ConfigError(f"alignment must be at least 1 byte, but got {alignment}; 512 suits every kernel")
    for i, tenant in enumerate(tenants):
        times = [time for span in tenant.spans for time in span]
        in_order = all(start < end for start, end in tenant.spans) and times == sorted(times)
        if tenant.size_bytes < 0 or not times or not in_order:
            raise ConfigError(
                "a tenant must have zero bytes or more and spans one after another that end after they "
                f"start, but tenant {i} is {tenant}; leave out what is never there"
            )
    sizes = [round_up(tenant.size_bytes, alignment) for tenant in tenants]
    first = min((tenant.spans[0][0] for tenant in tenants), default=0)
    last = max((tenant.spans[-1][1] for tenant in tenants), default=0)
    offsets = [0] * len(tenants)
    base = 0
    rest = []
    for i, tenant in enumerate(tenants):
        if sizes[i] == 0:
            continue
        if tenant.spans == ((first, last),):
            offsets[i] = base
            base += sizes[i]
        else:
            rest.append(i)
    spans, rest_sizes = [tenants[i].spans for i in rest], [sizes[i] for i in rest]
    bound, total, placed = _packed(spans, rest_sizes, first, last, enough_bytes - base)
    for i, offset in zip(rest, placed, strict=True):
        offsets[i] = base + offset
    return Slab(tuple(offsets), base + total, base + bound)


def _packed(
    spans: Sequence[_Spans], sizes: Sequence[int], first: int, last: int, enough_bytes: int
) -> tuple[int, int, list[int]]:
    """The bytes in use at once, those of the slab, and the offsets."""
    in_use = _bytes_in_use(spans, sizes, first, last)
    bound = int(in_use.max(initial=0))
    by_crowding = _by_crowding(spans, sizes, in_use, first)
    small = [i for i in by_crowding if sizes[i] * _GOOD_ENOUGH < bound]
    large = [i for i in by_crowding if sizes[i] * _GOOD_ENOUGH >= bound]
    if not small:
        enough = max(bound + bound // _GOOD_ENOUGH, enough_bytes)
        return bound, *_best_try(spans, sizes, large, bound, enough, (first, last))
    of_large = [spans[i] for i in large], [sizes[i] for i in large]
    bound_of_large = int(_bytes_in_use(*of_large, first, last).max(initial=0))
    enough = max(bound_of_large + bound // _GOOD_ENOUGH, enough_bytes - 2 * (bound - bound_of_large))
    _, offsets = _best_try(*of_large, range(len(large)), bound_of_large, enough, (first, last))
    return bound, *_place(spans, sizes, small, (first, last), dict(zip(large, offsets, strict=True)))


def _bytes_in_use(spans: Sequence[_Spans], sizes: Sequence[int], first: int, last: int) -> _Array:
    """The bytes in use at each time from ``first`` up to, not including, ``last``."""
    steps = np.zeros(last - first + 1, np.int64)
    for tenant, size in zip(spans, sizes, strict=True):
        for start, end in tenant:
            steps[start - first] += size
            steps[end - first] -= size
    return np.cumsum(steps)[:-1]


def _by_crowding(spans: Sequence[_Spans], sizes: Sequence[int], in_use: _Array, first: int) -> list[int]:
    """Numbers of tenants: first those whose time has the most bytes in use, then by length, then by size."""
    crowding = [max(int(in_use[s - first : e - first].max()) for s, e in tenant) for tenant in spans]
    lengths = [sum(end - start for start, end in tenant) for tenant in spans]
    return sorted(range(len(sizes)), key=lambda i: (-crowding[i], -lengths[i], -sizes[i], i))


def _best_try(
    spans: Sequence[_Spans],
    sizes: Sequence[int],
    by_crowding: Sequence[int],
    bound: int,
    enough: int,
    time: tuple[int, int],
) -> tuple[int, list[int]]:
    """The lowest total found, the first that is ``enough``, and its offsets.

    There are three rows of tries. In the first, all tenants above the bound move half way forward each time,
    in the others those at the very top come first. The last row begins with the longest-lived.
    """
    num_tries = min(max(_MIN_TRIES, _MAX_PLACEMENTS // max(1, len(sizes))), _MAX_TRIES)
    lengths = [sum(end - start for start, end in tenant) for tenant in spans]
    by_length = sorted(by_crowding, key=lambda i: (-lengths[i], -sizes[i]))
    best: tuple[int, list[int]] | None = None
    for begin, gently in ((by_crowding, True), (by_crowding, False), (by_length, False)):
        order = list(begin)
        for _ in range(num_tries // 3):
            total, offsets = _place(spans, sizes, order, time)
            if best is None or total < best[0]:
                best = (total, offsets)
            if best[0] <= enough:
                return best
            above = {i for i in order if offsets[i] + sizes[i] > (bound if gently else total - 1)}
            place = {i: (at / 2 - 1 if gently else -1) if i in above else at for at, i in enumerate(order)}
            order.sort(key=lambda i: place[i])
    assert best is not None
    return best


def _place(
    spans: Sequence[_Spans],
    sizes: Sequence[int],
    order: Sequence[int],
    time: tuple[int, int],
    known: Mapping[int, int] = MappingProxyType({}),
) -> tuple[int, list[int]]:
    """The total and the offsets when tenants are placed one by one in ``order``, among ``known`` ones."""
    placed = _Placed(sum(len(tenant) for tenant in spans), *time)
    offsets = [known.get(i, 0) for i in range(len(sizes))]
    for i, offset in known.items():
        placed.add(spans[i], offset, offset + sizes[i])
    for i in order:
        offsets[i] = placed.lowest_offset(spans[i], sizes[i])
        placed.add(spans[i], offsets[i], offsets[i] + sizes[i])
    return max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0), offsets


class _Placed:
    """Tenants placed so far, one row per span.

    Rows are kept by stretches of time: most tenants are there for a short time only and need not be compared
    with those of all others. For those that are there for longer, all rows are kept by offset too.
    """

    def __init__(self, num_rows: int, first: int, last: int) -> None:
        self._bottoms, self._tops, self._starts, self._ends = (np.empty(num_rows, np.int64) for _ in range(4))
        self._num_rows = 0
        self._first = first
        num_stretches = min(max(1, num_rows // _ROWS_PER_STRETCH), _MAX_STRETCHES)
        self._length = max(1, -(-(last - first) // num_stretches))
        self._rows: list[_Rows] = [_Rows() for _ in range(num_stretches)]
        self._by_offset, self._sorted_bottoms = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)

    def lowest_offset(self, spans: _Spans, size: int) -> int:
        """That of the smallest gap of ``size`` bytes between the rows that share time with ``spans``."""
        stretches = dict.fromkeys(stretch for span in spans for stretch in self._stretches(*span))
        num_near = sum(self._rows[stretch].count for stretch in stretches)
        looks_at_all = num_near * _NEAR_SHARE > self._num_rows
        if looks_at_all:
            near = self._by_offset[: self._num_rows]
        else:  # some rows come several times, which does no harm
            near = np.concatenate([self._rows[stretch].numbers() for stretch in stretches])
        meets = near[_meets(self._starts[near], self._ends[near], spans)]
        if not meets.size:
            return 0
        if not looks_at_all:
            meets = meets[self._bottoms[meets].argsort()]
        return _best_gap(self._bottoms[meets], self._tops[meets], size)

    def add(self, spans: _Spans, bottom: int, top: int) -> None:
        at = int(self._sorted_bottoms[: self._num_rows].searchsorted(bottom))
        for start, end in spans:
            row = self._num_rows
            for column, value in ((self._by_offset, row), (self._sorted_bottoms, bottom)):
                column[at + 1 : row + 1] = column[at:row]
                column[at] = value
            self._num_rows += 1
            self._bottoms[row], self._tops[row] = bottom, top
            self._starts[row], self._ends[row] = start, end
            for stretch in self._stretches(start, end):
                self._rows[stretch].append(row)

    def _stretches(self, start: int, end: int) -> range:
        return range((start - self._first) // self._length, (end - 1 - self._first) // self._length + 1)


class _Rows:
    """Numbers of rows, growing."""

    def __init__(self) -> None:
        self._numbers = np.empty(64, np.int64)
        self.count = 0

    def append(self, row: int) -> None:
        if self.count == len(self._numbers):
            self._numbers = np.concatenate([self._numbers, np.empty_like(self._numbers)])
        self._numbers[self.count] = row
        self.count += 1

    def numbers(self) -> _Array:
        return self._numbers[: self.count]


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
