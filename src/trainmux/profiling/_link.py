"""What the link between host and device carries: idle, both ways at once, and beside a step that runs.

Copies share the device's memory with kernels and are slower while those run. A plan hides copies behind
kernels, so what counts for it is what the link carries then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from trainmux.profiling._clocks import median_of, replays, wall_seconds
from trainmux.runtime import StreamOwner, borrow_stream, borrowed_stream, capturing

_PROBE_BYTES = 256 << 20
_PIECE_BYTES = 32 << 20
"""Of one copy beside a step: as large as a feature map may be."""
_MOST_PIECES = 400
"""A stream takes about a thousand copies before the host waits, and steps would not be enqueued meanwhile."""
_NUM_HANDOVERS = 64
_SECONDS_BESIDE = 0.3
"""A step is replayed for so long beside copies: they meet all of it, on a device that is under load."""
_LEAST_REPLAYS = 4
_SHARE_BESIDE = 0.75
"""Of that time, what copies would take by themselves: being slower, they still end before the step does."""


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between host and device: each direction alone, and each while both are busy.

    ``handover_seconds`` is what a copy of next to nothing takes between two kernels of a CUDA graph, of which
    one waits for the other through it.
    """

    out: float
    into: float
    out_duplex: float
    into_duplex: float
    handover_seconds: float = 0.0


_RATES = ("out", "into", "out_duplex", "into_duplex")


def probe_link(device: torch.device, num_bytes: int = _PROBE_BYTES) -> LinkRates:
    """Copy pinned memory back and forth. On a CPU both memories are the host's, and directions share it."""
    if device.type != "cuda":
        source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
        seconds = median_of(lambda: wall_seconds(lambda: target.copy_(source)))
        rate = num_bytes / seconds
        return LinkRates(rate, rate, rate / 2, rate / 2)
    link = _Link(device, num_bytes)

    def copies(out: bool, into: bool) -> float:
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        if out:
            link.copy_out(0, num_bytes)
        if into:
            link.copy_in(0, num_bytes)
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    copies(True, True)
    out, into, both = (
        num_bytes / median_of(partial(copies, *way)) for way in ((True, False), (False, True), (True, True))
    )
    return LinkRates(out, into, min(both, out), min(both, into), _handover_seconds(device))


def beside_step(
    idle: LinkRates, replay: Callable[[], None], step_seconds: float, device: torch.device
) -> LinkRates:
    """What the link carries while a captured step runs over and over; at most what it carries ``idle``.

    ``replay`` enqueues the step once on the current stream. Where memory is too short for the copies' ends on
    the device, the rates are those of the idle link.
    """
    try:
        link = _Link(device, 2 * _PIECE_BYTES)
    except torch.OutOfMemoryError:
        return idle
    num_replays = max(_LEAST_REPLAYS, math.ceil(_SECONDS_BESIDE / step_seconds))
    seconds = _SHARE_BESIDE * num_replays * step_seconds

    def rates(out: float, into: float) -> tuple[float, float]:
        """Of both directions, one of which may be 0 and then has no copies."""
        torch.cuda.synchronize(device)
        replay()
        marks = [link.keep_busy(is_out, seconds * rate) for is_out, rate in ((True, out), (False, into))]
        for _ in range(num_replays - 1):
            replay()
        torch.cuda.synchronize(device)
        found = [num_bytes / begin.elapsed_time(end) * 1e3 for num_bytes, begin, end in marks if num_bytes]
        return (found[0], found[-1]) if found else (0.0, 0.0)

    rates(idle.out_duplex, idle.into_duplex)
    out, _ = rates(idle.out, 0.0)
    _, into = rates(0.0, idle.into)
    out_duplex, into_duplex = rates(idle.out_duplex, idle.into_duplex)
    found = LinkRates(out, into, min(out, out_duplex), min(into, into_duplex))
    slower = {name: min(getattr(found, name), getattr(idle, name)) for name in _RATES}
    return replace(idle, **slower)


class _Link:
    """Memory at both ends, and a stream for each direction."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._owners = [StreamOwner() for _ in range(2)]
        self._streams = [borrow_stream(device, owner) for owner in self._owners]

    def copy_out(self, begin: int, end: int) -> None:
        """From the device to the host."""
        self._copy(0, self._host[0][begin:end], self._there[0][begin:end])

    def copy_in(self, begin: int, end: int) -> None:
        """From the host to the device."""
        self._copy(1, self._there[1][begin:end], self._host[1][begin:end])

    def keep_busy(self, is_out: bool, least_bytes: float) -> tuple[int, torch.cuda.Event, torch.cuda.Event]:
        """Enqueue copies of at least so many bytes one way: how many, and events before and behind them."""
        stream = self._streams[0 if is_out else 1]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        num_pieces = min(math.ceil(least_bytes / _PIECE_BYTES), _MOST_PIECES)
        for piece in range(num_pieces):
            first = piece * _PIECE_BYTES % self._num_bytes
            (self.copy_out if is_out else self.copy_in)(first, first + _PIECE_BYTES)
        end.record(stream)
        return num_pieces * _PIECE_BYTES, begin, end

    def _copy(self, stream: int, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._streams[stream]):
            target.copy_(source, non_blocking=True)


def _handover_seconds(device: torch.device) -> float:
    """By how much a row of kernels in a graph gets longer for each small copy between two of them."""
    counter, there = torch.zeros(1, device=device), torch.zeros(1024, device=device)
    host = torch.zeros(1024, pin_memory=True)
    owner = StreamOwner()
    side = borrow_stream(device, owner)

    def kernels(stream: torch.cuda.Stream, *, copies: bool) -> None:
        for _ in range(_NUM_HANDOVERS):
            counter.add_(1)
            if copies:
                side.wait_stream(stream)
                with torch.cuda.stream(side):
                    host.copy_(there, non_blocking=True)
                stream.wait_stream(side)

    found = []
    for copies in (False, True):
        with borrowed_stream(device) as stream:
            stream.wait_stream(torch.cuda.current_stream(device))
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, stream):
                kernels(stream, copies=copies)
            replays(graph, 1)
            found.append(median_of(partial(replays, graph, 1)))
            del graph
    return max(0.0, found[1] - found[0]) / _NUM_HANDOVERS
