"""Streams that are lent out, the same few again and again.

The matrix libraries keep a workspace (32 MiB) for every stream that they were ever used on. Torch hands out
its streams in turn, so whoever asks for a new one each time pays for a new workspace each time. Here those
who use the libraries get streams that have one: there are as many workspaces as such owners at one time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainmux.sizes import round_up

MATRIX_LIBRARIES_BYTES = 64 << 20
"""Workspaces of the matrix libraries for one stream: 32 MiB each, cuBLAS and cuBLASLt."""

_NUM_STREAMS = 32
"""Torch gives out so many streams of a device, in turn, and then the first one again."""


class StreamLender:
    """Lends streams of one device; ``make`` gives one, sooner or later one that it gave before."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._known: list[Any] = []
        self._used_for_matrices: list[Any] = []
        self._lent: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def lend(self, owner: Any, *, uses_matrices: bool = False) -> Any:
        """A stream that is ``owner``'s alone until it is gone, as long as there is one.

        ``uses_matrices``: the matrix libraries will be used on it.
        """
        taken = list(self._lent.values())
        free = [known for known in self._known if known not in taken]
        alike = [stream for stream in free if (stream in self._used_for_matrices) == uses_matrices]
        if alike or (free and (uses_matrices or len(self._known) == _NUM_STREAMS)):
            stream = (alike or free)[0]
        else:
            stream = self._new_stream(free)
        if uses_matrices and stream not in self._used_for_matrices:
            self._used_for_matrices.append(stream)
        self._lent[owner] = stream
        return stream

    def take_back(self, owner: Any) -> None:
        """The owner is done with its stream."""
        self._lent.pop(owner, None)

    def _new_stream(self, free: Sequence[Any]) -> Any:
        for _ in range(_NUM_STREAMS):
            stream = self._make()
            if stream not in self._known:
                self._known.append(stream)
                return stream
        return free[0] if free else stream  # all are lent: two owners share this one


_LENDERS: dict[torch.device, StreamLender] = {}
_WORKSPACES: dict[torch.device, dict[int, int]] = {}
"""By device and stream, what the matrix libraries took for it."""
_SEGMENT_BYTES = 2 << 20
"""Torch reserves memory in multiples of this."""


def borrow_stream(device: torch.device, owner: Any, *, uses_matrices: bool = False) -> torch.cuda.Stream:
    """A stream for ``owner``, which nobody else gets while it lives, or until `return_stream`.

    ``uses_matrices``: the matrix libraries will be used on it, and keep a workspace for it.
    """
    return _lender(device).lend(owner, uses_matrices=uses_matrices)  # type: ignore[no-any-return]


def return_stream(device: torch.device, owner: Any) -> None:
    """The owner is done with its stream."""
    _lender(device).take_back(owner)


@contextmanager
def borrowed_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream for matrices and all else that nobody else gets inside. Graphs captured on it must be gone at
    the end."""
    owner = StreamOwner()
    try:
        yield borrow_stream(device, owner, uses_matrices=True)
    finally:
        return_stream(device, owner)


class StreamOwner:
    """Stands for whoever has a stream for a while, or several."""


def _lender(device: torch.device) -> StreamLender:
    device = _with_index(device)
    return _LENDERS.setdefault(device, StreamLender(lambda: torch.cuda.Stream(device)))


def _with_index(device: torch.device) -> torch.device:
    """One device must not have two names."""
    index: int | None = device.index  # torch's stubs leave the None out
    return torch.device(device.type, torch.cuda.current_device()) if index is None else device


def warm_matrix_libraries(device: torch.device) -> None:
    """Have the matrix libraries take their workspace for the current stream now, in memory of its own.

    Later they would take it from whatever the allocator has cached, and hold a large segment with it.
    """
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(16, 16, dtype=dtype, device=device)
        torch.addmm(square[0], square, square)
    del square
    taken = round_up(torch.cuda.memory_allocated(device) - before, _SEGMENT_BYTES)
    if taken > 0:  # else they had it already
        stream = torch.cuda.current_stream(device).cuda_stream
        _WORKSPACES.setdefault(_with_index(device), {})[stream] = taken


def workspaces_bytes(device: torch.device) -> tuple[int, ...]:
    """Workspace bytes of the matrix libraries for each stream they were warmed for, the largest first."""
    return tuple(sorted(_WORKSPACES.get(_with_index(device), {}).values(), reverse=True))
