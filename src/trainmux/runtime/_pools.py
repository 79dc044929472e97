"""Leaving a memory pool after a capture that failed (torch 2.11 to 2.13).

Torch sends a capture's allocations to its pool from the capture's beginning to its end. Where the end itself
fails, because something invalidated the capture, that is never switched off: later allocations go astray, and
the process ends when the next pool is destroyed.
"""

from __future__ import annotations

import torch


def leave_pool(pool: torch.cuda.MemPool, device: torch.device) -> bool:
    """Send no more allocations to ``pool``; false where none were sent there."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        end(index, pool.id)
    except RuntimeError:  # nothing is sent there
        return False
    return True
