"""Micro-batches of one job side by side: which one may begin, and what waits for the one before it (§2.2).

A job that accumulates gradients may run its micro-batches in lanes, which take turns: the first in lane 0,
the second in lane 1. To the scheduler a lane is a job, whose iterations are tied to those of the others:

- micro-batches begin in order, so that each takes its batch and its random numbers as if it were alone;
- the part of a micro-batch that changes what all share (gradients are added up, weights updated) begins when
  the whole micro-batch before it has ended;
- the first micro-batch of a step begins when the update before it has ended.

All that a segment ever waits for here was enqueued before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainmux.colocate._lane import SegmentRef

if TYPE_CHECKING:
    from trainmux.colocate._demand import MicroBatchLane
    from trainmux.colocate._job import JobState


def tie_lanes(states: Sequence[JobState]) -> None:
    """From now on these are the lanes of one job, and what is learned of one is learned of all."""
    order = MicroBatchOrder(sorted(states, key=_index))
    for state in order.states:
        state.order = order
        state.sweep = order.states[0].sweep


def _index(state: JobState) -> int:
    assert state.demand.micro_batches is not None
    return state.demand.micro_batches.index


class MicroBatchOrder:
    """How far the lanes of one job are. Micro-batches count from 0; ``states`` are the lanes in order."""

    def __init__(self, states: Sequence[JobState]) -> None:
        self.states = tuple(states)
        self.num_begun = 0
        self._num_enqueued = 0
        """Micro-batches of which every segment is enqueued."""

    @property
    def _first(self) -> MicroBatchLane:
        """The first lane, as it is cut now."""
        first = self.states[0].demand.micro_batches
        assert first is not None
        return first

    @property
    def _last_segment(self) -> int:
        return self.states[0].num_segments - 1

    def is_next(self, job: JobState) -> bool:
        """Whether the micro-batch that comes next is one of ``job``'s and may begin."""
        number = self.num_begun
        if self.states[number % len(self.states)] is not job:
            return False
        if self._first.first_ordered and not self._first.opens_step(number):
            return True
        if self._num_enqueued < number:
            return False
        return not job.demand.is_watched or sum(state.num_ended for state in self.states) == number

    def is_foremost(self, job: JobState) -> bool:
        """Whether ``job`` is where the earliest micro-batch is that is not enqueued to its end."""
        return self.states[self._num_enqueued % len(self.states)] is job

    def behind(self, job: JobState, segment: int) -> tuple[SegmentRef, ...] | None:
        """The segments of other micro-batches behind which one of ``job``'s has to run.

        Segment 0 is that of a micro-batch that ``is_next``, every other one that of the micro-batch that was
        begun last in its lane. ``None`` where it must not be enqueued yet.
        """
        if segment == 0:
            waits_for_all = not self._first.first_ordered or self._first.opens_step(self.num_begun)
            return self._segment_before(self.num_begun, self._last_segment if waits_for_all else 0)
        if segment != self._first.first_ordered:
            return ()
        number = (job.num_begun - 1) * len(self.states) + self.states.index(job)
        return self._segment_before(number, self._last_segment) if self._num_enqueued == number else None

    def enqueued(self, segment: int) -> None:
        """A segment was enqueued."""
        self.num_begun += segment == 0
        self._num_enqueued += segment == self._last_segment

    def _segment_before(self, number: int, segment: int) -> tuple[SegmentRef, ...]:
        """One segment of the micro-batch before ``number``."""
        if number == 0:
            return ()
        iteration, lane = divmod(number - 1, len(self.states))
        return (SegmentRef(self.states[lane].name, iteration, segment),)
