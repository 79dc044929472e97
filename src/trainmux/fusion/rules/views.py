"""Shapes: views, joins and cuts, with the dimensions counted from behind the model axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, align, member_dim, rule

aten = torch.ops.aten


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, how="reshape")
def reshape(context: Context, op: OpOverload, x: Stacked, shape: Sequence[int]) -> Stacked:
    # A member's view may be impossible on the layout that fusion chose: reshape copies then.
    return Stacked(x.tensor.reshape(context.width, *context.value.shape))


@rule(aten.transpose.int, how="view")
def transpose(context: Context, op: OpOverload, x: Stacked, dim0: int, dim1: int) -> Stacked:
    if x.rank == 0:
        return x
    return Stacked(x.tensor.transpose(member_dim(dim0, x.rank), member_dim(dim1, x.rank)))


@rule(aten.t.default, how="view")
def t(context: Context, op: OpOverload, x: Stacked) -> Stacked:
    return Stacked(x.tensor.transpose(1, 2)) if x.rank == 2 else x


@rule(aten.permute.default, how="view")
def permute(context: Context, op: OpOverload, x: Stacked, dims: Sequence[int]) -> Stacked:
    return Stacked(x.tensor.permute(0, *[member_dim(dim, x.rank) for dim in dims]))


@rule(aten.unsqueeze.default, how="view")
def unsqueeze(context: Context, op: OpOverload, x: Stacked, dim: int) -> Stacked:
    return Stacked(x.tensor.unsqueeze(member_dim(dim, x.rank + 1)))


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, how="view")
def squeeze(context: Context, op: OpOverload, x: Stacked, dim: Any = None) -> Stacked:
    # Only dimensions of size one disappear, so the result's shape says all.
    return Stacked(x.tensor.reshape(context.width, *context.value.shape))


@rule(aten.expand.default, how="view")
def expand(
    context: Context, op: OpOverload, x: Stacked, size: Sequence[int], *, implicit: bool = False
) -> Stacked:
    return Stacked(align(x, len(size)).expand(context.width, *context.value.shape))


@rule(aten.select.int, how="view")
def select(context: Context, op: OpOverload, x: Stacked, dim: int, index: int) -> Stacked:
    return Stacked(x.tensor.select(member_dim(dim, x.rank), index))


@rule(aten.slice.Tensor, how="view")
def slice_(
    context: Context,
    op: OpOverload,
    x: Stacked,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Stacked:
    return Stacked(op(x.tensor, member_dim(dim, x.rank), start, end, step))


@rule(aten.split.Tensor, aten.split_with_sizes.default, how="view")
def split(context: Context, op: OpOverload, x: Stacked, sizes: Any, dim: int = 0) -> tuple[Stacked, ...]:
    return tuple(Stacked(part) for part in op(x.tensor, sizes, member_dim(dim, x.rank)))


@rule(aten.unbind.int, how="view")
def unbind(context: Context, op: OpOverload, x: Stacked, dim: int = 0) -> tuple[Stacked, ...]:
    return tuple(Stacked(part) for part in x.tensor.unbind(member_dim(dim, x.rank)))


@rule(aten.cat.default, how="one call")
def cat(context: Context, op: OpOverload, tensors: Sequence[Stacked | Tensor], dim: int = 0) -> Any:
    if any((item.rank if isinstance(item, Stacked) else item.dim()) == 1 for item in tensors) and (
        context.value.dim() > 1
    ):
        return NotImplemented  # torch lets an empty 1-d tensor join anything
    parts = [context.stack(item) for item in tensors]
    return Stacked(torch.cat(parts, member_dim(dim, context.value.dim())))


@rule(aten.stack.default, how="one call")
def stack(context: Context, op: OpOverload, tensors: Sequence[Stacked | Tensor], dim: int = 0) -> Stacked:
    parts = [context.stack(item) for item in tensors]
    return Stacked(torch.stack(parts, member_dim(dim, context.value.dim())))


@rule(aten.constant_pad_nd.default, how="one call")
def constant_pad(context: Context, op: OpOverload, x: Stacked, pad: Sequence[int], value: Any = 0) -> Stacked:
    # Padding is counted from the last dimension: the model axis is out of its way.
    return Stacked(op(x.tensor, pad, value))


@rule(aten.flip.default, how="one call")
def flip(context: Context, op: OpOverload, x: Stacked, dims: Sequence[int]) -> Stacked:
    return Stacked(x.tensor.flip([member_dim(dim, x.rank) for dim in dims]))


@rule(aten.select_scatter.default, how="one call")
def select_scatter(
    context: Context, op: OpOverload, x: Stacked | Tensor, src: Stacked | Tensor, dim: int, index: int
) -> Stacked:
    base = context.stack(x)
    return Stacked(op(base, context.stack(src), member_dim(dim, base.dim() - 1), index))


@rule(aten.slice_scatter.default, how="one call")
def slice_scatter(
    context: Context,
    op: OpOverload,
    x: Stacked | Tensor,
    src: Stacked | Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Stacked:
    base = context.stack(x)
    return Stacked(op(base, context.stack(src), member_dim(dim, base.dim() - 1), start, end, step))
