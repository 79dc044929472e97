"""Time that work takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def elapsed_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until ``work`` is done: between events on CUDA's current stream, else by the wall clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
