"""From a trace to a program: fused to the sub-array's width, lowered, put together for the whole group."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from trainmux.engine import (
    ForwardProgram,
    StepProgram,
    UpdateSettings,
    build_forward,
    build_step,
    forward_in_sub_arrays,
    in_sub_arrays,
)
from trainmux.fleet._config import FleetConfig
from trainmux.fusion import FusedGraph, fuse
from trainmux.ir import InputKind
from trainmux.lowering import KernelCache, decompositions, lower
from trainmux.runtime import stacked_strides
from trainmux.tracing import TracedGraph


@functools.cache
def _kernels(deterministic: bool) -> KernelCache:
    return KernelCache(deterministic=deterministic)


class ProgramBuilder:
    """Builds the programs of one group; ``shared`` names the tensors that its members have in common."""

    def __init__(self, config: FleetConfig, shared: Collection[str]) -> None:
        self._config = config
        self._shared = shared

    def step(
        self, traced: TracedGraph, width: int, settings: UpdateSettings, *, stacked_batch: bool
    ) -> tuple[StepProgram, FusedGraph]:
        """The step of ``width`` members, and the fused graph of one of its sub-arrays."""
        array = self._array_width(width)
        fused = self._fuse(traced, array, stacked_batch=stacked_batch)
        compiles = self._config.lowering == "inductor"
        program = build_step(fused, settings, reuses_gradients=not compiles)
        if compiles:
            program = replace(program, module=self._lower(program.module))
        return in_sub_arrays(program, width // array, self._config.branches), fused

    def forward(self, traced: TracedGraph, width: int, *, stacked_batch: bool) -> ForwardProgram:
        """Metrics of ``width`` members."""
        array = self._array_width(width)
        program = build_forward(self._fuse(traced, array, stacked_batch=stacked_batch))
        if self._config.lowering == "inductor":
            program = replace(program, module=self._lower(program.module))
        return forward_in_sub_arrays(program, width // array, self._config.branches)

    def _array_width(self, width: int) -> int:
        """The largest width of equal sub-arrays up to the one asked for."""
        wanted = self._config.width or width
        return max(size for size in range(1, min(wanted, width) + 1) if width % size == 0)

    def _lower(self, module: torch.nn.Module) -> fx.GraphModule:
        assert isinstance(module, fx.GraphModule)
        kernels = _kernels(self._config.deterministic)
        lowered = lower(module, kernels)
        kernels.compile(lowered.kernels)
        return lowered.module

    def _fuse(self, traced: TracedGraph, width: int, *, stacked_batch: bool) -> FusedGraph:
        strides = {
            position: stacked_strides(item.shape, _dtype(item.dtype))
            for position, item in enumerate(traced.inputs)
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        }
        batched = [
            stacked_batch
            if item.kind is InputKind.BATCH
            else item.kind is not InputKind.TANGENT and item.name not in self._shared
            for item in traced.inputs
        ]
        return fuse(
            traced,
            width,
            batched,
            strides=strides,
            strategies=self._config.strategies,
            decompositions=decompositions() if self._config.lowering == "inductor" else None,
        )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
