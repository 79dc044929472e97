"""Kinds of nodes: library calls, fusable operators, and inline ones that cost nothing."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.lowering._given_memory import same_strides
from trainmux.lowering._inductor import is_fusable
from trainmux.tracing import written_arguments

aten, prims = torch.ops.aten, torch.ops.prims

RESHAPES = frozenset(
    {aten.reshape.default, aten._unsafe_view.default, aten._reshape_copy.default, aten.view.default}
)
SMALL_BYTES = 1 << 16
_CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default})


class Kind(enum.Enum):
    """``INLINE`` nodes cost nothing where they are used: views, casts that widen or are small."""

    SOURCE = "source"
    LIBRARY = "library"
    FUSABLE = "fusable"
    INLINE = "inline"


def kind_of(node: fx.Node) -> Kind:
    """The kind of a node; a part of a tuple is of the kind of the tuple."""
    if node.op != "call_function":
        return Kind.SOURCE
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return kind_of(source)
    if is_view(node) or _is_cheap_cast(node):
        return Kind.INLINE
    return Kind.FUSABLE if is_fusable(node.target) and _computes_tensors(node) else Kind.LIBRARY


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument, or a part of a tuple of views."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target in RESHAPES:
        return _same_memory(node)
    returns = node.target._schema.returns
    if len(returns) != 1:
        return False
    alias = returns[0].alias_info
    return alias is not None and not alias.is_write


def may_share_memory(node: fx.Node) -> bool:
    """Whether a node's result may share its first argument's memory when it runs: a view, or a reshape."""
    return node.target in RESHAPES or is_view(node)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view shares; ``node`` itself where it is no view."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def root_of(node: fx.Node) -> fx.Node:
    """The node that an inline one is made from; ``node`` itself where it is not inline."""
    while kind_of(node) is Kind.INLINE:
        node = node.args[0]  # type: ignore[assignment]
    return node


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in a node's value."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in _tensors(value))


def changes(node: fx.Node) -> fx.Node | None:
    """The argument that a node writes to, if it does."""
    return next(iter(written_arguments(node)), None)


def _same_memory(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    given, wanted = source.meta["val"], node.meta["val"]
    if given.numel() != wanted.numel():
        return False
    try:
        strides = torch.ops.aten.view(
            torch.empty_strided(given.shape, given.stride(), device="meta"), wanted.shape
        )
    except (RuntimeError, ValueError):
        return False
    return same_strides(strides, wanted.stride())


def _is_cheap_cast(node: fx.Node) -> bool:
    if node.target not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    given, wanted = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(given, Tensor) or not isinstance(wanted, Tensor):
        return False
    if set(node.kwargs) - {"dtype"} or given.stride() != wanted.stride() or given.device != wanted.device:
        return False
    return wanted.dtype.itemsize > given.dtype.itemsize or num_bytes(wanted) <= SMALL_BYTES


def _computes_tensors(node: fx.Node) -> bool:
    """Whether inputs and results are tensors on one device, none of them complex or sparse."""
    values = list(_tensors(node.meta.get("val")))
    if not values:
        return False
    given = [value for source in node.all_input_nodes for value in _tensors(source.meta.get("val"))]
    devices = {value.device for value in values + given if value.dim() > 0 or value.device.type != "cpu"}
    return len(devices) <= 1 and not any(value.is_complex() or value.is_sparse for value in values + given)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
