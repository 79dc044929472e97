"""Batch norm folded into channels, layer norm with per-member affine parameters, and softmax backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, align, fold_channels, member_dim, rule, unfold_channels

aten = torch.ops.aten


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
    how="fold model axis into channels",
)
def batch_norm(
    context: Context, op: OpOverload, x: Stacked | Tensor, *rest: Stacked | Tensor | float | None
) -> tuple[Any, ...]:
    arguments: list[Any] = [
        _fold_vector(context, value) if isinstance(value, (Stacked, Tensor)) else value for value in rest
    ]
    out, *statistics = op(fold_channels(context.stack(x)), *arguments)
    return (
        Stacked(unfold_channels(out, context.width)),
        *(_unfold_vector(context, value) for value in statistics),
    )


@rule(aten.native_batch_norm_backward.default, how="fold model axis into channels")
def batch_norm_backward(
    context: Context, op: OpOverload, grad: Stacked | Tensor, x: Stacked | Tensor, *rest: Any
) -> tuple[Any, ...]:
    """``rest`` is weight, running and saved statistics, then training, eps and the wanted gradients."""
    *vectors, train, eps, mask = rest
    grad_x, grad_weight, grad_bias = op(
        fold_channels(context.stack(grad)),
        fold_channels(context.stack(x)),
        *(_fold_vector(context, value) for value in vectors),
        train,
        eps,
        mask,
    )
    return (
        Stacked(unfold_channels(grad_x, context.width)) if mask[0] else None,
        _unfold_vector(context, grad_weight) if mask[1] else None,
        _unfold_vector(context, grad_bias) if mask[2] else None,
    )


def _fold_vector(context: Context, value: Stacked | Tensor | None) -> Tensor | None:
    return None if value is None else context.stack(value).flatten()


def _unfold_vector(context: Context, value: Tensor) -> Stacked | Tensor:
    if value.numel() == 0:
        return value  # the operator's convention for "not computed"
    return Stacked(value.unflatten(0, (context.width, -1)))


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


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, how="one call")
def softmax_backward(
    context: Context, op: OpOverload, grad: Stacked | Tensor, output: Stacked | Tensor, dim: int, dtype: Any
) -> Any:
    """torch.vmap copies arguments that members share or that are not contiguous."""
    rank = context.value.dim()
    if rank == 0:
        return NotImplemented
    return Stacked(op(context.stack(grad), context.stack(output), member_dim(dim, rank), dtype))
