"""Write a graph from pieces: a call is traced once, and its nodes are copied wherever an equal one occurs.

Tracing an operator takes a millisecond or more, copying its nodes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.errors import FusionError
from trainmux.fusion._stacked import Stacked, is_stacked
from trainmux.tracing import (
    FakeTensorMode,
    copy_node,
    functionalized,
    graph_constant,
    graph_module,
    inherit_meta,
    make_fx,
    node_location,
    output_nodes,
)


@dataclass(frozen=True)
class Written:
    """A value of the graph that is being written."""

    node: fx.Node
    is_stacked: bool

    @property
    def fake(self) -> Tensor:
        value: Tensor = self.node.meta["val"]
        return value


@dataclass(frozen=True)
class _Piece:
    """A traced call: its graph, which results are stacked, and what was said of it.

    A result for which ``is_stacked`` is ``None`` is no tensor, but the next of ``others``. ``constants``
    keeps those tensors alive whose identity is part of the piece's key.
    """

    module: fx.GraphModule
    is_stacked: tuple[bool | None, ...]
    others: tuple[Any, ...]
    spec: pytree.TreeSpec
    said: Any
    constants: tuple[Tensor, ...]


class GraphWriter:
    """Writes one graph. ``decompositions`` take operators apart as they are written."""

    def __init__(
        self, mode: FakeTensorMode, decompositions: Mapping[OpOverload, Callable[..., Any]] | None
    ) -> None:
        self._mode = mode
        self._decompositions = decompositions
        self._graph = fx.Graph()
        self._owner = torch.nn.Module()
        self._num_inputs = 0
        self._pieces: dict[Hashable, _Piece] = {}
        self._constants: dict[int, fx.Node] = {}

    def empty(
        self, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A fake tensor; contiguous where no strides are given."""
        with self._mode:
            if strides is None:
                return torch.empty(shape, dtype=dtype, device=device)
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def placeholder(self, fake: Tensor, *, is_stacked: bool) -> Written:
        """A further input."""
        self._num_inputs += 1
        node = self._graph.placeholder(f"inputs_{self._num_inputs}")
        node.meta["val"] = fake
        return Written(node, is_stacked)

    def write(
        self,
        origin: fx.Node,
        kind: Hashable,
        function: Callable[..., tuple[Any, Any]],
        given: tuple[Any, ...],
    ) -> tuple[Any, Any]:
        """Append ``function(*given)`` to the graph, for a member's node ``origin``.

        ``given`` has ``Written`` values anywhere in it, which the function sees as fake tensors or as
        ``Stacked`` ones. It returns a result, whose tensors are returned as ``Written`` values, and what is
        to be said of it. Of calls with one ``kind`` and equal arguments only the first calls it.
        """
        sources: dict[fx.Node, Written] = {}
        key = (kind, _key(given, sources))
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = self._traced(origin, function, given, sources)
        return self._copied(piece, list(sources), origin), piece.said

    def finish(self, results: Sequence[Written]) -> fx.GraphModule:
        """The graph with these results, without unused nodes."""
        self._graph.output([result.node for result in results])
        self._graph.eliminate_dead_code()
        return graph_module(self._owner, self._graph)

    def _traced(
        self,
        origin: fx.Node,
        function: Callable[..., tuple[Any, Any]],
        given: tuple[Any, ...],
        sources: dict[fx.Node, Written],
    ) -> _Piece:
        found: list[Any] = []

        def run(*tensors: Tensor) -> list[Tensor]:
            values = {
                node: Stacked(tensor) if written.is_stacked else tensor
                for (node, written), tensor in zip(sources.items(), tensors, strict=True)
            }
            filled = pytree.tree_map_only(Written, lambda written: values[written.node], given)
            result, said = function(*filled)
            leaves, spec = pytree.tree_flatten(result, is_leaf=is_stacked)
            found[:] = [leaves, spec, said]
            return [leaf.tensor if isinstance(leaf, Stacked) else leaf for leaf in leaves if _is_tensor(leaf)]

        with self._mode:
            examples = [_stand_in(written.fake) for written in sources.values()]
            table = self._decompositions
            module = make_fx(run, decomposition_table=table)(*examples)
            if _mutating(module):  # torch's own rules may write to what they have just made
                module = make_fx(functionalized(module), decomposition_table=table)(*examples)
        if writes := _mutating(module):
            location = node_location(origin)
            raise FusionError(
                f"{origin.target}{f' at {location}' if location else ''} cannot be fused: expected operators "
                f"that write to none of their arguments, got {writes[0]}; register it as a functional one",
                op=str(origin.target),
                location=location,
            )
        leaves, spec, said = found
        stacked = tuple(is_stacked(leaf) if _is_tensor(leaf) else None for leaf in leaves)
        others = tuple(leaf for leaf in leaves if not _is_tensor(leaf))
        constants = tuple(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        return _Piece(module, stacked, others, spec, said, constants)

    def _copied(self, piece: _Piece, sources: list[fx.Node], origin: fx.Node) -> Any:
        copied: dict[fx.Node, fx.Node] = {}
        remaining = iter(sources)
        for node in piece.module.graph.nodes:
            if node.op == "placeholder":
                copied[node] = next(remaining)
            elif node.op == "get_attr":
                copied[node] = self._constant(graph_constant(piece.module, node), node)
            elif node.op != "output":
                copied[node] = new = copy_node(self._graph, node, lambda n: copied[n])
                inherit_meta(new, origin)
                new.meta["origin"] = origin.name
        tensors, others = iter(output_nodes(piece.module)), iter(piece.others)
        leaves = [
            next(others) if stacked is None else Written(copied[next(tensors)], stacked)
            for stacked in piece.is_stacked
        ]
        return pytree.tree_unflatten(leaves, piece.spec)

    def _constant(self, value: Tensor, like: fx.Node) -> fx.Node:
        if id(value) not in self._constants:
            name = f"_tensor_constant{len(self._constants)}"
            self._owner.register_buffer(name, value, persistent=False)
            self._constants[id(value)] = node = self._graph.get_attr(name)
            node.meta.update(like.meta)
        return self._constants[id(value)]


def tensor_key(tensor: Tensor) -> Hashable:
    """All that an operator can see of a fake tensor."""
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


def _mutating(module: fx.GraphModule) -> list[str]:
    targets = [node.target for node in module.graph.nodes]
    return [str(op) for op in targets if isinstance(op, OpOverload) and op._schema.is_mutable]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (Stacked, Tensor))


def _key(value: Any, sources: dict[fx.Node, Written]) -> Hashable:
    """A key, equal for values that differ in their nodes only; these are added to ``sources`` in order."""
    if isinstance(value, Written):
        sources.setdefault(value.node, value)
        return ("written", list(sources).index(value.node), value.is_stacked, tensor_key(value.fake))
    if isinstance(value, Tensor):
        return ("constant", id(value))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(_key(item, sources) for item in value))
    if isinstance(value, dict):
        return ("dict", *((name, _key(item, sources)) for name, item in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_key(item, sources) for item in (value.start, value.stop, value.step)))
    if isinstance(value, float):
        return ("float", repr(value))  # tells zeros apart
    return (type(value), value)


def _stand_in(fake: Tensor) -> Tensor:
    """A tensor of the same layout: the tracer tells its inputs apart by identity, and pieces share theirs."""
    offset = fake.storage_offset()
    if offset == 0:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    extent = (
        offset + 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
    )
    room = torch.empty(max(extent, 0), dtype=fake.dtype, device=fake.device)
    return room.as_strided(fake.shape, fake.stride(), offset)
