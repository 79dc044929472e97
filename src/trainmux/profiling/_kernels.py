"""The static part of a profile: a program's graph as kernels over storages (µ-TWO §4.1, Table A).

The graph is walked once with fake tensors: no memory is touched and nothing runs, so a step larger than any
device can be read. A tensor here is a storage; views, and parts of tuples, are not nodes. Forward nodes come
first, then the backward pass and the update, which may stand among its nodes: all keep their order.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.ir import ByteClass, Phase
from trainmux.lowering import RegionCall
from trainmux.tracing import FakeTensorMode

_ORDER = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.UPDATE: 2}


@dataclass(frozen=True)
class KernelTensor:
    """A storage: its place among arguments, results and values of the step."""

    name: str
    byte_class: ByteClass
    size_bytes: int


@dataclass(frozen=True)
class Location:
    """A value in memory: its storage, and the view of it. ``offset`` counts elements."""

    tensor: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def look(self, memory: Tensor) -> Tensor:
        """The value in the storage's bytes."""
        typed = memory.view(self.dtype) if memory.numel() else memory.new_empty(0, dtype=self.dtype)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset() + self.offset)


TILE = 128
"""Rows and columns of results that one block of a matrix kernel computes."""


@dataclass(frozen=True)
class Work:
    """A library call: ``batch`` matrices of ``rows`` by ``columns`` sums of ``depth`` products, ``passes``
    times over."""

    batch: int
    rows: int
    columns: int
    depth: int
    passes: float = 1.0

    @property
    def flops(self) -> float:
        """Floating-point operations: a product and a sum for each."""
        return 2.0 * (self.batch * self.rows * self.columns * self.depth) * self.passes

    @property
    def tiles(self) -> int:
        """The pieces of ``TILE`` by ``TILE`` results that it is spread over the device in."""
        return self.batch * -(-self.rows // TILE) * -(-self.columns // TILE)


@dataclass(frozen=True)
class KernelStep:
    """A node of the graph that computes. Positions are those of the graph's tensors.

    ``results`` has, for each tensor among the node's results in order, its storage; ``work`` is
    that of a library call, ``None`` for everything else.
    """

    node: fx.Node
    phase: Phase
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    changes: tuple[int, ...]
    results: tuple[int, ...]
    work: Work | None


@dataclass(frozen=True)
class KernelGraph:
    """A program's module with its nodes that compute, in order, and the storages they touch.

    ``values`` has every node's value with a `Location` in the place of each tensor, ``inputs`` those of the
    arguments, ``constants`` those of the module's own tensors by name, ``outputs`` those of the results.
    """

    module: fx.GraphModule
    steps: tuple[KernelStep, ...]
    tensors: tuple[KernelTensor, ...]
    values: Mapping[fx.Node, Any]
    inputs: tuple[Location, ...]
    constants: Mapping[str, Location]
    outputs: tuple[Location, ...]

    def fingerprint(self, *, layouts: bool = False) -> str:
        """Equal for graphs that do the same to storages of the same sizes.

        ``layouts``: and whose library calls find their operands in memory in the same order.
        """
        digest = hashlib.sha256()
        for step in self.steps:
            line = (step.node.op, called_text(self.module, step.node), step.phase.value)
            digest.update(repr((*line, step.reads, step.creates, step.changes)).encode())
            digest.update(repr(_kinds(self.values[step.node])).encode())
            if step.work is not None:
                digest.update(repr((step.work, _constants(step.node))).encode())
                if layouts:
                    operands = [self.values[source] for source in step.node.all_input_nodes]
                    digest.update(repr(_strides([*operands, self.values[step.node]])).encode())
        for tensor in self.tensors:
            digest.update(repr((tensor.byte_class.value, tensor.size_bytes)).encode())
        return digest.hexdigest()


def read_kernels(module: fx.GraphModule, classes: Sequence[ByteClass]) -> KernelGraph:
    """The kernels of a step whose arguments are of the given classes.

    Placeholders carry fake tensors in ``meta["val"]``, computing nodes their phase in ``meta["phase"]``.
    """
    reader = _Reader(module, classes)
    with reader.mode, torch.no_grad():
        reader.walk()
    return reader.finish()


class _Reader:
    """Runs the graph on fakes and writes down who touches which storage."""

    def __init__(self, module: fx.GraphModule, classes: Sequence[ByteClass]) -> None:
        self._module = module
        self._classes = iter(classes)
        self._values: dict[fx.Node, Any] = {}
        self._kept: list[Tensor] = []  # a storage's address must not be given to another one
        self._number: dict[int, int] = {}
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._given: dict[int, ByteClass] = {}
        self._steps: list[KernelStep] = []
        self._results: set[int] = set()
        placeholder = next(node for node in module.graph.nodes if node.op == "placeholder")
        self.mode: FakeTensorMode = placeholder.meta["val"].fake_mode

    def walk(self) -> None:
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                # A fresh one: the fakes of a parameter and its optimizer state may be one and the same.
                like = node.meta["val"]
                value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                self._values[node] = value
                self._given[self._storage(value, node.name)] = next(self._classes)
            elif node.op == "get_attr":
                value = self.mode.from_tensor(_attribute(self._module, str(node.target)))
                self._values[node] = value
                self._given[self._storage(value, node.name)] = ByteClass.CONSTANT
            elif node.op == "output":
                for leaf in pytree.tree_leaves(node.args):
                    if isinstance(leaf, fx.Node) and isinstance(self._values[leaf], Tensor):
                        self._results.add(self._storage(self._values[leaf], leaf.name))
            else:
                self._run(node)

    def finish(self) -> KernelGraph:
        steps = sorted(self._steps, key=lambda step: step.phase is not Phase.FORWARD)
        made: dict[int, Phase] = {}
        last: dict[int, Phase] = {}
        for step in steps:
            made.update(dict.fromkeys(step.creates, step.phase))
            last.update(dict.fromkeys((*step.reads, *step.creates, *step.changes), step.phase))
        used = sorted(set(made) | set(self._given))
        renumbered = {old: new for new, old in enumerate(used)}
        tensors = [KernelTensor(self._names[i], self._class_of(i, made, last), self._sizes[i]) for i in used]

        def new(numbers: Sequence[int]) -> tuple[int, ...]:
            return tuple(renumbered[number] for number in numbers)

        def locate(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            number = renumbered[self._storage(value, "")]
            place = (tuple(value.shape), tuple(value.stride()), int(value.storage_offset()))
            return Location(number, value.dtype, value.device, *place)

        values = {node: pytree.tree_map(locate, value) for node, value in self._values.items()}
        (output,) = self._module.graph.find_nodes(op="output")
        results = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)]
        return KernelGraph(
            self._module,
            tuple(
                replace(
                    step,
                    reads=new(step.reads),
                    creates=new(step.creates),
                    changes=new(step.changes),
                    results=new(step.results),
                )
                for step in steps
            ),
            tuple(tensors),
            MappingProxyType(values),
            tuple(values[node] for node in self._module.graph.find_nodes(op="placeholder")),
            MappingProxyType(
                {str(node.target): values[node] for node in self._module.graph.find_nodes(op="get_attr")}
            ),
            tuple(values[node] for node in results),
        )

    def _class_of(self, number: int, made: dict[int, Phase], last: dict[int, Phase]) -> ByteClass:
        if number in self._given:
            return self._given[number]
        if number in self._results:
            return ByteClass.RESULT
        born, died = made[number], last[number]
        if born is died:
            return ByteClass.GRADIENT_MAP if born is Phase.BACKWARD else ByteClass.TEMPORARY
        return ByteClass.FEATURE_MAP if born is Phase.FORWARD else ByteClass.GRADIENT

    def _storage(self, tensor: Tensor, name: str) -> int:
        """The number of a tensor's storage; new ones are named after the node that made them."""
        storage = tensor.untyped_storage()
        number = self._number.get(storage._cdata)
        if number is None:
            number = self._number[storage._cdata] = len(self._names)
            self._names.append(name)
            self._sizes.append(storage.nbytes())
            self._kept.append(tensor)
        return number

    def _run(self, node: fx.Node) -> None:
        filled: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self._values[n])
        args, kwargs = filled
        if node.target is operator.getitem:
            self._values[node] = args[0][args[1]]
            return
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = dict.fromkeys(self._storage(tensor, node.name) for tensor in given)
        if node.op == "call_module":
            called = self._module.get_submodule(str(node.target))
            if isinstance(called, RegionCall):
                value: Any = [spec.empty() for spec in called.outputs]
                changed = {self._storage(args[position], node.name) for position in called.changed}
            else:
                value, changed = called(*args, **kwargs), set()
        else:
            target: Callable[..., Any] = node.target  # type: ignore[assignment]
            changed = {self._storage(tensor, node.name) for tensor in _written(target, args, kwargs)}
            value = _as_it_runs(target, args, target(*args, **kwargs))
        self._values[node] = value
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        before = len(self._names)
        results = [self._storage(leaf, node.name) for leaf in leaves]
        creates = tuple(dict.fromkeys(number for number in results if number >= before))
        if not creates and not changed:
            return  # a view
        self._steps.append(
            KernelStep(
                node,
                node.meta.get("phase") or self._phase_of_inputs(node),
                tuple(number for number in inputs if number not in changed),
                creates,
                tuple(sorted(changed)),
                tuple(results),
                work_of(node.target, args, value),
            )
        )

    def _phase_of_inputs(self, node: fx.Node) -> Phase:
        """The latest phase of what a node reads, for one that was given none."""
        phases = [source.meta.get("phase") for source in node.all_input_nodes]
        known = [phase for phase in phases if phase is not None]
        return max(known, key=_ORDER.__getitem__, default=Phase.FORWARD)


def _as_it_runs(target: Any, args: Sequence[Any], value: Any) -> Any:
    """A view with the strides that it has when it is run, anything else as it is."""
    if target not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return value
    given: Tensor = args[0]
    strides = view_strides(given.shape, given.stride(), value.shape)
    is_copy = given.untyped_storage()._cdata != value.untyped_storage()._cdata
    if is_copy or strides is None or strides == tuple(value.stride()):
        return value
    return given.as_strided(value.shape, strides, value.storage_offset())


def view_strides(
    shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides that a view has when it is run; ``None`` where there is no such view, or nothing in it.

    Traced on fakes, an axis of one element keeps the stride that it had; when the same view is run, it gets
    the one that it would have in dense memory. No element lies elsewhere for it, but by such strides torch
    tells whether a convolution's filters of one channel have their channels innermost, and with it the
    layout of the result.

    Axes that lie densely within each other form a block. Each block is dealt out to the new axes, the last
    ones first; an axis of one element goes with the block behind it.
    """
    if 0 in shape:
        return None
    if not shape:
        return (1,) * len(wanted)
    found = [0] * len(wanted)
    axis = len(wanted) - 1
    base, in_block, dealt = strides[-1], 1, 1
    for old in reversed(range(len(shape))):
        in_block *= shape[old]
        is_first = old == 0
        if not is_first and (shape[old - 1] == 1 or strides[old - 1] == in_block * base):
            continue
        while axis >= 0 and (dealt < in_block or wanted[axis] == 1):
            found[axis] = dealt * base
            dealt *= wanted[axis]
            axis -= 1
        if dealt != in_block:
            return None
        if not is_first:
            base, in_block, dealt = strides[old - 1], 1, 1
    return tuple(found) if axis < 0 else None


def _written(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    if not isinstance(target, OpOverload):
        return []
    found = []
    for position, described in enumerate(target._schema.arguments):
        if described.alias_info is not None and described.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(described.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _attribute(module: torch.nn.Module, name: str) -> Tensor:
    value: Tensor = operator.attrgetter(name)(module)
    return value


def target_text(target: Any) -> str:
    """A node's target as text that is equal in every process: a function's own would have its address."""
    if isinstance(target, FunctionType):
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def called_text(module: torch.nn.Module, node: fx.Node) -> str:
    """A node's target as text that is equal in every process; a region's is its kernel's key."""
    if node.op != "call_module":
        return target_text(node.target)
    called = module.get_submodule(str(node.target))
    return called.kernel.key if isinstance(called, RegionCall) else type(called).__name__


def _kinds(value: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a value."""
    return [(str(at.dtype), at.shape) for at in locations_of(value)]


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [at.strides for at in locations_of(value)]


def locations_of(value: Any) -> list[Location]:
    """Locations of the tensors of a value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Location)]


def _constants(node: fx.Node) -> list[bool | int | float | str]:
    """Arguments of a call that are no tensors: strides, paddings, scales, the product that is extended."""
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    numbers_and_operators = (leaf for leaf in leaves if isinstance(leaf, bool | int | float | OpOverload))
    return [str(leaf) if isinstance(leaf, OpOverload) else leaf for leaf in numbers_and_operators]


aten = torch.ops.aten
_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


def work_of(target: Any, args: Sequence[Any], value: Any) -> Work | None:
    """The work of a library call; ``None`` for what is bound by memory."""
    if not isinstance(target, OpOverload) and args and isinstance(args[0], OpOverload):
        target, args = args[0], [leaf for leaf in args[1:] if isinstance(leaf, Tensor)]  # an extended product
    if target in _PRODUCTS:
        left = args[_PRODUCTS[target]]
        batch = value.shape[0] if value.dim() == 3 else 1
        return Work(batch, value.shape[-2], value.shape[-1], left.shape[-1])
    if target is aten.convolution.default:
        return _convolution(value, args[1], args[8], 1)
    if target is aten.convolution_backward.default:
        return _convolution(args[0], args[2], args[9], sum(map(bool, args[-1][:2])))
    name = str(target)
    if "scaled_dot_product" in name and "attention" in name:
        query, key = (args[1], args[2]) if "backward" in name else (args[0], args[1])
        # A block has some rows of one head, all columns of it. Two products forward, five backward.
        heads, depth = query.shape[0] * query.shape[1], query.shape[3] * key.shape[-2]
        return Work(heads, query.shape[2], 1, depth, 5.0 if "backward" in name else 2.0)
    return None


def _convolution(out: Tensor, weight: Tensor, groups: int, passes: int) -> Work:
    pixels = out.numel() // out.shape[1]
    return Work(groups, pixels, out.shape[1] // groups, weight.numel() // weight.shape[0], float(passes))


_ALIGNMENT = 16
"""Bytes. Kernels that move so many at a time check whether an operand begins at a multiple of it."""


def alike(graph: KernelGraph) -> list[list[int]]:
    """The ranks of the step's nodes, grouped by those that do the same work, in order.

    A deep model repeats its layers, and one of them tells of all. Two nodes are alike where they call the
    same kernel with the same numbers, on operands of the same types, shapes and strides, as well aligned, of
    which the same lie in one storage.
    """
    found: dict[Any, list[int]] = {}
    for rank, step in enumerate(graph.steps):
        found.setdefault(_call(graph, step), []).append(rank)
    return list(found.values())


def _call(graph: KernelGraph, step: KernelStep) -> tuple[Any, ...]:
    """All that decides what a node does, but for the storages that its operands lie in."""
    node = step.node
    given = fx.map_arg((node.args, dict(node.kwargs)), lambda source: graph.values[source])
    leaves, structure = pytree.tree_flatten((given, graph.values[node]))
    storages: dict[int, int] = {}
    said = tuple(
        _look(leaf, storages) if isinstance(leaf, Location) else (type(leaf).__name__, str(leaf))
        for leaf in leaves
    )
    changed = tuple(storages.get(number) for number in step.changes)
    return (node.op, called_text(graph.module, node), str(structure), said, changed)


def _look(at: Location, storages: dict[int, int]) -> tuple[Any, ...]:
    """The view that an operand is, its storage numbered by its first use in the call."""
    beginning = at.offset * at.dtype.itemsize % _ALIGNMENT
    storage = storages.setdefault(at.tensor, len(storages))
    return (at.dtype, at.device, at.shape, at.strides, beginning, storage)
