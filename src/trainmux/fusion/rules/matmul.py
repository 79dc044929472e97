"""Matrix products: of two matrices in the ways of a table, the others with the model axis in the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, align, rule, strategy_rule
from trainmux.fusion.strategies import Family
from trainmux.fusion.strategies.matmul_ways import BMM, EACH, SINGLE, WIDE

aten = torch.ops.aten


MATMUL = Family("matmul", (SINGLE, BMM, EACH, WIDE))
strategy_rule(MATMUL, aten.mm.default, aten.addmm.default)


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
    offset = (align(bias, 3) if isinstance(bias, Stacked) else bias).expand(
        context.width, *context.value.shape
    )
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
