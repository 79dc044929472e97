"""Hold a Ctrl-C back until a step is complete, so that no member is left half updated."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # a builtin without stubs
import signal
import threading
from types import FrameType


class deferred_interrupts:  # noqa: N801 (used like a function)
    """Inside, a SIGINT is remembered and raised as ``KeyboardInterrupt`` at the end.

    Python delivers signals to the main thread only; elsewhere this does nothing. A handler that was not
    installed by Python is left alone. A class, because a generator costs twice the time with every step.
    """

    __slots__ = ("_is_installed", "_is_pending")

    def __enter__(self) -> None:
        self._is_pending = False
        # The functions behind those of ``signal``, which make enums of their results: that took 15 us a step.
        self._is_installed = (
            threading.current_thread() is threading.main_thread()
            and _signal.getsignal(_signal.SIGINT) is signal.default_int_handler
        )
        if self._is_installed:
            _signal.signal(_signal.SIGINT, self._remember)

    def __exit__(self, *error: object) -> None:
        if self._is_installed:
            _signal.signal(_signal.SIGINT, signal.default_int_handler)
            if self._is_pending:
                raise KeyboardInterrupt

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._is_pending = True
