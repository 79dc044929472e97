"""Captures of CUDA graphs on a stream of their own, into one memory pool that is reserved beforehand (D8).

Left to itself the allocator reserves a segment for each large request that finds no hole, and holes in
different segments never join. Therefore work is rehearsed twice before it is captured. The second rehearsal
is recorded: for each stream, one segment as large as its live bytes ever were is reserved in the pool. Then
the work is captured, and the pool looked at. If it had to grow, because holes did not fit, the work is
captured a second time, into segments as large as the pool has become.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from trainmux.engine._pools import pool_bytes
from trainmux.ir import MemoryUse
from trainmux.runtime import (
    allocating_from,
    borrow_stream,
    bytes_outside_torch,
    capturing,
    deterministic_algorithms,
    measured_convolutions,
    warm_matrix_libraries,
)
from trainmux.sizes import round_up

T = TypeVar("T")

_BLOCK_BYTES = 512
"""Torch's allocator gives out multiples of this."""
_SMALL_BYTES = 1 << 20
"""Requests up to this size come out of small segments, which are never reserved here."""
_SEGMENT_BYTES = 2 << 20
"""The size of a small segment; large ones are multiples of it."""
_MAX_EVENTS = 1_000_000


@contextmanager
def kernel_settings(*, deterministic: bool) -> Iterator[None]:
    """Set torch's switches as steps run with them: to capture one, and to measure what it will take."""
    with deterministic_algorithms(deterministic), measured_convolutions(not deterministic):
        yield


@dataclass(frozen=True)
class PoolNeed:
    """Bytes by stream, for large requests, and for small ones of all streams."""

    large: Mapping[int, int] = field(default_factory=dict)
    small_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.large.values()) + self.small_bytes

    def shortfall(self, held: PoolNeed) -> PoolNeed:
        """The part of this that ``held`` does not cover."""
        large = {stream: max(0, size - held.large.get(stream, 0)) for stream, size in self.large.items()}
        return PoolNeed(large, max(0, self.small_bytes - held.small_bytes))


class CaptureRoom:
    """Captures on one stream into one pool; the graphs of a room must not run at the same time."""

    def __init__(self, device: torch.device, *, deterministic: bool) -> None:
        self._device = device
        self._deterministic = deterministic
        self._kept: list[torch.cuda.CUDAGraph] = []  # before the pool: what was made last goes last
        self._pool = torch.cuda.MemPool()
        self.stream = borrow_stream(device, self, uses_matrices=True)
        self._warm()
        self.memory: MemoryUse | None = None
        self.num_captures = 0
        self.graph_bytes = 0
        """Memory of the driver for the graphs of `capture_all`, outside any pool."""

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool has reserved."""
        return pool_bytes(self._pool)

    @property
    def num_kept(self) -> int:
        """Graphs of `capture_all` that the room holds, whether anybody still replays them or not."""
        return len(self._kept)

    def drop_kept(self) -> None:
        """Let all graphs of `capture_all` go at once: nobody may replay one after this."""
        self._kept.clear()

    def capture(self, rehearse: Callable[[], Any], run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of ``run``, and what it returned.

        ``rehearse`` does what ``run`` does and leaves no trace; it is called at least twice.
        """

        def once() -> tuple[torch.cuda.CUDAGraph, T]:
            graph = torch.cuda.CUDAGraph()
            return graph, self._captured(graph, run)

        return self._in_pool(rehearse, once)

    def capture_all(
        self, rehearse: Callable[[], None], run: Sequence[Callable[[], None]]
    ) -> list[torch.cuda.CUDAGraph]:
        """Graphs of several pieces of work that return nothing, in memory that is reserved for all at once.

        ``rehearse`` does all of them in an order in which they may run, and leaves no trace. The room keeps
        the graphs, those of a capture that failed among them: torch frees the matrix libraries' workspaces of
        a stream when a graph captured on it is destroyed (pytorch #193402), and the others still need theirs.
        """

        def once() -> list[torch.cuda.CUDAGraph]:
            graphs = []
            before = self._bytes_outside_torch()
            for each in run:
                graphs.append(torch.cuda.CUDAGraph())
                self._kept.append(graphs[-1])
                self._captured(graphs[-1], each)
            self.graph_bytes += max(0, self._bytes_outside_torch() - before)
            return graphs

        return self._in_pool(rehearse, once)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocate from the graphs' own pool, outside of a capture."""
        with allocating_from(self._pool, self._device):
            yield

    # ---- into the pool -------------------------------------------------------------------------------

    def _in_pool(self, rehearse: Callable[[], Any], capture: Callable[[], T]) -> T:
        outside = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(outside)
        try:
            # A capture that fails leaves its own stream current.
            with kernel_settings(deterministic=self._deterministic), torch.cuda.stream(outside):
                if self.num_captures or self.pool_bytes:
                    captured, promised = self._grown(rehearse, capture)
                else:
                    captured, promised = self._reserved(rehearse, capture)
        finally:
            outside.wait_stream(self.stream)
        reserved = torch.cuda.memory_reserved(self._device)
        predicted = None if promised is None else reserved - self.pool_bytes + promised
        self.memory = MemoryUse(predicted, reserved)
        return captured

    def _reserved(self, rehearse: Callable[[], Any], capture: Callable[[], T]) -> tuple[T, int | None]:
        """Capture into an empty pool; returns the result and the bytes promised for the pool before.

        A capture that made the pool grow is dropped. The second one gets segments as large as the pool had
        become, in which holes join; whatever that one takes is kept.
        """
        need = self._rehearsed(rehearse)
        if need is None:
            return capture(), None
        self._reserve(need)
        held = _pool_need(self._pool)  # torch rounds segments up
        captured = capture()
        seen = _pool_need(self._pool)
        if not any(seen.shortfall(held).large.values()):
            return captured, sum(held.large.values()) + need.small_bytes
        del captured  # its results lie in the pool
        self._start_over()
        self._rehearsed(rehearse)  # what the libraries keep for a stream may have gone with the graphs
        self._reserve(seen)
        return capture(), seen.total_bytes

    def _grown(self, rehearse: Callable[[], Any], capture: Callable[[], T]) -> tuple[T, int | None]:
        """Capture while earlier graphs stay: into the bytes they leave free, growing the pool if need be."""
        need = self._rehearsed(rehearse)
        before = self.pool_bytes
        missing = None if need is None else need.shortfall(_pool_need(self._pool, is_free=True)).total_bytes
        return capture(), None if missing is None else before + missing

    def _warm(self) -> None:
        with torch.cuda.stream(self.stream):
            warm_matrix_libraries(self._device)

    def _rehearsed(self, rehearse: Callable[[], Any]) -> PoolNeed | None:
        """Run it twice; what the second time needed, where that could be recorded."""
        with torch.cuda.stream(self.stream):
            rehearse()
            with _recorded(self._device) as found:
                kept = rehearse()
            del kept
        self.stream.synchronize()
        torch.cuda.empty_cache()  # the rehearsal's memory is not the graph's: the two would add up
        return found[0] if found else None

    def _reserve(self, need: PoolNeed) -> None:
        with allocating_from(self._pool, self._device):
            for stream, size in need.large.items():
                with torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device)):
                    torch.empty(size, dtype=torch.uint8, device=self._device)

    def _captured(self, graph: torch.cuda.CUDAGraph, run: Callable[[], T]) -> T:
        with capturing(graph, self.stream, self._pool):
            returned = run()
        self.num_captures += 1
        return returned

    def _start_over(self) -> None:
        """Drop the graphs and the pool of a first capture: nobody else was captured on this stream."""
        self._kept.clear()
        self.graph_bytes = 0
        self._pool = torch.cuda.MemPool()
        torch.cuda.empty_cache()
        self._warm()

    def _bytes_outside_torch(self) -> int:
        held = bytes_outside_torch(self._device)
        if held is not None:
            return held
        free, total = torch.cuda.mem_get_info(self._device)  # those of other processes among it
        return total - free - torch.cuda.memory_reserved(self._device)


def _pool_need(pool: torch.cuda.MemPool, *, is_free: bool = False) -> PoolNeed:
    """Bytes that a pool has reserved, or only the free ones."""
    large: dict[int, int] = {}
    small_bytes = 0
    for segment in pool.snapshot(include_traces=False):
        size = int(segment["total_size"]) - (int(segment["allocated_size"]) if is_free else 0)
        if segment["segment_type"] == "small":
            small_bytes += size
        else:
            large[segment["stream"]] = large.get(segment["stream"], 0) + size
    return PoolNeed(large, small_bytes)


@contextmanager
def _recorded(device: torch.device) -> Iterator[list[PoolNeed]]:
    """Record what is allocated inside; the list yielded gets what that needs of a pool.

    The history of allocations is the process's own: where the user has it running, it is left alone and the
    list stays empty.
    """
    found: list[PoolNeed] = []
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if is_enabled is not None and is_enabled():
        yield found
        return
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MAX_EVENTS)
    try:
        yield found
        found.append(peak_need(torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]))
    finally:
        torch.cuda.memory._record_memory_history(None)


def peak_need(trace: Sequence[Mapping[str, Any]]) -> PoolNeed:
    """The most bytes live at a time on each stream, out of the allocator's history.

    Frees of what was there before are left out.
    """
    live: dict[int, tuple[int | None, int]] = {}  # by address: stream (None for small requests) and size
    now: dict[int | None, int] = {}
    peak: dict[int | None, int] = {}
    for entry in trace:
        address = int(entry["addr"])
        if entry["action"] == "alloc":
            size = round_up(int(entry["size"]), _BLOCK_BYTES)
            key = None if size <= _SMALL_BYTES else int(entry["stream"])
            live[address] = (key, size)
            now[key] = now.get(key, 0) + size
            peak[key] = max(peak.get(key, 0), now[key])
        elif entry["action"] == "free_completed" and address in live:
            key, size = live.pop(address)
            now[key] -= size
    sizes = {key: round_up(size, _SEGMENT_BYTES) for key, size in peak.items()}
    small_bytes = sizes.pop(None, 0)
    return PoolNeed({stream: size for stream, size in sizes.items() if stream is not None}, small_bytes)
