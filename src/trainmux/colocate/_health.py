"""Whether sharing works, and the fall-back to time slicing and back (§5.3).

Two things can go wrong. Predictions of a pair can be off, so that gates hold up iterations that were let in:
`StallCounter` counts those per pair. And jobs can slow each other down by more than sharing gains:
`GainMeter` sees it in the work done per second on the whole device. Either way jobs are time-sliced, one
iteration at a time, for a while, and for longer each time that sharing fails again.
"""

from __future__ import annotations

import math
from collections import deque

_FIRST_ROUNDS, _MOST_ROUNDS, _ROUNDS_GROWTH = 16, 1024, 4
"""Rounds of time slicing before sharing is tried again, and their growth with each failure."""
_STALL_WINDOW, _STALLS_TO_FALL_BACK = 8, 4
"""A pair falls back at this many mispredictions among its last iterations."""
_LEAST_GAIN = 0.97
"""Solo seconds of work per second below which sharing loses; below 1, so that noise does not end sharing."""
_ROUNDS_TO_LOSE = 0.25
"""Work that may be lost before the fall-back, in rounds of all jobs."""
_AS_GOOD_AS_SLICING = 0.99
_ROUNDS_OF_A_WINDOW = 2
_GOOD_ROUNDS = 8
_LONGEST_WAIT = 3.0
"""Time between two ends counts up to this multiple of the longest segment: a host that was away once
(garbage collection, a new memory layout) says nothing about sharing."""


class TimeSlicing:
    """A period in which jobs run one iteration after the other, before sharing is tried again."""

    def __init__(self) -> None:
        self._next_rounds = _FIRST_ROUNDS
        self._until = 0.0
        self.is_on = False

    def fall_back(self, now: float, round_seconds: float) -> None:
        """Slice time for a number of rounds of all jobs, ``round_seconds`` each."""
        self.is_on = True
        self._until = now + self._next_rounds * round_seconds
        self._next_rounds = min(_ROUNDS_GROWTH * self._next_rounds, _MOST_ROUNDS)

    def iteration_ended(self, now: float) -> bool:
        """Return to sharing if the period is over; true if it is."""
        self.is_on = now < self._until
        return not self.is_on

    def end(self) -> None:
        """Share from now on, and make the next period a short one."""
        self.is_on = False
        self.sharing_works()

    def sharing_works(self) -> None:
        """Make the next period a short one."""
        self._next_rounds = _FIRST_ROUNDS


class StallCounter:
    """Counts the mispredicted iterations of a pair of jobs."""

    def __init__(self) -> None:
        self._num_clean = 0
        self._recent: deque[bool] = deque(maxlen=_STALL_WINDOW)
        self.slicing = TimeSlicing()

    def iteration_ended(self, now: float, round_seconds: float, *, stalled: bool) -> bool:
        """Count an iteration of a pair, whose rounds take ``round_seconds``; true if slicing begins now."""
        if self.slicing.is_on:
            if self.slicing.iteration_ended(now):
                self._recent.clear()
            return False
        self._recent.append(stalled)
        if sum(self._recent) >= _STALLS_TO_FALL_BACK:
            self.slicing.fall_back(now, round_seconds)
            self._num_clean = 0
            return True
        self._num_clean += not stalled
        if self._num_clean >= 4 * _STALL_WINDOW:
            self.slicing.sharing_works()
        return False


class GainMeter:
    """Measures solo seconds of work per second while jobs share the device; time-slices where that loses.

    Work counts when a segment ends, so a short window looks better or worse by a segment or two. Losses are
    therefore added up, and count once they exceed a part of a round and the longest segment, which may be
    running. Idle seconds count: where jobs wait for the host, sharing may lose to time slicing. But time
    slicing has idle seconds too, so once it was tried, sharing has to be about as good as it was.
    """

    def __init__(self) -> None:
        self.slicing = TimeSlicing()
        self.forget()

    def forget(self) -> None:
        """Start over for other jobs."""
        self._gain_of_slicing = math.inf
        self.restart()

    def restart(self) -> None:
        """Measure anew, because memory changed or a job ran alone."""
        self._last_end: float | None = None
        self._work_seconds = self._seconds = 0.0
        self._lost_seconds = self._longest_seconds = 0.0

    def share_again(self) -> None:
        """End time slicing, because its cause may be over."""
        self.slicing.end()
        self.restart()

    @property
    def required_gain(self) -> float:
        """The gain below which sharing loses."""
        return min(_LEAST_GAIN, _AS_GOOD_AS_SLICING * self._gain_of_slicing)

    def segment_ended(self, solo_seconds: float, ended_at: float) -> None:
        if self._last_end is None:
            self._last_end = ended_at
            return
        self._longest_seconds = max(self._longest_seconds, solo_seconds)
        passed = min(max(0.0, ended_at - self._last_end), _LONGEST_WAIT * self._longest_seconds)
        self._last_end = max(self._last_end, ended_at)
        self._work_seconds += solo_seconds
        self._seconds += passed
        self._lost_seconds = max(0.0, self._lost_seconds + self.required_gain * passed - solo_seconds)

    def iteration_ended(self, now: float, round_seconds: float, num_jobs: int) -> bool:
        """Judge what was lost, in rounds of all jobs of ``round_seconds``; true if slicing begins now."""
        if self.slicing.is_on:
            if self.slicing.iteration_ended(now):
                if self._seconds >= _ROUNDS_OF_A_WINDOW * round_seconds:
                    self._gain_of_slicing = self._work_seconds / self._seconds
                self.restart()
            return False
        if num_jobs < 2:
            return False
        if self._lost_seconds > max(_ROUNDS_TO_LOSE * round_seconds, self._longest_seconds):
            self.restart()
            self.slicing.fall_back(now, round_seconds)
            return True
        is_long = self._seconds > _GOOD_ROUNDS * round_seconds
        if is_long and self._work_seconds > self.required_gain * self._seconds:
            self.slicing.sharing_works()
        return False
