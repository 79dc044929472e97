"""A fleet that is interrupted again and again while it trains."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import trainmux as tm

_PAUSE_SECONDS = 0.004
_MOST_SECONDS = 20.0


def train_interrupted(fleet: tm.Fleet, batch: Callable[[int], Any], num_steps: int) -> int:
    """Step until ``num_steps`` are done, with a Ctrl-C every few milliseconds; returns how many got through.

    The next one is only sent when the last was dealt with: nothing but the fleet is interrupted.
    """
    main = threading.main_thread().ident
    assert main is not None
    stop, ready = threading.Event(), threading.Event()

    def interrupt() -> None:
        while not stop.wait(_PAUSE_SECONDS):
            if ready.is_set():
                ready.clear()
                signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    until = time.monotonic() + _MOST_SECONDS
    num_interrupts, is_done = 0, False
    sender.start()
    while not is_done:
        try:
            ready.set()
            while fleet.num_steps < num_steps and time.monotonic() < until:
                fleet.step(batch(fleet.num_steps))
            stop.set()
            sender.join()
            is_done = True
        except KeyboardInterrupt:
            num_interrupts += 1
    return num_interrupts
