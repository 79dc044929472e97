"""Rows picked, added or looked up by index: along each member's own rows, or through offset indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, member_dim, rule

aten = torch.ops.aten


@rule(aten.embedding.default, how="gather per member")
def embedding(
    context: Context,
    op: OpOverload,
    weight: Stacked | Tensor,
    indices: Stacked | Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Stacked:
    if not isinstance(weight, Stacked):
        assert isinstance(indices, Stacked)
        return Stacked(op(weight, indices.tensor, padding_idx, scale_grad_by_freq, False))
    if not isinstance(indices, Stacked):
        rows = weight.tensor.index_select(1, indices.flatten())
        return Stacked(rows.reshape(context.width, *context.value.shape))
    index = indices.tensor.reshape(context.width, -1, 1).expand(-1, -1, weight.shape[1])
    return Stacked(weight.tensor.gather(1, index).reshape(context.width, *context.value.shape))


@rule(aten.embedding_dense_backward.default, how="offset indices, one call")
def embedding_backward(
    context: Context,
    op: OpOverload,
    grad: Stacked | Tensor,
    indices: Stacked | Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Stacked:
    k = context.width
    rows = context.stack(grad).reshape(k, -1, context.value.shape[1])
    index = context.stack(indices).reshape(k, -1)
    if padding_idx >= 0:
        # The operator itself can leave out one row of one table only.
        rows = rows.masked_fill((index == padding_idx).unsqueeze(-1), 0.0)
    offset = torch.arange(k, device=index.device, dtype=index.dtype).unsqueeze(1) * num_weights
    flat = op(rows.flatten(0, 1), (index + offset).flatten(), k * num_weights, -1, scale_grad_by_freq)
    return Stacked(flat.unflatten(0, (k, num_weights)))


@rule(aten.index_add.default, how="offset indices, one call")
def index_add(
    context: Context,
    op: OpOverload,
    x: Stacked | Tensor,
    dim: int,
    index: Stacked | Tensor,
    source: Stacked | Tensor,
    *,
    alpha: float = 1,
) -> Any:
    """torch.vmap loops over members whose indices differ."""
    base, added = context.stack(x), context.stack(source)
    if base.dim() == 1 or added.dim() != base.dim():
        return NotImplemented
    axis = member_dim(dim, base.dim() - 1)
    if not isinstance(index, Stacked):
        return Stacked(op(base, axis, index, added, alpha=alpha))
    k, size = context.width, base.shape[axis]
    offset = torch.arange(k, device=index.tensor.device, dtype=index.tensor.dtype).unsqueeze(1) * size
    rows = op(
        base.movedim(axis, 1).flatten(0, 1),
        0,
        (index.tensor.reshape(k, -1) + offset).flatten(),
        added.movedim(axis, 1).flatten(0, 1),
        alpha=alpha,
    )
    return Stacked(rows.unflatten(0, (k, size)).movedim(1, axis))


@rule(aten.searchsorted.Tensor, how="one call")
def searchsorted(
    context: Context,
    op: OpOverload,
    boundaries: Stacked | Tensor,
    x: Stacked | Tensor,
    *,
    sorter: Stacked | Tensor | None = None,
    **kwargs: Any,
) -> Stacked:
    """torch.vmap hands on what members share as a view, and the kernel warns before it copies that."""
    values = context.stack(x)
    if not isinstance(boundaries, Stacked) and not isinstance(sorter, Stacked) and boundaries.dim() == 1:
        return Stacked(op(boundaries, values.contiguous(), sorter=sorter, **kwargs))
    rows = context.stack(boundaries).contiguous()
    if rows.dim() == 2:  # one row for values of any shape
        values = values.reshape(context.width, -1)
    order = None if sorter is None else context.stack(sorter).contiguous()
    found = op(rows, values.contiguous(), sorter=order, **kwargs)
    return Stacked(found.reshape(context.width, *context.value.shape))
