"""Timing of replayed graphs on the device and of work on the host; the median of a few."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from trainmux.runtime import CudaTimer

NUM_REPEATS = 3


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
