"""Convolution, which has several ways to be fused; none is best everywhere (D2).

``grouped``: members side by side in channels, one call with k times the groups. ``separate``: one call
per member into one result. ``bmm``: a 1x1 convolution as a batched matrix product. A strategy is a pair
of functions, forward and backward; adding one is an entry in ``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, rule
from trainmux.fusion.rules.normalisation import fold_channels, unfold_channels

aten = torch.ops.aten


@dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution, one member's."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def arguments(self, groups: int) -> tuple[Any, ...]:
        return (self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups)


Forward = Callable[[Context, Tensor | Stacked, Tensor, Tensor | None, Geometry], Tensor]
Backward = Callable[
    [Context, Tensor, Tensor | Stacked, Tensor, list[int] | None, Geometry, Sequence[bool]],
    tuple[Tensor | None, Tensor | None, Tensor | None],
]


@dataclass(frozen=True)
class Strategy:
    """One way to fuse a convolution; ``fits`` says for which shapes it works."""

    name: str
    fits: Callable[[Geometry, torch.Size], bool]
    forward: Forward
    backward: Backward


def _grouped_forward(
    context: Context, x: Tensor | Stacked, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    flat_bias = None if bias is None else bias.flatten()
    if not isinstance(x, Stacked) and geometry.groups == 1 and not geometry.transposed:
        # All members look at the same images: k times as many filters over one input.
        out = torch.ops.aten.convolution(x, weight.flatten(0, 1), flat_bias, *geometry.arguments(1))
    else:
        folded = fold_channels(context.stack(x))
        out = torch.ops.aten.convolution(
            folded, weight.flatten(0, 1), flat_bias, *geometry.arguments(geometry.groups * context.width)
        )
    return unfold_channels(out, context.width)


def _grouped_backward(
    context: Context,
    grad: Tensor,
    x: Tensor | Stacked,
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: Geometry,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    k = context.width
    sizes = None if bias_sizes is None else [bias_sizes[0] * k]
    shared = not isinstance(x, Stacked) and geometry.groups == 1 and not geometry.transposed and not mask[0]
    images = x if shared and isinstance(x, Tensor) else fold_channels(context.stack(x))
    groups = 1 if shared else geometry.groups * k
    grad_x, grad_weight, grad_bias = aten.convolution_backward(
        fold_channels(grad), images, weight.flatten(0, 1), sizes, *geometry.arguments(groups), list(mask)
    )
    return (
        unfold_channels(grad_x, k) if mask[0] else None,
        grad_weight.unflatten(0, (k, -1)) if mask[1] else None,
        grad_bias.unflatten(0, (k, -1)) if mask[2] else None,
    )


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
) -> Tensor:
    """One convolution per member, ``[k, ...]`` in and out; one node to the graph."""
    outs = [
        aten.convolution(
            x[i],
            weight[i],
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
    return torch.stack(outs)


@convolution_each.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    one: Tensor = aten.convolution(x[0], weight[0], None if bias is None else bias[0], *geometry)
    return one.new_empty((weight.shape[0], *one.shape))


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``convolution_each``; one that ``mask`` leaves out comes back empty."""
    parts = [
        aten.convolution_backward(
            grad[i],
            x[i],
            weight[i],
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
    columns = [
        torch.stack(column) if wanted else grad.new_empty(0)
        for column, wanted in zip(zip(*parts, strict=True), mask, strict=True)
    ]
    return columns[0], columns[1], columns[2]


@convolution_each_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mask = rest[-1]
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format) if mask[0] else grad.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if mask[1] else grad.new_empty(0),
        grad.new_empty((grad.shape[0], *(bias_sizes or ()))) if mask[2] else grad.new_empty(0),
    )


def _separate_forward(
    context: Context, x: Tensor | Stacked, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    out: Tensor = convolution_each(context.stack(x), weight, bias, *geometry.arguments(geometry.groups))
    return out


def _separate_backward(
    context: Context,
    grad: Tensor,
    x: Tensor | Stacked,
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: Geometry,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    arguments = geometry.arguments(geometry.groups)
    parts = convolution_each_backward(grad, context.stack(x), weight, bias_sizes, *arguments, list(mask))
    return tuple(part if wanted else None for part, wanted in zip(parts, mask, strict=True))  # type: ignore[return-value]


def _single_forward(
    context: Context, x: Tensor | Stacked, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    out: Tensor = aten.convolution(
        _channels_last(context.stack(x)[0]),
        _channels_last(weight[0]),
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    parts = aten.convolution_backward(
        _channels_last(grad[0]),
        _channels_last(context.stack(x)[0]),
        _channels_last(weight[0]),
        bias_sizes,
        *geometry.arguments(geometry.groups),
        list(mask),
    )
    return tuple(part.unsqueeze(0) if wanted else None for part, wanted in zip(parts, mask, strict=True))  # type: ignore[return-value]


def _channels_last(x: Tensor) -> Tensor:
    """Images and filters as tensor cores want them: channels innermost."""
    if x.dim() != 4 or x.device.type != "cuda":
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _is_pointwise(geometry: Geometry, weight: torch.Size) -> bool:
    return (
        all(size == 1 for size in weight[2:])
        and set(geometry.stride) == {1}
        and set(geometry.padding) == {0}
        and geometry.groups == 1
        and not geometry.transposed
    )


def _bmm_forward(
    context: Context, x: Tensor | Stacked, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    images = context.stack(x)
    pixels = images.flatten(3)
    out = torch.matmul(weight.flatten(2).unsqueeze(1), pixels)
    if bias is not None:
        out = out + bias[:, None, :, None]
    return out.reshape(*out.shape[:3], *images.shape[3:])


def _bmm_backward(
    context: Context,
    grad: Tensor,
    x: Tensor | Stacked,
    weight: Tensor,
    bias_sizes: list[int] | None,
    geometry: Geometry,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    images = context.stack(x)
    outgoing, pixels = grad.flatten(3), images.flatten(3)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        flat = torch.matmul(weight.flatten(2).transpose(1, 2).unsqueeze(1), outgoing)
        grad_x = flat.unflatten(3, images.shape[3:])
    if mask[1]:
        left = outgoing.transpose(1, 2).flatten(2)
        right = pixels.permute(0, 1, 3, 2).flatten(1, 2)
        grad_weight = torch.bmm(left, right).reshape(weight.shape)
    if mask[2]:
        grad_bias = outgoing.sum((1, 3))
    return grad_x, grad_weight, grad_bias


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("grouped", lambda geometry, weight: True, _grouped_forward, _grouped_backward),
        Strategy("separate", lambda geometry, weight: True, _separate_forward, _separate_backward),
        Strategy("bmm", _is_pointwise, _bmm_forward, _bmm_backward),
    )
}


_SINGLE = Strategy("single", lambda geometry, weight: True, _single_forward, _single_backward)


def choose(context: Context, geometry: Geometry, weight: torch.Size) -> Strategy:
    """The strategy asked for, where it fits; else the default for the device."""
    if context.width == 1:
        return _SINGLE
    wanted = context.strategies.get("convolution", "auto")
    if wanted != "auto" and STRATEGIES[wanted].fits(geometry, weight):
        return STRATEGIES[wanted]
    return STRATEGIES["grouped"]


def _geometry(arguments: Sequence[Any]) -> Geometry:
    stride, padding, dilation, transposed, output_padding, groups = arguments
    return Geometry(tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)


@rule(aten.convolution.default, how="convolution strategy")
def convolution(
    context: Context,
    op: OpOverload,
    x: Stacked | Tensor,
    weight: Stacked | Tensor,
    bias: Stacked | Tensor | None,
    *arguments: Any,
) -> Stacked:
    geometry = _geometry(arguments)
    weights = context.stack(weight)
    strategy = choose(context, geometry, weights.shape[1:])
    biases = None if bias is None else context.stack(bias)
    return Stacked(strategy.forward(context, x, weights, biases, geometry))


@rule(aten.convolution_backward.default, how="convolution strategy")
def convolution_backward(
    context: Context,
    op: OpOverload,
    grad: Stacked | Tensor,
    x: Stacked | Tensor,
    weight: Stacked | Tensor,
    bias_sizes: list[int] | None,
    *arguments: Any,
) -> tuple[Stacked | None, ...]:
    *numbers, mask = arguments
    geometry = _geometry(numbers)
    weights = context.stack(weight)
    strategy = choose(context, geometry, weights.shape[1:])
    parts = strategy.backward(context, context.stack(grad), x, weights, bias_sizes, geometry, mask)
    return tuple(None if part is None else Stacked(part) for part in parts)
