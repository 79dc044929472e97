"""Small surgery on traced graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from trainmux.tracing._torch_private import FakeTensorMode, copy_node, make_piece

aten = torch.ops.aten

# After functionalization a value is never written to, so these hand on what they were given.
_PASS_THROUGH = frozenset({aten.detach.default, aten.alias.default})
_INHERITED = ("stack_trace", "recompute", "ac_graph_id")


def output_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a graph returns, flat."""
    (output,) = module.graph.find_nodes(op="output")
    nodes: list[fx.Node] = pytree.tree_leaves(output.args)
    return nodes


def graph_constant(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """The tensor that a ``get_attr`` node stands for."""
    value: object = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, torch.Tensor)
    return value


def source_of(node: fx.Node) -> fx.Node:
    """The node whose value ``node`` merely hands on."""
    while node.op == "call_function" and node.target in _PASS_THROUGH:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def simplify(module: fx.GraphModule, kept_outputs: Iterable[int]) -> None:
    """Keep only some outputs, drop what hands on and what nobody uses; in place."""
    nodes = output_nodes(module)
    (output,) = module.graph.find_nodes(op="output")
    output.args = ([source_of(nodes[position]) for position in kept_outputs],)
    for node in list(module.graph.nodes):
        source = source_of(node)
        if source is not node:
            node.replace_all_uses_with(source)
    _compute_transposes_directly(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _compute_transposes_directly(graph: fx.Graph) -> None:
    """``t(mm(a, b))`` becomes ``mm(t(b), t(a))``.

    Autograd computes a linear layer's weight gradient transposed and hands on a transposed view, which
    every later pass over it would have to read across the grain.
    """
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        product = node.args[0]
        if product.target is not aten.mm.default or len(product.users) != 1:
            continue
        left, right = product.args
        with graph.inserting_before(node):
            swapped = graph.call_function(
                aten.mm.default, (_transposed(graph, right), _transposed(graph, left))
            )
        swapped.meta["val"] = node.meta["val"].contiguous()
        inherit_meta(swapped, product)
        node.replace_all_uses_with(swapped)


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.target is aten.t.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    transposed = graph.call_function(aten.t.default, (node,))
    transposed.meta["val"] = node.meta["val"].t()
    inherit_meta(transposed, node)
    return transposed


def inherit_meta(new: fx.Node, old: fx.Node) -> None:
    """Origin and marks of ``old`` go over to a node that takes its place."""
    for key in _INHERITED:
        if key in old.meta:
            new.meta[key] = old.meta[key]


def replace_node(node: fx.Node, fn: Callable[..., Any], args: tuple[Any, ...], mode: FakeTensorMode) -> None:
    """Put what ``fn(*args)`` computes in the place of ``node``; ``args`` may hold nodes anywhere."""
    leaves, spec = pytree.tree_flatten(args)
    sources = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def flat(*tensors: Any) -> Any:
        values = iter(tensors)
        filled = [next(values) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        return fn(*pytree.tree_unflatten(filled, spec))

    with mode:
        part = make_piece(flat)(*[source.meta["val"] for source in sources])
    graph = node.graph
    copied: dict[fx.Node, Any] = {}
    remaining = iter(sources)
    with graph.inserting_before(node):
        for inner in part.graph.nodes:
            if inner.op == "placeholder":
                copied[inner] = next(remaining)
            elif inner.op == "output":
                result = fx.map_arg(inner.args[0], lambda n: copied[n])
            else:
                if inner.op == "get_attr":
                    raise RuntimeError(
                        f"expected no constants in the replacement of {node}, got {inner.target}"
                    )
                new = copy_node(graph, inner, lambda n: copied[n])
                inherit_meta(new, node)
                copied[inner] = new
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise RuntimeError(f"expected only getitem to use {node}, got {user.target}")
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
