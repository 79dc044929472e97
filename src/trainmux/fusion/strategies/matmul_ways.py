"""Products of matrices: one batched product, one per member, or one wide product over a shared factor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, align
from trainmux.fusion.strategies._family import Way

aten = torch.ops.aten
_ALIGNMENT_BYTES = 16


def rows_merge(x: Tensor) -> bool:
    """Whether ``[k, m, n]`` can be seen as ``[k * m, n]`` without a copy."""
    return x.stride(0) == x.stride(1) * x.shape[1]


def _plus(product: Tensor, bias: Stacked | Tensor, beta: float, alpha: float) -> Stacked:
    """What ``addmm`` does beside the product; with ``beta`` 0 the bias is left out, NaN and all."""
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return Stacked(scaled)
    offset = align(bias, 2)
    return Stacked(scaled + (offset if beta == 1 else offset * beta))


def _single_mm(context: Context, op: OpOverload, a: Stacked | Tensor, b: Stacked | Tensor) -> Stacked:
    return Stacked(torch.mm(context.stack(a)[0], context.stack(b)[0]).unsqueeze(0))


def _single_addmm(
    context: Context,
    op: OpOverload,
    bias: Stacked | Tensor,
    a: Stacked | Tensor,
    b: Stacked | Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Stacked:
    one = torch.addmm(
        context.stack(bias)[0], context.stack(a)[0], context.stack(b)[0], beta=beta, alpha=alpha
    )
    return Stacked(one.unsqueeze(0))


def _bmm(context: Context, op: OpOverload, a: Stacked | Tensor, b: Stacked | Tensor) -> Stacked:
    if isinstance(a, Stacked) and not isinstance(b, Stacked) and rows_merge(a.tensor):
        k, m, n = a.tensor.shape
        return Stacked(torch.mm(a.tensor.view(k * m, n), b).view(k, m, -1))
    return Stacked(torch.bmm(context.stack(a), context.stack(b)))


def _baddbmm(
    context: Context,
    op: OpOverload,
    bias: Stacked | Tensor,
    a: Stacked | Tensor,
    b: Stacked | Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Stacked:
    if not isinstance(a, Stacked) and not isinstance(b, Stacked):
        return _plus(torch.mm(a, b).expand(context.width, -1, -1), bias, beta, alpha)
    offset = align(bias, 2) if isinstance(bias, Stacked) else bias
    return Stacked(torch.baddbmm(offset, context.stack(a), context.stack(b), beta=beta, alpha=alpha))


@torch.library.custom_op("trainmux::mm_each", mutates_args=())
def mm_each(a: Tensor, b: Tensor) -> Tensor:
    """One product per member, ``[k, m, n]`` times ``[k, n, p]``; one node to the graph."""
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    for index in range(a.shape[0]):
        torch.mm(a[index], b[index], out=out[index])
    return out


@mm_each.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


def _each(context: Context, op: OpOverload, a: Stacked | Tensor, b: Stacked | Tensor) -> Stacked:
    return Stacked(mm_each(context.stack(a), context.stack(b)))


def _each_plus(
    context: Context,
    op: OpOverload,
    bias: Stacked | Tensor,
    a: Stacked | Tensor,
    b: Stacked | Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Stacked:
    return _plus(mm_each(context.stack(a), context.stack(b)), bias, beta, alpha)


def _is_aligned(context: Context, op: OpOverload, *args: Stacked | Tensor, **kwargs: float) -> bool:
    """Whether the sizes are such that a product need not be extended: only a plain product ever is."""
    a, b = args[-2:]
    if not isinstance(a, Stacked) and not isinstance(b, Stacked):
        return False
    sizes = (*a.shape[-2:], *b.shape[-2:])
    itemsize = (a.tensor if isinstance(a, Stacked) else a).dtype.itemsize
    return all(size * itemsize % _ALIGNMENT_BYTES == 0 for size in sizes)


def _wide(context: Context, op: OpOverload, a: Tensor, b: Stacked) -> Stacked:
    k, _, p = b.tensor.shape
    columns = b.tensor.transpose(1, 2).flatten(0, 1)  # [k * p, n], as weights are stored
    return Stacked(torch.mm(a, columns.t()).unflatten(1, (k, p)).transpose(0, 1))


def _wide_plus(
    context: Context,
    op: OpOverload,
    bias: Stacked | Tensor,
    a: Tensor,
    b: Stacked,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Stacked:
    return _plus(_wide(context, op, a, b).tensor, bias, beta, alpha)


def _shares_the_left(context: Context, op: OpOverload, *args: Stacked | Tensor, **kwargs: float) -> bool:
    """Whether all members multiply the same rows with weights that lie one after another."""
    a, b = args[-2:]
    return not isinstance(a, Stacked) and isinstance(b, Stacked) and rows_merge(b.tensor.transpose(1, 2))


SINGLE = Way(
    "single",
    "the member's own product",
    {aten.mm.default: _single_mm, aten.addmm.default: _single_addmm},
    single=True,
)
BMM = Way("bmm", "bmm", {aten.mm.default: _bmm, aten.addmm.default: _baddbmm})
EACH = Way(
    "separate",
    "one product per member",
    {aten.mm.default: _each, aten.addmm.default: _each_plus},
    _is_aligned,
)
WIDE = Way(
    "wide",
    "one wide product over shared rows",
    {aten.mm.default: _wide, aten.addmm.default: _wide_plus},
    _shares_the_left,
)
