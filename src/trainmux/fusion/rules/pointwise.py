"""Element by element: align the members' dimensions, then call the operator once."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, align, is_stacked, rank_of, rule
from trainmux.runtime import random_words

aten = torch.ops.aten

# Pointwise in effect, but without torch's tag.
EXTRA = frozenset(
    {
        aten.clone.default,
        aten._to_copy.default,
        aten.lift_fresh_copy.default,
        aten.threshold_backward.default,
        aten.gelu_backward.default,
        aten.tanh_backward.default,
        aten.sigmoid_backward.default,
        aten.silu_backward.default,
        aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu_backward.default,
        aten.elu_backward.default,
        aten.softplus_backward.default,
        aten.mish_backward.default,
        aten.masked_fill.Scalar,
        aten.where.self,
    }
)


def is_pointwise(op: Any) -> bool:
    """Whether ``pointwise`` can fuse this operator."""
    return isinstance(op, OpOverload) and (torch.Tag.pointwise in op.tags or op in EXTRA)


def pointwise(context: Context, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Broadcasting from the right works once every member value has the same number of dimensions."""
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_stacked)
    rank = max(rank_of(leaf) for leaf in leaves if isinstance(leaf, (Stacked, Tensor)))
    promoted = _scalar_dtype(leaves)

    def aligned(leaf: Any) -> Any:
        if not isinstance(leaf, Stacked):
            return leaf
        tensor = align(leaf, rank)
        if leaf.rank == 0 and promoted is not None and tensor.dtype.is_floating_point:
            # A member's scalar ranks below dimensioned tensors in type promotion; stacked it would not.
            return tensor.to(promoted)
        return tensor

    args, kwargs = pytree.tree_map(aligned, (args, kwargs), is_leaf=is_stacked)
    if "memory_format" in kwargs:
        # A member's channels_last has no meaning with one more dimension; the layout is ours to choose.
        kwargs = {**kwargs, "memory_format": torch.preserve_format}
    result = op(*args, **kwargs)
    if not isinstance(result, Tensor):
        return tuple(Stacked(item) for item in result)
    expected = context.value.dtype
    return Stacked(result if result.dtype == expected else result.to(expected))


def _scalar_dtype(leaves: list[Any]) -> torch.dtype | None:
    """The floating dtype that a member's scalars are promoted to by its other arguments."""
    by_rank: dict[bool, list[torch.dtype]] = {True: [], False: []}
    for leaf in leaves:
        tensor = leaf.tensor if isinstance(leaf, Stacked) else leaf
        if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point:
            by_rank[rank_of(leaf) > 0].append(tensor.dtype)
    dtypes = by_rank[True] or by_rank[False]
    if not dtypes:
        return None
    return functools.reduce(torch.promote_types, dtypes)


@rule(aten.masked_fill.Tensor, how="where")
def masked_fill(
    context: Context,
    op: OpOverload,
    x: Stacked | Tensor,
    mask: Stacked | Tensor,
    value: Stacked | Tensor,
) -> Stacked:
    """The operator itself takes one value only."""
    rank = context.value.dim()
    filled = torch.where(align(mask, rank), align(value, rank).to(context.value.dtype), align(x, rank))
    return Stacked(filled.expand(context.width, *context.value.shape))


@rule(aten.log_sigmoid_backward.default, aten._prelu_kernel.default, how="one call")
def sized_by_the_first(context: Context, op: OpOverload, *args: Stacked | Tensor) -> Stacked:
    """The kernel sizes its result by its first argument alone, and warns when that was too small."""
    return Stacked(op(*[context.stack(value) for value in args]))


@rule(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    how="shared constant",
)
def like(context: Context, op: OpOverload, x: Stacked, *args: Any, **kwargs: Any) -> Tensor:
    """A constant of a member's shape: the same for all members."""
    kwargs.pop("memory_format", None)
    shape, dtype = context.value.shape, context.value.dtype
    value = args[0] if op is aten.full_like.default else int(op is aten.ones_like.default)
    return torch.full(shape, value, dtype=dtype, device=context.value.device)


@rule(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
    how="shared constant",
)
def new(context: Context, op: OpOverload, x: Stacked, size: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A constant that takes only dtype and device from a member's value."""
    value = args[0] if op is aten.new_full.default else int(op is aten.new_ones.default)
    return torch.full(size, value, dtype=context.value.dtype, device=context.value.device)


@rule(aten.copy.default, how="one call")
def copy(
    context: Context, op: OpOverload, x: Stacked | Tensor, source: Stacked | Tensor, *args: Any
) -> Stacked:
    """The source in the shape and dtype of ``x``, whose values do not matter."""
    shape = context.value.shape
    values = align(source, len(shape))
    return Stacked(values.to(context.value.dtype).expand(context.width, *shape).clone())


@rule(torch.ops.trainmux.random_words.default, how="counters")
def words(
    context: Context, op: OpOverload, seed: Stacked, counter: Stacked, operator: int, shape: list[int]
) -> Stacked:
    return Stacked(random_words(context.stack(seed), context.stack(counter), operator, shape))
