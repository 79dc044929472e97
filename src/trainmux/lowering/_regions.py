"""A piece of a program as a function: what it reads, what it gives, and a key for its structure."""

from __future__ import annotations

import hashlib
import importlib
import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from trainmux.ir import Phase
from trainmux.lowering._given_memory import Place
from trainmux.lowering._inductor import OWN_DECOMPOSITIONS, decompositions
from trainmux.lowering._kinds import SMALL_BYTES, Kind, base_of, is_view
from trainmux.lowering._partition import Cut
from trainmux.tracing import FakeTensorMode, make_fx, static_fake_mode

_MANY_NODES = 40
_MANY_OUTPUTS = 6


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's memory, without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    padded: tuple[int, ...] | None = None
    """The shape of the memory around it, zeros beyond ``shape``; ``None`` where nothing is around it."""

    aligned: bool = True
    """Whether it begins at a multiple of 16 bytes."""

    def empty(self) -> Tensor:
        """New memory; what is beyond the shape is zero."""
        if not self.aligned:
            reach = self.shape[0] * self.strides[0] + 1
            memory = torch.empty(reach, dtype=self.dtype, device=self.device)
            return memory.as_strided(self.shape, self.strides, 1)
        if self.padded is None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return self._cleared(torch.empty(self.padded, dtype=self.dtype, device=self.device))

    def inside(self, place: Place) -> Tensor:
        """The memory of ``place``; what is beyond the shape is zero."""
        if self.padded is None:
            return place.value
        return self._cleared(place.memory.view(self.dtype).view(self.padded))

    def _cleared(self, memory: Tensor) -> Tensor:
        assert self.padded is not None
        for dim, (size, around) in enumerate(zip(self.shape, self.padded, strict=True)):
            if size != around:
                memory.narrow(dim, size, around - size).zero_()
        return memory[tuple(slice(size) for size in self.shape)]


def spec_of(node: fx.Node) -> TensorSpec:
    """The memory of a node's value; ``node.meta["padded"]`` holds the shape around it, if any."""
    value = node.meta["val"]
    # One number per member: a sub-array's part of it begins anywhere.
    aligned = node.op != "placeholder" or value.dim() != 1
    strides = tuple(value.stride())
    if 0 in strides and node.op == "call_function" and not is_view(node):
        # Torch 2.11 takes over the strides of what was expanded; the result has memory of its own.
        strides = tuple(torch.empty(value.shape, device="meta").stride())
    return TensorSpec(
        tuple(value.shape), strides, value.dtype, value.device, node.meta.get("padded"), aligned
    )


@dataclass(frozen=True)
class RegionGraph:
    """A region: its nodes in order, the outer nodes it reads and the nodes that are read elsewhere.

    ``placed`` says which outputs go to memory that is given, because their layout is of our choosing.
    """

    body: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]
    placed: tuple[bool, ...]

    def content(self) -> tuple[Any, ...]:
        """Everything that decides the kernel of the region, without its graph."""
        place = {node: NodeAt(i) for i, node in enumerate((*self.inputs, *self.body))}
        lines = [
            (op_name(node.target), *fx.map_arg((node.args, dict(node.kwargs)), lambda n: place[n]))  # type: ignore[arg-type, return-value]
            for node in self.body
        ]
        outputs = [place[node].place for node in self.outputs]
        return self.input_specs, self.output_specs, self.placed, outputs, lines

    def key(self) -> str:
        """Equal for regions that one compiled kernel can serve."""
        return hashlib.sha256(repr(self.content()).encode()).hexdigest()

    @property
    def combines(self) -> bool:
        """Whether it is many small independent computations: casts, or updates of several parameters."""
        if self.body[-1].meta.get("phase") is Phase.UPDATE:
            return len(self.body) > _MANY_NODES
        small = all(prod(spec.shape) * spec.dtype.itemsize <= SMALL_BYTES for spec in self.output_specs)
        return small and len(self.outputs) >= _MANY_OUTPUTS

    def placed_specs(self) -> list[TensorSpec]:
        """The memory to be given."""
        return [spec for spec, is_placed in zip(self.output_specs, self.placed, strict=True) if is_placed]

    def traced(self) -> tuple[fx.GraphModule, list[Tensor], FakeTensorMode]:
        """A functional graph of the region, its fake arguments and their mode.

        Its arguments are the inputs, then memory for the placed outputs; it returns the other ones.
        """
        mode = static_fake_mode()

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            values: dict[fx.Node, Any] = dict(zip(self.inputs, tensors, strict=False))
            for node in self.body:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                target: Callable[..., Any] = node.target  # type: ignore[assignment]
                values[node] = target(*args, **kwargs)
            given = iter(tensors[len(self.inputs) :])
            returned = []
            for node, is_placed in zip(self.outputs, self.placed, strict=True):
                if is_placed:
                    next(given).copy_(values[node])
                else:
                    returned.append(values[node])
            return tuple(returned)

        with mode, torch.no_grad():
            fakes = [replace(spec, padded=None).empty() for spec in (*self.input_specs, *self.placed_specs())]
            table = {**decompositions(), **OWN_DECOMPOSITIONS}
            module = make_fx(torch.func.functionalize(run, remove="mutations"), decomposition_table=table)(
                *fakes
            )
        module.graph.eliminate_dead_code()
        for node in module.graph.nodes:
            node.meta.setdefault("original_aten", node.target)  # Inductor names kernels by it
        module.recompile()
        return module, fakes, mode


class Extractor:
    """Makes regions of the pieces that a graph was cut into."""

    def __init__(self, graph: fx.Graph, cut: Cut) -> None:
        self._kinds = cut.kinds
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self._computed = {node for piece in cut.pieces for node in piece}

    def region(self, piece: Sequence[fx.Node]) -> RegionGraph:
        own = set(piece)
        body: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source in own or source in body:
                    continue
                if self._is_inlined(source, node):
                    visit(source)
                    body[source] = None
                else:
                    inputs[source] = None

        for node in piece:
            visit(node)
            body[node] = None
        ordered = sorted(body, key=self._position.__getitem__)
        outputs = [node for node in piece if self._is_read_elsewhere(node, own)]
        return RegionGraph(
            tuple(ordered),
            tuple(inputs),
            tuple(outputs),
            tuple(spec_of(node) for node in inputs),
            tuple(spec_of(node) for node in outputs),
            tuple("padded" in node.meta for node in outputs),
        )

    def _is_inlined(self, source: fx.Node, reader: fx.Node) -> bool:
        if self._kinds[source] is not Kind.INLINE or source in self._computed:
            return False
        return not self._is_part_of_storage(source, reader)

    def _is_part_of_storage(self, view: fx.Node, reader: fx.Node) -> bool:
        """Whether the update reads a parameter or its state through a view.

        The view is then made outside: a compiler that has to write through one splits the update into
        a kernel for each tensor it changes.
        """
        if reader.meta.get("phase") is not Phase.UPDATE:
            return False
        return base_of(view).op == "placeholder"

    def _is_read_elsewhere(self, node: fx.Node, own: set[fx.Node]) -> bool:
        return isinstance(node.meta.get("val"), Tensor) and self._leaves(node, own)

    def _leaves(self, node: fx.Node, own: set[fx.Node]) -> bool:
        for user in node.users:
            if user in own:
                continue
            if self._kinds[user] is not Kind.INLINE or user in self._computed:
                return True
            if self._leaves(user, own):
                return True
        return False


# ---- regions as bytes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeAt:
    """A node in stored arguments, by its place in the graph."""

    place: int


def to_payload(region: RegionGraph) -> bytes:
    """A region as bytes, to be compiled elsewhere."""
    return pickle.dumps((region.content(), region.body[-1].meta.get("phase")))


def from_payload(payload: bytes) -> RegionGraph:
    """The region again, in a graph of its own."""
    content, phase = pickle.loads(payload)
    input_specs, output_specs, placed, outputs, lines = content
    graph = fx.Graph()
    nodes = [graph.placeholder(f"input_{i}") for i in range(len(input_specs))]
    num_inputs = len(nodes)

    def found(value: Any) -> Any:
        return nodes[value.place] if isinstance(value, NodeAt) else value

    for name, args, kwargs in lines:
        node = graph.call_function(op_of(name), map_aggregate(args, found), map_aggregate(kwargs, found))
        node.meta["phase"] = phase
        nodes.append(node)
    return RegionGraph(
        tuple(nodes[num_inputs:]),
        tuple(nodes[:num_inputs]),
        tuple(nodes[i] for i in outputs),
        input_specs,
        output_specs,
        placed,
    )


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
    if namespace == "prims" and not hasattr(torch.ops.prims, packet):
        importlib.import_module("torch._inductor.inductor_prims")  # Inductor's own, of pooling and the like
    op: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return op
