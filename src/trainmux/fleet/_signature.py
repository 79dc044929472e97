"""Whether two traced graphs compute the same."""

from __future__ import annotations

import hashlib

from trainmux.tracing import TracedGraph, graph_constant, tensor_digest


def graph_key(traced: TracedGraph) -> str:
    """Equal for graphs that compute the same: code, input and output descriptions, constants."""
    digest = hashlib.sha256(traced.module.code.encode())
    digest.update(repr((traced.inputs, traced.outputs)).encode())
    for node in traced.module.graph.nodes:
        if node.op == "get_attr":
            digest.update(tensor_digest(graph_constant(traced.module, node)))
    return digest.hexdigest()
