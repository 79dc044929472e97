"""A member's graph, widened to ``k`` members: graph in, graph out (sub-array fusion, B.1.1).

Each node is fused by the rule of its operator, or, for the long tail, by ``torch.vmap`` of that one
operator, or by a loop over members where torch has no rule either. Values that do not depend on the
member (a shared batch, masks, positions) stay as they are. What was done to each operator is recorded;
nothing falls back silently.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.errors import FusionError
from trainmux.fusion._stacked import Context, Stacked, find_rule
from trainmux.fusion.rules.pointwise import is_pointwise, pointwise
from trainmux.fusion.strategies import OperatorTimes
from trainmux.ir import FusionRecord, GraphInput, GraphOutput
from trainmux.tracing import (
    FakeTensorMode,
    TracedGraph,
    graph_constant,
    inherit_meta,
    last_node,
    make_fx,
    node_location,
    nodes_after,
    output_nodes,
    tracer_graph,
    vmap_without_loops,
)

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
    strategies: Mapping[str, str] | None = None,
    times: OperatorTimes | None = None,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
) -> FusedGraph:
    """Widen ``traced`` to ``width`` members.

    ``batched`` says for each placeholder whether it differs between members; ``strides`` gives the
    strides of stacked inputs that are not contiguous (padded storage), by position; ``strategies`` names a
    way for families of operators that have several, or "measured", which asks ``times`` for the fastest;
    ``decompositions`` take operators apart as they are written, after fusion. Raises
    ``FusionError`` naming the operator and the user's line where an operator cannot be fused.
    """
    chosen = _Choosing(dict(strategies or {}), times, decompositions is not None)
    fuser = _Fuser(traced.module, width, batched, chosen)
    placeholders = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
    mode = _mode_of(placeholders)
    examples: list[Tensor] = []
    with mode:
        for position, (node, is_batched) in enumerate(zip(placeholders, batched, strict=True)):
            value = node.meta["val"]
            if not is_batched:
                examples.append(value)
                continue
            shape = (width, *value.shape)
            if strides is not None and position in strides:
                examples.append(
                    torch.empty_strided(shape, strides[position], dtype=value.dtype, device=value.device)
                )
            else:
                examples.append(torch.empty(shape, dtype=value.dtype, device=value.device))
        module = make_fx(fuser.run, decomposition_table=decompositions)(*examples)
    inputs = tuple(
        replace(described, batched=is_batched)
        for described, is_batched in zip(traced.inputs, batched, strict=True)
    )
    return FusedGraph(module, width, inputs, traced.outputs, fuser.records())


def _mode_of(placeholders: Sequence[fx.Node]) -> FakeTensorMode:
    for node in placeholders:
        value = node.meta["val"]
        if hasattr(value, "fake_mode"):
            mode: FakeTensorMode = value.fake_mode
            return mode
    raise RuntimeError("expected a graph traced with fake tensors, got none among its placeholders")


@dataclass(frozen=True)
class _Choosing:
    """What decides between the ways of an operator."""

    strategies: Mapping[str, str]
    times: OperatorTimes | None
    compiles: bool


class _Fuser:
    """Walks the member's graph and computes each node once for all members."""

    def __init__(
        self, module: fx.GraphModule, width: int, batched: Sequence[bool], choosing: _Choosing
    ) -> None:
        self._module = module
        self._width = width
        self._batched = batched
        self._choosing = choosing
        self._how: dict[fx.Node, tuple[str, str]] = {}

    def run(self, *inputs: Tensor) -> list[Tensor]:
        environment: dict[fx.Node, Any] = {}
        given = iter(zip(inputs, self._batched, strict=True))
        graph = tracer_graph()
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                tensor, is_batched = next(given)
                environment[node] = Stacked(tensor) if is_batched else tensor
            elif node.op == "get_attr":
                environment[node] = graph_constant(self._module, node)
            elif node.op == "output":
                return [self._stack_output(environment[item]) for item in output_nodes(self._module)]
            else:
                last = last_node(graph)
                environment[node] = self._compute(node, environment)
                for new in nodes_after(graph, last):
                    inherit_meta(new, node)
                    new.meta["origin"] = node.name
        raise RuntimeError("expected a graph with an output node, got none")

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

    def _stack_output(self, value: Stacked | Tensor) -> Tensor:
        if isinstance(value, Stacked):
            return value.tensor
        return value.unsqueeze(0).expand(self._width, *value.shape).clone()

    def _compute(self, node: fx.Node, environment: dict[fx.Node, Any]) -> Any:
        filled: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: environment[n])
        args, kwargs = filled
        if node.target is operator.getitem:
            return args[0][args[1]]
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_stacked)
        if not any(_is_stacked(leaf) for leaf in leaves):
            self._how[node] = ("shared", "")
            return node.target(*args, **kwargs)  # type: ignore[operator]
        try:
            result = self._fused(node, tuple(args), dict(kwargs))
        except FusionError:
            raise
        except Exception as error:
            raise self._error(node, f"{type(error).__name__}: {error}") from error
        self._check(node, result)
        return result

    def _fused(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = node.target
        if not isinstance(op, OpOverload):
            if self._width > 1:
                raise self._error(node, "it is not an ATen operator")
            self._how[node] = ("loop", "not an ATen operator")
            return self._loop(node, args, kwargs)
        context = Context(
            self._width,
            _device(args, kwargs),
            node.meta.get("val"),
            self._choosing.strategies,
            self._choosing.times,
            self._choosing.compiles,
        )
        named = find_rule(op)
        if named is not None:
            result, how = named.fused(context, op, *args, **kwargs)
            if result is not NotImplemented:
                self._how[node] = (how, "")
                return result
        if is_pointwise(op):
            self._how[node] = ("pointwise", "")
            return pointwise(context, op, *args, **kwargs)
        return self._vmapped(node, op, args, kwargs)

    def _vmapped(self, node: fx.Node, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_stacked)
        positions = [i for i, leaf in enumerate(leaves) if _is_stacked(leaf)]

        shape_of_result: list[Any] = []

        def member(*tensors: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for position, tensor in zip(positions, tensors, strict=True):
                filled[position] = tensor
            member_args, member_kwargs = pytree.tree_unflatten(filled, spec)
            values, result_spec = pytree.tree_flatten(op(*member_args, **member_kwargs))
            present = [isinstance(value, Tensor) for value in values]
            shape_of_result[:] = [result_spec, present]
            return [value for value in values if isinstance(value, Tensor)]  # vmap takes no None

        graph = tracer_graph()
        last = last_node(graph)
        try:
            with vmap_without_loops():
                results = iter(torch.vmap(member, randomness="error")(*[leaves[i].tensor for i in positions]))
        except Exception as error:
            for new in reversed(nodes_after(graph, last)):
                graph.erase_node(new)
            reason = str(error).strip().splitlines()[0][:160] if str(error) else type(error).__name__
            self._how[node] = ("loop", f"torch.vmap has no rule for it ({reason})")
            return self._loop(node, args, kwargs)
        result_spec, present = shape_of_result
        result = pytree.tree_unflatten(
            [Stacked(next(results)) if is_tensor else None for is_tensor in present], result_spec
        )
        wrong = self._mismatch(node, result)
        if wrong:
            for new in reversed(nodes_after(graph, last)):
                graph.erase_node(new)
            self._how[node] = ("loop", f"torch.vmap's rule is wrong here ({wrong})")
            return self._loop(node, args, kwargs)
        self._how[node] = ("vmap", "")
        return result

    def _loop(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        by_storage = "as_strided" in str(target)  # counts offsets from the beginning of the storage

        def row(leaf: Any, index: int) -> Any:
            if not isinstance(leaf, Stacked):
                return leaf
            return leaf.tensor[index].clone() if by_storage else leaf.tensor[index]

        results = []
        for index in range(self._width):
            member_args, member_kwargs = pytree.tree_map(
                lambda leaf, index=index: row(leaf, index),
                (args, kwargs),
                is_leaf=_is_stacked,
            )
            results.append(target(*member_args, **member_kwargs))
        columns = [pytree.tree_flatten(result)[0] for result in results]
        spec = pytree.tree_flatten(results[0])[1]
        merged = [
            Stacked(torch.stack(list(column))) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*columns, strict=True)
        ]
        return pytree.tree_unflatten(merged, spec)

    def _check(self, node: fx.Node, result: Any) -> None:
        """Every fused value must be what the members' own values are, with one more axis."""
        wrong = self._mismatch(node, result)
        if wrong:
            how = self._how.get(node, ("unknown", ""))[0]
            raise self._error(node, f"the rule '{how}' gave {wrong}")

    def _mismatch(self, node: fx.Node, result: Any) -> str:
        """What is wrong with the shape or dtype of a fused value; empty if nothing is."""
        expected = node.meta.get("val")
        if expected is None:
            return ""
        pairs = [(result, expected)]
        if isinstance(expected, (tuple, list)):
            pairs = list(zip(result, expected, strict=True))
        for value, member in pairs:
            if not isinstance(member, Tensor) or value is None:
                continue
            tensor = value.tensor if isinstance(value, Stacked) else value
            shape = (self._width, *member.shape) if isinstance(value, Stacked) else tuple(member.shape)
            if tuple(tensor.shape) != shape or tensor.dtype != member.dtype:
                return f"{tuple(tensor.shape)} {tensor.dtype} where {shape} {member.dtype} was expected"
        return ""

    def _error(self, node: fx.Node, reason: str) -> FusionError:
        location = node_location(node)
        where = f" at {location}" if location else ""
        return FusionError(
            f"{node.target}{where} cannot be fused over {self._width} members: {reason}",
            op=str(node.target),
            location=location,
        )


def _is_stacked(leaf: Any) -> bool:
    return isinstance(leaf, Stacked)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for leaf in pytree.tree_leaves((args, kwargs), is_leaf=_is_stacked):
        if isinstance(leaf, Stacked):
            return leaf.tensor.device
    raise RuntimeError("expected a stacked argument, got none")
