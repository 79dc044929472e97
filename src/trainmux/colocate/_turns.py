"""The dispatcher among other threads: a lock that others get between two of its turns, and how soon it goes
on when one of them is busy."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """One thread at a time. Who waits goes before who has just had its turn; a turn within a turn is free."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._room = threading.Lock()
        self._inside: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Alone with what the lock protects."""
        this = threading.get_ident()
        if self._inside == this:
            yield
            return
        with self._door:  # held while waiting, so that the one inside cannot come back in before
            self._room.acquire()
        self._inside = this
        try:
            yield
        finally:
            self._inside = None
            self._room.release()


_SWITCH_SECONDS = 2e-4
_switching = threading.Lock()
_usual_seconds: list[float] = []
"""Python's own, once for each block that is active."""


@contextmanager
def prompt_threads() -> Iterator[None]:
    """Inside, a thread that runs Python lets another one go on after 0.2 ms, not 5.

    The segments that are in flight may last for less than those 5: a live view, or a loader's thread, would
    let the device run dry. The thread that is inside wakes from a short sleep when it should.
    """
    with _prompt_waking(), _switching_soon():
        yield


@contextmanager
def _switching_soon() -> Iterator[None]:
    with _switching:
        _usual_seconds.append(_usual_seconds[0] if _usual_seconds else sys.getswitchinterval())
        sys.setswitchinterval(min(_SWITCH_SECONDS, _usual_seconds[0]))
    try:
        yield
    finally:
        with _switching:
            usual = _usual_seconds.pop()
            if not _usual_seconds:
                sys.setswitchinterval(usual)


_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_SLACK_NANOSECONDS = 1000


@contextmanager
def _prompt_waking() -> Iterator[None]:
    """Have Linux wake this thread within a microsecond. It may take 50 more than a sleep was to last, to wake
    several threads at once; that is as long as a look at what has ended, a decision and a launch."""
    control = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    usual = control(_PR_GET_TIMERSLACK, 0, 0, 0, 0) if control is not None else -1
    if control is None or usual <= _SLACK_NANOSECONDS:
        yield
        return
    control(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)
    try:
        yield
    finally:
        control(_PR_SET_TIMERSLACK, usual, 0, 0, 0)
