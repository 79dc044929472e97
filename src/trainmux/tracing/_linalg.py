"""Failed factorizations, per member.

Torch raises when, say, a Cholesky factorization fails, after a look at its error code on the host. A
graph cannot raise, and one member's failure must not stop the others: here the loss of a member whose
error code is not zero becomes NaN, which freezes that member. The loss is known before the backward pass:
where a factorization fails in there (``linalg.eig`` solves a system), the member's gradients become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from trainmux.tracing._cleanup import output_nodes, replace_node
from trainmux.tracing._torch_private import FakeTensorMode

aten = torch.ops.aten


def failures_make_nan(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Turn error checks into NaN, in place: in the first output (a loss, a metric) or in the gradients."""
    checks = module.graph.find_nodes(op="call_function", target=aten._linalg_check_errors.default)
    if not checks:
        return
    backward = _after_tangent(module.graph)
    outputs = output_nodes(module)
    early = [node.args[0] for node in checks if node not in backward]
    late = [node.args[0] for node in checks if node in backward]
    if early:
        _poison(module, outputs[0], early, mode)
    if late:
        for output in dict.fromkeys(node for node in outputs if node in backward):
            _poison(module, output, late, mode)
    for node in checks:
        module.graph.erase_node(node)
    module.recompile()


def _after_tangent(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the backward pass: those that depend on the last placeholder."""
    found = {graph.find_nodes(op="placeholder")[-1]}
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _poison(module: fx.GraphModule, value: fx.Node, codes: list[fx.Node], mode: FakeTensorMode) -> None:
    """Return NaN in the place of the output ``value`` where one of ``codes`` is not zero."""
    (output,) = module.graph.find_nodes(op="output")

    def poisoned(value: Tensor, *infos: Tensor) -> Tensor:
        failed = torch.stack([(info != 0).any() for info in infos]).any()
        return torch.where(failed, torch.full_like(value, float("nan")), value)

    with module.graph.inserting_before(output):
        marker = module.graph.call_function(aten.alias.default, (value,))
        marker.meta["val"] = value.meta["val"]
    output.args = fx.map_arg(output.args, lambda node: marker if node is value else node)
    replace_node(marker, poisoned, (value, *codes), mode)
