"""The order of nodes in a step: masks made late, and the cut before the first change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor, fx

from trainmux.ir import Phase
from trainmux.lowering import RegionCall, changed_argument, may_share_memory
from trainmux.tracing import graph_module

aten = torch.ops.aten


def memory_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The node that owns the memory which each node may share; the node itself, if it owns its own."""
    memory: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = changed_argument(node)
        if source is None and may_share_memory(node):
            source = node.args[0]
        memory[node] = memory[source] if isinstance(source, fx.Node) else node
    return memory


# ---- masks -------------------------------------------------------------------------------------------

_COMPARISONS = frozenset(
    {aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.eq.Scalar, aten.ne.Scalar}
)


def make_masks_late(graph: fx.Graph) -> None:
    """Move comparisons of the forward pass that only the backward pass reads to before their first reader.

    The backward pass of ReLU asks where its result was zero. That result is kept for the next layer's
    backward pass, often as a view of it. Torch's min-cut weighs a value apart from its views and saves a mask
    as well, one byte for each element. Only comparisons of memory that is kept anyway are moved.
    """
    memory = memory_of(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    kept = {
        memory[source]
        for node in graph.nodes
        if node.meta.get("phase") is Phase.BACKWARD
        for source in node.all_input_nodes
    }
    for node in [node for node in graph.nodes if _can_be_late(node, memory, kept)]:
        node.meta["phase"] = Phase.BACKWARD
        min(node.users, key=place.__getitem__).prepend(node)


def _can_be_late(node: fx.Node, memory: Mapping[fx.Node, fx.Node], kept: Set[fx.Node]) -> bool:
    """Arguments of the step are left alone: an update may have changed one by then."""
    if node.target not in _COMPARISONS or node.meta["phase"] is not Phase.FORWARD:
        return False
    compared = memory[node.all_input_nodes[0]]
    reads_late = [user.meta.get("phase") is Phase.BACKWARD for user in node.users]
    return compared in kept and compared.op == "call_function" and bool(reads_late) and all(reads_late)


# ---- halves ------------------------------------------------------------------------------------------

Apply = Callable[[], list[Tensor]]
"""Does the second half of a run and returns its results; to be called once."""


class Halves:
    """A program's graph, cut before the first node that changes an argument.

    Updates, buffers and counters all follow the backward pass. A step can fail in its first half and
    leave everything as it was, and several groups can compute before any of them changes.
    """

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
