"""How long something takes on a device, without what the host adds.

On CUDA the work is captured and replayed, as the engine will do with it: gaps between its kernels are those
of a graph, not of a host that launches one after another. cuDNN is told to time its own algorithms, as it is
when a step is captured. On a CPU it is wall-clock time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from trainmux.runtime import capturing, measured_convolutions

NUM_TIMED = 5
_GRAPH_SECONDS = 4e-4
"""A replay is to take at least this long; short work is captured several times over."""
_MAX_REPEATS = 16

Work = Callable[[], Any]


class Clock(Protocol):
    """Tells how long work takes on a device."""

    def glance(self, branches: Sequence[Work]) -> float:
        """A rough time, had quickly; ``RuntimeError`` where the work cannot be done."""

    def seconds(self, branches: Sequence[Work]) -> float:
        """The time until everything in ``branches``, begun together, is done; warmed up, a median."""


class HostClock:
    """Wall-clock time on a CPU, one branch after another."""

    def glance(self, branches: Sequence[Work]) -> float:
        self._once(branches)
        return self._once(branches)

    def seconds(self, branches: Sequence[Work]) -> float:
        self._once(branches)
        return statistics.median(self._once(branches) for _ in range(NUM_TIMED))

    def _once(self, branches: Sequence[Work]) -> float:
        begin = time.perf_counter()
        for work in branches:
            work()
        return time.perf_counter() - begin


class CudaClock:
    """Device time of captured work. It owns its streams: no other graph is ever captured on them.

    A glance leaves the algorithm to cuDNN's rules. Otherwise cuDNN times its algorithms first, as it does
    when a step is captured; that is what takes long.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []

    def glance(self, branches: Sequence[Work]) -> float:
        return self._measure(branches, num_timed=1, searches=False)

    def seconds(self, branches: Sequence[Work]) -> float:
        return self._measure(branches, num_timed=NUM_TIMED, searches=True)

    def _measure(self, branches: Sequence[Work], *, num_timed: int, searches: bool) -> float:
        while len(self._streams) < len(branches):
            self._streams.append(torch.cuda.Stream(self._device))
        with torch.cuda.device(self._device), measured_convolutions(searches):
            torch.cuda.synchronize(self._device)
            try:
                with torch.cuda.stream(self._streams[0]):
                    self._run(branches)
                    once = self._time(lambda: self._run(branches))
                    repeats = max(1, min(_MAX_REPEATS, round(_GRAPH_SECONDS / max(once, 1e-9))))
                    graph = torch.cuda.CUDAGraph()
                    with capturing(graph, self._streams[0]):  # memory of its own, gone with it
                        for _ in range(repeats):
                            self._run(branches)
                    graph.replay()
                    return statistics.median(self._time(graph.replay) for _ in range(num_timed)) / repeats
            finally:
                torch.cuda.synchronize(self._device)

    def _run(self, branches: Sequence[Work]) -> None:
        main, *others = self._streams[: len(branches)]
        for stream in others:
            stream.wait_stream(main)
        # Results are let go at once: each stream takes its own memory again, in order.
        for stream, work in zip((main, *others), branches, strict=True):
            with torch.cuda.stream(stream):
                work()
        for stream in others:
            main.wait_stream(stream)

    def _time(self, work: Work) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
