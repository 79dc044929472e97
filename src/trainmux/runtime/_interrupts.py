"""Hold a Ctrl-C back until a step is complete, so that no member is left half updated."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # a builtin without stubs
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """While active a SIGINT is remembered and raised as ``KeyboardInterrupt`` at the end.

    Python delivers signals to the main thread only; elsewhere this does nothing. A handler that was not
    installed by Python is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The functions behind those of ``signal``, which make enums of their results: that took 15 us a step.
    original = _signal.getsignal(_signal.SIGINT)
    if original is not signal.default_int_handler:
        yield
        return
    pending = False

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal pending
        pending = True

    _signal.signal(_signal.SIGINT, remember)
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, original)
        if pending:
            raise KeyboardInterrupt
