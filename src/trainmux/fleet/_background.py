"""Compiling while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from trainmux.errors import warn_user

T = TypeVar("T")


class Upgrade(Generic[T]):
    """A replacement that is made while training goes on, a part of it on a thread.

    ``prepare`` returns ``(work, finish)``. It and ``finish``, which makes the result, run on the caller's
    thread, because they trace, which only one thread can do at a time. ``work``, which waits for other
    processes, runs on a thread. A failure is warned about once; then there is no upgrade. Nothing happens
    for the first ``patience_s`` seconds.
    """

    def __init__(
        self, prepare: Callable[[], tuple[Callable[[], None], Callable[[], T]]], patience_s: float = 0.0
    ) -> None:
        self._prepare = prepare
        self._earliest_s = time.monotonic() + patience_s
        self._finish: Callable[[], T] | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_ready(self) -> bool:
        return self._error is not None or (self._thread is not None and not self._thread.is_alive())

    def start(self, *, at_once: bool = False) -> None:
        """Prepare and start working in the background, unless it is too early."""
        if self._thread is not None or self._error is not None:
            return
        if not at_once and time.monotonic() < self._earliest_s:
            return
        try:
            work, self._finish = self._prepare()
        except Exception as error:
            self._error = error
            return
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is ready."""
        self.start(at_once=True)
        if self._thread is not None:
            self._thread.join()

    def result(self) -> T | None:
        """Return the result, or ``None``, with a warning, where there is none."""
        self.wait()
        try:
            if self._error is not None:
                raise self._error
            assert self._finish is not None
            return self._finish()
        except Exception as error:
            warn_user(
                f"a step could not be compiled and goes on through ATen, slower: "
                f"{type(error).__name__}: {error}"
            )
            return None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error
