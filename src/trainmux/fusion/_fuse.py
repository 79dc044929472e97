"""Widen a member's graph to ``k`` members: graph in, graph out (sub-array fusion, B.1.1).

Equal layers have equal nodes: each kind is fused once, and copied wherever it occurs. How each operator was
fused is recorded; nothing falls back silently.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.fusion._operator import OperatorFuser
from trainmux.fusion._stacked import Stacked
from trainmux.fusion._writing import GraphWriter, Written, tensor_key
from trainmux.ir import FusionRecord, GraphInput, GraphOutput
from trainmux.tracing import TracedGraph, graph_constant, node_location, output_nodes

_MAX_LOCATIONS = 3


@dataclass(frozen=True)
class FusedGraph:
    """A graph over ``width`` members; every output, and each input marked ``batched``, is ``[k, ...]``."""

    module: fx.GraphModule
    width: int
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    records: tuple[FusionRecord, ...]


def fuse(
    traced: TracedGraph,
    width: int,
    batched: Sequence[bool],
    *,
    strides: Mapping[int, Sequence[int]] | None = None,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
) -> FusedGraph:
    """Widen ``traced`` to ``width`` members.

    ``batched`` says for each placeholder whether it differs between members; ``strides`` gives the
    strides of stacked inputs that are not contiguous (padded storage), by position; ``decompositions``
    take operators apart as they are written, after fusion. Raises ``FusionError`` naming the operator and
    the user's line where an operator cannot be fused.
    """
    placeholders = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
    writer = GraphWriter(placeholders[0].meta["val"].fake_mode, decompositions)
    fuser = _Fuser(traced.module, width, writer)
    given: list[Written] = []
    for position, (node, is_batched) in enumerate(zip(placeholders, batched, strict=True)):
        value = node.meta["val"]
        if is_batched:
            shape = (width, *value.shape)
            value = writer.empty(shape, (strides or {}).get(position), value.dtype, value.device)
        given.append(writer.placeholder(value, is_stacked=is_batched))
    module = writer.finish(fuser.run(given))
    inputs = tuple(
        replace(described, batched=is_batched)
        for described, is_batched in zip(traced.inputs, batched, strict=True)
    )
    return FusedGraph(module, width, inputs, traced.outputs, fuser.records())


class _Fuser:
    """Walks the member's graph and has each node written once for all members."""

    def __init__(self, module: fx.GraphModule, width: int, writer: GraphWriter) -> None:
        self._module = module
        self._width = width
        self._writer = writer
        self._operator = OperatorFuser(width)
        self._how: dict[fx.Node, tuple[str, str]] = {}

    def run(self, given: Sequence[Written]) -> list[Written]:
        values: dict[fx.Node, Any] = {}
        remaining = iter(given)
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = graph_constant(self._module, node)
            elif node.op != "output":
                values[node] = self._written(node, values)
        return [self._stacked(item, values[item]) for item in output_nodes(self._module)]

    def records(self) -> tuple[FusionRecord, ...]:
        """One record for each (operator, way, reason), in order of first use."""
        counts: Counter[tuple[str, str, str]] = Counter()
        places: dict[tuple[str, str, str], list[str]] = {}
        for node, (how, fallback) in self._how.items():
            key = (str(node.target), how, fallback)
            counts[key] += 1
            location = node_location(node)
            found = places.setdefault(key, [])
            if location and location not in found and len(found) < _MAX_LOCATIONS:
                found.append(location)
        return tuple(
            FusionRecord(op, how, count, tuple(places[op, how, fallback]), fallback)
            for (op, how, fallback), count in counts.items()
        )

    def _written(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        filled: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
        args, kwargs = filled
        if node.target is operator.getitem:
            return args[0][args[1]]

        def fused(args: Any, kwargs: Any) -> tuple[Any, tuple[str, str]]:
            return self._operator(node, tuple(args), dict(kwargs)), self._operator.how

        result, how = self._writer.write(node, (node.target, _described(node)), fused, (args, kwargs))
        self._how[node] = how
        return result

    def _stacked(self, node: fx.Node, value: Written | Tensor) -> Written:
        """An output ``[k, ...]``, whether members differ in it or not."""
        if isinstance(value, Written) and value.is_stacked:
            return value

        def repeated(shared: Tensor) -> tuple[Stacked, None]:
            return Stacked(shared.unsqueeze(0).expand(self._width, *shared.shape).clone()), None

        result, _ = self._writer.write(node, "repeated", repeated, (value,))
        assert isinstance(result, Written)
        return result


def _described(node: fx.Node) -> Any:
    """All that a rule may know of the member's own result."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(tensor_key(item) if isinstance(item, Tensor) else None for item in values)
