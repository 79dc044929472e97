"""Which nodes of a step do the same work: a deep model repeats its layers, and one of them tells of all.

Two nodes are alike where they call the same kernel with the same numbers, on operands of the same types,
shapes and strides, as well aligned, of which the same lie in one storage.
"""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import fx

from trainmux.profiling._kernels import KernelGraph, KernelStep, Location, called_text

_ALIGNMENT = 16
"""Bytes: kernels that move so many at a time look whether an operand begins at a multiple of it."""


def alike(graph: KernelGraph) -> list[list[int]]:
    """The ranks of the step's nodes, those that do the same work together, in order."""
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
    """How an operand is looked at, its storage numbered by its first use in the call."""
    beginning = at.offset * at.dtype.itemsize % _ALIGNMENT
    storage = storages.setdefault(at.tensor, len(storages))
    return (at.dtype, at.device, at.shape, at.strides, beginning, storage)
