"""Operators called by methods of tensors, which takes Python half the time of a call of the operator."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

METHODS = {
    operator: operator._schema.name.partition("::")[2]
    for operator in (
        *(aten.view.default, aten.view.dtype, aten.reshape.default, aten.expand.default),
        *(aten.permute.default, aten.transpose.int, aten.t.default, aten.select.int),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
        *(aten.relu.default, aten.tanh.default, aten.sigmoid.default, aten.exp.default, aten.log.default),
        *(aten.neg.default, aten.abs.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default),
        *(aten.add.Tensor, aten.sub.Tensor),
        *(aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar),
        *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.lerp_.Tensor),
        *(aten.addcmul.default, aten.addcmul_.default, aten.addcdiv.default, aten.addcdiv_.default),
        *(aten.eq.Tensor, aten.ne.Tensor, aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar),
        *(aten.gt.Scalar, aten.ge.Scalar, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor),
        *(aten.bitwise_and_.Tensor, aten.bitwise_not.default, aten.logical_and_.default),
        *(aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.gather.default),
        *(aten.scatter.value, aten.index_select.default, aten.clone.default, aten.copy_.default),
        *(aten.clamp.default, aten.clamp_min.default, aten.zero_.default),
    )
}
"""The methods that call just these operators, when they are called with the operators' own arguments."""


def call_by_methods(graph: fx.Graph) -> None:
    """Call what can be called so by methods; ``operator`` in a node's ``meta`` is what it is called for."""
    for node in graph.nodes:
        name = METHODS.get(node.target) if node.op == "call_function" else None
        if name is not None:
            node.op, node.target, node.meta["operator"] = "call_method", name, node.target
