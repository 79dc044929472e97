"""Fewer waits between lanes: only those that values and placed bytes need, each for as much as possible.

A wait between a kernel and a copy costs even where what is waited for has long ended: some microseconds in a
CUDA graph (`Profile.meeting_seconds`), for an edge between two engines, whichever of the two waits.

Copies wait for compute. Before bytes had places, one that brings a tensor back had to wait for all of compute
before it: any of it might have had the bytes. Now the last that had them is known; and one that takes a
tensor away needs whoever wrote it, no more. Where that is known to have ended there is no wait. Where there
must be one, it is for all of compute before it, so that later copies need none. And copies are held back
until there are some to begin together, for as long as nobody will miss them.

Compute waits for copies. Copies of one direction run one after another, so whoever waits for one knows that
all before it have ended. A wait for the latest copy that will have ended by then holds compute up no longer
than the one that is needed, and makes later waits needless.

When things end is taken from the simulation, as predicted and with slower copies: if those come true, nothing
is held up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trainmux.ir import (
    Compute,
    Free,
    Offload,
    Part,
    Prefetch,
    Profile,
    Recompute,
    Tenancy,
    Wait,
    lane_of,
)
from trainmux.planning._facts import Key
from trainmux.planning._lane_writer import LaneWriter
from trainmux.planning._lanes import COMPUTE, IN, LANES, OUT
from trainmux.planning._timeline import lane_times

_STRAIN = 1.25
"""Copies may take this many times their predicted time before a moved wait holds up compute."""
_TOLERANCES = (1e-12, 1e-2)
"""By how much a part may become slower where copies take as long as predicted, and where they take longer."""
_HELD_SHARES = ({OUT: 0.5, IN: 0.5}, {OUT: 0.25, IN: 0.0}, {OUT: 0.0, IN: 0.0})
"""By lane, the share of the time until somebody needs it that a copy is held back for; the quickest is taken,
and where meetings cost nothing the one with the fewest waits."""
_MOST_HELD = 1 / 64
"""A copy is held back for at most this share of the part's time: others queue behind it."""
_MOST_PASSES = 3
"""A pass knows who had ended when by the times of the part before it, and some more are found by the next."""


def fewer_waits(part: Part, profiles: Sequence[Profile]) -> Part:
    """Return the part with fewer waits: bytes stay where they are and each lane's work stays in order.

    It is not slower with copies as predicted, and at most a hundredth slower where copies are slower."""
    if not any(isinstance(item, Wait) for item in part.instructions):
        return part
    old = _Old(part, profiles)
    at_most = [
        times.seconds * (1 + tolerance) for times, tolerance in zip(old.times, _TOLERANCES, strict=True)
    ]
    for _ in range(_MOST_PASSES):
        found = _quickest(old, at_most)
        if found is old.part:
            break
        old = _Old(found, profiles)
    return old.part


def _quickest(old: _Old, at_most: Sequence[float]) -> Part:
    """One pass: the quickest rewriting within ``at_most`` seconds (as predicted, and with slower copies) that
    has no more waits; among equally quick ones, the one with the fewest."""
    part, profiles = old.part, old.profiles
    best, best_rank = part, _rank(part, old.times[0].seconds, at_most[0])
    for shares in (*_HELD_SHARES, None):
        # A copy that begins earlier may meet one of the other direction, and both take longer; and what a
        # wait taught others that is gone now, they may have to wait for themselves.
        found = _Waits(old, shares).part()
        if len(found.instructions) > len(part.instructions):
            continue
        taken = lane_times(found, profiles).seconds
        rank = _rank(found, taken, at_most[0])
        if taken > at_most[0] or rank >= best_rank:
            continue
        if lane_times(found, profiles, _STRAIN).seconds <= at_most[1]:
            best, best_rank = found, rank
    return best


def _rank(part: Part, seconds: float, at_most: float) -> tuple[int, int]:
    """Quicker ones first, but for rounding; then those with fewer waits."""
    return round(1e9 * seconds / at_most) if at_most > 0 else 0, len(part.instructions)


class _Old:
    """A part as it is, with its times, who needs which copy first, and who had which bytes."""

    def __init__(self, part: Part, profiles: Sequence[Profile]) -> None:
        self.part = part
        self.profiles = profiles
        self.times = [lane_times(part, profiles, strain) for strain in (1.0, _STRAIN)]
        self.needed_at = _first_needs(part, profiles)
        self.tenants = _Tenants(part)


class _HeldCopies:
    """Copies of one lane that are held back, in order, for ``share`` of their slack.

    They begin together, once all of compute that is issued before them has ended, and run one after another.
    So the first that would be late says how late compute may be.
    """

    def __init__(self, old: _Old, share: float) -> None:
        self._old = old
        self._share = share
        self.copies: list[int] = []
        self.take()

    def take(self) -> list[int]:
        """The copies that are held back, which are not any more."""
        copies, self.copies = self.copies, []
        self._first_need = len(self._old.part.instructions)
        num = len(self._old.times)
        self._seconds, self._ends, self._latest = [0.0] * num, [-math.inf] * num, [math.inf] * num
        return copies

    def add(self, copy: int) -> None:
        """Hold back the copy at a position of the old part."""
        self.copies.append(copy)
        need = self._old.needed_at[copy]
        self._first_need = min(self._first_need, need)
        for number, times in enumerate(self._old.times):
            start, end = times.starts[copy], times.ends[copy]
            until = times.starts[need] if need < len(times.starts) else times.seconds
            slack = max(0.0, until - end)
            allowed = end + min(self._share * slack, _MOST_HELD * times.seconds)
            self._seconds[number] += end - start
            self._ends[number] = max(self._ends[number], start) + end - start
            latest = -math.inf if self._ends[number] > allowed else allowed - self._seconds[number]
            self._latest[number] = min(self._latest[number], latest)

    def are_due(self, position: int) -> bool:
        """Whether they must begin before the old part's instruction at ``position``."""
        if self._first_need <= position:
            return True
        return any(
            times.ends[position] > latest for times, latest in zip(self._old.times, self._latest, strict=True)
        )


class _Waits(LaneWriter):
    """The instructions of a part once more with waits found anew, copies held back for ``shares`` of their
    slack.

    Without ``shares`` copies begin where they began, and wait for all of compute before them, whatever it
    was.
    """

    def __init__(self, old: _Old, shares: Mapping[int, float] | None) -> None:
        super().__init__()
        self._old = old
        self._shares = shares
        self._held = {lane: _HeldCopies(old, 0.0 if shares is None else shares[lane]) for lane in (OUT, IN)}
        self._moved = {-1: -1}
        self._copies: dict[int, list[int]] = {OUT: [], IN: []}
        self._copy_ends: dict[int, list[list[float]]] = {lane: [[] for _ in old.times] for lane in (OUT, IN)}
        """When the copies of a lane ended in the old part, by each of its times."""
        self._written: dict[Key, int] = {}
        self._position = -1
        """Position of the old part's instruction that is being written."""

    def part(self) -> Part:
        """The part with the waits that it takes."""
        old = self._old.part
        for position, item in enumerate(old.instructions):
            if isinstance(item, Wait):
                continue
            for lane in self._held:
                held = self._held[lane]
                if held.copies and (self._shares is None or held.are_due(position)):
                    self._begin_held(lane)
            lane = LANES.index(lane_of(item))
            if lane in self._held:
                self._held[lane].add(position)
            else:
                self._put(position)
        for lane in self._held:
            self._begin_held(lane)
        moved = self._moved
        moved[len(old.instructions)] = len(self._instructions)
        return Part(
            tuple(self._instructions),
            tuple(
                Tenancy(
                    each.sub_array,
                    each.tensor,
                    moved[each.begin],
                    moved[each.end],
                    each.offset,
                    each.size_bytes,
                )
                for each in old.tenancies
            ),
        )

    def _begin_held(self, lane: int) -> None:
        copies = self._held[lane].take()
        for position in copies:
            self._put(position)

    def _put(self, position: int) -> None:
        """An instruction of the old part, with the waits that it takes."""
        self._position = position
        match self._old.part.instructions[position]:
            case Compute() | Recompute() as item:
                node = self._old.profiles[item.sub_array].nodes[item.node]
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

    def _note_copy(self, lane: int, new: int) -> None:
        self._copies[lane].append(new)
        for ends, times in zip(self._copy_ends[lane], self._old.times, strict=True):
            ends.append(times.ends[self._position])

    def _wait_for_copies(self, needed: Iterable[int]) -> None:
        for on in sorted(needed, reverse=True):
            if on >= 0 and not self._known.has_ended(COMPUTE, on):
                self._wait(COMPUTE, self._latest_ended(on))

    def _wait_for_maker(self, key: Key) -> None:
        if self._shares is None or self._is_news(OUT, self._written.get(key, -1)):
            super()._wait_for_maker(key)

    def _wait_for_bytes(self) -> None:
        last = self._moved[self._old.tenants.last_end_before(self._position)]
        if self._shares is None or self._is_news(IN, last):
            super()._wait_for_bytes()

    def _is_news(self, lane: int, position: int) -> bool:
        """Whether a lane does not know that an instruction, if there is one, has ended."""
        return position >= 0 and not self._known.has_ended(lane, position)

    def _latest_ended(self, needed: int) -> int:
        """The last copy of a lane that has ended when ``needed`` must have."""
        lane = self._known.lane_of(needed)
        num_ended = min(
            bisect_right(ends, times.starts[self._position])
            for ends, times in zip(self._copy_ends[lane], self._old.times, strict=True)
        )
        return max(needed, self._copies[lane][num_ended - 1]) if num_ended else needed


def _first_needs(part: Part, profiles: Sequence[Profile]) -> dict[int, int]:
    """By position of a copy: the first instruction behind it that may not begin before it has ended."""
    length = len(part.instructions)
    found: dict[int, int] = {}
    of_offloads: dict[Key, int] = {}
    of_prefetches: dict[Key, int] = {}
    for position in range(length - 1, -1, -1):
        match part.instructions[position]:
            case Compute(sub_array, node) | Recompute(sub_array, node):
                profiled = profiles[sub_array].nodes[node]
                for tensor in (*profiled.reads, *profiled.changes):
                    of_prefetches[sub_array, tensor] = position
                for tensor in profiled.changes:
                    of_offloads[sub_array, tensor] = position
            case Free(sub_array, tensor):
                of_offloads[sub_array, tensor] = of_prefetches[sub_array, tensor] = position
            case Offload(sub_array, tensor):
                found[position] = of_offloads.get((sub_array, tensor), length)
                of_prefetches[sub_array, tensor] = position
            case Prefetch(sub_array, tensor):
                found[position] = of_prefetches.get((sub_array, tensor), length)
                of_offloads[sub_array, tensor] = position
    return found


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
