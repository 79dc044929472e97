"""The order of nodes in a step: masks made late, and the cut before the first change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence, Set

import torch
from torch import Tensor, fx

from trainmux.engine._methods import call_by_methods
from trainmux.engine._views import drop_idle_views, views_of
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

    ``lasting`` are positions of arguments that are the same tensors run after run: views of them are made
    once, and kept by whoever runs it.
    """

    def __init__(self, module: fx.GraphModule, lasting: Collection[int] = ()) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        drop_idle_views(graph)
        arguments = graph.find_nodes(op="placeholder")
        views = views_of(graph, [arguments[position] for position in lasting])
        apart = {*arguments, *views}
        others = [node for node in graph.nodes if node not in apart]
        cut = others.index(_first_change(module, graph))
        first, second = others[:cut], others[cut:]
        kept = _read_by(others, views)
        carried = _read_by(second, first)
        read = set(_read_by(views, arguments))
        self._viewed = [position for position in sorted(lasting) if arguments[position] in read]
        self._view = _part(module, [arguments[position] for position in self._viewed], views, kept)
        self._compute = _part(module, [*arguments, *kept], first, carried)
        self._apply = _part(module, [*arguments, *kept, *carried], second)

    def begin(self, arguments: Sequence[Tensor], kept: KeptViews | None = None) -> Apply:
        """Run up to the first change of an argument."""
        given = [*arguments, *self._views_of(arguments, {} if kept is None else kept)]
        carried = self._compute.forward(*given)

        def apply() -> list[Tensor]:
            results: list[Tensor] = self._apply.forward(*given, *carried)
            return results

        return apply

    def _views_of(self, arguments: Sequence[Tensor], kept: KeptViews) -> Sequence[Tensor]:
        viewed = tuple(arguments[position] for position in self._viewed)
        known, views = kept.get(self, ((), ()))
        if len(known) != len(viewed) or not all(map(operator.is_, known, viewed)):
            views = self._view.forward(*viewed)
            kept[self] = viewed, views
        return views


KeptViews = MutableMapping[Halves, tuple[Sequence[Tensor], Sequence[Tensor]]]
"""Lasting arguments of programs, and the views that were made of them."""


def _read_by(readers: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that any of the readers reads, in their order."""
    found = set(readers)
    return [node for node in nodes if not found.isdisjoint(node.users)]


def _part(
    module: fx.GraphModule,
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    results: Sequence[fx.Node] | None = None,
) -> fx.GraphModule:
    """A module of some nodes of a graph; they end with its output, where no ``results`` are named."""
    graph = fx.Graph()
    new = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    if results is not None:
        graph.output(tuple(new[node] for node in results))
    call_by_methods(graph)
    return graph_module(module, graph, lazily=False)


def _first_change(module: fx.GraphModule, graph: fx.Graph) -> fx.Node:
    """The first node that writes to an argument or a constant, or else the output."""
    memory = memory_of(graph)
    nodes: list[fx.Node] = list(graph.nodes)
    for node in nodes:
        if any(memory[changed].op in ("placeholder", "get_attr") for changed in _changed(module, node)):
            return node
    return nodes[-1]


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
