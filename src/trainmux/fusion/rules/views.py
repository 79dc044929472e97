"""Shapes: views and joins for which ``torch.vmap`` fails, copies or scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, align, member_dim, rule

aten = torch.ops.aten


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    how="reshape",
)
def reshape(context: Context, op: OpOverload, x: Stacked, shape: Any) -> Stacked:
    # A member's view may be impossible on the layout that fusion chose: reshape copies then.
    return Stacked(x.tensor.reshape(context.width, *context.value.shape))


@rule(aten.expand.default, how="view")
def expand(
    context: Context, op: OpOverload, x: Stacked, size: Sequence[int], *, implicit: bool = False
) -> Stacked:
    return Stacked(align(x, len(size)).expand(context.width, *context.value.shape))


@rule(aten.stack.default, how="one call")
def stack(context: Context, op: OpOverload, tensors: Sequence[Stacked | Tensor], dim: int = 0) -> Stacked:
    parts = [context.stack(item) for item in tensors]
    return Stacked(torch.stack(parts, member_dim(dim, context.value.dim())))


@rule(aten.select_scatter.default, aten.slice_scatter.default, how="one call")
def scatter(
    context: Context,
    op: OpOverload,
    x: Stacked | Tensor,
    src: Stacked | Tensor,
    dim: int = 0,
    *where: int | None,
) -> Stacked:
    base = context.stack(x)
    return Stacked(op(base, context.stack(src), member_dim(dim, base.dim() - 1), *where))
