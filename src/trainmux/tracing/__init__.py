"""One member and a batch become a graph; a fused graph becomes forward and backward."""

from trainmux.tracing._ambient import is_plain, plain_torch
from trainmux.tracing._cleanup import graph_constant, inherit_meta, output_nodes
from trainmux.tracing._composites import RESIZES
from trainmux.tracing._joint import LossFunction, TracedGraph, TraceSettings, trace_forward, trace_joint
from trainmux.tracing._reach import Holder, Items, Reach, same_items, tensor_digest
from trainmux.tracing._source import node_location
from trainmux.tracing._split import SplitGraph, split_joint
from trainmux.tracing._substitute import NamedTensor, unique_buffers, unique_parameters
from trainmux.tracing._text import Text
from trainmux.tracing._torch_private import (
    FakeTensor,
    FakeTensorMode,
    copy_node,
    functionalized,
    graph_module,
    has_vmap_rule,
    last_node,
    make_fx,
    make_piece,
    nodes_after,
    static_fake_mode,
    tracer_graph,
)
from trainmux.tracing._tree import BatchSpec, FlatBatch, LeafSpec, check_batch, flatten_batch

__all__ = [
    "RESIZES",
    "BatchSpec",
    "FakeTensor",
    "FakeTensorMode",
    "FlatBatch",
    "Holder",
    "Items",
    "LeafSpec",
    "LossFunction",
    "NamedTensor",
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
    "is_plain",
    "last_node",
    "make_fx",
    "make_piece",
    "node_location",
    "nodes_after",
    "output_nodes",
    "plain_torch",
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
