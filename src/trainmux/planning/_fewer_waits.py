"""Fewer waits between lanes: only those that values and placed bytes need, each for as much as possible.

A wait between a kernel and a copy costs even where what is waited for has long ended: some microseconds in a
CUDA graph (`Profile.sync_seconds`), for an edge between two engines, whichever of the two waits.

Copies wait for compute. Before bytes had places, one that brings a tensor back had to wait for all of compute
before it: any of it might have had the bytes. Now the last that had them is known; and one that takes a
tensor away needs whoever wrote it, no more. Where that is known to have ended there is no wait. Where there
must be one, it is for all of compute before it, so that later copies need none.

Compute waits for copies. Copies of one direction run one after another, so whoever waits for one knows that
all before it have ended. A wait for the latest copy that will have ended by then holds compute up no longer
than the one that is needed, and makes later waits needless.

When things end is taken from the simulation, as predicted and with slower copies: if those come true, nothing
is held up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from trainmux.ir import Compute, Free, Offload, Part, Prefetch, Profile, Recompute, Wait
from trainmux.planning._facts import Key
from trainmux.planning._lane_writer import LaneWriter
from trainmux.planning._timeline import COMPUTE, IN, OUT, LaneTimes, lane_times

_SLOW_COPIES = 1.25
"""Copies may take this many times their predicted time before a moved wait holds up compute."""
_TOLERANCES = (1e-12, 1e-2)
"""By how much a part may become slower where copies take as long as predicted, and where they take longer."""


def fewer_waits(part: Part, profiles: Sequence[Profile]) -> Part:
    """Return the part with fewer waits: bytes stay where they are and each lane's work stays in order.

    It is not slower with copies as predicted, and at most a hundredth slower where copies are slower. Of two
    ways the quicker is taken, of equally quick ones the one with fewer waits.
    """
    if not any(isinstance(item, Wait) for item in part.instructions):
        return part
    times = _times(part, profiles)
    at_most, at_most_slow = (
        each.seconds * (1 + tolerance) for each, tolerance in zip(times, _TOLERANCES, strict=True)
    )
    best, best_rank = part, _rank(part, times[0].seconds, at_most)
    for by_bytes in (True, False, True):
        if best is not part:  # ends are others where nodes wait less often
            times = _times(best, profiles)
        # A copy that begins earlier may meet one of the other direction, and both take longer; and what a
        # wait taught others that is gone now, they may have to wait for themselves.
        found = _Waits(best, profiles, times, by_bytes=by_bytes).part()
        if len(found.instructions) > len(part.instructions):
            continue
        taken = lane_times(found, profiles).seconds
        rank = _rank(found, taken, at_most)
        if taken > at_most or rank >= best_rank:
            continue
        if lane_times(found, profiles, _SLOW_COPIES).seconds <= at_most_slow:
            best, best_rank = found, rank
    return best


def _times(part: Part, profiles: Sequence[Profile]) -> list[LaneTimes]:
    return [lane_times(part, profiles, slow_copies) for slow_copies in (1.0, _SLOW_COPIES)]


def _rank(part: Part, seconds: float, at_most: float) -> tuple[int, int]:
    """Quicker ones first, but for rounding; then those with fewer waits."""
    return round(1e9 * seconds / at_most) if at_most > 0 else 0, len(part.instructions)


class _Waits(LaneWriter):
    """The instructions of a part once more with waits found anew.

    ``by_bytes``: copies wait for who wrote their tensor or had their bytes, not for all of compute before
    them. ``times`` are those of the part as predicted and with slower copies.
    """

    def __init__(
        self, old: Part, profiles: Sequence[Profile], times: Sequence[LaneTimes], *, by_bytes: bool
    ) -> None:
        super().__init__()
        self._old = old
        self._profiles = profiles
        self._times = times
        self._by_bytes = by_bytes
        self._tenants = _Tenants(old)
        self._moved = {-1: -1}
        self._copies: dict[int, list[int]] = {OUT: [], IN: []}
        self._copy_ends: dict[int, list[list[float]]] = {lane: [[] for _ in times] for lane in (OUT, IN)}
        """When the copies of a lane ended in the old part, by each of its times."""
        self._written: dict[Key, int] = {}
        self._position = -1
        """Position of the old part's instruction that is being written."""

    def part(self) -> Part:
        """The part with the waits that it takes."""
        for position, item in enumerate(self._old.instructions):
            self._position = position
            match item:
                case Wait():
                    continue
                case Compute() | Recompute():
                    node = self._profiles[item.sub_array].nodes[item.node]
                    new = self._compute(item, node.reads, node.changes)
                    for tensor in (*node.creates, *node.changes):
                        self._written[item.sub_array, tensor] = new
                case Free(sub_array, tensor):
                    new = self._free((sub_array, tensor))
                case Offload(sub_array, tensor):
                    new = self._copy_out((sub_array, tensor))
                    self._note_copy(OUT, new)
                case Prefetch(sub_array, tensor):
                    new = self._copy_back((sub_array, tensor))
                    self._note_copy(IN, new)
            self._moved[position] = new
        moved = {**self._moved, len(self._old.instructions): len(self.instructions)}
        tenancies = (replace(t, begin=moved[t.begin], end=moved[t.end]) for t in self._old.tenancies)
        return Part(tuple(self.instructions), tuple(tenancies))

    def _note_copy(self, lane: int, new: int) -> None:
        self._copies[lane].append(new)
        for ends, times in zip(self._copy_ends[lane], self._times, strict=True):
            ends.append(times.ends[self._position])

    def _wait_for_copies(self, needed: Iterable[int]) -> None:
        for on in sorted(needed, reverse=True):
            if self._is_news(COMPUTE, on):
                self._wait(COMPUTE, self._latest_ended(on))

    def _wait_for_maker(self, key: Key) -> None:
        if not self._by_bytes or self._is_news(OUT, self._written.get(key, -1)):
            super()._wait_for_maker(key)

    def _wait_for_bytes(self) -> None:
        last = self._moved[self._tenants.last_end_before(self._position)]
        if not self._by_bytes or self._is_news(IN, last):
            super()._wait_for_bytes()

    def _latest_ended(self, needed: int) -> int:
        """The last copy of a lane that has ended when ``needed`` must have."""
        lane = self._lane_of[needed]
        num_ended = min(
            bisect_right(ends, times.starts[self._position])
            for ends, times in zip(self._copy_ends[lane], self._times, strict=True)
        )
        return max(needed, self._copies[lane][num_ended - 1]) if num_ended else needed


class _Tenants:
    """Lookup of the tenancies that had given bytes of a part, and until when."""

    def __init__(self, part: Part) -> None:
        rows = [(t.end, t.offset, t.offset + t.size_bytes) for t in part.tenancies]
        self._end, self._low, self._high = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        self._own = {
            t.begin: (t.offset, t.offset + t.size_bytes)
            for t in part.tenancies
            if t.begin >= 0 and isinstance(part.instructions[t.begin], Prefetch)
        }

    def last_end_before(self, position: int) -> int:
        """Position at which the bytes of the copy at ``position`` were last freed; -1: not in this part."""
        low, high = self._own[position]
        had = (self._end < position) & (self._low < high) & (low < self._high)
        return int(self._end[had].max(initial=-1))
