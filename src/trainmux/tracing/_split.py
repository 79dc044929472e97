"""A joint graph, fused or not, cut into forward and backward (D3).

Torch's min-cut partitioner decides what is saved between the two: the fewest bytes, where what a
cheap chain of operators can compute again is not saved. It runs after fusion, so that a value shared
by all members counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from trainmux.ir import GraphInput, GraphOutput, InputKind, OutputKind
from trainmux.tracing._torch_private import min_cut


@dataclass(frozen=True)
class SplitGraph:
    """Forward and backward with the values that pass between them.

    ``forward`` takes all inputs but the tangent and returns the forward outputs, then ``saved``;
    ``backward`` takes ``saved`` by name, then the tangent if it needs it, and returns gradients.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int


def split_joint(
    module: fx.GraphModule, inputs: tuple[GraphInput, ...], outputs: tuple[GraphOutput, ...]
) -> SplitGraph:
    """Cut ``module`` (which is used up) where the fewest bytes pass."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for position, (node, described) in enumerate(zip(placeholders, inputs, strict=True)):
        role = "tangents" if described.kind is InputKind.TANGENT else "primals"
        node.target = f"{role}_{position + 1}"
        node._rename(node.target)
    module.recompile()
    num_forward = sum(output.kind is not OutputKind.GRADIENT for output in outputs)
    static = [position for position, item in enumerate(inputs) if item.kind is InputKind.PARAMETER]
    forward, backward = min_cut(module, num_forward, static)
    return SplitGraph(forward, backward, num_forward)
