"""Batches as trees of tensors: copied to the device, written into fixed buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

NUM_BATCHES = 4
"""Different batches that a measurement rotates among, so that no step finds its data in a cache."""


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with ``function`` of each tensor in its place; tuples, lists, dicts, dataclasses."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, value) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        changed = {field.name: map_tensors(function, getattr(tree, field.name)) for field in fields(tree)}
        return replace(tree, **changed)
    return tree


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, always in the same order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return iter(found)


def make_batches(make: Callable[[int, int], Any], batch_size: int, device: torch.device) -> list[Any]:
    """``NUM_BATCHES`` batches, on the device already.

    A way that trains members one after another would otherwise copy each batch once for each of them, which
    a loader that reads ahead could hide.
    """
    return [to_device(make(seed, batch_size), device) for seed in range(NUM_BATCHES)]


def to_device(batch: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def channels_last(batch: Any) -> Any:
    """Images in the layout that convolutions are fastest in; everything else as it is."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    return map_tensors(convert, batch)


class StaticBatch:
    """Buffers on the device that a CUDA graph reads; ``load`` copies a batch into them."""

    def __init__(self, example: Any, device: torch.device) -> None:
        self.tree = map_tensors(lambda tensor: tensor.to(device, copy=True), example)
        self._buffers = list(tensors_of(self.tree))

    def load(self, batch: Any) -> None:
        for buffer, fresh in zip(self._buffers, tensors_of(batch), strict=True):
            buffer.copy_(fresh, non_blocking=True)
