"""Masks that only the backward pass reads are made there, out of what is kept for it anyway.

The backward pass of ReLU asks where its result was zero. That result is kept for the next layer's backward
pass, often as a view of it. Torch's min-cut weighs a value apart from its views and keeps a mask beside it: a
byte for each element beside two.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import fx

from trainmux.engine._early import memory_of
from trainmux.ir import Phase

aten = torch.ops.aten

_COMPARISONS = frozenset(
    {aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.eq.Scalar, aten.ne.Scalar}
)


def make_masks_late(graph: fx.Graph) -> None:
    """Move comparisons of the forward pass that only the backward pass reads to before their first reader,
    where the memory of what they compare is there until the backward pass."""
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
