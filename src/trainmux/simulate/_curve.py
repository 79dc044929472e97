"""A curve of bytes over positions that planners change one interval at a time.

A tree over the positions keeps, for each stretch of them, the highest value in it. An amount that applies to
a whole stretch is kept at the stretch and never pushed further down, so that adding to an interval, the
peak, and the search for positions above a limit each touch a number of stretches that grows with the
logarithm of the curve's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from trainmux.errors import ConfigError

_NOWHERE = -(1 << 62)
"""Lies below every value: what stands behind the last position."""


class MemoryCurve:
    """Bytes at each of ``len(base)`` positions, ``base`` at first.

    Refused with `ConfigError`: a curve without positions, an interval outside of it, a mark that was given
    up.
    """

    def __init__(self, base: Sequence[int]) -> None:
        if not base:
            raise ConfigError(
                "a memory curve needs at least one position, but got none; pass the bytes at each position"
            )
        self._length = len(base)
        self._width = 1 << (self._length - 1).bit_length()
        width = self._width
        # Node 1 is the whole curve, nodes 2i and 2i + 1 are the halves of node i, leaf p is node width + p.
        self._high = [_NOWHERE] * width + list(base) + [_NOWHERE] * (width - self._length)
        self._whole = [0] * (2 * width)
        high = self._high
        for node in range(width - 1, 0, -1):
            high[node] = max(high[2 * node], high[2 * node + 1])
        self._journal: list[tuple[int, int, int]] | None = None

    def __len__(self) -> int:
        return self._length

    def add(self, begin: int, end: int, amount: int) -> None:
        """Add ``amount`` at the positions from ``begin`` up to, not including, ``end``."""
        if begin >= end:
            if begin == end and 0 <= begin <= self._length:
                return
            self._refuse(begin, end)
        if begin < 0 or end > self._length:
            self._refuse(begin, end)
        if self._journal is not None:
            self._journal.append((begin, end, amount))
        self._apply(begin, end, amount)

    def _apply(self, begin: int, end: int, amount: int) -> None:
        high, whole = self._high, self._whole
        left = begin + self._width
        right = end + self._width
        low, top = left, right - 1
        while left < right:
            if left & 1:
                high[left] += amount
                whole[left] += amount
                left += 1
            if right & 1:
                right -= 1
                high[right] += amount
                whole[right] += amount
            left >>= 1
            right >>= 1
        # Above the two ends of the interval the highest values have to be found again.
        low >>= 1
        top >>= 1
        while low != top:
            a, b = high[2 * low], high[2 * low + 1]
            high[low] = (a if a > b else b) + whole[low]
            a, b = high[2 * top], high[2 * top + 1]
            high[top] = (a if a > b else b) + whole[top]
            low >>= 1
            top >>= 1
        while low:
            a, b = high[2 * low], high[2 * low + 1]
            high[low] = (a if a > b else b) + whole[low]
            low >>= 1

    def peak(self) -> int:
        """The highest value."""
        return self._high[1]

    def peak_position(self) -> int:
        """The first position of the highest value."""
        node, high = 1, self._high
        while node < self._width:
            node *= 2
            if high[node] < high[node + 1]:
                node += 1
        return node - self._width

    def max_over(self, begin: int, end: int) -> int:
        """The highest value from ``begin`` up to, not including, ``end``; an empty interval is refused."""
        if not 0 <= begin < end <= self._length:
            self._refuse(begin, end)
        high, whole = self._high, self._whole
        left = begin + self._width
        right = end + self._width
        # Everything gathered on the left lies below node left - 1 of the present level, on the right below
        # node right: what applies to those as a whole has to be added on the way up.
        from_left = from_right = _NOWHERE
        while left < right:
            if left & 1:
                if high[left] > from_left:
                    from_left = high[left]
                left += 1
            if right & 1:
                right -= 1
                if high[right] > from_right:
                    from_right = high[right]
            left >>= 1
            right >>= 1
            from_left += whole[left - 1]
            from_right += whole[right]
        node = (left - 1) >> 1
        while node > 0:
            from_left += whole[node]
            node >>= 1
        right >>= 1
        while right > 0:
            from_right += whole[right]
            right >>= 1
        return from_left if from_left > from_right else from_right

    def first_over(self, limit: int) -> int | None:
        """The first position with more than ``limit``; ``None`` where there is none."""
        high, whole = self._high, self._whole
        if high[1] <= limit:
            return None
        node = 1
        while node < self._width:
            limit -= whole[node]
            node *= 2
            if high[node] <= limit:
                node += 1
        return node - self._width

    def last_over(self, limit: int) -> int | None:
        """The last position with more than ``limit``; ``None`` where there is none."""
        high, whole = self._high, self._whole
        if high[1] <= limit:
            return None
        node = 1
        while node < self._width:
            limit -= whole[node]
            node = 2 * node + 1
            if high[node] <= limit:
                node -= 1
        return node - self._width

    def value(self, position: int) -> int:
        """The bytes at one position."""
        return self.max_over(position, position + 1)

    def values(self) -> list[int]:
        """The bytes at every position."""
        total = self._whole.copy()
        for node in range(2, 2 * self._width):
            total[node] += total[node // 2]
        # A leaf's value holds what was added at the leaf itself already: add what lies above it.
        width = self._width
        if width == 1:
            return [self._high[1]]
        return [self._high[width + p] + total[(width + p) // 2] for p in range(self._length)]

    def copy(self) -> MemoryCurve:
        """An independent curve with the same values and no marks."""
        other = MemoryCurve.__new__(MemoryCurve)
        other._length = self._length
        other._width = self._width
        other._high = self._high.copy()
        other._whole = self._whole.copy()
        other._journal = None
        return other

    def mark(self) -> int:
        """A mark to roll back to. From now on what is added is remembered, until `commit`."""
        if self._journal is None:
            self._journal = []
        return len(self._journal)

    def rollback(self, mark: int) -> None:
        """Take back all that was added since ``mark``; marks set after it are given up, it stays itself."""
        if self._journal is None or not 0 <= mark <= len(self._journal):
            raise ConfigError(
                f"rollback needs a mark that is still set, but got {mark}; set one with mark() before the "
                "change that may have to be undone"
            )
        while len(self._journal) > mark:
            begin, end, amount = self._journal.pop()
            self._apply(begin, end, -amount)

    def commit(self) -> None:
        """Give up all marks and keep what was added."""
        self._journal = None

    def _refuse(self, begin: int, end: int) -> NoReturn:
        raise ConfigError(
            f"an interval of this curve must lie within 0 and {self._length} and not end before it begins, "
            f"but got {begin} to {end}; count positions as in the base the curve was made from"
        )
