"""Batch norm in the ways of a table; layer norm with per-member affine parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, align, rule, strategy_rule
from trainmux.fusion.strategies import Family
from trainmux.fusion.strategies.batch_norm_ways import FAMILY_NAME, FOLD, FOLD_SINGLE, FORWARDS, OWN_AXES

aten = torch.ops.aten


BATCH_NORM = Family(FAMILY_NAME, (FOLD_SINGLE, FOLD, OWN_AXES))
strategy_rule(BATCH_NORM, *FORWARDS, aten.native_batch_norm_backward.default)


@rule(aten.native_layer_norm.default, how="normalise at once, affine per member")
def layer_norm(
    context: Context,
    op: OpOverload,
    x: Stacked | Tensor,
    shape: Sequence[int],
    weight: Stacked | Tensor | None,
    bias: Stacked | Tensor | None,
    eps: float,
) -> tuple[Stacked, Stacked, Stacked]:
    stacked = context.stack(x)
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        out, mean, rstd = op(stacked, shape, weight, bias, eps)
        return Stacked(out), Stacked(mean), Stacked(rstd)
    out, mean, rstd = op(stacked, shape, None, None, eps)
    rank = stacked.dim() - 1
    if weight is not None:
        out = out * align(weight, rank)
    if bias is not None:
        out = out + align(bias, rank)
    return Stacked(out.to(context.value[0].dtype)), Stacked(mean), Stacked(rstd)


@rule(aten.native_layer_norm_backward.default, how="normalise at once, affine per member")
def layer_norm_backward(
    context: Context,
    op: OpOverload,
    grad: Stacked | Tensor,
    x: Stacked | Tensor,
    shape: Sequence[int],
    mean: Stacked | Tensor,
    rstd: Stacked | Tensor,
    weight: Stacked | Tensor | None,
    bias: Stacked | Tensor | None,
    mask: Sequence[bool],
) -> tuple[Stacked | None, Stacked | None, Stacked | None]:
    incoming, inputs = context.stack(grad), context.stack(x)
    # The kernel reads these two as if they were contiguous.
    means, scales = context.stack(mean).contiguous(), context.stack(rstd).contiguous()
    rank = inputs.dim() - 1
    batch_dims = list(range(1, 1 + rank - len(shape)))
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        inner = incoming if weight is None else (incoming * align(weight, rank)).to(inputs.dtype)
        grad_x = Stacked(op(inner, inputs, shape, means, scales, None, None, [True, False, False])[0])
    if mask[1]:
        product = incoming * ((inputs - means) * scales)
        summed = product.sum(batch_dims) if batch_dims else product
        grad_weight = Stacked(summed.to(context.value[1].dtype))
    if mask[2]:
        summed = incoming.sum(batch_dims) if batch_dims else incoming
        grad_bias = Stacked(summed.to(context.value[2].dtype))
    return grad_x, grad_weight, grad_bias
