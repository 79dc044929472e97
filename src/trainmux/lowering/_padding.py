"""Matrix products of unaligned size run at a third of the speed: extend them with zeros.

A vocabulary of 50257 words makes such products: tensor cores read 16 bytes at a time, along whichever
axis lies in a row. Regions that compute an operand leave room around it, filled with zeros, and the
product takes the room in: its result has zeros, or room of its own, beyond the true shape. Nothing is
copied, and everyone else sees tensors of the true shape with wider strides.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.lowering._kinds import RESHAPES, Kind, base_of, is_view, kind_of
from trainmux.runtime import ALIGNMENT_BYTES
from trainmux.sizes import round_up
from trainmux.tracing import FakeTensorMode

aten = torch.ops.aten

_MIN_SIZE = 256
_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default})
Sizes = tuple[int, int]


def extended_product(
    op: OpOverload, left_sizes: Sizes, right_sizes: Sizes, true_sizes: Sizes, left: Tensor, right: Tensor
) -> Tensor:
    """``op`` over the room around its operands; its result in its true size."""
    product: Tensor = op(extended(left, left_sizes), extended(right, right_sizes))
    return product[..., : true_sizes[0], : true_sizes[1]]


def extended(operand: Tensor, sizes: Sizes) -> Tensor:
    """An operand with the room around it."""
    return operand.as_strided((*operand.shape[:-2], *sizes), operand.stride(), operand.storage_offset())


def pad_unaligned(graph: fx.Graph) -> None:
    """Extend the products of unaligned size whose operands are computed by regions; in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.addmm.default and not node.kwargs:
            _separate_the_sum(node)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _PRODUCTS:
            _extend(node)


def _separate_the_sum(node: fx.Node) -> None:
    """``addmm`` of unaligned width as a product and a sum."""
    bias, left, right = node.args
    value = node.meta["val"]
    if not _unaligned(value.shape[-1], value):
        return
    graph = node.graph
    with graph.inserting_before(node), value.fake_mode:
        product = graph.call_function(aten.mm.default, (left, right))
        product.meta = {**node.meta, "val": torch.empty_like(value)}
        total = graph.call_function(aten.add.Tensor, (product, bias))
        total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _unaligned(size: int, value: Tensor) -> bool:
    return size >= _MIN_SIZE and (size * value.dtype.itemsize) % ALIGNMENT_BYTES != 0


def _aligned(size: int, value: Tensor) -> int:
    return round_up(size, ALIGNMENT_BYTES // value.dtype.itemsize) if _unaligned(size, value) else size


def _extend(node: fx.Node) -> None:
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    value = node.meta["val"]
    rows, columns = value.shape[-2:]
    inner = left.meta["val"].shape[-1]
    wanted = [_aligned(size, value) for size in (rows, inner, columns)]
    if wanted == [rows, inner, columns] or value.dtype.itemsize > 4:
        return
    plans = [_room(left, (wanted[0], wanted[1])), _room(right, (wanted[1], wanted[2]))]
    if any(plan is None for plan in plans):
        return
    found: dict[fx.Node, Tensor] = {}
    paddings: dict[fx.Node, tuple[int, ...]] = {}
    for plan in plans:
        assert plan is not None
        for base, shape in plan.items():
            known = paddings.get(base, shape)
            paddings[base] = tuple(max(a, b) for a, b in zip(known, shape, strict=True))
    mode = value.fake_mode
    try:
        for base, shape in paddings.items():
            _look_again(base, _inside(base.meta["val"], shape, mode), found, mode)
        outer = (*value.shape[:-2], wanted[0], wanted[2])
        _look_again(node, _inside(value, outer, mode), found, mode)
    except (RuntimeError, ValueError):
        return  # somebody looks at one of them in a way that needs it to be dense
    for changed, new in found.items():
        changed.meta["val"] = new
    for base, shape in paddings.items():
        base.meta["padded"] = shape
    node.meta["extended"] = ((wanted[0], wanted[1]), (wanted[1], wanted[2]))


def _room(operand: fx.Node, wanted: Sizes) -> dict[fx.Node, tuple[int, ...]] | None:
    """The shape that an operand's memory must have to be taken as ``wanted``; ``None`` if it cannot."""
    value = operand.meta["val"]
    if tuple(value.shape[-2:]) == wanted:
        return {}
    base = base_of(operand)
    memory = base.meta.get("val")
    if kind_of(base) is not Kind.FUSABLE or not isinstance(memory, Tensor) or memory.dim() < 2:
        return None
    if "padded" not in base.meta and not memory.is_contiguous():
        return None
    shape = list(base.meta.get("padded", memory.shape))
    for size, new, stride in zip(value.shape[-2:], wanted, value.stride()[-2:], strict=True):
        if size == new:
            continue
        if stride == 1 and size == memory.shape[-1]:
            shape[-1] = new
        elif stride == memory.stride()[-2] and size == memory.shape[-2]:
            shape[-2] = new
        else:
            return None
    return {base: tuple(shape)}


def _inside(value: Tensor, outer: tuple[int, ...], mode: FakeTensorMode) -> Tensor:
    """A fake of ``value``'s shape inside memory of a larger one."""
    with mode:
        memory = torch.empty(outer, dtype=value.dtype, device=value.device)
        return memory.as_strided(tuple(value.shape), memory.stride())


def _look_again(node: fx.Node, value: Tensor, found: dict[fx.Node, Tensor], mode: FakeTensorMode) -> None:
    """Recompute every view of ``node`` for a value with another layout."""
    found[node] = value
    for view in _views(node):
        target = aten.view.default if view.target in RESHAPES else view.target
        with mode:
            found[view] = target(found[view.args[0]], *view.args[1:], **view.kwargs)  # type: ignore[operator, index]


def _views(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_view(user):
            yield user
            yield from _views(user)
