"""Stacked storage: the same tensor of k members in one allocation, each member a plain slice (D2)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from trainmux.sizes import round_up

ALIGNMENT_BYTES = 16


def stacked_strides(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Strides of ``[k, *shape]``: rows dense, the distance between members a multiple of 16 bytes.

    On CUDA the filters of two-dimensional convolutions (four axes) have their channels innermost, as the
    kernels want them; everything else is in the order of its axes.
    """
    per_alignment = max(1, ALIGNMENT_BYTES // dtype.itemsize)
    member_stride = max(1, round_up(prod(shape), per_alignment))
    inner = [0] * len(shape)
    step = 1
    for dim in (1, 3, 2, 0) if len(shape) == 4 and device.type == "cuda" else reversed(range(len(shape))):
        inner[dim] = step
        step *= max(1, shape[dim])
    return (member_stride, *inner)


def stacked_zeros(width: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of shape ``[width, *shape]`` in aligned storage."""
    strides = stacked_strides(shape, dtype, device)
    flat = torch.zeros(width * strides[0], dtype=dtype, device=device)
    return flat.as_strided((width, *shape), strides)


def storage_bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
