"""Views in a graph that runs node by node: idle ones are left out, those of lasting memory are made once.

To the host a view is a call like any other: of the two hundred calls of a small model's step, half are views.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from trainmux.lowering import RESHAPES, is_view

aten = torch.ops.aten

_ALIASES = frozenset({aten.detach.default, aten.alias.default})
_SHAPED = RESHAPES | {aten.expand.default}


def drop_idle_views(graph: fx.Graph) -> None:
    """Have readers of a view that is just like its source read the source; erase views that nobody reads.

    For graphs that run without autograd: there a tensor is the memory that it shows, and how it shows it.
    """
    for node in graph.nodes:
        if _is_view(node) and _is_idle(node):
            node.replace_all_uses_with(node.args[0])
    for node in reversed(graph.nodes):
        if not node.users and _is_view(node):
            graph.erase_node(node)


def views_of(graph: fx.Graph, arguments: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes, in order, that are views of these arguments, or views of those."""
    sources, found = set(arguments), []
    for node in graph.nodes:
        if _is_view(node) and sources.issuperset(node.all_input_nodes):
            sources.add(node)
            found.append(node)
    return found


def _is_view(node: fx.Node) -> bool:
    if node.target in RESHAPES:  # results of compiled regions are not described
        described = all("val" in each.meta for each in (node, *node.all_input_nodes))
        return described and node.target is not aten._reshape_copy.default and is_view(node)
    return is_view(node)


def _is_idle(node: fx.Node) -> bool:
    """Whether a view shows what its source does, in the same way."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target is aten.permute.default:
        dims = list(node.args[1])  # type: ignore[arg-type]
        return dims == list(range(len(dims)))
    if node.target not in _SHAPED:
        return node.target in _ALIASES
    given, wanted = source.meta.get("val"), node.meta.get("val")
    return isinstance(given, Tensor) and isinstance(wanted, Tensor) and given.shape == wanted.shape
