"""Gradients that are zero but for a few rows: those of embedding tables (D3).

An optimizer with state changes every row of a table in every step, but the rows that no batch looked up have
a gradient of zero. To write that gradient, to read it for its norm and to read it again for the update is a
third of an update's traffic. Here rows that were looked up are updated by themselves, all others with a
gradient that is nowhere in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from trainmux.lowering import insert_call

aten = torch.ops.aten
T = TypeVar("T")

MIN_ROWS_FOR_EACH = 4
"""A table has at least so many rows for each that is looked up, or its gradient stays one tensor."""
MIN_ELEMENTS = 1 << 16
"""Smaller tables are updated in one kernel with others."""

_SAME_ELEMENTS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.clone.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.full.default, aten.new_full.default)


class RowGradient(NamedTuple, Generic[T]):
    """``values`` ``[k * n, d]`` belong to the rows ``rows`` ``[k, n]`` of each member's table.

    A row that comes up several times has the sum of its values as its gradient, one that does not has zero.
    In a graph that is being built both are nodes.
    """

    rows: T
    values: T


def as_row_gradient(gradient: fx.Node, parameter: fx.Node) -> RowGradient[fx.Node] | None:
    """The rows that a gradient consists of, if it is one of rows and nobody else reads it."""
    table = parameter.meta["val"]
    if table.dim() != 3 or table[0].numel() < MIN_ELEMENTS or gradient.users:
        return None
    node = gradient
    while node.op == "call_function" and node.target in _SAME_ELEMENTS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if len(source.users) != 1:
            return None
        node = source
    found = _scattered(node, tuple(table.shape))
    if found is None:
        return None
    offset, values, mask = found
    index = _index_of_members(offset, len(table), table.shape[1])
    if index is None or index.meta["val"].shape[1] * MIN_ROWS_FOR_EACH > table.shape[1]:
        return None
    return RowGradient(index, values if mask is None else _masked(node, values, mask))


def erase_unread(node: fx.Node) -> None:
    """Take a node that nobody reads out of its graph, and then those that only it read."""
    sources = node.all_input_nodes
    if node.users or node.op == "placeholder":
        return
    node.graph.erase_node(node)
    for source in dict.fromkeys(sources):
        erase_unread(source)


def _scattered(node: fx.Node, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Indices into all members' tables in one, the values added there, and which of them count.

    ``None`` where ``node`` computes something else.
    """
    num_members, num_rows, size = shape
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or tuple(value.shape) != (num_members * num_rows, size):
        return None
    mask: Any = None
    zeros: Any = None
    match node.target, node.args:
        case aten.embedding_dense_backward.default, (values, index, _, -1, False):
            pass
        case aten._unsafe_masked_index_put_accumulate.default, (zeros, mask, [index], values):
            pass
        case ((aten.index_put.default | aten._unsafe_index_put.default), (zeros, [index], values, True)):
            pass
        case aten.index_add.default, (zeros, 0, index, values) if not node.kwargs:
            pass
        case _:
            return None
    assert isinstance(index, fx.Node)
    assert isinstance(values, fx.Node)
    if zeros is not None and not _is_zero(zeros):
        return None
    if index.meta["val"].dim() != 1 or tuple(values.meta["val"].shape) != (len(index.meta["val"]), size):
        return None
    return index, values, mask


def _masked(node: fx.Node, values: fx.Node, mask: fx.Node) -> fx.Node:
    """The scattered values, zero where the mask is false; a new node in front of ``node``."""
    graph = node.graph
    with graph.inserting_before(node), node.meta["val"].fake_mode:
        off = insert_call(graph, node, aten.logical_not.default, (mask,))
        return insert_call(graph, node, aten.masked_fill.Scalar, (values, off, 0.0))


def _is_zero(node: object) -> bool:
    if not isinstance(node, fx.Node) or node.target not in _ZEROS:
        return False
    return node.target in _ZEROS[:2] or node.args[-1] == 0  # type: ignore[return-value]


def _index_of_members(offset: fx.Node, num_members: int, num_rows: int) -> fx.Node | None:
    """``[k, n]`` rows of each member's own table, from indices into all members' tables in one."""
    node = offset
    while node.target in _SAME_ELEMENTS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    index, begin = node.args
    if not isinstance(index, fx.Node) or not isinstance(begin, fx.Node):
        return None
    shapes = tuple(index.meta["val"].shape), tuple(begin.meta["val"].shape)
    if len(shapes[0]) != 2 or shapes[0][0] != num_members or shapes[1] != (num_members, 1):
        return None
    is_offset = begin.target is aten.mul.Tensor and begin.args[1] == num_rows
    return index if is_offset else None


@dataclass(frozen=True)
class GradientRows:
    """The rows of a table that have a gradient: where they are, and each one's whole gradient."""

    member: Tensor  # [k, 1]
    index: Tensor  # [k, n]
    once: Tensor  # [k, n * d]: each row's gradient at one of its places, zero at the others
    gradient: Tensor  # [k, n, d]: each row's gradient at all of its places

    @staticmethod
    def of(given: RowGradient[Tensor], parameter: Tensor) -> GradientRows:
        """Add up what belongs to the same row."""
        index, values = given.rows, given.values
        num_members, num_rows, size = parameter.shape
        member = torch.arange(num_members, device=index.device).unsqueeze(1)
        flat = (index + member * num_rows).flatten()
        numbers = torch.arange(len(flat), device=index.device, dtype=torch.int32)
        # One of the places that share a row stands for all of them. It does not matter which.
        place = torch.zeros(num_members * num_rows, device=index.device, dtype=torch.int32)
        first = place.index_put((flat,), numbers)[flat]
        once = torch.zeros_like(values).index_put((first,), values, accumulate=True)
        gradient = once[first].reshape(num_members, -1, size)
        return GradientRows(member, index, once.reshape(num_members, -1), gradient)

    def take(self, table: Tensor) -> Tensor:
        """A copy of the rows, ``[k, n, d]``."""
        return table[self.member, self.index]

    def put(self, table: Tensor, rows: Tensor) -> None:
        """Write the rows. Those of one row are the same, so it does not matter which comes last."""
        table.index_put_((self.member, self.index), rows)


def zero_like(parameter: Tensor) -> Tensor:
    """A gradient of zeros that takes no memory."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
