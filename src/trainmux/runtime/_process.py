"""One lock for all that torch and Python have once per process, and warnings ignored in one thread alone.

Tracing patches torch, compiling changes Inductor's settings, deterministic algorithms are a switch: each of
these happens while the lock is held, so that what one thread found is what it puts back. Steps do not hold
it. Those that want torch's switches as they are say so (`steps`), and wait only for a thread that has
changed one (`switched`).
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PAUSE_SECONDS = 50e-6  # between looks at whether other threads' steps are over: shorter than most steps


class ProcessLock:
    """A re-entrant lock, which a thread may take in the middle of a step too."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.steps = _Steps(self)
        self.is_switched = False

    def __enter__(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        # While it waits, this thread computes nothing: whoever has the lock need not wait for its steps.
        steps = self.steps.threads
        own = [thread for thread in list(steps) if thread == threading.get_ident()]
        for thread in own:
            steps.remove(thread)
        try:
            self._lock.acquire()
        finally:
            steps.extend(own)

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Hold the lock while no other thread is in a step: for a switch that steps would notice."""
        with self:
            was_switched, self.is_switched = self.is_switched, True
            try:
                while any(thread != threading.get_ident() for thread in list(self.steps.threads)):
                    time.sleep(_PAUSE_SECONDS)
                yield
            finally:
                self.is_switched = was_switched


class _Steps:
    """Entered by a step that wants torch's switches as they are; any number of threads may be in it."""

    def __init__(self, lock: ProcessLock) -> None:
        self._lock = lock
        self.threads: list[int] = []

    def __enter__(self) -> None:
        # In this order: a thread that switches looks at the two in the other one.
        self.threads.append(threading.get_ident())
        if self._lock.is_switched:
            with self._lock:  # another thread's switch is waited for, one's own is not
                pass

    def __exit__(self, *error: object) -> None:
        self.threads.remove(threading.get_ident())


process_lock = ProcessLock()


class _Ignored(threading.local):
    """Stands in a filter in the place of a pattern for messages; each thread has one of its own."""

    pattern: re.Pattern[str] | None = None

    def match(self, message: str) -> bool:
        return self.pattern is not None and self.pattern.match(message) is not None


_ignored = _Ignored()


@contextmanager
def ignored_warnings(message: str = "") -> Iterator[None]:
    """Ignore warnings of this thread whose text begins with the pattern ``message``.

    ``warnings.catch_warnings`` is for all threads, and two of them at once leave filters behind.
    """
    rule: Any = ("ignore", _ignored, Warning, None, 0)
    before, _ignored.pattern = _ignored.pattern, re.compile(message)
    warnings.filters.insert(0, rule)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _ignored.pattern = before
        with suppress(ValueError):  # somebody may have put other filters in their place meanwhile
            warnings.filters.remove(rule)  # type: ignore[attr-defined]
