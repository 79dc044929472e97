"""From a trace to a program: fused to the sub-array's width, lowered, put together for the whole group."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

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
from trainmux.fleet._background import Prepared, Upgrade
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._program_store import StoredStep, load, step_key, store
from trainmux.fleet._width import choose_partition
from trainmux.fusion import FusedGraph, fuse
from trainmux.ir import FusionRecord, InputKind
from trainmux.lowering import (
    KernelCache,
    Lowered,
    compare_instead_of_scatter,
    decompositions,
    lower,
)
from trainmux.runtime import stacked_strides
from trainmux.tracing import TracedGraph


@functools.cache
def _kernels(deterministic: bool) -> KernelCache:
    return KernelCache(deterministic=deterministic)


@dataclass(frozen=True)
class BuiltStep:
    """A step to begin with, how its operators were fused, and a compiled one to come, if any."""

    program: StepProgram
    records: tuple[FusionRecord, ...]
    num_nodes: int
    upgrade: Upgrade[StepProgram] | None = None


class ProgramBuilder:
    """Builds the programs of one group; ``shared`` names the tensors that its members have in common."""

    def __init__(self, config: FleetConfig, shared: Collection[str]) -> None:
        self._config = config
        self._shared = frozenset(shared)

    def step(
        self, traced: TracedGraph, width: int, settings: UpdateSettings, *, stacked_batch: bool
    ) -> BuiltStep:
        """The step of ``width`` members."""
        array, branches = choose_partition(traced, width, self._config)

        def whole(program: StepProgram, how: str) -> StepProgram:
            notes = (_partition_text(width, array, branches), how, _precision_text(self._config))
            return replace(in_sub_arrays(program, width // array, branches), notes=notes)

        def lowered() -> StoredStep:
            return self.lowered_step(traced, array, settings, stacked_batch=stacked_batch)

        def finished(step: StoredStep) -> StepProgram:
            self.compile(step)
            return whole(step.program(settings), step.lowered.text())

        if self._config.lowering == "inductor":
            step = lowered()
            return BuiltStep(finished(step), step.records, step.num_nodes)

        fused = self._fuse(traced, array, stacked_batch=stacked_batch, compiles=False)
        program = build_step(fused, settings)
        if self._config.lowering == "aten":
            return _built(whole(program, "runs through ATen"), fused)

        def prepare() -> Prepared[StepProgram]:
            better = lowered()
            work = self._cache().fill(better.lowered.kernels)
            return Prepared(work, lambda: finished(better))

        built = _built(whole(program, "runs through ATen until its kernels are compiled"), fused)
        return replace(built, upgrade=Upgrade(prepare))

    def lowered_step(
        self, traced: TracedGraph, width: int, settings: UpdateSettings, *, stacked_batch: bool
    ) -> StoredStep:
        """The step of one array of ``width`` members, lowered, not compiled; from disk where it is there."""
        key = step_key(traced, width, settings, stacked_batch, self._config, self._shared)
        stored = load(key, self._cache(), self._config.device)
        if stored is not None:
            return stored
        fused = self._fuse(traced, width, stacked_batch=stacked_batch, compiles=True)
        compare_instead_of_scatter(fused.module.graph)
        program = build_step(fused, settings, reuses_gradients=False)
        low = self._lower(program.module)
        num_nodes = len(fused.module.graph.nodes)
        step = StoredStep(low, program.inputs, program.metrics, fused.records, num_nodes)
        store(key, step)
        return step

    def compile(self, step: StoredStep) -> None:
        """Compile the kernels of a lowered step."""
        self._cache().compile(step.lowered.kernels)

    def forward(self, traced: TracedGraph, width: int, *, stacked_batch: bool) -> ForwardProgram:
        """Metrics of ``width`` members."""
        array, branches = choose_partition(traced, width, self._config)
        compiles = self._config.lowering == "inductor"
        fused = self._fuse(traced, array, stacked_batch=stacked_batch, compiles=compiles)
        program = build_forward(fused)
        if compiles:
            low = self._lower(program.module)
            self._cache().compile(low.kernels)
            program = replace(program, module=low.module)
        return forward_in_sub_arrays(program, width // array, branches)

    def _cache(self) -> KernelCache:
        return _kernels(self._config.deterministic)

    def _lower(self, module: torch.nn.Module) -> Lowered:
        assert isinstance(module, fx.GraphModule)
        return lower(module, self._cache())

    def _fuse(self, traced: TracedGraph, width: int, *, stacked_batch: bool, compiles: bool) -> FusedGraph:
        strides = {
            position: stacked_strides(item.shape, _dtype(item.dtype), self._config.device)
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
            decompositions=decompositions() if compiles else None,
        )


def _built(program: StepProgram, fused: FusedGraph) -> BuiltStep:
    return BuiltStep(program, fused.records, len(fused.module.graph.nodes))


def _partition_text(width: int, array: int, branches: int) -> str:
    if array == width:
        return f"one array of width {width}"
    side_by_side = f", {branches} side by side" if branches > 1 else ", one after another"
    return f"{width // array} sub-arrays of width {array}{side_by_side}"


def _precision_text(config: FleetConfig) -> str:
    """What torch's own switches say about products of single-precision numbers."""
    if config.device.type != "cuda":
        return f"fp32 products at torch's precision {torch.get_float32_matmul_precision()!r}"
    products = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "full fp32"
    convolutions = "TF32" if torch.backends.cudnn.allow_tf32 else "full fp32"
    return f"fp32 products in {products}, fp32 convolutions in {convolutions} (torch's settings)"


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
