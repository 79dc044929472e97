"""Compiled regions that write their outputs to memory given to them (torch 2.11 to 2.15).

Code that Inductor writes allocates its outputs by calling a function of its own module. While a region runs
with memory given, that function is ours: it hands out the given memory where an output begins, and new
memory for everything in between. Which allocation becomes which output is learnt from one ordinary run and is
the same in all later ones. Nothing is compiled anew, and code that cannot be steered so is simply run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmux.lowering._inductor import generated_module
from trainmux.runtime import storage_bytes

_ALLOCATORS = ("empty_strided_cpu", "empty_strided_cuda")

Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]


@dataclass(frozen=True)
class Place:
    """Memory for a value: its storage's bytes, and the value as it lies in them."""

    memory: Tensor
    value: Tensor

    def take(self, result: Tensor) -> Tensor:
        """``result`` in its place: already there, or copied. Room around it in its storage comes along."""
        value = self.value
        if value.numel() == 0 or (
            result.data_ptr() == value.data_ptr() and same_strides(result, value.stride())
        ):
            return value
        storage = result.untyped_storage()
        if storage.data_ptr() == self.memory.untyped_storage().data_ptr():
            result = result.clone()  # there already, but in another order
        has_room = storage.nbytes() != result.numel() * result.element_size()
        if has_room and storage.nbytes() == self.memory.numel() and same_strides(result, value.stride()):
            self.memory.copy_(storage_bytes(storage))
        else:
            value.copy_(result)
        return value


def same_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has the given strides, where they mean anything."""
    return all(
        size <= 1 or given == wanted
        for size, given, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


class GivenMemory:
    """Steers the allocations of one compiled region."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        module = generated_module(compiled)
        self._globals = module if any(name in module for name in _ALLOCATORS) else None
        self._output_at: dict[int, int] | None = None

    def run(self, tensors: list[Tensor], places: Sequence[Place | None]) -> Sequence[Tensor]:
        """The region's outputs, in their places where they could be steered there."""
        if self._globals is None:
            results: Sequence[Tensor] = self._compiled(tensors)
            return results
        if self._output_at is None:
            return self._learn(self._globals, tensors)
        output_at, number = self._output_at, 0

        def allocate(original: Allocate, size: Sequence[int], strides: Sequence[int], dtype: Any) -> Tensor:
            nonlocal number
            place = places[output_at[number]] if number in output_at else None
            number += 1
            if place is not None:
                needed = 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
                if 0 not in size and needed * dtype.itemsize <= place.memory.numel():
                    typed: Tensor = place.memory.view(dtype)
                    return typed.as_strided(tuple(size), tuple(strides))
            return original(size, strides, dtype)

        with _allocating(self._globals, allocate):
            steered: Sequence[Tensor] = self._compiled(tensors)
        return steered

    def _learn(self, module: dict[str, Any], tensors: list[Tensor]) -> Sequence[Tensor]:
        """An ordinary run that finds out which allocation each output begins in."""
        made: list[Tensor] = []  # kept to the end: an address must not come up twice

        def allocate(original: Allocate, size: Sequence[int], strides: Sequence[int], dtype: Any) -> Tensor:
            made.append(original(size, strides, dtype))
            return made[-1]

        with _allocating(module, allocate):
            results: Sequence[Tensor] = self._compiled(tensors)
        first = {tensor.data_ptr(): number for number, tensor in enumerate(made) if tensor.numel()}
        self._output_at = {}
        for output, result in enumerate(results):
            number = first.get(result.data_ptr()) if isinstance(result, Tensor) else None
            if number is not None and number not in self._output_at:
                self._output_at[number] = output
        return results


@contextmanager
def _allocating(module: dict[str, Any], allocate: Callable[..., Tensor]) -> Iterator[None]:
    """While active, the code of ``module`` allocates through ``allocate``, which is given the original."""
    originals = {name: module[name] for name in _ALLOCATORS if name in module}

    def through(original: Allocate) -> Allocate:
        return lambda size, strides, dtype: allocate(original, size, strides, dtype)

    module.update({name: through(original) for name, original in originals.items()})
    try:
        yield
    finally:
        module.update(originals)
