"""A lock that the dispatcher takes again and again and that others get between two of its turns."""

from __future__ import annotations

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
