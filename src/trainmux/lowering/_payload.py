"""A region as bytes, to be compiled elsewhere."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from trainmux.ir import Phase
from trainmux.lowering._regions import RegionGraph


@dataclass(frozen=True)
class _At:
    """A node, by its place among inputs and body."""

    place: int


def to_payload(region: RegionGraph) -> bytes:
    """Everything that decides a region's kernel."""
    place = {node: _At(i) for i, node in enumerate((*region.inputs, *region.body))}
    lines = [
        (op_name(node.target), *fx.map_arg((node.args, dict(node.kwargs)), lambda n: place[n]))  # type: ignore[arg-type, return-value]
        for node in region.body
    ]
    outputs = [place[node].place for node in region.outputs]
    phase = region.body[-1].meta.get("phase")
    return pickle.dumps(
        (
            region.input_specs,
            region.output_specs,
            region.placed,
            outputs,
            lines,
            None if phase is None else phase.value,
            region.is_bucket,
        )
    )


def from_payload(payload: bytes) -> RegionGraph:
    """The region again, in a graph of its own."""
    input_specs, output_specs, placed, outputs, lines, phase, is_bucket = pickle.loads(payload)
    graph = fx.Graph()
    nodes = [graph.placeholder(f"input_{i}") for i in range(len(input_specs))]
    num_inputs = len(nodes)
    for name, args, kwargs in lines:
        node = graph.call_function(op_of(name), _filled(args, nodes), _filled(kwargs, nodes))
        if phase is not None:
            node.meta["phase"] = Phase(phase)
        node.meta["bucket"] = is_bucket
        nodes.append(node)
    return RegionGraph(
        tuple(nodes[num_inputs:]),
        tuple(nodes[:num_inputs]),
        tuple(nodes[i] for i in outputs),
        input_specs,
        output_specs,
        placed,
    )


def _filled(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, _At):
        return nodes[value.place]
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(item, nodes) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, nodes) for key, item in value.items()}
    return value


def op_name(target: Any) -> str:
    """An operator as text; the way back is ``op_of``."""
    if target is operator.getitem:
        return "getitem"
    if not isinstance(target, OpOverload):
        raise TypeError(f"expected an ATen operator, got {target}")
    return str(target)


def op_of(name: str) -> Callable[..., Any]:
    """The operator that ``op_name`` wrote down."""
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    op: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return op
