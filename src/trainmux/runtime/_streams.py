"""Streams that are lent out, the same few again and again.

The matrix libraries keep a workspace (32 MiB) for every stream that they were ever used on. Torch hands out
its streams in turn, so whoever asks for a new one each time pays for a new workspace each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NUM_STREAMS = 32
"""Torch gives out so many streams of a device, in turn, and then the first one again."""


class StreamLender:
    """Lends streams of one device; ``make`` gives one, sooner or later one that it gave before."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._known: list[Any] = []
        self._lent: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def lend(self, owner: Any) -> Any:
        """A stream that is ``owner``'s alone until it is gone, as long as there is one."""
        taken = list(self._lent.values())
        stream = next((known for known in self._known if known not in taken), None)
        if stream is None:
            stream = self._new_stream()
        self._lent[owner] = stream
        return stream

    def take_back(self, owner: Any) -> None:
        """The owner is done with its stream."""
        self._lent.pop(owner, None)

    def _new_stream(self) -> Any:
        for _ in range(_NUM_STREAMS):
            stream = self._make()
            if stream not in self._known:
                self._known.append(stream)
                return stream
        return stream  # all are lent: two owners share this one


_LENDERS: dict[torch.device, StreamLender] = {}


def borrow_stream(device: torch.device, owner: Any) -> torch.cuda.Stream:
    """A stream for ``owner``, which nobody else gets while it lives."""
    return _lender(device).lend(owner)  # type: ignore[no-any-return]


@contextmanager
def borrowed_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream that nobody else gets inside. Graphs captured on it must be gone at the end."""
    owner = _Owner()
    try:
        yield borrow_stream(device, owner)
    finally:
        _lender(device).take_back(owner)


class _Owner:
    """Stands for whoever has a stream for a while."""


def _lender(device: torch.device) -> StreamLender:
    return _LENDERS.setdefault(device, StreamLender(lambda: torch.cuda.Stream(device)))


def warm_matrix_libraries(device: torch.device) -> None:
    """Have the matrix libraries take their workspace for the current stream now, in memory of its own.

    Later they would take it from whatever the allocator has cached, and hold a large segment with it.
    """
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(16, 16, dtype=dtype, device=device)
        torch.addmm(square[0], square, square)
