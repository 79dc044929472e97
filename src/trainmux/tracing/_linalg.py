"""Failed factorizations, per member.

Torch raises when, say, a Cholesky factorization fails, after a look at its error code on the host. A
graph cannot raise, and one member's failure must not stop the others: here the loss of a member whose
error code is not zero becomes NaN, which freezes that member.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from trainmux.tracing._cleanup import output_nodes, replace_node
from trainmux.tracing._torch_private import FakeTensorMode

aten = torch.ops.aten


def failures_make_loss_nan(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Turn error checks into NaN in the first output (the loss of a joint graph, a metric), in place."""
    checks = module.graph.find_nodes(op="call_function", target=aten._linalg_check_errors.default)
    if not checks:
        return
    codes = [node.args[0] for node in checks]
    first = output_nodes(module)[0]
    (output,) = module.graph.find_nodes(op="output")

    def poisoned(value: Tensor, *infos: Tensor) -> Tensor:
        failed = torch.stack([(info != 0).any() for info in infos]).any()
        return torch.where(failed, torch.full_like(value, float("nan")), value)

    with module.graph.inserting_before(output):
        marker = module.graph.call_function(aten.alias.default, (first,))
        marker.meta["val"] = first.meta["val"]
    output.args = fx.map_arg(output.args, lambda node: marker if node is first else node)
    replace_node(marker, poisoned, (first, *codes), mode)
    for node in checks:
        module.graph.erase_node(node)
    module.recompile()
