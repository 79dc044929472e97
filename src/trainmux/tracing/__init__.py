"""One member and a batch become a graph; a fused graph becomes forward and backward."""

from trainmux.tracing._batch import BatchSpec, FlatBatch, Text, check_batch, flatten_batch
from trainmux.tracing._composites import RESIZES
from trainmux.tracing._effects import unique_buffers, unique_parameters
from trainmux.tracing._joint import LossFunction, TracedGraph, TraceSettings, trace_forward, trace_joint
from trainmux.tracing._passes import SplitGraph, graph_constant, inherit_meta, output_nodes, split_joint
from trainmux.tracing._reach import Holder, Identity, Items, Reach, same_items, tensor_digest
from trainmux.tracing._source import innermost_user_frame, node_location
from trainmux.tracing._torch_private import (
    FakeTensor,
    FakeTensorMode,
    copy_node,
    functionalized,
    graph_module,
    has_vmap_rule,
    is_plain,
    last_node,
    make_fx,
    nodes_after,
    plain_torch,
    replaced,
    replacing_thread,
    static_fake_mode,
    tracer_graph,
)

__all__ = [
    "RESIZES",
    "BatchSpec",
    "FakeTensor",
    "FakeTensorMode",
    "FlatBatch",
    "Holder",
    "Identity",
    "Items",
    "LossFunction",
    "Reach",
    "SplitGraph",
    "Text",
    "TraceSettings",
    "TracedGraph",
    "check_batch",
    "copy_node",
    "flatten_batch",
    "functionalized",
    "graph_constant",
    "graph_module",
    "has_vmap_rule",
    "inherit_meta",
    "innermost_user_frame",
    "is_plain",
    "last_node",
    "make_fx",
    "node_location",
    "nodes_after",
    "output_nodes",
    "plain_torch",
    "replaced",
    "replacing_thread",
    "same_items",
    "split_joint",
    "static_fake_mode",
    "tensor_digest",
    "trace_forward",
    "trace_joint",
    "tracer_graph",
    "unique_buffers",
    "unique_parameters",
]
