"""The number of slots of a group: fewer where most were empty for long, more again where members come."""

from __future__ import annotations

import time

WORTH = 0.5
"""Share of the time that the programs in use took to build: once so much has been spent on empty slots,
narrower ones are built. A first build takes longer than the next, because it imports torch's compilers."""


class Widths:
    """Chooses among the most slots that a group has had, half of them, a quarter, and so on.

    These few widths come again and again, in the next search too, and programs for them are known, or on
    disk. Others take time to build: if they are built once as much time has been lost without them, no more
    than twice is lost of what must be lost by one who knows how long members will train. Where it cannot
    shrink, a group keeps all slots: products of another width may differ in their last bits.
    """

    def __init__(self, width: int, *, can_shrink: bool) -> None:
        self.most = width
        self._can_shrink = can_shrink
        self._looked_s: float | None = None
        self._lost_s = 0.0

    def note(self, width: int) -> None:
        """The group has so many slots from now on."""
        self.most = max(self.most, width)
        self._looked_s, self._lost_s = None, 0.0

    def narrower(self, width: int, num_members: int, build_s: float) -> int:
        """The width to take the next step at; ``build_s`` is what the programs in use took to build."""
        if not self._can_shrink or 2 * num_members > width:
            self._looked_s = None
            return width
        wanted, now_s = self._holding(num_members), time.monotonic()
        if self._looked_s is not None:
            self._lost_s += (now_s - self._looked_s) * (1 - wanted / width)
        self._looked_s = now_s
        return wanted if self._lost_s >= WORTH * build_s else width

    def wider(self, width: int) -> int:
        """The next width, for one member more than it holds."""
        return self._holding(width + 1)

    def _holding(self, num_members: int) -> int:
        """The smallest of the widths that holds so many."""
        found = self.most
        while num_members <= (half := (found + 1) // 2) < found:
            found = half
        return found
