"""Matrix products with the model axis in the batch; a single member's as a plain product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, align, rule

aten = torch.ops.aten


@rule(aten.mm.default, how="bmm", how_alone="the member's own product")
def mm(context: Context, op: OpOverload, a: Stacked | Tensor, b: Stacked | Tensor) -> Stacked:
    if context.width == 1:
        return Stacked(torch.mm(context.alone(a), context.alone(b)).unsqueeze(0))
    if isinstance(a, Stacked) and not isinstance(b, Stacked) and _rows_merge(a.tensor):
        k, m, n = a.tensor.shape
        return Stacked(torch.mm(a.tensor.view(k * m, n), b).view(k, m, -1))
    return Stacked(torch.bmm(context.stack(a), context.stack(b)))


def _rows_merge(x: Tensor) -> bool:
    """Whether ``[k, m, n]`` can be viewed as ``[k * m, n]``."""
    return x.stride(0) == x.stride(1) * x.shape[1]


@rule(aten.addmm.default, how="bmm", how_alone="the member's own product")
def addmm(
    context: Context,
    op: OpOverload,
    bias: Stacked | Tensor,
    a: Stacked | Tensor,
    b: Stacked | Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Stacked:
    if context.width == 1:
        one = torch.addmm(*map(context.alone, (bias, a, b)), beta=beta, alpha=alpha)
        return Stacked(one.unsqueeze(0))
    offset = align(bias, 2)
    if isinstance(a, Stacked) or isinstance(b, Stacked):
        return Stacked(torch.baddbmm(offset, context.stack(a), context.stack(b), beta=beta, alpha=alpha))
    product = torch.mm(a, b).expand(context.width, -1, -1)
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return Stacked(scaled)  # as torch does: NaN in an ignored bias does not count
    return Stacked(scaled + (offset if beta == 1 else offset * beta))


@rule(aten.bmm.default, how="fold model axis into batch")
def bmm(context: Context, op: OpOverload, a: Stacked | Tensor, b: Stacked | Tensor) -> Stacked:
    left, right = context.stack(a).flatten(0, 1), context.stack(b).flatten(0, 1)
    return Stacked(torch.bmm(left, right).unflatten(0, (context.width, -1)))


@rule(aten.baddbmm.default, how="fold model axis into batch")
def baddbmm(
    context: Context,
    op: OpOverload,
    bias: Stacked | Tensor,
    a: Stacked | Tensor,
    b: Stacked | Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Stacked:
    offset = align(bias, 3).expand(context.width, *context.value.shape)
    left, right = context.stack(a).flatten(0, 1), context.stack(b).flatten(0, 1)
    product = torch.baddbmm(offset.flatten(0, 1), left, right, beta=beta, alpha=alpha)
    return Stacked(product.unflatten(0, (context.width, -1)))


@rule(aten.mv.default, how="bmm")
def mv(context: Context, op: OpOverload, a: Stacked | Tensor, x: Stacked | Tensor) -> Stacked:
    return Stacked(torch.bmm(context.stack(a), context.stack(x).unsqueeze(2)).squeeze(2))


@rule(aten.dot.default, how="bmm")
def dot(context: Context, op: OpOverload, x: Stacked | Tensor, y: Stacked | Tensor) -> Stacked:
    product = torch.bmm(context.stack(x).unsqueeze(1), context.stack(y).unsqueeze(2))
    return Stacked(product.reshape(context.width))
