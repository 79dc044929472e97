"""One pass through a step's nodes with real tensors, each node as a plan will run it: into given memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Phase
from trainmux.lowering import Place
from trainmux.profiling._kernels import KernelGraph, KernelStep, Location, locations_of
from trainmux.runtime import storage_bytes

Into = Callable[[Any, Sequence[Any], Mapping[str, Any], Sequence[Place | None]], list[Tensor]]
"""Calls an operator; returns the tensors among its results, those with a place lying there."""


@dataclass(frozen=True)
class PassingPlace(Place):
    """Memory for a value that only the next node reads, so that it need not come to lie there.

    A result stays where its operator has put it, provided that views of it read the same there.
    """

    def take(self, result: Tensor) -> Tensor:
        """``result`` as it is, or in its place."""
        storage, value = result.untyped_storage(), self.value
        lies_alike = (
            storage.data_ptr() != self.memory.untyped_storage().data_ptr()
            and storage.nbytes() >= self.memory.numel()
            and result.storage_offset() * result.element_size() == value.data_ptr() - self.memory.data_ptr()
            and result.stride() == value.stride()
        )
        return result if lies_alike else super().take(result)


class Pass:
    """Runs nodes in their order; with ``swaps``, feature maps are away between forward and backward.

    ``handed_over`` has, by rank, tensors that may stay where the node's operator puts them.
    """

    def __init__(
        self,
        graph: KernelGraph,
        arguments: Sequence[Tensor],
        into: Into,
        handed_over: Mapping[int, frozenset[int]],
        *,
        swaps: bool = False,
    ) -> None:
        self._graph = graph
        self._into = into
        self._handed_over = handed_over
        self._device = arguments[0].device
        self._places: list[Place | None] = []
        self._host: dict[int, Tensor] = {}
        self._memory = {
            at.tensor: _bytes_from(argument) for at, argument in zip(graph.inputs, arguments, strict=True)
        }
        for name, at in graph.constants.items():
            constant: Tensor = graph.module.get_buffer(name)
            self._memory[at.tensor] = storage_bytes(constant.untyped_storage())
        self._ending = last_uses_of_created(graph.steps)
        self._leaving = _last_forward_uses(graph) if swaps else {}

    def run_all(self, behind: Callable[[int], None] = lambda rank: None) -> None:
        """Every node, one after another; ``behind`` is called with the rank of each that was enqueued."""
        for rank, step in enumerate(self._graph.steps):
            self.prepare(rank, step)
            self.run(step)
            self.release(rank)
            behind(rank)
        self.close()

    def prepare(self, rank: int, step: KernelStep) -> None:
        """Bring back what a node reads, and make room for what it creates."""
        for number in (*step.reads, *step.changes):
            if number in self._host:
                self._memory[number] = self._host.pop(number).to(self._device, copy=True)
        for number in step.creates:
            self._memory.pop(number, None)  # of a node that is run again
            size = self._graph.tensors[number].size_bytes
            self._memory[number] = torch.empty(size, dtype=torch.uint8, device=self._device)
        handed = self._handed_over.get(rank, frozenset())
        self._places = [
            (PassingPlace if at.tensor in handed else Place)(self._memory[at.tensor], self._look(at))
            if at.tensor in step.creates and at.device == self._device
            else None
            for at in locations_of(self._graph.values[step.node])
        ]

    def run(self, step: KernelStep) -> None:
        """A node that was prepared."""
        node = step.node
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value)
        target: Any = node.target
        if node.op == "call_module":
            target = self._graph.module.get_submodule(str(node.target))
        with torch.no_grad():
            results = self._into(target, args, kwargs, self._places)
        self._places = []
        if len(results) != len(step.results):
            raise PlanError(
                f"node {node.name}: expected {len(step.results)} results as traced, got {len(results)}; "
                "profile the program that was traced"
            )
        for number, result in zip(step.results, results, strict=True):
            storage = result.untyped_storage()
            if number in step.creates and storage.data_ptr() != self._memory[number].data_ptr():
                size = self._graph.tensors[number].size_bytes  # handed over, or on another device
                self._memory[number] = storage_bytes(storage)[:size]

    def release(self, rank: int) -> None:
        """Let go of what no later node reads, and send away feature maps that the backward pass will read."""
        for number in self._ending.get(rank, ()):
            del self._memory[number]
        for number in self._leaving.get(rank, ()):
            if self._memory[number].device == self._device:
                self._host[number] = self._memory.pop(number).to("cpu", copy=True)

    def close(self) -> None:
        """Let go of everything."""
        self._memory.clear()
        self._host.clear()

    def _look(self, at: Location) -> Tensor:
        return at.look(self._memory[at.tensor])

    def _value(self, node: fx.Node) -> Any:
        """The value of a node, as it lies in memory."""
        value = self._graph.values[node]
        if isinstance(value, Location):  # nearly all of them
            return self._look(value)
        return pytree.tree_map(lambda item: self._look(item) if isinstance(item, Location) else item, value)


def _bytes_from(argument: Tensor) -> Tensor:
    """The bytes of an argument's storage, from where it begins."""
    return storage_bytes(argument.untyped_storage())[argument.storage_offset() * argument.element_size() :]


def last_uses_of_created(steps: Sequence[KernelStep]) -> dict[int, list[int]]:
    """Storages made in the pass, by the rank of the last node that touches them."""
    last: dict[int, int] = {}
    for rank, step in enumerate(steps):
        last.update(dict.fromkeys(step.touched, rank))
    ending: dict[int, list[int]] = {}
    for step in steps:
        for number in step.creates:
            ending.setdefault(last[number], []).append(number)
    return ending


def _last_forward_uses(graph: KernelGraph) -> dict[int, list[int]]:
    """Feature maps by the rank of their last use in the forward pass."""
    last: dict[int, int] = {}
    for rank, step in enumerate(graph.steps):
        if step.phase is Phase.FORWARD:
            last.update(dict.fromkeys((*step.reads, *step.creates), rank))
    found: dict[int, list[int]] = {}
    for number, rank in last.items():
        if graph.tensors[number].byte_class is ByteClass.FEATURE_MAP:
            found.setdefault(rank, []).append(number)
    return found
