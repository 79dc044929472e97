"""Members of a smaller rank in the graph of a larger one, their adapters padded with zeros.

A member is traced twice: as it is, and with some parameters wider than its own. The wide graph is taken only
where it is proved, node by node, that each of its values is the member's own one followed by zeros:

- both graphs have the same nodes with the same arguments, but for the sizes of views,
- an axis is wide where its length differs; wide axes go through operators of a short list alone, each of
  which turns zeros behind its operands into zeros behind its result, or sums over them,
- losses, metrics and buffers have no wide axis.

So losses are the member's own, and gradients of what was padded are zero. Code that reads its rank from a
shape, normalises over it or draws random numbers for it fails the proof.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.ir import OutputKind
from trainmux.tracing._passes import graph_constant, output_nodes
from trainmux.tracing._reach import tensor_digest

aten = torch.ops.aten

Pair = tuple[Any, Any]
"""A value's own shape and the wide one; of an argument that is no tensor, itself twice."""


def extends_by_zeros(own: fx.GraphModule, wide: fx.GraphModule, kinds: Sequence[OutputKind]) -> bool:
    """Whether ``wide`` computes what ``own`` does when its inputs are padded with zeros.

    ``kinds`` are those of the outputs of both.
    """
    nodes = list(zip(own.graph.nodes, wide.graph.nodes, strict=False))
    if len(own.graph.nodes) != len(wide.graph.nodes):
        return False
    number = {node: index for index, pair in enumerate(nodes) for node in pair}
    for one, other in nodes:
        named = one.op in ("placeholder", "get_attr")
        if one.op != other.op or not (named or one.target == other.target):
            return False
        if one.op == "get_attr":
            values = (graph_constant(own, one), graph_constant(wide, other))
            if tensor_digest(values[0]) != tensor_digest(values[1]):
                return False
        elif one.op == "call_function" and not _is_proved(one, other, number):
            return False
    outputs = zip(output_nodes(own), output_nodes(wide), kinds, strict=True)
    return all(
        number[one] == number[other] and (kind is OutputKind.GRADIENT or not _wide_axes(_shapes(one, other)))
        for one, other, kind in outputs
    )


def _is_proved(one: fx.Node, other: fx.Node, number: dict[fx.Node, int]) -> bool:
    """Whether two calls do the same, and zeros behind the operands are zeros behind the result."""
    leaves = [pytree.tree_leaves((node.args, dict(node.kwargs))) for node in (one, other)]
    if len(leaves[0]) != len(leaves[1]):
        return False
    pairs = list(zip(*leaves, strict=True))
    same = all(_same_argument(left, right, number) for left, right in pairs)
    operands = [_shapes(left, right) for left, right in pairs if isinstance(left, fx.Node)]
    result = _shapes(one, other)
    if not any(map(_wide_axes, (*operands, result))):
        return same
    rule = _RULES.get(one.target)
    is_view = rule is _views
    return rule is not None and (same or is_view) and rule(operands, result)


def _same_argument(one: Any, other: Any, number: dict[fx.Node, int]) -> bool:
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return number.get(one) == number.get(other)
    return type(one) is type(other) and (one == other or one != one)


def _shapes(one: fx.Node, other: fx.Node) -> Pair:
    """The shapes of a node's value in both graphs; of several values together, ``None`` where they differ."""
    values = [pytree.tree_leaves(node.meta.get("val")) for node in (one, other)]
    shapes = [tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)) for leaves in values]
    if len(shapes[0]) == len(shapes[1]) == 1:
        return shapes[0][0], shapes[1][0]
    return shapes[0], shapes[1]


def _wide_axes(pair: Pair) -> set[int]:
    """Axes whose length differs; the one numbered -1 where that cannot be said."""
    own, wide = pair
    if len(own) != len(wide):
        return {-1}
    return {axis for axis, (a, b) in enumerate(zip(own, wide, strict=True)) if a != b}


Rule = Callable[[Sequence[Pair], Pair], bool]


def _always(operands: Sequence[Pair], result: Pair) -> bool:
    """Axes are moved, values scaled or rounded, or summed over: zeros stay zeros, or add nothing.

    Of a product of matrices the inner axis is wide in both factors or in none: their lengths agree.
    """
    return True


def _views(operands: Sequence[Pair], result: Pair) -> bool:
    """Every wide axis is an axis of the result, with as many elements before and behind it."""
    (own, wide), (new_own, new_wide) = operands[0], result
    axes = _wide_axes(operands[0])
    found = {
        place
        for axis, place in itertools.product(axes, range(len(new_wide)))
        if (own[axis], wide[axis]) == (new_own[place], new_wide[place])
        and prod(wide[:axis]) == prod(new_wide[:place])
        and prod(own[:axis]) == prod(new_own[:place])
    }
    return len(found) == len(axes) and found == _wide_axes(result)


def _aligned(operands: Sequence[Pair], result: Pair) -> list[set[int]]:
    """Wide axes of each operand, counted as those of the result that they are broadcast to."""
    return [{axis + len(result[0]) - len(pair[0]) for axis in _wide_axes(pair)} for pair in operands]


def _sum(operands: Sequence[Pair], result: Pair) -> bool:
    """Both operands of a sum are zero where it is wide; neither is a number."""
    return len(operands) == 2 and all(axes == _wide_axes(result) for axes in _aligned(operands, result))


def _product(operands: Sequence[Pair], result: Pair) -> bool:
    """One factor is zero behind each wide axis of an elementwise product."""
    return _wide_axes(result) <= set().union(*_aligned(operands, result))


def _sum_and_product(operands: Sequence[Pair], result: Pair) -> bool:
    """A term that a product of matrices is added to must be zero where the product is."""
    return _aligned(operands[:1], result)[0] == _wide_axes(result)


def _lookup(operands: Sequence[Pair], result: Pair) -> bool:
    """Rows of a table, or gradients of rows, are wide; the number of rows is not."""
    return all(0 not in _wide_axes(pair) or len(pair[0]) > 2 for pair in (*operands, result))


_RULES: dict[Any, Rule] = {
    aten.t.default: _always,
    aten.transpose.int: _always,
    aten.permute.default: _always,
    aten.clone.default: _always,
    aten.detach.default: _always,
    aten.alias.default: _always,
    aten._to_copy.default: _always,
    aten.neg.default: _always,
    aten.mul.Scalar: _always,
    aten.div.Scalar: _always,
    aten.mm.default: _always,
    aten.bmm.default: _always,
    aten.sum.dim_IntList: _always,
    aten.view.default: _views,
    aten._unsafe_view.default: _views,
    aten.reshape.default: _views,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.mul.Tensor: _product,
    aten.addmm.default: _sum_and_product,
    aten.baddbmm.default: _sum_and_product,
    aten.embedding.default: _lookup,
    aten.embedding_dense_backward.default: _lookup,
}
