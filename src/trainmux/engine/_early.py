"""Updates among the nodes of the backward pass (D3 "immediate"): gradients do not wait for one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import fx

from trainmux.engine._row_gradients import RowGradient
from trainmux.ir import Phase
from trainmux.lowering import changed_argument, interleave, may_share_memory


def ready_places(
    graph: fx.Graph, parameters: Sequence[fx.Node], gradients: Sequence[fx.Node | RowGradient[fx.Node]]
) -> list[int]:
    """For each parameter, the place in the graph behind which only its update reads it or its gradient."""
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
    """Which gradients share their memory with no other: the next one's norm may be taken after an update."""
    memory = memory_of(graph)
    owners = Counter(memory[gradient] for gradient in gradients)
    return [owners[memory[gradient]] == 1 for gradient in gradients]


def _nodes_of(gradient: fx.Node | RowGradient[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(gradient) if isinstance(gradient, RowGradient) else (gradient,)


def update_early(graph: fx.Graph) -> None:
    """Put the nodes of the update where they can first run; placeholders come first in the graph.

    Within each phase nodes keep their order.
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


def memory_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory it may look at, itself in the end."""
    memory: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = changed_argument(node)
        if source is None and may_share_memory(node):
            source = node.args[0]
        memory[node] = memory[source] if isinstance(source, fx.Node) else node
    return memory
