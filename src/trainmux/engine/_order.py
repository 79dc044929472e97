"""The order of nodes in a step: masks made late, updates made early, and the cut before the first change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, fx

from trainmux.engine._row_gradients import RowGradient
from trainmux.ir import Phase
from trainmux.lowering import RegionCall, changed_argument, interleave, may_share_memory
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


# ---- updates -----------------------------------------------------------------------------------------


def ready_places(
    graph: fx.Graph, parameters: Sequence[fx.Node], gradients: Sequence[fx.Node | RowGradient[fx.Node]]
) -> list[int]:
    """For each parameter, the place in the graph after which only its update reads it or its gradient."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    last_read = dict.fromkeys(parameters, 0)
    memory = memory_of(graph)
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if memory[source] in last_read:
                last_read[memory[source]] = place[node]
    return [
        max(last_read[parameter], *(place[node] for node in _nodes_of(gradient)))
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


def with_memory_alone(graph: fx.Graph, gradients: Sequence[fx.Node]) -> list[bool]:
    """Whether each gradient shares its memory with no other: a later norm may be taken after its update."""
    memory = memory_of(graph)
    owners = Counter(memory[gradient] for gradient in gradients)
    return [owners[memory[gradient]] == 1 for gradient in gradients]


def _nodes_of(gradient: fx.Node | RowGradient[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(gradient) if isinstance(gradient, RowGradient) else (gradient,)


def update_early(graph: fx.Graph) -> None:
    """Move each node of the update to where it can first run, so that gradients do not wait for one another.

    Placeholders come first in the graph; within each phase nodes keep their order.
    """
    memory = memory_of(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    steps = [(node,) for node in nodes if node.meta["phase"] is not Phase.UPDATE]
    updates = [(node,) for node in nodes if node.meta["phase"] is Phase.UPDATE]
    backward = [place for place, (node,) in enumerate(steps) if node.meta["phase"] is Phase.BACKWARD]

    def reads(piece: tuple[fx.Node, ...]) -> Iterable[fx.Node]:
        for source in piece[0].all_input_nodes:
            yield from (source, memory[source])

    def changes(piece: tuple[fx.Node, ...]) -> Iterable[fx.Node]:
        changed = changed_argument(piece[0])
        return () if changed is None else (memory[changed],)

    first = min(backward, default=len(steps))
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    for constant in graph.find_nodes(op="get_attr"):
        last.append(constant)
        last = constant
    for (node,) in interleave(steps, updates, first=first, reads=reads, changes=changes):
        last.append(node)
        last = node


# ---- halves ------------------------------------------------------------------------------------------

Apply = Callable[[], list[Tensor]]
"""Does the second half of a run and returns its results; to be called once."""


class Halves:
    """A program's graph, cut before the first node that changes an argument.

    Deferred updates, buffers and counters all follow the backward pass. A step can fail in its first half and
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
