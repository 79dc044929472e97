"""Capturing CUDA graphs, and what a capture must be kept from (torch 2.11 to 2.13).

A memory pool that Python collects while something is captured, or while allocations are sent to another pool,
ends the process. Torch sends a capture's allocations to its pool from the capture's beginning to its end.
Where the end itself fails, because something invalidated the capture, that is never switched off: later
allocations go astray, and the process ends when the next pool is destroyed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, Python looks for no cycles by itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def allocating_from(pool: torch.cuda.MemPool, device: torch.device) -> Iterator[None]:
    """Inside, this thread allocates from ``pool``, and Python looks for no cycles."""
    with no_collections(), torch.cuda.use_mem_pool(pool, device):
        yield


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: torch.cuda.MemPool | None = None
) -> Iterator[None]:
    """Capture what is enqueued inside; other threads may use the device meanwhile.

    Without a ``pool``, memory is the graph's own and goes with it. What went wrong inside is raised as it is:
    the end of a capture fails after that, too, and does not know why.
    """
    handle: Any = torch.cuda.graph_pool_handle() if pool is None else pool.id
    cause: BaseException | None = None
    try:
        with (
            no_collections(),
            torch.cuda.graph(graph, pool=handle, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                yield
            except BaseException as error:
                cause = error
                raise
    except BaseException:
        _leave(handle, stream.device)
        if cause is not None:
            raise cause  # noqa: B904
        raise


def _leave(pool: tuple[int, int], device: torch.device) -> None:
    """Send no more allocations to a pool."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is None:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # nothing is sent there
        end(index, pool)
