"""How long things take: by the wall, by events around replays; the median of a few."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

NUM_REPEATS = 3


def replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds for one of so many replays in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    enqueue_replays(graph, count)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def enqueue_replays(graph: torch.cuda.CUDAGraph, count: int) -> None:
    """So many in a row, without waiting for them."""
    for _ in range(count):
        graph.replay()


def wall_seconds(work: Callable[[], Any]) -> float:
    """What the host waits for ``work``."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def median_of(measure: Callable[[], float]) -> float:
    """Of a few measurements."""
    return statistics.median(measure() for _ in range(NUM_REPEATS))
