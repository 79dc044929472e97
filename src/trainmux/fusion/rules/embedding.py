"""Embedding tables: look up along each member's own rows; gradients through offset indices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, rule

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
    offset = torch.arange(k, device=context.device, dtype=index.dtype).unsqueeze(1) * num_weights
    flat = op(rows.flatten(0, 1), (index + offset).flatten(), k * num_weights, -1, scale_grad_by_freq)
    return Stacked(flat.unflatten(0, (k, num_weights)))
