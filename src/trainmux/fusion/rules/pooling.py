"""Operators that treat every channel of every image alike: fold the model axis wherever it is free."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, fold_channels, rank_of, rule, unfold_channels

aten = torch.ops.aten


def _channels_lie_together(x: Tensor) -> bool:
    """Whether ``[k, n, c, ...]`` is stored as ``[n, k, c, ...]``."""
    return x.stride(0) == x.stride(2) * x.shape[2] and x.stride(0) < x.stride(1)


@rule(
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    how="fold model axis into batch or channels",
)
def per_channel(context: Context, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    images = [value for value in args if isinstance(value, (Stacked, Tensor))]
    if any(rank_of(item) != 4 for item in images):
        return NotImplemented
    by_channel = any(isinstance(item, Stacked) and _channels_lie_together(item.tensor) for item in images)

    def fold(value: Any) -> Any:
        if not isinstance(value, (Stacked, Tensor)):
            return value
        stacked = context.stack(value)
        return fold_channels(stacked) if by_channel else stacked.flatten(0, 1)

    def unfold(value: Tensor) -> Stacked:
        if by_channel:
            return Stacked(unfold_channels(value, context.width))
        return Stacked(value.unflatten(0, (context.width, -1)))

    result = op(*[fold(value) for value in args], **kwargs)
    return unfold(result) if isinstance(result, Tensor) else tuple(unfold(item) for item in result)
