"""Whether sharing works: the ramp of the budget, the fall-back to turns, the return from it (§5.3).

Two things can go wrong. A pair's predictions can be off, so that gates hold up iterations that were let in:
that is counted per pair. And jobs can slow each other down by more than sharing gains: that shows in the
work done per second, which belongs to the device as a whole. Either way jobs take turns for a while, and for
longer when sharing fails again.
"""

from __future__ import annotations

import math
from collections import deque

from trainmux.colocate._constants import ScroogeConstants

_ROUNDS_OF_A_WINDOW = 2
_GOOD_ROUNDS = 8
_AS_GOOD_AS_TURNS = 0.99
_LONGEST_WAIT = 3.0
"""How many times the longest segment may pass between two ends before the rest no longer counts."""


class Turns:
    """A while in which jobs take turns before sharing is tried again."""

    def __init__(self, constants: ScroogeConstants) -> None:
        self._first, self._most = constants.rounds_of_turns, constants.max_rounds_of_turns
        self._growth = constants.turns_growth
        self._next_rounds = self._first
        self._until = 0.0
        self.are_on = False
        self.num_fall_backs = 0

    def fall_back(self, now: float, round_seconds: float) -> None:
        """Take turns for as long as so many rounds of all jobs, ``round_seconds`` each, would last."""
        self.are_on = True
        self._until = now + self._next_rounds * round_seconds
        self._next_rounds = min(self._growth * self._next_rounds, self._most)
        self.num_fall_backs += 1

    def iteration_ended(self, now: float) -> bool:
        """Go back to sharing if it is time; true if that is now."""
        self.are_on = now < self._until
        return not self.are_on

    def end(self) -> None:
        """Share from now on, and have the next turns be short ones."""
        self.are_on = False
        self.sharing_works()

    def sharing_works(self) -> None:
        """The next fall-back will be a short one again."""
        self._next_rounds = self._first


class PairHealth:
    """The budget that a pair's predictions may fill, and whether they come true."""

    def __init__(self, constants: ScroogeConstants, *, is_ramped: bool) -> None:
        self._constants = constants
        self._raises = 0 if is_ramped else constants.ramp_steps
        self._is_ramped = is_ramped
        self._in_round = 0
        self._num_clean = 0
        self._recent: deque[bool] = deque(maxlen=constants.stall_window)
        self.turns = Turns(constants)

    def soft_budget(self, capacity_bytes: int, largest_peak_bytes: int) -> int:
        """The bytes that predictions may fill: below the arena's capacity until the ramp is over."""
        if self._raises >= self._constants.ramp_steps:
            return capacity_bytes
        first = max(largest_peak_bytes, int(self._constants.first_budget_share * capacity_bytes))
        return first + (capacity_bytes - first) * self._raises // self._constants.ramp_steps

    def iteration_ended(self, now: float, round_seconds: float, num_jobs: int, *, stalled: bool) -> bool:
        """Take down an iteration of a pair that takes ``round_seconds`` in turns; true if these begin now."""
        if self.turns.are_on:
            if self.turns.iteration_ended(now):
                self._raises = 0 if self._is_ramped else self._constants.ramp_steps
                self._recent.clear()
            return False
        self._recent.append(stalled)
        if sum(self._recent) >= self._constants.stalls_to_fall_back:
            self.turns.fall_back(now, round_seconds)
            self._num_clean = 0
            return True
        if stalled:
            self._in_round = 0
            return False
        self._num_clean += 1
        self._in_round += 1
        if self._in_round >= num_jobs:
            self._in_round = 0
            self._raises = min(self._raises + 1, self._constants.ramp_steps)
        if self._num_clean >= 4 * self._constants.stall_window:
            self.turns.sharing_works()
        return False


class GainMeter:
    """Solo seconds of work per second while jobs share the device; turns for all where that is a loss.

    Work counts when a segment ends, so a short stretch looks better or worse than it is by a segment or two,
    and turns last for long. So what is lost is added up, and only counts when it is more than that: more than
    a part of a round, and than the longest segment, which may be under way. Seconds
    in which nothing runs count: where the host is what jobs wait for, sharing may lose to turns. But turns
    have such seconds too. Once they have been tried, what they gave is what sharing must give. And once in a
    while the host is away for many segments' time, with garbage to collect or memory to lay out anew: that
    says nothing of sharing, so between two ends only a few times the longest segment's seconds count.
    """

    def __init__(self, constants: ScroogeConstants) -> None:
        self._least_gain = constants.least_gain
        self._rounds_to_lose = constants.rounds_to_lose
        self.turns = Turns(constants)
        self.gain: float | None = None
        """Of the last window that was measured."""
        self.forget()

    def forget(self) -> None:
        """Other jobs: nothing is known of them."""
        self._gain_of_turns = math.inf
        self.restart()

    def restart(self) -> None:
        """Measure anew, because memory changed or a job ran alone."""
        self._last_end: float | None = None
        self._work_seconds = self._seconds = 0.0
        self._window_work = self._window_seconds = 0.0
        self._lost_seconds = self._longest_seconds = 0.0

    def share_again(self) -> None:
        """End turns, because what they were taken for may be over."""
        self.turns.end()
        self.restart()

    @property
    def must_be(self) -> float:
        """The gain below which sharing loses."""
        return min(self._least_gain, _AS_GOOD_AS_TURNS * self._gain_of_turns)

    def segment_ended(self, solo_seconds: float, ended_at: float) -> None:
        if self._last_end is None:
            self._last_end = ended_at
            return
        self._longest_seconds = max(self._longest_seconds, solo_seconds)
        passed = min(max(0.0, ended_at - self._last_end), _LONGEST_WAIT * self._longest_seconds)
        self._last_end = max(self._last_end, ended_at)
        self._work_seconds += solo_seconds
        self._seconds += passed
        self._lost_seconds = max(0.0, self._lost_seconds + self.must_be * passed - solo_seconds)

    def iteration_ended(self, now: float, round_seconds: float, num_jobs: int) -> bool:
        """Look at what was lost, in rounds of all jobs, ``round_seconds`` each; true if turns begin now."""
        if self.turns.are_on:
            if self.turns.iteration_ended(now):
                if self._seconds >= _ROUNDS_OF_A_WINDOW * round_seconds:
                    self._gain_of_turns = self._work_seconds / self._seconds
                self.restart()
            return False
        if num_jobs < 2:
            return False
        seconds = self._seconds - self._window_seconds
        if seconds >= _ROUNDS_OF_A_WINDOW * round_seconds:
            self.gain = (self._work_seconds - self._window_work) / seconds
            self._window_work, self._window_seconds = self._work_seconds, self._seconds
        to_lose = max(self._rounds_to_lose * round_seconds, self._longest_seconds)
        if self._lost_seconds > to_lose:
            self.gain = self._work_seconds / self._seconds
            self.restart()
            self.turns.fall_back(now, round_seconds)
            return True
        if self._seconds > _GOOD_ROUNDS * round_seconds and self._work_seconds > self.must_be * self._seconds:
            self.turns.sharing_works()
        return False
