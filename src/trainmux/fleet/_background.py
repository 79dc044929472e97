"""Compiling while training goes on."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Generic, TypeVar

from trainmux.errors import TrainmuxWarning

T = TypeVar("T")

TRACING = threading.RLock()
"""Held by whoever traces, fuses or splits a graph: torch's switches for these are the process's own."""


class Upgrade(Generic[T]):
    """Something better in the making: ``prepare`` runs on a thread, ``finish`` on the caller's.

    A failure is said once, and there is no upgrade.
    """

    def __init__(self, prepare: Callable[[], Callable[[], T]]) -> None:
        self._finish: Callable[[], T] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(prepare,), daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is ready."""
        self._thread.join()

    def result(self) -> T | None:
        """What was made; ``None`` where it could not be."""
        self.wait()
        try:
            if self._error is not None:
                raise self._error
            assert self._finish is not None
            return self._finish()
        except Exception as error:
            warnings.warn(
                f"a step could not be compiled and goes on through ATen, slower: "
                f"{type(error).__name__}: {error}",
                TrainmuxWarning,
                stacklevel=2,
            )
            return None

    def _run(self, prepare: Callable[[], Callable[[], T]]) -> None:
        try:
            self._finish = prepare()
        except Exception as error:
            self._error = error
