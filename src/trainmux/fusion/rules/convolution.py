"""Convolution: members side by side in channels, one call with k times the groups.

A single member is convolved as it is, on CUDA with its channels innermost, as tensor cores want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, fold_channels, rule, unfold_channels

aten = torch.ops.aten
_HOW = {"how": "grouped convolution", "how_alone": "the member's own convolution"}


@rule(aten.convolution.default, **_HOW)
def convolution(
    context: Context,
    op: OpOverload,
    x: Stacked | Tensor,
    weight: Stacked | Tensor,
    bias: Stacked | Tensor | None,
    *geometry: Any,
) -> Stacked:
    """``geometry`` is stride, padding, dilation, transposed, output padding and groups."""
    if context.width == 1:
        offset = None if bias is None else context.alone(bias)
        out = op(_for_library(context.alone(x)), _for_library(context.alone(weight)), offset, *geometry)
        return Stacked(out.unsqueeze(0))
    *numbers, groups = geometry
    filters = context.stack(weight).flatten(0, 1)
    biases = None if bias is None else context.stack(bias).flatten()
    if _reads_shared_images(x, geometry):
        assert isinstance(x, Tensor)
        out = op(x, filters, biases, *numbers, 1)  # k times as many filters over one input
    else:
        out = op(fold_channels(context.stack(x)), filters, biases, *numbers, groups * context.width)
    return Stacked(unfold_channels(out, context.width))


@rule(aten.convolution_backward.default, **_HOW)
def convolution_backward(
    context: Context,
    op: OpOverload,
    grad: Stacked | Tensor,
    x: Stacked | Tensor,
    weight: Stacked | Tensor,
    bias_sizes: Sequence[int] | None,
    *rest: Any,
) -> tuple[Stacked | None, ...]:
    """``rest`` is the geometry of the convolution, then which of the three gradients are wanted."""
    *geometry, mask = rest
    k = context.width
    if k == 1:
        tensors = [_for_library(context.alone(value)) for value in (grad, x, weight)]
        parts = op(*tensors, bias_sizes, *geometry, mask)
        return tuple(
            Stacked(part.unsqueeze(0)) if wanted else None for part, wanted in zip(parts, mask, strict=True)
        )
    *numbers, groups = geometry
    shares_images = _reads_shared_images(x, geometry) and not mask[0]
    images = x if shares_images and isinstance(x, Tensor) else fold_channels(context.stack(x))
    grad_x, grad_weight, grad_bias = op(
        fold_channels(context.stack(grad)),
        images,
        context.stack(weight).flatten(0, 1),
        None if bias_sizes is None else [bias_sizes[0] * k],
        *numbers,
        1 if shares_images else groups * k,
        mask,
    )
    return (
        Stacked(unfold_channels(grad_x, k)) if mask[0] else None,
        Stacked(grad_weight.unflatten(0, (k, -1))) if mask[1] else None,
        Stacked(grad_bias.unflatten(0, (k, -1))) if mask[2] else None,
    )


def _for_library(x: Tensor) -> Tensor:
    """A single member's images or filters in the layout that the device's library prefers."""
    is_image = x.dim() == 4 and x.device.type == "cuda"
    return x.contiguous(memory_format=torch.channels_last) if is_image else x


def _reads_shared_images(x: Stacked | Tensor, geometry: Sequence[Any]) -> bool:
    """Whether all members look at the same images, and all channels of them."""
    *_, transposed, _, groups = geometry
    return not isinstance(x, Stacked) and groups == 1 and not transposed
