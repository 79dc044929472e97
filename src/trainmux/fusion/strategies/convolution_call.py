"""A convolution's arguments as its ways see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked
from trainmux.fusion.strategies._family import Runs, Way, always

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
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Backward = Callable[
    [Context, Tensor, Tensor | Stacked, Tensor, list[int] | None, Geometry, Sequence[bool]], Gradients
]


def convolution_way(
    name: str,
    how: str,
    forward: Forward,
    backward: Backward,
    fits: Callable[[Context, Geometry, torch.Size], bool] = always,
    *,
    single: bool = False,
) -> Way:
    """A way from its two functions; ``fits`` is asked with the geometry and a member's filter shape."""

    def run_forward(
        context: Context,
        op: OpOverload,
        x: Stacked | Tensor,
        weight: Stacked | Tensor,
        bias: Stacked | Tensor | None,
        *numbers: Any,
    ) -> Stacked:
        biases = None if bias is None else context.stack(bias)
        return Stacked(forward(context, x, context.stack(weight), biases, _geometry(numbers)))

    def run_backward(
        context: Context,
        op: OpOverload,
        grad: Stacked | Tensor,
        x: Stacked | Tensor,
        weight: Stacked | Tensor,
        bias_sizes: list[int] | None,
        *numbers: Any,
    ) -> tuple[Stacked | None, ...]:
        *geometry, mask = numbers
        parts = backward(
            context, context.stack(grad), x, context.stack(weight), bias_sizes, _geometry(geometry), mask
        )
        return tuple(None if part is None else Stacked(part) for part in parts)

    def fits_call(context: Context, op: OpOverload, *args: Any) -> bool:
        is_backward = op is aten.convolution_backward.default
        weight = args[2] if is_backward else args[1]
        numbers = args[4:-1] if is_backward else args[3:]
        return fits(context, _geometry(numbers), weight.shape)

    runs: Runs = {aten.convolution.default: run_forward, aten.convolution_backward.default: run_backward}
    return Way(name, how, runs, fits_call, single)


def _geometry(numbers: Sequence[Any]) -> Geometry:
    stride, padding, dilation, transposed, output_padding, groups = numbers
    return Geometry(tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)


def is_two_dimensional(context: Context, geometry: Geometry, weight: torch.Size) -> bool:
    """Whether images have rows and columns: only these can have their channels innermost."""
    return len(weight) == 4


def has_one_pixel(context: Context, geometry: Geometry, weight: torch.Size) -> bool:
    """Whether each pixel of the output comes from one pixel of the input: a product of matrices."""
    return (
        all(size == 1 for size in weight[2:])
        and set(geometry.stride) == {1}
        and set(geometry.padding) == {0}
        and geometry.groups == 1
        and not geometry.transposed
    )


def channels_last(x: Tensor) -> Tensor:
    """One member's images or filters with their channels innermost, where they have rows and columns."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
