"""Steps per second, smoothed."""

from __future__ import annotations

import time
from collections.abc import Callable

_NEW_SHARE = 0.3


class Speed:
    """Told the step count whenever the device has caught up with the host, since only then it is true."""

    def __init__(self, step: int, time_s: Callable[[], float] = time.monotonic) -> None:
        self._time_s = time_s
        self._step = step
        self.last_s = time_s()
        self.steps_per_s: float | None = None

    def update(self, step: int) -> None:
        """The device has finished ``step`` steps by now."""
        now_s = self._time_s()
        if step > self._step and now_s > self.last_s:
            rate = (step - self._step) / (now_s - self.last_s)
            old = self.steps_per_s
            self.steps_per_s = rate if old is None else old + _NEW_SHARE * (rate - old)
        self._step, self.last_s = step, now_s
