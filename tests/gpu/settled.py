"""The device as it is when nothing is left of a test."""

from __future__ import annotations

import gc

import torch


def settle(*, clears_workspaces: bool = False) -> None:
    """Let go of what nobody refers to, wait for the device, give back what torch has cached.

    ``clears_workspaces``: those of the matrix libraries too, which they keep for every stream. Only where no
    graph is left that may use them.
    """
    gc.collect()
    torch.cuda.synchronize()
    if clears_workspaces:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
