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
        self._swaps = swaps
        self._values: dict[fx.Node, Any] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._places: list[Place | None] = []
        self._host: dict[int, Tensor] = {}
        self._device = arguments[0].device
        given = iter(arguments)
        for node in graph.module.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = next(given)
            elif node.op == "get_attr":
                value: Any = graph.module
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                self._values[node] = value
        computing = {step.node for step in graph.steps}
        self._last_use = self._last_uses(computing)
        self._last_forward = _last_forward_uses(graph.steps)
        self._ending = last_uses_of_created(graph.steps)

    def run_all(self, behind: Callable[[int], None] = lambda rank: None) -> None:
        """Every node, one after another; ``behind`` is called with the rank of each that was enqueued."""
        for rank, step in enumerate(self._graph.steps):
            self.prepare(rank, step)
            self.run(step)
            self.release(rank, step)
            behind(rank)
        self.close()

    def prepare(self, rank: int, step: KernelStep) -> None:
        """Bring back what a node reads, and make room for what it creates."""
        for number in (*step.reads, *step.changes):
            host = self._host.pop(number, None)
            if host is not None:
                storage = self._storages[number]
                storage.resize_(host.numel())
                storage_bytes(storage).copy_(host)
        rooms: dict[int, Tensor] = {}
        self._places = []
        for location in locations_of(self._graph.values[step.node]):
            number = location.tensor
            if number not in step.creates or location.device != self._device:
                self._places.append(None)
                continue
            if number not in rooms:
                size = self._graph.tensors[number].size_bytes
                rooms[number] = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._storages[number] = rooms[number].untyped_storage()
            kind = PassingPlace if number in self._handed_over.get(rank, ()) else Place
            self._places.append(kind(rooms[number], location.look(rooms[number])))

    def run(self, step: KernelStep) -> None:
        """A node that was prepared."""
        args, kwargs = fx.map_arg((step.node.args, dict(step.node.kwargs)), self._value)
        with torch.no_grad():
            results = self._into(self._target(step.node), args, kwargs, self._places)
        self._places = []
        if len(results) != len(step.results):
            raise PlanError(
                f"node {step.node.name}: expected {len(step.results)} results as traced, got {len(results)}; "
                "profile the program that was traced"
            )
        for number, result in zip(step.results, results, strict=True):
            if number in step.creates:
                self._storages[number] = result.untyped_storage()
        left = iter(results)
        self._values[step.node] = pytree.tree_map(
            lambda item: next(left) if isinstance(item, Location) else item, self._graph.values[step.node]
        )

    def release(self, rank: int, step: KernelStep) -> None:
        """Let go of what no later node reads, and send away feature maps that the backward pass will read."""
        for node in self._last_use.get(rank, ()):
            self._values.pop(node, None)
        for number in self._ending.get(rank, ()):
            self._storages.pop(number, None)
        for number in self._last_forward.get(rank, ()) if self._swaps else ():
            storage = self._storages.get(number)
            is_kept = self._graph.tensors[number].byte_class is ByteClass.FEATURE_MAP
            if is_kept and storage is not None and storage.nbytes() and storage.device == self._device:
                self._host[number] = storage_bytes(storage).to("cpu", copy=True)
                storage.resize_(0)

    def close(self) -> None:
        """Let go of everything."""
        self._values.clear()
        self._storages.clear()
        self._host.clear()

    def _value(self, node: fx.Node) -> Any:
        """The value of a node; views and parts of tuples are made when they are read."""
        if node not in self._values:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value)
            with torch.no_grad():
                self._values[node] = self._target(node)(*args, **kwargs)
        return self._values[node]

    def _target(self, node: fx.Node) -> Any:
        """The function or module that a node calls."""
        if node.op == "call_module":
            return self._graph.module.get_submodule(str(node.target))
        return node.target

    def _last_uses(self, computing: set[fx.Node]) -> dict[int, list[fx.Node]]:
        """Nodes by rank whose values, views of them included, are read for the last time."""
        last: dict[fx.Node, int] = {}

        def note(node: fx.Node, rank: int) -> None:
            last[node] = max(rank, last.get(node, -1))
            if node not in computing:
                for source in node.all_input_nodes:
                    note(source, rank)

        for rank, step in enumerate(self._graph.steps):
            last.setdefault(step.node, rank)
            for source in step.node.all_input_nodes:
                note(source, rank)
        found: dict[int, list[fx.Node]] = {}
        for node, rank in last.items():
            if node.op not in ("placeholder", "get_attr"):
                found.setdefault(rank, []).append(node)
        return found


def last_uses_of_created(steps: Sequence[KernelStep]) -> dict[int, list[int]]:
    """Storages made in the pass, by the rank of the last node that touches them."""
    last: dict[int, int] = {}
    for rank, step in enumerate(steps):
        last.update(dict.fromkeys((*step.reads, *step.creates, *step.changes), rank))
    ending: dict[int, list[int]] = {}
    for step in steps:
        for number in step.creates:
            ending.setdefault(last[number], []).append(number)
    return ending


def _last_forward_uses(steps: Sequence[KernelStep]) -> dict[int, list[int]]:
    """Storages by the rank of their last use in the forward pass."""
    last: dict[int, int] = {}
    for rank, step in enumerate(steps):
        if step.phase is Phase.FORWARD:
            last.update(dict.fromkeys((*step.reads, *step.creates), rank))
    found: dict[int, list[int]] = {}
    for number, rank in last.items():
        found.setdefault(rank, []).append(number)
    return found
