"""Members side by side in channels: one call with k times the groups, in either layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from trainmux.fusion._stacked import Context, Stacked, fold_channels, unfold_channels
from trainmux.fusion.strategies.convolution_call import (
    Geometry,
    Gradients,
    channels_last,
    convolution_way,
    is_two_dimensional,
)

aten = torch.ops.aten
Layout = Callable[[Tensor], Tensor]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _forward(
    layout: Layout,
    context: Context,
    x: Tensor | Stacked,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    flat_bias = None if bias is None else bias.flatten()
    filters = layout(weight.flatten(0, 1))
    if not isinstance(x, Stacked) and geometry.groups == 1 and not geometry.transposed:
        # All members look at the same images: k times as many filters over one input.
        out = aten.convolution(layout(x), filters, flat_bias, *geometry.arguments(1))
    else:
        folded = layout(fold_channels(context.stack(x)))
        out = aten.convolution(
            folded, filters, flat_bias, *geometry.arguments(geometry.groups * context.width)
        )
    return unfold_channels(out, context.width)


def _backward(
    layout: Layout,
    context: Context,
    grad: Tensor,
    x: Tensor | Stacked,
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: Geometry,
    mask: Sequence[bool],
) -> Gradients:
    k = context.width
    sizes = None if bias_sizes is None else [bias_sizes[0] * k]
    shared = not isinstance(x, Stacked) and geometry.groups == 1 and not geometry.transposed and not mask[0]
    images = x if shared and isinstance(x, Tensor) else fold_channels(context.stack(x))
    groups = 1 if shared else geometry.groups * k
    grad_x, grad_weight, grad_bias = aten.convolution_backward(
        layout(fold_channels(grad)),
        layout(images),
        layout(weight.flatten(0, 1)),
        sizes,
        *geometry.arguments(groups),
        list(mask),
    )
    return (
        unfold_channels(grad_x, k) if mask[0] else None,
        grad_weight.unflatten(0, (k, -1)) if mask[1] else None,
        grad_bias.unflatten(0, (k, -1)) if mask[2] else None,
    )


GROUPED = convolution_way(
    "grouped", "grouped convolution", partial(_forward, _as_it_is), partial(_backward, _as_it_is)
)
GROUPED_CHANNELS_LAST = convolution_way(
    "grouped_channels_last",
    "grouped convolution, channels innermost",
    partial(_forward, channels_last),
    partial(_backward, channels_last),
    is_two_dimensional,
)
