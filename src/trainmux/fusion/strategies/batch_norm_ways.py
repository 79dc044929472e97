"""Batch norm over several members: their channels side by side in one call, or each along its own axes.

Folding the model axis into channels is free where members lie side by side already, as a grouped convolution
leaves them. Where members lie one after another it is a copy of all images, and the layout is lost for what
comes next. Written as arithmetic over each member's own axes there is no copy; a compiler makes one kernel of
it, so compiled steps take that way whenever folding would copy. Uncompiled ones measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, fold_channels, unfold_channels
from trainmux.fusion.strategies._family import MEASURED, Runs, Way

aten = torch.ops.aten
FAMILY_NAME = "batch_norm"


# ---- folded into channels --------------------------------------------------------------------------------


def _channel_vector(context: Context, value: Stacked | Tensor | None) -> Tensor | None:
    return None if value is None else context.stack(value).flatten()


def _unfold_vector(context: Context, value: Tensor) -> Stacked | Tensor:
    if value.numel() == 0:
        return value  # "not computed" in the operator's own convention
    return Stacked(value.unflatten(0, (context.width, -1)))


def _folded(
    context: Context, op: OpOverload, x: Stacked | Tensor, *rest: Stacked | Tensor | float | None
) -> tuple[Any, ...]:
    arguments: list[Any] = [
        _channel_vector(context, value) if isinstance(value, (Stacked, Tensor)) else value for value in rest
    ]
    out, *statistics = op(fold_channels(context.stack(x)), *arguments)
    return (
        Stacked(unfold_channels(out, context.width)),
        *(_unfold_vector(context, value) for value in statistics),
    )


def _folded_backward(
    context: Context,
    op: OpOverload,
    grad: Stacked | Tensor,
    x: Stacked | Tensor,
    weight: Stacked | Tensor | None,
    running_mean: Stacked | Tensor | None,
    running_var: Stacked | Tensor | None,
    save_mean: Stacked | Tensor | None,
    save_invstd: Stacked | Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Any, ...]:
    vectors = [
        _channel_vector(context, value)
        for value in (weight, running_mean, running_var, save_mean, save_invstd)
    ]
    grad_x, grad_weight, grad_bias = op(
        fold_channels(context.stack(grad)), fold_channels(context.stack(x)), *vectors, train, eps, mask
    )
    return (
        Stacked(unfold_channels(grad_x, context.width)) if mask[0] else None,
        _unfold_vector(context, grad_weight) if mask[1] else None,
        _unfold_vector(context, grad_bias) if mask[2] else None,
    )


# ---- along each member's own axes ------------------------------------------------------------------------


def _accumulated(x: Tensor) -> Tensor:
    """Half-precision numbers are summed in single precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _image_axes(x: Tensor) -> list[int]:
    """All axes of ``[k, n, c, ...]`` but the members' and the channels'."""
    return [axis for axis in range(1, x.dim()) if axis != 2]


def _along_channels(context: Context, vector: Stacked | Tensor, like: Tensor) -> Tensor:
    """``[k, c]`` so that it broadcasts with ``[k, n, c, ...]``."""
    stacked = context.stack(vector)
    return stacked.reshape(stacked.shape[0], 1, stacked.shape[1], *[1] * (like.dim() - 3))


def _own_axes(
    context: Context,
    op: OpOverload,
    x: Stacked | Tensor,
    weight: Stacked | Tensor | None,
    bias: Stacked | Tensor | None,
    running_mean: Stacked | Tensor,
    running_var: Stacked | Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    images = context.stack(x)
    wide = _accumulated(images)
    var, mean = torch.var_mean(wide, _image_axes(images), correction=0, keepdim=True)
    scale = torch.rsqrt(var + eps)
    out = (wide - mean) * scale
    if weight is not None:
        out = out * _along_channels(context, weight, images)
    if bias is not None:
        out = out + _along_channels(context, bias, images)
    k, count = images.shape[0], prod(images.shape) // (images.shape[0] * images.shape[2])
    means, variances = mean.reshape(k, -1), var.reshape(k, -1)
    unbiased = variances * (count / (count - 1) if count > 1 else float("nan"))
    new_mean = means * momentum + context.stack(running_mean) * (1 - momentum)
    new_var = unbiased * momentum + context.stack(running_var) * (1 - momentum)
    results = (out.to(images.dtype), means, scale.reshape(k, -1), new_mean, new_var)
    return tuple(
        Stacked(result.to(expected.dtype)) for result, expected in zip(results, context.value, strict=True)
    )


def _own_axes_backward(
    context: Context,
    op: OpOverload,
    grad: Stacked | Tensor,
    x: Stacked | Tensor,
    weight: Stacked | Tensor | None,
    running_mean: Stacked | Tensor | None,
    running_var: Stacked | Tensor | None,
    save_mean: Stacked | Tensor,
    save_invstd: Stacked | Tensor,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Any, ...]:
    images = context.stack(x)
    outgoing = _accumulated(context.stack(grad))
    axes, k = _image_axes(images), images.shape[0]
    count = prod(images.shape) // (k * images.shape[2])
    scale = _along_channels(context, save_invstd, images)
    normal = (_accumulated(images) - _along_channels(context, save_mean, images)) * scale
    summed = outgoing.sum(axes, keepdim=True)
    aligned = (outgoing * normal).sum(axes, keepdim=True)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        inner = (outgoing - summed / count - normal * (aligned / count)) * scale
        if weight is not None:
            inner = inner * _along_channels(context, weight, images)
        grad_x = Stacked(inner.to(images.dtype))
    vector_dtype = images.dtype if weight is None else context.stack(weight).dtype
    if mask[1]:
        grad_weight = Stacked(aligned.reshape(k, -1).to(vector_dtype))
    if mask[2]:
        grad_bias = Stacked(summed.reshape(k, -1).to(vector_dtype))
    return grad_x, grad_weight, grad_bias


# ---- the ways --------------------------------------------------------------------------------------------


def _images_of(context: Context, op: OpOverload, args: Sequence[Any]) -> Tensor:
    return context.stack(args[1] if op is aten.native_batch_norm_backward.default else args[0])


def _folds_freely(x: Tensor) -> bool:
    """Whether ``[k, n, c, ...]`` can be seen as ``[n, k * c, ...]`` without a copy."""
    return x.shape[0] == 1 or x.stride(0) == x.stride(2) * x.shape[2]


def _fold_fits(context: Context, op: OpOverload, *args: Any) -> bool:
    avoids_copies = context.compiles and context.strategies.get(FAMILY_NAME) == MEASURED
    return not (avoids_copies and op in (_FUNCTIONAL, _BACKWARD) and _own_axes_fit(context, op, *args))


def _own_axes_fit(context: Context, op: OpOverload, *args: Any) -> bool:
    trains = args[7] if op is aten.native_batch_norm_backward.default else args[5]
    return bool(trains) and not _folds_freely(_images_of(context, op, args))


_FUNCTIONAL = aten._native_batch_norm_legit_functional.default
_BACKWARD = aten.native_batch_norm_backward.default
FORWARDS = (
    _FUNCTIONAL,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
)
_FOLDED_RUNS: Runs = dict.fromkeys(FORWARDS, _folded) | {_BACKWARD: _folded_backward}
FOLD = Way("fold", "fold model axis into channels", _FOLDED_RUNS, _fold_fits)
FOLD_SINGLE = Way("single", "fold model axis into channels", _FOLDED_RUNS, single=True)
OWN_AXES = Way(
    "own_axes",
    "arithmetic along each member's own axes",
    {_FUNCTIONAL: _own_axes, _BACKWARD: _own_axes_backward},
    _own_axes_fit,
)
