"""Memory pools of torch's caching allocator, and a bound on what it takes from the device meanwhile.

A pool that somebody holds gives nothing back to the device, so what it has reserved is what it ever took.
Torch bounds only what the whole process reserves; with the present amount known, that bounds what comes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def release_cached(device: torch.device) -> None:
    """Give back to ``device`` what nobody uses and torch would keep for later; nothing on a CPU.

    Before other memory is asked for: of a kept segment even a small tensor may take a part, and the rest then
    stays with torch however much is asked for elsewhere.
    """
    if device.type == "cuda":
        gc.collect()  # what graphs held is free only when they are gone
        torch.cuda.empty_cache()


def pool_bytes(pool: torch.cuda.MemPool) -> int:
    """Bytes that ``pool`` has reserved on the device."""
    return sum(int(segment["total_size"]) for segment in pool.snapshot(include_traces=False))


@contextmanager
def limited_growth(device: torch.device, num_bytes: int) -> Iterator[None]:
    """While active, torch reserves at most ``num_bytes`` more on ``device``; ``OutOfMemoryError`` beyond.

    The bound is the process's: what other threads take meanwhile counts too.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    limit = torch.cuda.memory_reserved(device) + num_bytes
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(before, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
