"""Where graphs are captured: a stream of its own, and a memory pool whose size is known beforehand (D8).

What is to be captured is rehearsed twice. The second rehearsal is recorded: the allocator's rules, simulated
over its allocations, say what the capture will reserve before it does, and one segment of that size is
reserved in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from trainmux.engine._allocations import AllocationEvent, record_allocations
from trainmux.engine._pools import pool_bytes
from trainmux.ir import MemoryUse
from trainmux.runtime import (
    borrow_stream,
    capturing,
    deterministic_algorithms,
    measured_convolutions,
    warm_matrix_libraries,
)
from trainmux.simulate import Allocate, AllocatorRules, Event, Free, PoolForecast

T = TypeVar("T")


@contextmanager
def kernel_settings(*, deterministic: bool) -> Iterator[None]:
    """Torch's switches as steps run with them: for capturing one, and for measuring what it will take."""
    with deterministic_algorithms(deterministic), measured_convolutions(not deterministic):
        yield


class CaptureRoom:
    """Captures on one stream into one pool; the graphs of a room must not run at the same time."""

    def __init__(self, device: torch.device, *, deterministic: bool) -> None:
        self._device = device
        self._deterministic = deterministic
        self._kept: list[torch.cuda.CUDAGraph] = []  # before the pool: what was made last goes last
        self._pool = torch.cuda.MemPool()
        self._forecast: PoolForecast | None = PoolForecast(AllocatorRules.for_torch(torch.__version__))
        self.stream = borrow_stream(device, self, uses_matrices=True)
        with torch.cuda.stream(self.stream):
            warm_matrix_libraries(device)
        self.memory: MemoryUse | None = None
        self.num_captures = 0
        self.graph_bytes = 0
        """What the graphs of `capture_all` took themselves: the driver's, in no pool."""

    @property
    def pool_bytes(self) -> int:
        """What the pool has reserved."""
        return pool_bytes(self._pool)

    @property
    def num_kept(self) -> int:
        """Graphs of `capture_all` that the room holds, whether anybody still replays them or not."""
        return len(self._kept)

    def drop_kept(self) -> None:
        """Let all graphs of `capture_all` go at once: nobody may replay one after this."""
        self._kept.clear()

    def capture(
        self, rehearse: Callable[[], Any], run: Callable[[], T]
    ) -> tuple[torch.cuda.CUDAGraph, T, tuple[int, ...]]:
        """The graph of ``run``, what it returned, and handles to `release` when the graph is dropped.

        ``rehearse`` does what ``run`` does and leaves no trace; it is called twice.
        """
        with self._working():
            events = self._rehearsed(rehearse)
            torch.cuda.empty_cache()  # the rehearsal's memory is not the graph's: the two would add up
            predicted, handles = self._reserve(events)
            graph = torch.cuda.CUDAGraph()
            returned = self._captured(graph, run)
        self.memory = MemoryUse(predicted, torch.cuda.memory_reserved(self._device))
        return graph, returned, tuple(handles)

    def capture_all(
        self, rehearse: Callable[[], None], run: Sequence[Callable[[], None]]
    ) -> list[torch.cuda.CUDAGraph]:
        """Graphs of several pieces of work that return nothing, in memory that is reserved for all at once.

        ``rehearse`` does all of them in an order in which they may run, and leaves no trace. The room keeps
        the graphs, those of a capture that failed among them: torch frees the matrix libraries' workspaces of
        a stream when a graph captured on it is destroyed (pytorch #193402), and the others still need theirs.
        """
        with self._working():
            events = self._rehearsed(rehearse)
            torch.cuda.empty_cache()
            predicted, _ = self._reserve(events)
            graphs = []
            before = self._bytes_outside_torch()
            for each in run:
                graphs.append(torch.cuda.CUDAGraph())
                self._kept.append(graphs[-1])
                self._captured(graphs[-1], each)
            self.graph_bytes += max(0, self._bytes_outside_torch() - before)
        self.memory = MemoryUse(predicted, torch.cuda.memory_reserved(self._device))
        return graphs

    def _bytes_outside_torch(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """The room's stream begins behind the caller's, and the caller's goes on behind it."""
        outside = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(outside)
        try:
            # A capture that fails leaves its own stream current.
            with kernel_settings(deterministic=self._deterministic), torch.cuda.stream(outside):
                yield
        finally:
            outside.wait_stream(self.stream)

    def _rehearsed(self, rehearse: Callable[[], Any]) -> list[AllocationEvent] | None:
        """Run it twice; what the second time allocated, where that could be recorded."""
        with torch.cuda.stream(self.stream):
            rehearse()
            with record_allocations(self._device) as record:
                kept = rehearse()
            del kept
        self.stream.synchronize()
        return record.events

    def _captured(self, graph: torch.cuda.CUDAGraph, run: Callable[[], T]) -> T:
        with capturing(graph, self.stream, self._pool):
            returned = run()
        self.num_captures += 1
        return returned

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """What is allocated inside, outside of a capture, comes from the graphs' own pool."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def release(self, handles: Sequence[int]) -> None:
        """A graph that was captured here is gone."""
        if self._forecast is not None:
            self._forecast.release(handles)

    def _reserve(self, events: list[AllocationEvent] | None) -> tuple[int | None, list[int]]:
        """Reserve what ``events`` need; returns what will be reserved in all, where that is known."""
        if events is None or not _default_allocator():
            self._forecast = None
        if self._forecast is None:
            return None, []
        assert events is not None
        held = torch.cuda.memory_reserved(self._device) - self._forecast.reserved_bytes
        reservation, handles = self._forecast.reserve(_named(events))
        with torch.cuda.use_mem_pool(self._pool, self._device):
            for stream, size in reservation.segments:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device)):
                    torch.empty(size, dtype=torch.uint8, device=self._device)
        return held + reservation.reserved_bytes, handles


def _default_allocator() -> bool:
    """Whether the rules that are simulated are those in force."""
    settings = (os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), os.environ.get("PYTORCH_ALLOC_CONF"))
    return torch.cuda.get_allocator_backend() == "native" and not any(settings)


def _named(events: Sequence[AllocationEvent]) -> list[Event]:
    """The events with a name for each allocation: an address comes up again and again."""
    names: dict[int, str] = {}
    found: list[Event] = []
    for number, event in enumerate(events):
        if event.is_free:
            found.append(Free(names.pop(event.address)))
        else:
            names[event.address] = str(number)
            found.append(Allocate(str(number), event.size_bytes, event.stream))
    return found
