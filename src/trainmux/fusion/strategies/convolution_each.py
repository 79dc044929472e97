"""One call per member, in line, into one result; or the only member's own call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainmux.fusion._stacked import Context, Stacked
from trainmux.fusion.strategies.convolution_call import (
    Geometry,
    Gradients,
    channels_last,
    convolution_way,
    is_two_dimensional,
)

aten = torch.ops.aten


def _stack(members: Sequence[Tensor], innermost: bool) -> Tensor:
    """Members' tensors in one, members outermost; with their channels innermost where that is wanted."""
    if not innermost:
        return torch.stack(list(members))
    return torch.stack([member.permute(0, 2, 3, 1) for member in members]).permute(0, 1, 4, 2, 3)


def _like(tensor: Tensor, shape: Sequence[int], innermost: bool) -> Tensor:
    """What ``_stack`` gives for members that together have ``shape``."""
    if not innermost:
        return tensor.new_empty(tuple(shape))
    k, n, c, h, w = shape
    return tensor.new_empty((k, n, h, w, c)).permute(0, 1, 4, 2, 3)


def _row(x: Tensor, index: int, innermost: bool) -> Tensor:
    return channels_last(x[index]) if innermost else x[index]


@torch.library.custom_op("trainmux::convolution_each", mutates_args=())
def convolution_each(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    innermost: bool,
) -> Tensor:
    """One convolution per member, ``[k, ...]`` in and out; one node to the graph.

    ``innermost`` asks for channels innermost in everything that is read and written.
    """
    outs = [
        aten.convolution(
            _row(x, i, innermost),
            _row(weight, i, innermost),
            None if bias is None else bias[i],
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
        )
        for i in range(weight.shape[0])
    ]
    return _stack(outs, innermost)


@convolution_each.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *geometry, innermost = rest
    one: Tensor = aten.convolution(x[0], weight[0], None if bias is None else bias[0], *geometry)
    return _like(one, (weight.shape[0], *one.shape), innermost)


@torch.library.custom_op("trainmux::convolution_each_backward", mutates_args=())
def convolution_each_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
    innermost: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``convolution_each``; one that ``mask`` leaves out comes back empty."""
    parts = [
        aten.convolution_backward(
            _row(grad, i, innermost),
            _row(x, i, innermost),
            _row(weight, i, innermost),
            bias_sizes,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            mask,
        )
        for i in range(weight.shape[0])
    ]
    images, filters, biases = zip(*parts, strict=True)
    return (
        _stack(images, innermost) if mask[0] else grad.new_empty(0),
        _stack(filters, innermost) if mask[1] else grad.new_empty(0),
        torch.stack(biases) if mask[2] else grad.new_empty(0),
    )


@convolution_each_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, mask, innermost = rest
    return (
        _like(grad, x.shape, innermost) if mask[0] else grad.new_empty(0),
        _like(grad, weight.shape, innermost) if mask[1] else grad.new_empty(0),
        grad.new_empty((grad.shape[0], *(bias_sizes or ()))) if mask[2] else grad.new_empty(0),
    )


def _separate_forward(
    innermost: bool,
    context: Context,
    x: Tensor | Stacked,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    arguments = geometry.arguments(geometry.groups)
    out: Tensor = convolution_each(context.stack(x), weight, bias, *arguments, innermost)
    return out


def _separate_backward(
    innermost: bool,
    context: Context,
    grad: Tensor,
    x: Tensor | Stacked,
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: Geometry,
    mask: Sequence[bool],
) -> Gradients:
    arguments = (*geometry.arguments(geometry.groups), list(mask), innermost)
    parts = convolution_each_backward(grad, context.stack(x), weight, bias_sizes, *arguments)
    first, second, third = (part if wanted else None for part, wanted in zip(parts, mask, strict=True))
    return first, second, third


def _row_for_cuda(x: Tensor) -> Tensor:
    """The only member's tensor: tensor cores want channels innermost, a CPU has no such wish."""
    return channels_last(x[0]) if x.device.type == "cuda" else x[0]


def _single_forward(
    context: Context, x: Tensor | Stacked, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    out: Tensor = aten.convolution(
        _row_for_cuda(context.stack(x)),
        _row_for_cuda(weight),
        None if bias is None else bias[0],
        *geometry.arguments(geometry.groups),
    )
    return out.unsqueeze(0)


def _single_backward(
    context: Context,
    grad: Tensor,
    x: Tensor | Stacked,
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: Geometry,
    mask: Sequence[bool],
) -> Gradients:
    parts = aten.convolution_backward(
        _row_for_cuda(grad),
        _row_for_cuda(context.stack(x)),
        _row_for_cuda(weight),
        bias_sizes,
        *geometry.arguments(geometry.groups),
        list(mask),
    )
    first, second, third = (
        part.unsqueeze(0) if wanted else None for part, wanted in zip(parts, mask, strict=True)
    )
    return first, second, third


SEPARATE = convolution_way(
    "separate",
    "one convolution per member",
    partial(_separate_forward, False),
    partial(_separate_backward, False),
)
SEPARATE_CHANNELS_LAST = convolution_way(
    "separate_channels_last",
    "one convolution per member, channels innermost",
    partial(_separate_forward, True),
    partial(_separate_backward, True),
    is_two_dimensional,
)
SINGLE = convolution_way(
    "single", "the member's own convolution", _single_forward, _single_backward, single=True
)
