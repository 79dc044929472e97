"""The pace at which a search reports to its study."""

from __future__ import annotations

import time
from collections.abc import Collection

_SHARE = 0.03
"""Of the time, at most so much goes into reports: they are Python, which keeps steps from being launched."""


class Pace:
    """Keeps reports to a share of the time, in which each trial has its turn."""

    def __init__(self) -> None:
        self._left_s = 0.0  # for reports
        self._looked_s = time.monotonic()  # when that was
        self._cost_s = 0.0  # of a report and a decision
        self._reported_s: dict[int, float] = {}  # when a trial's last report was

    def is_due(self, number: int, trials: Collection[int]) -> bool:
        """Whether there is time for a report on one of ``trials``, and none has waited longer for one."""
        now_s = time.monotonic()
        # Unused time is kept for one round at most.
        most_s = self._cost_s * len(trials)
        self._left_s = min(self._left_s + _SHARE * (now_s - self._looked_s), most_s)
        self._looked_s = now_s
        oldest_s = min(self._reported_s.get(other, 0.0) for other in trials)
        return self._left_s >= 0 and self._reported_s.get(number, 0.0) <= oldest_s

    def spent(self, number: int, seconds: float) -> None:
        """Note that a report on a trial has taken some of this thread's time."""
        self._cost_s += 0.1 * (seconds - self._cost_s)
        # A retry reports many epochs once; that is not to silence the others.
        self._left_s = max(self._left_s - seconds, -self._cost_s)
        self._reported_s[number] = time.monotonic()

    def forget(self, number: int) -> None:
        """Let go of a trial that is finished."""
        self._reported_s.pop(number, None)
