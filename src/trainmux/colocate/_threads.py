"""The dispatcher among other threads: a fair lock, and prompt wake-ups."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_SECONDS = 2e-4
_SLACK_NANOSECONDS = 1000
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


class FairLock:
    """A fair, re-entrant lock."""

    def __init__(self) -> None:
        self._queue = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock."""
        this = threading.get_ident()
        if self._owner == this:
            yield
            return
        with self._queue:  # held while waiting, so that the owner cannot overtake
            self._lock.acquire()
        self._owner = this
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()


_switching = threading.Lock()
_usual_seconds: list[float] = []
"""Python's own switch interval, once for each active block."""


@contextmanager
def prompt_threads() -> Iterator[None]:
    """Lower Python's switch interval from 5 ms to 0.2 ms, and this thread's timer slack from 50 µs to 1 µs.

    The segments in flight may last for less than 5 ms: a live view, or a loader's thread, would let the
    device run dry. And 50 µs after a sleep are as long as a look for ended segments, a decision and a launch.
    """
    control = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    slack = 0 if control is None else control(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    with _switching:
        _usual_seconds.append(_usual_seconds[0] if _usual_seconds else sys.getswitchinterval())
        sys.setswitchinterval(min(_SWITCH_SECONDS, _usual_seconds[0]))
    try:
        if control is not None and slack > _SLACK_NANOSECONDS:
            control(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)
        yield
    finally:
        if control is not None and slack > _SLACK_NANOSECONDS:
            control(_PR_SET_TIMERSLACK, slack, 0, 0, 0)
        with _switching:
            usual = _usual_seconds.pop()
            if not _usual_seconds:
                sys.setswitchinterval(usual)
