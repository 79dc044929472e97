"""Co-location on a CPU: segments run in the caller's thread, in the order in which they are enqueued.

An arena is a range of addresses as long as its two largest jobs could ever use together. Only the part below
its capacity is used; pages above it are never touched, and are returned to the system where the capacity
shrinks. So a new budget moves no job's bytes.
"""

from __future__ import annotations

import math
import mmap
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trainmux.colocate._demand import JobDemand, SegmentRef
from trainmux.colocate._layout import ArenaLayout, MemoryLayout
from trainmux.colocate._placement import ALIGNMENT_BYTES
from trainmux.colocate._protocols import Ended
from trainmux.engine import Memory
from trainmux.sizes import round_up

_POISON = 0xFF
"""A byte that makes every floating-point number NaN."""

_MAX_ENDS = 1024
"""Segments whose ends are remembered; a segment that waits for one is enqueued while that is in flight."""


class JobMemory(Memory):
    """A job's addresses: its area, then its end of the arena, backwards for a job at the top."""

    def __init__(self, area: Tensor) -> None:
        super().__init__(area, torch.zeros(1, dtype=torch.uint8), {})
        self._arena = area[:0]
        self._end: int | None = None

    def map_arena(self, arena: Tensor, capacity_bytes: int, *, is_top: bool) -> None:
        """Use the first ``capacity_bytes`` of ``arena`` from now on."""
        self._arena = arena
        self._end = capacity_bytes if is_top else None

    def at(self, offset: int, size_bytes: int) -> Tensor:
        """The bytes of a tensor at one of the job's addresses."""
        height = offset - self.slab.numel()
        if height < 0:
            return self.slab[offset : offset + size_bytes]
        start = height if self._end is None else self._end - height - round_up(size_bytes, ALIGNMENT_BYTES)
        return self._arena[start : start + size_bytes]


class _HostArena:
    """The bytes of one arena, whose pages exist once they are written. The first ``capacity_bytes`` are
    used."""

    def __init__(self, row: ArenaLayout, demands: Mapping[str, JobDemand]) -> None:
        ends = [max((demands[name].peak_bytes for name in side), default=0) for side in (row.base, row.top)]
        size_bytes = max(sum(ends), row.capacity_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # pages of a shared mapping would stay
        self._pages = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE), flags=flags)
        self.tensor: Tensor = torch.frombuffer(self._pages, dtype=torch.uint8)[:size_bytes]
        self.capacity_bytes = row.capacity_bytes

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity; whole pages above a smaller one are returned, and read as zeros after."""
        first = round_up(capacity_bytes, mmap.PAGESIZE)
        size = len(self._pages) // mmap.PAGESIZE * mmap.PAGESIZE
        if capacity_bytes < self.capacity_bytes and hasattr(mmap, "MADV_DONTNEED") and first < size:
            self._pages.madvise(mmap.MADV_DONTNEED, first, size - first)
        self.capacity_bytes = capacity_bytes


class HostDevice:
    """Runs segments in the caller's thread. ``poisons`` fills new memory with NaN.

    A segment counts as started when only the processor keeps it from running: jobs that alternate on the
    processor are slow, as on a shared device, and only memory makes them stall.
    """

    def __init__(self, *, poisons: bool = False) -> None:
        self._fill = _POISON if poisons else 0
        self._queue: deque[tuple[SegmentRef, tuple[SegmentRef, ...], float, Callable[[], None]]] = deque()
        self._job_ended_at: dict[str, float] = {}
        self._ended_at: OrderedDict[SegmentRef, float] = OrderedDict()
        self._memories: dict[str, JobMemory] = {}
        self._demands: dict[str, JobDemand] = {}
        self._arenas: dict[tuple[tuple[str, ...], tuple[str, ...]], _HostArena] = {}

    @property
    def reserved_bytes(self) -> int:
        local = sum(demand.local_bytes for demand in self._demands.values())
        return local + sum(arena.capacity_bytes for arena in self._arenas.values())

    @property
    def free_bytes(self) -> float:
        return math.inf

    def now(self) -> float:
        return time.perf_counter()

    def keep_less(self, demand: JobDemand) -> None:
        self._demands[demand.name] = demand

    def arrange(self, layout: MemoryLayout, demands: Mapping[str, JobDemand]) -> None:
        for gone in self._memories.keys() - layout.names:
            del self._memories[gone], self._demands[gone]
        known = {(row.base, row.top) for row in layout.arenas}
        self._arenas = {places: arena for places, arena in self._arenas.items() if places in known}
        for row in layout.arenas:
            arena = self._arenas.get((row.base, row.top))
            if arena is None:
                arena = self._arenas[row.base, row.top] = _HostArena(row, demands)
                if self._fill:
                    arena.tensor.fill_(self._fill)
            else:
                arena.resize(row.capacity_bytes)
            for name in row.names:
                if name not in self._memories:
                    area = torch.full((demands[name].area_bytes,), self._fill, dtype=torch.uint8)
                    self._memories[name] = JobMemory(area)
                self._demands[name] = demands[name]  # its scratch may have grown
                is_top = name in row.top
                self._memories[name].map_arena(arena.tensor, row.capacity_bytes, is_top=is_top)

    def memory_of(self, job: str) -> JobMemory:
        return self._memories[job]

    def lane(self, job: str) -> AbstractContextManager[None]:
        return nullcontext()

    def behind(self, job: str) -> AbstractContextManager[None]:
        return nullcontext()  # nothing of the job is enqueued

    def enqueue(self, ref: SegmentRef, after: tuple[SegmentRef, ...], work: Callable[[], None]) -> None:
        # A segment's dependencies were enqueued before it, so they have run when it does.
        self._queue.append((ref, after, self.now(), work))

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def next_ended(self, until: float | None = None) -> Ended | None:
        if not self._queue:
            return None
        ref, after, enqueued_at, work = self._queue.popleft()
        before = [self._job_ended_at.get(ref.job, enqueued_at)]
        before += [self._ended_at.get(other, enqueued_at) for other in after]
        work()
        ended_at = self.now()
        self._job_ended_at[ref.job] = self._ended_at[ref] = ended_at
        while len(self._ended_at) > _MAX_ENDS:
            self._ended_at.popitem(last=False)
        return Ended(ref, max(enqueued_at, *before), ended_at)
