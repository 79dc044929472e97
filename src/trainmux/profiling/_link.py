"""Bandwidth of the link between host and device: each way alone and both at once, idle and under load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from trainmux.profiling._clocks import NUM_REPEATS, median_of, replays, wall_seconds
from trainmux.runtime import CudaTimer, StreamOwner, borrow_stream, borrowed_stream, capturing

_PROBE_BYTES = 256 << 20
_PIECE_BYTES = 32 << 20
_SHARE_OF_LOAD = 0.6
"""The share of a load's time that copies should take, so that the load outlasts them."""
_NUM_HANDOVERS = 64
_OUT, _INTO = 0, 1
"""To the host, and from it."""


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between host and device: each direction alone, and each while both are busy.

    ``handover_seconds`` is the time of a tiny copy between two kernels of a CUDA graph, the second of which
    waits for the first through it.
    """

    out: float
    into: float
    out_duplex: float
    into_duplex: float
    handover_seconds: float = 0.0


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
            link.copy(_OUT)
        if into:
            link.copy(_INTO)
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    copies(True, True)
    out, into, both = (
        num_bytes / median_of(partial(copies, *way)) for way in ((True, False), (False, True), (True, True))
    )
    return LinkRates(out, into, min(both, out), min(both, into), _handover_seconds(device))


@dataclass(frozen=True)
class LinkUnderLoad:
    """The link's rates while the device computes, and the factor by which copies slow kernels down."""

    link: LinkRates
    slowdown: float = 1.0


def probe_link_under_load(
    load: Callable[[], object], load_seconds: float, idle: LinkRates, device: torch.device
) -> LinkUnderLoad:
    """Copies and kernels of a CUDA device at the same time: both are slower than alone.

    ``load`` enqueues ``load_seconds`` of kernels on the current stream. Without memory for the copies, here
    or on the host, the rates are those of the ``idle`` link.
    """
    try:
        link = _Link(device, _PIECE_BYTES)
    except RuntimeError:
        return LinkUnderLoad(idle)
    slowdowns: list[float] = []

    def seconds(lanes: Sequence[int], rates: Sequence[float]) -> list[float]:
        """Seconds per byte of each lane, all lanes at once."""
        stream = torch.cuda.current_stream(device)
        timer = CudaTimer()
        torch.cuda.synchronize(device)
        timer.start(stream)
        load()
        timer.stop(stream)
        counts = [_pieces_under_load(load_seconds, rate) for rate in rates]
        copies = [link.timed_copies(lane, count) for lane, count in zip(lanes, counts, strict=True)]
        torch.cuda.synchronize(device)
        copied = [copy.seconds() for copy in copies]
        if len(lanes) == 2:
            slowdowns.append(slowdown_of(load_seconds, timer.seconds(), max(copied)))
        return [taken / (count * _PIECE_BYTES) for taken, count in zip(copied, counts, strict=True)]

    def found(*rates: tuple[int, float]) -> list[float]:
        lanes, expected = zip(*rates, strict=True)
        samples = [seconds(lanes, expected) for _ in range(NUM_REPEATS)]
        return [1 / statistics.median(of_lane) for of_lane in zip(*samples, strict=True)]

    (out,), (into,) = found((_OUT, idle.out)), found((_INTO, idle.into))
    both = found((_OUT, idle.out_duplex), (_INTO, idle.into_duplex))
    return LinkUnderLoad(_slower_of(idle, LinkRates(out, into, *both)), statistics.median(slowdowns))


class _Link:
    """Pinned memory and the device's, ``num_bytes`` for each direction, and a stream for each."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._ends = {_OUT: (host[0], there[0]), _INTO: (there[1], host[1])}
        self._owners = {lane: StreamOwner() for lane in (_OUT, _INTO)}
        self._streams = {lane: borrow_stream(device, owner) for lane, owner in self._owners.items()}

    def copy(self, lane: int, count: int = 1) -> None:
        """Enqueue so many copies one way."""
        target, source = self._ends[lane]
        with torch.cuda.stream(self._streams[lane]):
            for _ in range(count):
                target.copy_(source, non_blocking=True)

    def timed_copies(self, lane: int, count: int) -> CudaTimer:
        """Enqueue so many copies one way, and time them."""
        timer = CudaTimer()
        timer.start(self._streams[lane])
        self.copy(lane, count)
        timer.stop(self._streams[lane])
        return timer


def slowdown_of(alone_seconds: float, taken_seconds: float, copy_seconds: float) -> float:
    """The factor by which kernels were slower during copies, which ran for ``copy_seconds`` of them.

    Never less than 1, nor more than twice: then something else was in the way.
    """
    without_copies = max(0.0, taken_seconds - copy_seconds)
    alone_during = alone_seconds - without_copies
    if copy_seconds <= 0 or alone_during <= 0:
        return 1.0
    return min(2.0, max(1.0, min(copy_seconds, taken_seconds) / alone_during))


def _pieces_under_load(load_seconds: float, rate: float) -> int:
    """The number of pieces to copy at ``rate`` during a load of ``load_seconds``."""
    return max(1, int(_SHARE_OF_LOAD * load_seconds * rate / _PIECE_BYTES))


def _slower_of(idle: LinkRates, loaded: LinkRates) -> LinkRates:
    """The slower rate of each direction, none faster in duplex than alone."""
    out, into = min(idle.out, loaded.out), min(idle.into, loaded.into)
    return replace(
        idle,
        out=out,
        into=into,
        out_duplex=min(out, idle.out_duplex, loaded.out_duplex),
        into_duplex=min(into, idle.into_duplex, loaded.into_duplex),
    )


def _handover_seconds(device: torch.device) -> float:
    """Seconds that a small copy between two kernels adds to a row of them in a graph."""
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
