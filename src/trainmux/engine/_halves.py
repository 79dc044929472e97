"""A step in two calls: one that computes, and one that changes what lasts.

Deferred updates, buffers and counters all follow the backward pass. Cut before the first change, a step can
fail in its first half and leave everything as it was; several groups can compute before any of them changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, fx

from trainmux.engine._early import memory_of
from trainmux.lowering import RegionCall, changed_argument
from trainmux.tracing import graph_module

Apply = Callable[[], list[Tensor]]
"""Does the second half of a run and returns its results; to be called once."""


@runtime_checkable
class InHalves(Protocol):
    """Runs in two halves."""

    def begin(self, arguments: Sequence[Tensor]) -> Apply:
        """Run up to the first change of an argument."""
        ...


class Halves:
    """A program's graph, cut before the first node that changes an argument."""

    def __init__(self, module: fx.GraphModule) -> None:
        nodes, cut = list(module.graph.nodes), _first_change(module)
        first, second = nodes[:cut], nodes[cut:]
        behind = set(second)
        arguments = [node for node in first if node.op == "placeholder"]
        carried = [node for node in first if node.op != "placeholder" and not behind.isdisjoint(node.users)]

        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in first:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in carried))
        self._compute = graph_module(module, graph)

        graph = fx.Graph()
        new = {node: graph.node_copy(node) for node in arguments}
        new |= {node: graph.placeholder(f"carried_{place}") for place, node in enumerate(carried)}
        for node in second:
            new[node] = graph.node_copy(node, new.__getitem__)
        self._apply = graph_module(module, graph)

    def begin(self, arguments: Sequence[Tensor]) -> Apply:
        """Run up to the first change of an argument."""
        carried = self._compute.forward(*arguments)

        def apply() -> list[Tensor]:
            results: list[Tensor] = self._apply.forward(*arguments, *carried)
            return results

        return apply


def _first_change(module: fx.GraphModule) -> int:
    """The place of the first node that writes to an argument or a constant, or of the output."""
    memory = memory_of(module.graph)
    for place, node in enumerate(module.graph.nodes):
        if any(memory[changed].op in ("placeholder", "get_attr") for changed in _changed(module, node)):
            return place
    return len(memory) - 1


def _changed(module: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node writes to."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        positions = called.changed if isinstance(called, RegionCall) else ()
        return [
            source
            for source in (node.args[position] for position in positions)
            if isinstance(source, fx.Node)
        ]
    changed = changed_argument(node)
    return [] if changed is None else [changed]
