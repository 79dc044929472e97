"""Stacked storage: the same tensor of k members in one allocation, each member a plain slice (D2)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16


def stacked_strides(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Strides of ``[k, *shape]``: rows contiguous, the distance between members a multiple of 16 bytes."""
    per_alignment = max(1, ALIGNMENT_BYTES // dtype.itemsize)
    numel = prod(shape)
    member_stride = max(1, -(-numel // per_alignment) * per_alignment)
    inner: list[int] = []
    step = 1
    for size in reversed(shape):
        inner.append(step)
        step *= max(1, size)
    return (member_stride, *reversed(inner))


def stacked_zeros(width: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of shape ``[width, *shape]`` in aligned storage."""
    strides = stacked_strides(shape, dtype)
    flat = torch.zeros(width * strides[0], dtype=dtype, device=device)
    return flat.as_strided((width, *shape), strides)
