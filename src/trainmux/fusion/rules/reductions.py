"""Reductions and softmax along a member's own dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, member_dim, rule

aten = torch.ops.aten


def _dims(x: Stacked, dims: Sequence[int] | int | None) -> list[int]:
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(1, x.rank + 1))
    if isinstance(dims, int):
        dims = [dims]
    return [member_dim(dim, x.rank) for dim in dims]


def _flat(x: Stacked) -> Stacked:
    """A member's scalar as a vector of one, so that there is a dimension to reduce."""
    return Stacked(x.tensor.unsqueeze(1)) if x.rank == 0 else x


@rule(aten.sum.dim_IntList, aten.mean.dim, how="one call")
def over_dims(
    context: Context,
    op: OpOverload,
    x: Stacked,
    dims: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Stacked:
    if x.rank == 0:
        return Stacked(op(x.tensor.unsqueeze(1), [1], False, dtype=dtype))
    return Stacked(op(x.tensor, _dims(x, dims), keepdim, dtype=dtype))


@rule(aten.sum.default, how="one call")
def total(context: Context, op: OpOverload, x: Stacked, *, dtype: torch.dtype | None = None) -> Stacked:
    x = _flat(x)
    return Stacked(aten.sum.dim_IntList(x.tensor, _dims(x, None), False, dtype=dtype))


@rule(aten.mean.default, how="one call")
def average(context: Context, op: OpOverload, x: Stacked, *, dtype: torch.dtype | None = None) -> Stacked:
    x = _flat(x)
    return Stacked(aten.mean.dim(x.tensor, _dims(x, None), False, dtype=dtype))


@rule(aten.amax.default, aten.amin.default, how="one call")
def extreme(
    context: Context, op: OpOverload, x: Stacked, dims: Sequence[int] = (), keepdim: bool = False
) -> Stacked:
    if x.rank == 0:
        return x
    return Stacked(op(x.tensor, _dims(x, dims), keepdim))


@rule(
    aten._softmax.default,
    aten._log_softmax.default,
    aten._safe_softmax.default,
    how="one call",
)
def softmax(context: Context, op: OpOverload, x: Stacked, dim: int, *args: Any, **kwargs: Any) -> Any:
    if x.rank == 0:
        return NotImplemented
    return Stacked(op(x.tensor, member_dim(dim, x.rank), *args, **kwargs))


@rule(
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    how="one call",
)
def softmax_backward(
    context: Context, op: OpOverload, grad: Stacked | Tensor, output: Stacked | Tensor, dim: int, dtype: Any
) -> Any:
    if context.value.dim() == 0:
        return NotImplemented
    rank = context.value.dim()
    return Stacked(op(context.stack(grad), context.stack(output), member_dim(dim, rank), dtype))


@rule(aten.cumsum.default, aten.cumprod.default, how="one call")
def cumulate(context: Context, op: OpOverload, x: Stacked, dim: int, **kwargs: Any) -> Any:
    if x.rank == 0:
        return NotImplemented
    return Stacked(op(x.tensor, member_dim(dim, x.rank), **kwargs))
