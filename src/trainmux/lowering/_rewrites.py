"""Rewrites of a fused graph before it is split, for the compiler's sake."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def compare_instead_of_scatter(graph: fx.Graph) -> int:
    """One value per row scattered into a constant becomes a comparison; returns how many did.

    The gradient of a cross-entropy loss begins like that. A scatter has to be written to memory, as large
    as the logits; a comparison is computed where it is read. The sum over a row of zeros and one value is not
    computed, so that the gradient of log-softmax needs no reduction.
    """
    found = 0
    for node in graph.find_nodes(op="call_function", target=aten.scatter.value):
        constant, dim, index, value = node.args
        if constant.target is not aten.full.default or node.kwargs:
            continue
        target, chosen = node.meta["val"], index.meta["val"]
        if target.dim() == 0:
            continue
        dim %= target.dim()
        if chosen.dim() != target.dim() or chosen.shape[dim] != 1:
            continue
        if any(a != b for d, (a, b) in enumerate(zip(chosen.shape, target.shape, strict=True)) if d != dim):
            continue
        shape = [1] * target.dim()
        shape[dim] = target.shape[dim]
        with graph.inserting_before(node), target.fake_mode:
            places = insert_call(graph, node, aten.arange.default, (target.shape[dim],), device=target.device)
            places = insert_call(graph, node, aten.view.default, (places, shape))
            chosen_here = insert_call(graph, node, aten.eq.Tensor, (index, places))
            hit = insert_call(
                graph, node, aten.full.default, ([], value), dtype=target.dtype, device=target.device
            )
            rest = insert_call(
                graph,
                node,
                aten.full.default,
                ([], constant.args[1]),
                dtype=target.dtype,
                device=target.device,
            )
            result = insert_call(graph, node, aten.where.self, (chosen_here, hit, rest))
        node.replace_all_uses_with(result)
        if constant.args[1] == 0:
            _replace_row_sums(graph, result, dim, hit)
        graph.erase_node(node)
        found += 1
    if found:
        graph.eliminate_dead_code()
        graph.lint()
    return found


def _replace_row_sums(graph: fx.Graph, rows: fx.Node, dim: int, hit: fx.Node) -> None:
    """Sums of ``rows`` times a factor per row: along ``dim``, a row is ``hit`` in one place, and zeros."""
    from_end = dim - rows.meta["val"].dim()
    for product in [user for user in rows.users if user.target is aten.mul.Tensor]:
        whole = product.meta["val"]
        dim = whole.dim() + from_end  # the product of rows that all members share has one dimension more
        factors = [
            each
            for each in product.all_input_nodes
            if each is not rows
            and (value := each.meta["val"]).shape == (*whole.shape[:dim], 1, *whole.shape[dim + 1 :])
            and value.dtype == whole.dtype
        ]
        for total in [user for user in product.users if user.target is aten.sum.dim_IntList and factors]:
            if total.meta["val"].dtype != whole.dtype:
                continue  # sums of short integers are long
            if total.args[1:] in (([dim], True), ([from_end], True)) and not total.kwargs:
                with graph.inserting_before(total), whole.fake_mode:
                    alone = insert_call(graph, total, aten.mul.Tensor, (factors[0], hit))
                total.replace_all_uses_with(alone)
                graph.erase_node(total)


_INDEXED_WRITES = (
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_put.default,
)


def write_to_whole_tensors(graph: fx.Graph) -> int:
    """Indexed writes get a copy of a destination that is expanded; returns how many did.

    Inductor makes such a write one into the memory behind, where rows that should differ are one row
    (pytorch #183986; wrong in torch 2.11 and 2.13).
    """
    found = 0
    for node in [node for node in graph.nodes if node.target in _INDEXED_WRITES]:
        target = node.args[0].meta["val"]
        if not any(size > 1 and step == 0 for size, step in zip(target.shape, target.stride(), strict=True)):
            continue
        with graph.inserting_before(node), target.fake_mode:
            whole = insert_call(
                graph, node, aten.clone.default, (node.args[0],), memory_format=torch.contiguous_format
            )
        node.update_arg(0, whole)
        found += 1
    if found:
        graph.lint()
    return found


def insert_call(graph: fx.Graph, like: fx.Node, op: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
    """A new node where the graph's next one goes, marked as ``like`` is; a fake mode must be active."""
    new = graph.call_function(op, args, kwargs)
    new.meta = dict(like.meta)
    values = fx.map_arg(args, lambda node: node.meta["val"])
    new.meta["val"] = op(*values, **kwargs)
    return new
