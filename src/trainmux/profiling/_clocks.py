"""Clocks: replayed graphs, work on the host, and single nodes with the host ahead of the device.

A node is enqueued behind a wait of the device, so that the host's time to launch its kernels is not measured.
One with so many kernels that the wait was too short is measured behind a longer one the next time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainmux.runtime import CudaTimer

NUM_REPEATS = 3
_HEAD_START_SECONDS = 1e-3
"""The device waits so long before each node that the host, which launches kernels one by one, is ahead."""
_IN_TIME = 0.8
"""The share of a head start that the host may have used up."""
_CALIBRATION_CYCLES = 2_000_000


def replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds per replay of ``count`` in a row."""
    timer = CudaTimer()
    timer.start()
    enqueue_replays(graph, count)
    timer.stop()
    return timer.seconds() / count


def enqueue_replays(graph: torch.cuda.CUDAGraph, count: int) -> None:
    """Enqueue ``count`` replays without waiting for them."""
    for _ in range(count):
        graph.replay()


def wall_seconds(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of ``work``."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def median_of(measure: Callable[[], float]) -> float:
    """The median of a few measurements."""
    return statistics.median(measure() for _ in range(NUM_REPEATS))


@dataclass(frozen=True)
class Sample:
    """One measurement of a node: its time, its bytes beyond its results', and whether the host was ahead.

    ``host_seconds`` is what the host took to enqueue it, ``head_start_seconds`` what it had for that.
    """

    seconds: float
    workspace_bytes: int = 0
    host_seconds: float = 0.0
    head_start_seconds: float = _HEAD_START_SECONDS

    @property
    def is_clean(self) -> bool:
        return self.host_seconds <= _IN_TIME * self.head_start_seconds


class NodeSamples:
    """The measurements of one node, or of some that are alike. Those in which the device waited for the host
    count only where there are no others."""

    def __init__(self) -> None:
        self._all: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self._all.append(sample)

    @property
    def head_start_seconds(self) -> float:
        """The head start for the next time: longer where it was too short."""
        if not self._all:
            return _HEAD_START_SECONDS
        if self._all[-1].is_clean:
            return self._all[-1].head_start_seconds
        return _HEAD_START_SECONDS + 2 * min(sample.host_seconds for sample in self._all)

    @property
    def is_clean(self) -> bool:
        """Whether the device did not wait for the host each time."""
        return any(sample.is_clean for sample in self._all)

    @property
    def seconds(self) -> float:
        """The median."""
        clean = [sample.seconds for sample in self._all if sample.is_clean]
        return statistics.median(clean or [sample.seconds for sample in self._all])

    @property
    def workspace_bytes(self) -> int:
        return max(sample.workspace_bytes for sample in self._all)


class HostClock:
    """On a CPU: wall-clock time; workspaces are not seen."""

    def measure(self, work: Callable[[], None], head_start_seconds: float) -> Sample:
        return Sample(wall_seconds(work))


class CudaClock:
    """On CUDA: device time of a node, the host ahead; the allocator's peak meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timer = CudaTimer()
        waits = [self._wait(_CALIBRATION_CYCLES) for _ in range(3)]
        self._cycles_per_second = _CALIBRATION_CYCLES / statistics.median(waits)

    def _wait(self, cycles: int) -> float:
        self._timer.start()
        torch.cuda._sleep(cycles)
        self._timer.stop()
        return self._timer.seconds()

    def measure(self, work: Callable[[], None], head_start_seconds: float) -> Sample:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda._sleep(int(head_start_seconds * self._cycles_per_second))
        begin = time.perf_counter()
        self._timer.start()
        work()
        self._timer.stop()
        host_seconds = time.perf_counter() - begin
        torch.cuda.synchronize(self._device)
        workspace = max(0, torch.cuda.max_memory_allocated(self._device) - before)
        return Sample(self._timer.seconds(), workspace, host_seconds, head_start_seconds)
