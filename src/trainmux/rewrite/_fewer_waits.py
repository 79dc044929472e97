"""Fewer waits between lanes: those that values and bytes take where they lie, each for all it can be for.

A wait between a kernel and a copy costs even where what is waited for has long ended: in a CUDA graph about
ten microseconds on an H200, for an edge between two engines, whichever of the two waits.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from trainmux.ir import (
    Compute,
    Free,
    Instruction,
    Offload,
    Part,
    Prefetch,
    Profile,
    Recompute,
    Wait,
    lane_of,
)
from trainmux.rewrite._known import COMPUTE, IN, LANES, OUT, Known
from trainmux.rewrite._views import Key
from trainmux.simulate import LaneTimes, lane_times

_STRAINS = (1.0, 1.25)
"""How many times as long as predicted copies may take without a wait that was moved holding up compute."""
_TOLERANCES = (1e-12, 5e-3)
"""By how much a part may become slower where copies take as long as predicted, and where they take longer."""
_HELD_SHARES = ({OUT: 0.5, IN: 0.5}, {OUT: 0.25, IN: 0.0}, {OUT: 0.0, IN: 0.0})
"""By lane, the share of the time until somebody needs it that a copy is held back for; the first that costs
nothing is taken."""
_MOST_HELD = 1 / 64
"""Of the part's time: no copy is held back for longer. Others will queue behind it."""


def fewer_waits(part: Part, profiles: Sequence[Profile]) -> Part:
    """The same part with as few waits as this gives: bytes where they are, each lane's work in its order, and
    not slower."""
    if not any(isinstance(item, Wait) for item in part.instructions):
        return part
    times = [lane_times(part, profiles, strain) for strain in _STRAINS]
    for shares in _HELD_SHARES:
        found = _Waits(part, profiles, times, shares).part()
        if all(
            lane_times(found, profiles, strain).seconds <= before.seconds * (1 + tolerance)
            for strain, before, tolerance in zip(_STRAINS, times, _TOLERANCES, strict=True)
        ):
            return found
    # A copy that begins earlier may meet one of the other direction, and both take longer.
    return _Waits(part, profiles, times, None).part()


class _Waits:
    """The instructions of a part once more with waits found anew, copies held back for ``shares`` of their
    slack.

    ``times`` are those of the part as it is. Without ``shares`` copies begin where they began, and wait for
    all of compute before them, whatever it was.
    """

    def __init__(
        self,
        part: Part,
        profiles: Sequence[Profile],
        times: Sequence[LaneTimes],
        shares: Mapping[int, float] | None,
    ) -> None:
        self._old = part
        self._profiles = profiles
        self._times = times
        self._shares = shares
        self._needed_at = _first_needs(part, profiles)
        self._held: dict[int, list[int]] = {OUT: [], IN: []}
        self._tenants = _Tenants(part)
        self._known = Known()
        self._instructions: list[Instruction] = []
        self._moved = {-1: -1}
        self._copies: dict[int, list[tuple[int, int]]] = {OUT: [], IN: []}
        self._prefetches: dict[Key, int] = {}
        self._offloads: dict[Key, int] = {}
        self._written: dict[Key, int] = {}
        self._last_node = self._last_on_compute = -1

    def part(self) -> Part:
        """The part with the waits that it takes."""
        for position, item in enumerate(self._old.instructions):
            if isinstance(item, Wait):
                continue
            for lane in self._held:
                if self._are_due(lane, position):
                    self._begin_held(lane)
            lane = LANES.index(lane_of(item))
            if lane in self._held:
                self._held[lane].append(position)
            else:
                self._put(position, item, lane)
        for lane in self._held:
            self._begin_held(lane)
        self._moved[len(self._old.instructions)] = len(self._instructions)
        return Part(
            tuple(self._instructions),
            tuple(
                replace(each, begin=self._moved[each.begin], end=self._moved[each.end])
                for each in self._old.tenancies
            ),
        )

    def _are_due(self, lane: int, position: int) -> bool:
        """Whether copies that are held back must begin before the old part's instruction at ``position``.

        They will wait for all of compute that is issued before them, and then for each other.
        """
        held = self._held[lane]
        if not held:
            return False
        if self._shares is None or any(self._needed_at[copy] <= position for copy in held):
            return True
        for times in self._times:
            end = times.ends[position]
            for copy in held:
                end = max(end, times.starts[copy]) + times.ends[copy] - times.starts[copy]
                needed_at = self._needed_at[copy]
                until = times.starts[needed_at] if needed_at < len(times.starts) else times.seconds
                slack = max(0.0, until - times.ends[copy])
                if end > times.ends[copy] + min(self._shares[lane] * slack, _MOST_HELD * times.seconds):
                    return True
        return False

    def _begin_held(self, lane: int) -> None:
        for position in self._held[lane]:
            self._put(position, self._old.instructions[position], lane)
        self._held[lane].clear()

    def _put(self, position: int, item: Instruction, lane: int) -> None:
        """An instruction of the old part, with the waits that it takes."""
        self._wait_for_all(position, item)
        self._instructions.append(item)
        new = self._moved[position] = self._known.append(lane)
        self._note(position, item, lane, new)

    def _wait_for_all(self, position: int, item: Instruction) -> None:
        """All waits that an instruction of the old part takes."""
        match item:
            case Compute(sub_array, node) | Recompute(sub_array, node):
                profiled = self._profiles[sub_array].nodes[node]
                changes = [(sub_array, tensor) for tensor in profiled.changes]
                reads = [(sub_array, tensor) for tensor in profiled.reads]
                found = [self._prefetches.get(key, -1) for key in (*reads, *changes)]
                self._compute_waits(position, (*found, *(self._offloads.get(key, -1) for key in changes)))
            case Free(sub_array, tensor):
                key = (sub_array, tensor)
                self._compute_waits(position, (self._prefetches.pop(key, -1), self._offloads.get(key, -1)))
            case Offload(sub_array, tensor):
                key = (sub_array, tensor)
                self._copy_waits(OUT, self._written.get(key, -1), self._last_node)
                self._wait(OUT, self._prefetches.get(key, -1))
            case Prefetch(sub_array, tensor):
                last = self._tenants.last_end_before(position)
                self._copy_waits(IN, self._moved[last], self._last_on_compute)
                self._wait(IN, self._offloads.get((sub_array, tensor), -1))

    def _note(self, position: int, item: Instruction, lane: int, new: int) -> None:
        """An instruction of the old part is there, at ``new``."""
        match item:
            case Compute(sub_array, node) | Recompute(sub_array, node):
                profiled = self._profiles[sub_array].nodes[node]
                for tensor in (*profiled.creates, *profiled.changes):
                    self._written[sub_array, tensor] = new
                self._last_node = self._last_on_compute = new
            case Free():
                self._last_on_compute = new
            case Offload(sub_array, tensor):
                self._offloads[sub_array, tensor] = new
            case Prefetch(sub_array, tensor):
                self._prefetches[sub_array, tensor] = new
        if lane in self._copies:
            self._copies[lane].append((position, new))

    def _copy_waits(self, lane: int, needed: int, latest: int) -> None:
        """Let a lane of copies know that ``needed`` has ended, and then all of compute up to ``latest``."""
        if self._shares is None or (needed >= 0 and not self._known.has_ended(lane, needed)):
            self._wait(lane, latest)

    def _compute_waits(self, position: int, needed: Iterable[int]) -> None:
        """The latest is waited for first: it makes the others of its lane needless."""
        for on in sorted(needed, reverse=True):
            if on >= 0 and not self._known.has_ended(COMPUTE, on):
                self._wait(COMPUTE, self._latest_ended(on, position))

    def _wait(self, lane: int, on: int) -> None:
        if on < 0 or self._known.has_ended(lane, on):
            return
        self._known.learn(lane, on)
        self._instructions.append(Wait(LANES[lane], on))
        self._known.append(lane)

    def _latest_ended(self, needed: int, position: int) -> int:
        """The last copy of a lane that has ended when ``needed`` must have, for the old part's instruction at
        ``position``."""
        copies = self._copies[self._known.lane_of(needed)]
        later = takewhile(lambda copy: copy[1] > needed, reversed(copies))
        ended = (
            new for old, new in later if all(each.ends[old] <= each.starts[position] for each in self._times)
        )
        return next(ended, needed)


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
    """Who had which bytes of a part, and until when."""

    def __init__(self, part: Part) -> None:
        rows = [(t.begin, t.end, t.offset, t.offset + t.size_bytes) for t in part.tenancies]
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        self._begin, self._end, self._low, self._high = table.T
        self._own = {
            t.begin: (t.offset, t.offset + t.size_bytes)
            for t in part.tenancies
            if t.begin >= 0 and isinstance(part.instructions[t.begin], Prefetch)
        }

    def last_end_before(self, position: int) -> int:
        """Where the bytes that the copy at ``position`` takes were last given back, -1: not in this part."""
        low, high = self._own[position]
        had = (self._end < position) & (self._low < high) & (low < self._high)
        return int(self._end[had].max(initial=-1))
