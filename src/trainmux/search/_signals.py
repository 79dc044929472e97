"""SIGTERM, as schedulers send it some time before they kill."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainmux.search._search import Search


@contextmanager
def ends_on_sigterm(search: Search, is_wanted: bool = True) -> Iterator[None]:
    """Have SIGTERM end a search after the epoch; a second one ends the process as it did before."""
    if not is_wanted:
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        search.end()

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
