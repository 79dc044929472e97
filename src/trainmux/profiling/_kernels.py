"""The static part of a profile: a program's graph as kernels over storages (µ-TWO §4.1, Table A).

A tensor here is a storage; views, and parts of tuples, are not nodes. Forward nodes come first, then the
backward pass and the update, which may stand among its nodes: all keep their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.ir import ByteClass, Phase, ProfiledNode, ProfiledTensor
from trainmux.lowering import RegionCall


@dataclass(frozen=True)
class KernelTensor:
    """A storage: its place among arguments, results and values of the step."""

    name: str
    byte_class: ByteClass
    size_bytes: int


@dataclass(frozen=True)
class Location:
    """A value in memory: its storage, and the view of it. ``offset`` counts elements.

    ``is_conj`` and ``is_neg`` are torch's marks of views that conjugate or negate what lies there.
    """

    tensor: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: int, value: Tensor) -> Location:
        """The location of ``value``, which lies in the storage ``tensor``."""
        view = (tuple(value.shape), tuple(value.stride()), int(value.storage_offset()))
        return cls(tensor, value.dtype, value.device, *view, value.is_conj(), value.is_neg())

    @property
    def is_plain(self) -> bool:
        """Whether it begins where its storage does, and is as it lies there."""
        return self.offset == 0 and not self.is_conj and not self.is_neg

    def look(self, memory: Tensor) -> Tensor:
        """The value in the storage's bytes."""
        typed = memory.view(self.dtype) if memory.numel() else memory.new_empty(0, dtype=self.dtype)
        value = typed.as_strided(self.shape, self.strides, typed.storage_offset() + self.offset)
        value = value.conj() if self.is_conj else value
        return torch._neg_view(value) if self.is_neg else value


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
    """A node of the graph that computes. Positions are those of the graph's tensors; reads are sorted.

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

    @property
    def touched(self) -> tuple[int, ...]:
        """All storages that it reads, creates or changes."""
        return (*self.reads, *self.creates, *self.changes)


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
            line = (step.node.op, _called_text(self.module, step.node), step.phase.value)
            digest.update(repr((*line, step.reads, step.creates, step.changes)).encode())
            results = locations_of(self.values[step.node])
            digest.update(repr([(str(at.dtype), at.shape) for at in results]).encode())
            if step.work is not None:
                digest.update(repr((step.work, _constants(step.node))).encode())
                if layouts:
                    operands = [self.values[source] for source in step.node.all_input_nodes]
                    strides = [at.strides for at in (*locations_of(operands), *results)]
                    digest.update(repr(strides).encode())
        for tensor in self.tensors:
            digest.update(repr((tensor.byte_class.value, tensor.size_bytes)).encode())
        return digest.hexdigest()

    def profiled(
        self,
        seconds: Sequence[float],
        rates: tuple[float, float, float, float],
        *,
        copy_seconds: float = 0.0,
        workspaces: Sequence[int] | None = None,
    ) -> tuple[tuple[ProfiledTensor, ...], tuple[ProfiledNode, ...]]:
        """Tensors and nodes of a profile, by the nodes' ``seconds``.

        ``rates`` are bytes per second of copies: out, in, and both again while both are busy; each copy takes
        ``copy_seconds`` besides. ``workspaces`` are bytes, of each node.
        """
        tensors = (
            ProfiledTensor(
                tensor.name,
                tensor.byte_class,
                tensor.size_bytes,
                *(copy_seconds + tensor.size_bytes / rate for rate in rates),
            )
            for tensor in self.tensors
        )
        nodes = (
            ProfiledNode(
                step.node.name,
                step.phase,
                step.reads,
                step.creates,
                step.changes,
                taken,
                workspace,
                is_repeatable=not step.changes,
            )
            for step, taken, workspace in zip(
                self.steps, seconds, workspaces or [0] * len(self.steps), strict=True
            )
        )
        return tuple(tensors), tuple(nodes)

    def signatures(self) -> list[Hashable]:
        """For each step, all that decides its work; equal signatures take equally long.

        A deep model repeats its layers, and one of them tells of all. Two nodes have one signature where they
        call the same kernel with the same numbers, on operands of the same types, shapes and strides, as well
        aligned, of which the same lie in one storage.
        """
        return [_signature(self, step) for step in self.steps]


def locations_of(value: Any) -> list[Location]:
    """Locations of the tensors of a value, in order."""
    if isinstance(value, Location):  # nearly always
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Location)]


def target_text(target: Any) -> str:
    """A node's target as text that is equal in every process: a function's own would have its address."""
    if isinstance(target, FunctionType):
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def _called_text(module: torch.nn.Module, node: fx.Node) -> str:
    """A node's target as text that is equal in every process; a region's is its kernel's key."""
    if node.op != "call_module":
        return target_text(node.target)
    called = module.get_submodule(str(node.target))
    return called.kernel.key if isinstance(called, RegionCall) else type(called).__name__


def _constants(node: fx.Node) -> list[bool | int | float | str]:
    """Arguments of a call that are no tensors: strides, paddings, scales, the product that is extended."""
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    numbers_and_operators = (leaf for leaf in leaves if isinstance(leaf, bool | int | float | OpOverload))
    return [str(leaf) if isinstance(leaf, OpOverload) else leaf for leaf in numbers_and_operators]


_ALIGNMENT = 16
"""Bytes. Kernels that move so many at a time check whether an operand begins at a multiple of it."""


def _signature(graph: KernelGraph, step: KernelStep) -> Hashable:
    """All that decides what a node does, but for the storages that its operands lie in."""
    node = step.node
    given = fx.map_arg((node.args, dict(node.kwargs)), lambda source: graph.values[source])
    leaves, structure = pytree.tree_flatten((given, graph.values[node]))
    storages: dict[int, int] = {}  # numbered by their first use in the call

    def described(leaf: Any) -> Hashable:
        if not isinstance(leaf, Location):
            return (type(leaf).__name__, str(leaf))
        beginning = leaf.offset * leaf.dtype.itemsize % _ALIGNMENT
        storage = storages.setdefault(leaf.tensor, len(storages))
        return (leaf.dtype, leaf.device, leaf.shape, leaf.strides, beginning, storage)

    operands = tuple(map(described, leaves))
    changed = tuple(storages.get(number) for number in step.changes)
    return (node.op, _called_text(graph.module, node), str(structure), operands, changed)
