"""A lowered program as bytes, so that a second start need not fuse, split and cut again.

Kernels are stored as the regions they were made from; the compiler's own cache has their code. What is read
here was written by this package into the user's own cache folder: it is trusted as compiled code is.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from trainmux.lowering._compile import KernelCache
from trainmux.lowering._lower import Conform, Lowered, RegionCall
from trainmux.lowering._padding import extended_product
from trainmux.lowering._regions import (
    NodeAt,
    TensorSpec,
    from_payload,
    op_name,
    op_of,
    spec_of,
)
from trainmux.tracing import graph_module, static_fake_mode

_EXTENDED = "trainmux.extended_product"


@dataclass(frozen=True)
class _Operator:
    """An operator among the arguments of another."""

    name: str


def to_bytes(lowered: Lowered) -> bytes:
    """Everything of a lowered program but its compiled code. Its kernels must not be compiled yet."""
    place = {node: NodeAt(i) for i, node in enumerate(lowered.module.graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return place[value]
        return _Operator(op_name(value)) if isinstance(value, OpOverload) else value

    lines = []
    inputs: list[TensorSpec] = []
    constants: dict[str, Tensor] = {}
    regions: dict[str, tuple[Any, ...]] = {}
    layouts: dict[str, tuple[TensorSpec | None, ...]] = {}
    for node in lowered.module.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            constants[target] = getattr(lowered.module, target).detach().cpu()
        elif node.op == "call_module":
            called = lowered.module.get_submodule(target)
            if isinstance(called, RegionCall):
                regions[target] = (called.kernel.key, called.outputs, called.placed, called.changed)
            else:
                assert isinstance(called, Conform)
                layouts[target] = called.specs
        elif node.op == "call_function":
            target = _EXTENDED if node.target is extended_product else op_name(node.target)
        elif node.op == "placeholder":
            inputs.append(spec_of(node))
        args, kwargs = map_aggregate(node.args, plain), map_aggregate(node.kwargs, plain)
        lines.append((node.op, node.name, target, args, kwargs, node.meta.get("phase")))
    kernels = {kernel.key: kernel.payload() for kernel in lowered.kernels}
    stream = io.BytesIO()
    torch.save(dict(enumerate(constants.values())), stream)
    counts = lowered.num_regions, lowered.num_calls
    content = (lines, inputs, regions, layouts, kernels, counts, tuple(constants))
    return pickle.dumps((content, stream.getvalue()))


def from_bytes(data: bytes, cache: KernelCache, device: torch.device) -> Lowered:
    """The program again; kernels that ``cache`` knows are shared."""
    content, stored = pickle.loads(data)
    lines, inputs, regions, layouts, payloads, counts, names = content
    constants = torch.load(io.BytesIO(stored), weights_only=True)
    kernels = {key: cache.kernel(key, partial(from_payload, item)) for key, item in payloads.items()}
    owner = nn.Module()
    for index, name in enumerate(names):
        owner.register_buffer(name, constants[index].to(device), persistent=False)
    for name, (key, *described) in regions.items():
        owner.add_module(name, RegionCall(kernels[key], *described))
    for name, specs in layouts.items():
        owner.add_module(name, Conform(specs))
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def whole(value: Any) -> Any:
        if isinstance(value, NodeAt):
            return nodes[value.place]
        return op_of(value.name) if isinstance(value, _Operator) else value

    for op, name, target, args, kwargs, phase in lines:
        if op == "output":
            nodes.append(graph.output(map_aggregate(args, whole)[0]))
            continue
        function: Any = target
        if op == "call_function":
            function = extended_product if target == _EXTENDED else op_of(target)
        given = map_aggregate(args, whole), map_aggregate(kwargs, whole)
        node = graph.create_node(op, function, *given, name=name)
        if phase is not None:
            node.meta["phase"] = phase
        nodes.append(node)
    with static_fake_mode():
        for node, spec in zip(nodes, inputs, strict=False):  # placeholders come first
            node.meta["val"] = spec.empty()
    module = graph_module(owner, graph)
    return Lowered(module, tuple(kernels.values()), *counts)
