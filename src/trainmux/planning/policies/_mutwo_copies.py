"""Copies of swapped tensors on the two copy lanes, in the time that compute takes.

Copies back run one after another. Each starts as late as it can: it must have ended when its tensor is due
and before the next copy on the lane starts. The node whose turn has come by then is its ``prefetch_prompt``.
Where that leaves too little time a stall is booked at the deadline, and from then on it is time like any
other. All copies of a lane are laid out at once, by running sums and minima over arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from trainmux.planning.policies._mutwo_body import BODY_END, Body, Bools, Floats, Ints

Key = tuple[int, int]
"""A tensor: its sub-array and its position in the sub-array's profile."""


@dataclass(frozen=True)
class CopyBack:
    """A tensor to bring back before node ``deadline`` has its turn; nodes are numbers of the body.

    ``overlaps_recomputes`` says that recomputations just before the deadline do not read it, so that they
    hide its copy. ``stall_seconds`` were booked for it at the deadline.
    """

    key: Key
    size_bytes: int
    seconds: float
    release: int
    deadline: int
    overlaps_recomputes: bool
    stall_seconds: float = 0.0


@dataclass(frozen=True)
class _Columns:
    """The copies of a lane as arrays, which are never written to."""

    deadlines: Ints
    releases: Ints
    sizes: Ints
    seconds: Floats
    overlaps: Bools

    def without(self, index: int) -> _Columns:
        return _Columns(
            np.delete(self.deadlines, index),
            np.delete(self.releases, index),
            np.delete(self.sizes, index),
            np.delete(self.seconds, index),
            np.delete(self.overlaps, index),
        )

    def with_copy(self, index: int, copy: CopyBack) -> _Columns:
        return _Columns(
            np.insert(self.deadlines, index, copy.deadline),
            np.insert(self.releases, index, copy.release),
            np.insert(self.sizes, index, copy.size_bytes),
            np.insert(self.seconds, index, copy.seconds),
            np.insert(self.overlaps, index, copy.overlaps_recomputes),
        )


@dataclass(frozen=True)
class LaneState:
    """A copy of a lane, to go back to."""

    copies: tuple[CopyBack, ...]
    columns: _Columns
    prompts: Ints


class LaneIn:
    """The copies back of one stage, in the order the lane runs them.

    ``prompts`` and ``starts`` are those of the last `lay_out`: the node before which each copy is issued and
    the latest time at which it must start. ``is_hidden`` says whether it can.
    """

    def __init__(self, stage: int, tolerance: float) -> None:
        self._stage = stage
        self._tolerance = tolerance
        numbers, reals = np.zeros(0, dtype=np.int64), np.zeros(0)
        self.copies: list[CopyBack] = []
        self.prompts: Ints = numbers
        self.starts: Floats = reals
        self.is_hidden: Bools = np.zeros(0, dtype=np.bool_)
        self._columns = _Columns(numbers, numbers, numbers, reals, self.is_hidden)

    def due(self, body: Body, times: Floats, copy: CopyBack) -> float:
        """When a copy must have ended."""
        due = times[body.place[copy.deadline]] + body.stall_seconds[copy.deadline]
        if copy.overlaps_recomputes:
            due += body.recompute_seconds[copy.deadline]
        return float(due)

    def index_by_deadline(self, body: Body, deadline: int) -> int:
        """Where a copy belongs that should run before all that are due later."""
        earlier = np.nonzero(body.place[self._columns.deadlines] <= body.place[deadline])[0]
        return int(earlier[-1]) + 1 if len(earlier) else 0

    def insert(self, index: int, copy: CopyBack, body: Body) -> None:
        """Add a copy to the lane and book its tensor's absence, back at the deadline until it is laid out."""
        self.copies.insert(index, copy)
        self.prompts = np.insert(self.prompts, index, copy.deadline)
        self._columns = self._columns.with_copy(index, copy)
        body.take_out(copy.size_bytes, copy.release, copy.deadline)

    def remove(self, index: int, body: Body) -> None:
        """Take a copy off the lane: its tensor is there all the time, and nobody waits for it."""
        copy = self.copies.pop(index)
        body.take_out(-copy.size_bytes, copy.release, int(self.prompts[index]))
        body.stall_seconds[copy.deadline] -= copy.stall_seconds
        self.prompts = np.delete(self.prompts, index)
        self._columns = self._columns.without(index)

    def stall(self, index: int, seconds: float, body: Body) -> None:
        """Let compute wait for a copy at its deadline; negative seconds take that back."""
        copy = self.copies[index]
        self.copies[index] = replace(copy, stall_seconds=copy.stall_seconds + seconds)
        body.stall_seconds[copy.deadline] += seconds

    def read_at_deadline(self, index: int) -> None:
        """From now on a recomputation just before the deadline reads this copy's tensor."""
        self.copies[index] = replace(self.copies[index], overlaps_recomputes=False)
        overlaps = self._columns.overlaps.copy()
        overlaps[index] = False
        self._columns = replace(self._columns, overlaps=overlaps)

    def lay_out(self, body: Body, times: Floats) -> None:
        """Find start and prompt of every copy, as late as can be, and rebook those whose prompt changes."""
        if not self.copies:
            self.starts, self.is_hidden = np.zeros(0), np.zeros(0, dtype=np.bool_)
            return
        stage, columns = body.stages[self._stage], self._columns
        place = body.place[columns.deadlines]
        due = times[place] + body.stall_seconds[columns.deadlines]
        due += np.where(columns.overlaps, body.recompute_seconds[columns.deadlines], 0.0)
        # A copy may start when all that follow it on the lane up to any deadline still fit before that one.
        own_and_after = np.cumsum(columns.seconds[::-1])[::-1]
        after = own_and_after - columns.seconds
        self.starts = np.minimum.accumulate((due + after)[::-1])[::-1] - own_and_after
        row = times[stage.begin : stage.end]
        latest = stage.begin - 1 + np.searchsorted(row, self.starts + self._tolerance, side="right")
        earliest = self._earliest(body, place)
        self.is_hidden = latest >= earliest
        prompts = body.order[np.minimum(np.maximum(latest, earliest), place)]
        moved = np.nonzero(prompts != self.prompts)[0]
        if len(moved):
            np.subtract.at(body.taken, self.prompts[moved], columns.sizes[moved])
            np.add.at(body.taken, prompts[moved], columns.sizes[moved])
            self.prompts = prompts

    def earliest(self, body: Body, index: int) -> int:
        """The first position at which a copy may be issued: behind its release, if that is in this stage."""
        return int(self._earliest(body, body.place[self._columns.deadlines])[index])

    def state(self) -> LaneState:
        """A copy to go back to."""
        return LaneState(tuple(self.copies), self._columns, self.prompts)

    def go_back(self, state: LaneState) -> None:
        """Be again as when ``state`` was copied, bookings in the body aside."""
        self.copies = list(state.copies)
        self._columns = state.columns
        self.prompts = state.prompts

    def _earliest(self, body: Body, deadline_places: Ints) -> Ints:
        begin, releases = body.stages[self._stage].begin, self._columns.releases
        here = (releases != BODY_END) & (body.stage_of[releases] == self._stage)
        behind = here & (body.place[releases] < deadline_places)
        earliest: Ints = np.where(behind, body.place[releases] + 1, begin)
        return earliest


class LaneOut:
    """Copies to the host, in the order in which their tensors have been used for the last time."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.keys: list[Key] = []
        self._offloads: list[int] = []
        self._seconds: list[float] = []

    def add(self, key: Key, offload: int, seconds: float) -> None:
        """Copy ``key`` out after node ``offload``."""
        self.keys.append(key)
        self._offloads.append(offload)
        self._seconds.append(seconds)

    def remove(self, keys: Iterable[Key]) -> None:
        """Copy these out no longer."""
        gone = set(keys)
        kept = [index for index, key in enumerate(self.keys) if key not in gone]
        self.keys = [self.keys[index] for index in kept]
        self._offloads = [self._offloads[index] for index in kept]
        self._seconds = [self._seconds[index] for index in kept]

    def ends(self, body: Body, times: Floats) -> tuple[Ints, Floats]:
        """The order in which the copies run, as positions in ``keys``, and when each of those ends."""
        place = body.place[np.asarray(self._offloads, dtype=np.int64)]
        order = np.argsort(place, kind="stable")
        seconds = np.asarray(self._seconds, dtype=np.float64)[order]
        so_far = np.cumsum(seconds)
        waited = np.maximum.accumulate(times[place[order] + 1] - (so_far - seconds))
        return order, so_far + waited

    def end_of(self, body: Body, times: Floats, offload: int, seconds: float) -> float:
        """When a copy would end that is added behind those offloaded before it."""
        place = body.place[offload]
        start = float(times[place + 1])
        if self.keys:
            order, ends = self.ends(body, times)
            offloads = body.place[np.asarray(self._offloads, dtype=np.int64)][order]
            earlier = int(np.searchsorted(offloads, place, side="right"))
            start = max(start, float(ends[earlier - 1])) if earlier else start
        return start + seconds

    def release_at(
        self, body: Body, times: Floats, over: Ints, offload: int, deadline: int, seconds: float
    ) -> tuple[int, float] | None:
        """Where the bytes of a tensor are given back, and how long compute waits there for the copy.

        Just before the first node whose turn comes when the copy has ended, or, earlier, before the first
        node that needs more than there is: ``over`` are the positions of those, rising. ``None`` where the
        tensor would have to be back by then.
        """
        end = self.end_of(body, times, offload, seconds)
        begin = int(body.place[offload]) + 1
        place = int(body.place[deadline])
        wraps = place < begin
        stop = len(body.order) if wraps else place
        ended = int(np.searchsorted(times[:-1], end - self._tolerance))
        natural = min(max(ended, begin), stop)
        first_over = int(np.searchsorted(over, begin))
        release = natural
        if first_over < len(over):
            release = min(natural, int(over[first_over]))
        if release < stop:
            return int(body.order[release]), max(0.0, end - float(times[release]))
        return (BODY_END, max(0.0, end - float(times[-1]))) if wraps else None
