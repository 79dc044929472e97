"""Co-location on a CPU: one thread, segments in the order in which they are enqueued, arenas by page.

An arena is a range of addresses as long as its two largest jobs could ever use together. Only what lies
below its capacity is used; pages above are never touched, and given back to the system where the capacity
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

from trainmux.colocate._device import Ended, JobMemory, MemoryNeed
from trainmux.colocate._lane import SegmentRef
from trainmux.colocate._layout import ArenaLayout, Layout
from trainmux.colocate._placement import ALIGNMENT_BYTES

_POISON = 0xFF
"""A byte of which every floating number made is NaN."""

_MAX_ENDS = 1024
"""Segments whose ends are remembered; who waits for one is enqueued while it is in flight."""


class PagedBytes:
    """Bytes whose pages the system gives when they are first written and takes back when told."""

    def __init__(self, size_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # pages of a shared mapping would not go
        self._pages = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE), flags=flags)
        self.tensor: Tensor = torch.frombuffer(self._pages, dtype=torch.uint8)[:size_bytes]

    def give_back(self, start: int) -> None:
        """Give back the whole pages from ``start`` on; they read as zeros after."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = len(self._pages) // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and first < size:
            self._pages.madvise(mmap.MADV_DONTNEED, first, size - first)


class _HostArena:
    """The bytes of one arena, of which the first ``capacity_bytes`` are in use."""

    def __init__(self, row: ArenaLayout, needs: Mapping[str, MemoryNeed]) -> None:
        ends = [max((needs[name].peak_bytes for name in side), default=0) for side in (row.base, row.top)]
        self.bytes = PagedBytes(max(sum(ends), row.capacity_bytes))
        self.capacity_bytes = row.capacity_bytes

    def resize(self, capacity_bytes: int) -> None:
        if capacity_bytes < self.capacity_bytes:
            self.bytes.give_back(capacity_bytes)
        self.capacity_bytes = capacity_bytes


class HostDevice:
    """Runs segments in the caller's thread. ``poisons`` fills new memory with ones, which are NaN.

    A segment counts as started when nothing but the processor keeps it from running: jobs that take turns
    at the processor are slow, as on a device that they share, and only memory makes them stall.
    """

    def __init__(self, *, poisons: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._poisons = poisons
        self._clock = clock
        self._queue: deque[tuple[SegmentRef, tuple[SegmentRef, ...], float, Callable[[], None]]] = deque()
        self._job_ended_at: dict[str, float] = {}
        self._ended_at: OrderedDict[SegmentRef, float] = OrderedDict()
        self._memories: dict[str, JobMemory] = {}
        self._needs: dict[str, MemoryNeed] = {}
        self._arenas: dict[tuple[tuple[str, ...], tuple[str, ...]], _HostArena] = {}

    @property
    def reserved_bytes(self) -> int:
        local = sum(need.local_bytes for need in self._needs.values())
        return local + sum(arena.capacity_bytes for arena in self._arenas.values())

    @property
    def free_bytes(self) -> float:
        return math.inf

    def now(self) -> float:
        return self._clock()

    def keep_less(self, needs: Mapping[str, MemoryNeed]) -> None:
        self._needs.update(needs)

    def arrange(self, layout: Layout, needs: Mapping[str, MemoryNeed]) -> None:
        names = {name for row in layout.arenas for name in row.names}
        for gone in self._memories.keys() - names:
            del self._memories[gone], self._needs[gone]
        known = {(row.base, row.top) for row in layout.arenas}
        self._arenas = {places: arena for places, arena in self._arenas.items() if places in known}
        for row in layout.arenas:
            arena = self._arenas.get((row.base, row.top))
            if arena is None:
                arena = self._arenas[row.base, row.top] = _HostArena(row, needs)
                if self._poisons:
                    arena.bytes.tensor.fill_(_POISON)
            else:
                arena.resize(row.capacity_bytes)
            for name in row.names:
                if name not in self._memories:
                    self._memories[name] = self._new_memory(needs[name])
                self._needs[name] = needs[name]  # what it takes beside its area may be more now
                is_top = name in row.top
                self._memories[name].map_arena(arena.bytes.tensor, row.capacity_bytes, is_top=is_top)

    def memory_of(self, job: str) -> JobMemory:
        return self._memories[job]

    def lane(self, job: str) -> AbstractContextManager[None]:
        return nullcontext()

    def behind(self, job: str) -> AbstractContextManager[None]:
        return nullcontext()  # of a job of which nothing is enqueued

    def enqueue(self, ref: SegmentRef, after: tuple[SegmentRef, ...], work: Callable[[], None]) -> None:
        # What a segment has to wait for was enqueued before it, so it has run when its turn comes.
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
        error = None
        try:
            work()
        except Exception as raised:
            error = raised
        ended_at = self.now()
        self._job_ended_at[ref.job] = self._ended_at[ref] = ended_at
        while len(self._ended_at) > _MAX_ENDS:
            self._ended_at.popitem(last=False)
        return Ended(ref, max(enqueued_at, *before), ended_at, error)

    def _new_memory(self, need: MemoryNeed) -> JobMemory:
        fill = _POISON if self._poisons else 0
        return JobMemory(torch.full((need.area_bytes,), fill, dtype=torch.uint8), ALIGNMENT_BYTES)
