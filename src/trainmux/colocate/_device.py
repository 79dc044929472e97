"""What co-location asks of a device: to lay out memory, to enqueue a segment, to say that one has ended.

Everything else is the same on every device. On a CPU a segment is run when it is its turn (`_host_device`).
On a CUDA device segments run on a stream per job, ends are events, and a job's addresses are a virtual range
of its own into which the arena's regions are mapped (`_cuda_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainmux.colocate._lane import SegmentRef
from trainmux.colocate._layout import Layout
from trainmux.engine import Memory


class Ended(NamedTuple):
    """A segment that has run; ``error`` is what its work raised, if anything."""

    ref: SegmentRef
    started_at: float
    ended_at: float
    error: Exception | None


@dataclass(frozen=True)
class MemoryNeed:
    """What a job has to be given: an area of its own, and up to ``peak_bytes`` at its end of an arena.

    ``local_bytes`` are the area's and those that its kernels and results take beside it.
    """

    area_bytes: int
    local_bytes: int
    peak_bytes: int


class JobMemory(Memory):
    """A job's addresses where there is one arena for all: its area, and behind it its end of the arena.

    The arena's bytes are counted from its beginning for a job at the base and from its end, backwards, for
    one at the top.
    """

    def __init__(self, area: Tensor, alignment: int) -> None:
        super().__init__(area, torch.zeros(1, dtype=torch.uint8), {})
        self._alignment = alignment
        self._arena = area[:0]
        self._end: int | None = None

    def map_arena(self, arena: Tensor, capacity_bytes: int, *, is_top: bool) -> None:
        """From now on the arena is ``capacity_bytes`` at the beginning of ``arena``."""
        self._arena = arena
        self._end = capacity_bytes if is_top else None

    def at(self, offset: int, size_bytes: int) -> Tensor:
        """The bytes of a tensor at one of the job's addresses."""
        height = offset - self.slab.numel()
        if height < 0:
            return self.slab[offset : offset + size_bytes]
        start = height
        if self._end is not None:
            start = self._end - height - -(-size_bytes // self._alignment) * self._alignment
        return self._arena[start : start + size_bytes]


class LaneMemory(Memory):
    """The addresses of a further lane of a job: what all lanes share is where the first one has it.

    To the lane, everything lies as it does for the first: ``shared_bytes`` of what is shared, the rest of an
    area of ``area_bytes``, the arena. Its ``own`` memory has an area of ``own_area_bytes``, for the rest.
    """

    def __init__(
        self, first: Memory, own: Memory, shared_bytes: int, area_bytes: int, own_area_bytes: int
    ) -> None:
        super().__init__(own.slab, own.host, own.host_offsets)
        self._first, self._own = first, own
        self._shared_bytes, self._area_bytes = shared_bytes, area_bytes
        self._own_area_bytes = own_area_bytes

    def at(self, offset: int, size_bytes: int) -> Tensor:
        """The bytes of a tensor at one of the lane's addresses."""
        if offset < self._shared_bytes:
            return self._first.at(offset, size_bytes)
        if offset < self._area_bytes:
            return self._own.at(offset - self._shared_bytes, size_bytes)
        return self._own.at(offset - self._area_bytes + self._own_area_bytes, size_bytes)


class ColocationDevice(Protocol):
    """Runs segments for the dispatcher, in memory that it lays out."""

    @property
    def reserved_bytes(self) -> int:
        """What is laid out now: every job's own bytes, and the arenas."""

    @property
    def free_bytes(self) -> float:
        """What could be laid out beside it."""

    def now(self) -> float:
        """The clock of ``Ended``, in seconds."""

    def arrange(self, layout: Layout, needs: Mapping[str, MemoryNeed]) -> None:
        """Lay out memory; nothing of a job whose place changes is in flight.

        Areas of jobs that are not in ``layout`` any more are given back.
        """

    def keep_less(self, needs: Mapping[str, MemoryNeed]) -> None:
        """Jobs that are laid out need no more than that, of what is beside their areas."""

    def memory_of(self, job: str) -> Memory:
        """The addresses of a job that is laid out: its own area from 0 on, and behind it its end of the
        arena. The same object until it is not laid out any more."""

    def lane(self, job: str) -> AbstractContextManager[None]:
        """What is done inside belongs to the job's lane, and has ended when the block has."""

    def behind(self, job: str) -> AbstractContextManager[None]:
        """What is done inside comes behind all that is enqueued of the job; nobody waits for it."""

    def enqueue(self, ref: SegmentRef, after: tuple[SegmentRef, ...], work: Callable[[], None]) -> None:
        """Have ``work`` run on its job's lane, behind what is enqueued there and behind ``after``."""

    @property
    def is_busy(self) -> bool:
        """Whether a segment is enqueued whose end was not told."""

    def next_ended(self, until: float | None = None) -> Ended | None:
        """The next segment that ends, waited for; ``None`` where none is in flight, or none ends before
        ``until``."""
