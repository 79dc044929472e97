"""From a trace to a program: fused to the sub-array's width, lowered, put together for the whole group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx

from trainmux.engine import (
    ForwardProgram,
    StepProgram,
    UpdateSettings,
    build_forward,
    build_planned_forward,
    build_step,
    in_sub_arrays,
)
from trainmux.errors import FusionError, TrainmuxError, first_line
from trainmux.fleet._background import Upgrade
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._program_store import StoredStep, load, step_key, store
from trainmux.fusion import FusedGraph, fuse
from trainmux.ir import FusionRecord, InputKind
from trainmux.lowering import (
    KernelCache,
    Lowered,
    compare_instead_of_scatter,
    decompositions,
    lower,
)
from trainmux.profiling import work_of
from trainmux.runtime import stacked_strides
from trainmux.tracing import TracedGraph

aten = torch.ops.aten

P = ParamSpec("P")
T = TypeVar("T")

_LARGE_CONVOLUTIONS_FLOPS = 2e10
_NUM_BRANCHES = 4
"""Measured on an H200 (bf16, eight members, `benchmarks/results/`): transformers, recommenders and small
models gain from complete fusion; large convolutions do not, because one grouped convolution is slower than
its parts, and its layout forces copies on everything around it. There, single members on four branches of one
CUDA graph fill the device."""
_CPU_PATIENCE_S = 5.0
"""Seconds of training after which compiling for a CPU begins: about what it keeps steps waiting for."""

_MAX_POOLS = (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)
"""For a CPU these are taken apart in their region, once they are fused: code for a pool that was taken apart
before takes three times as long (16 small CNNs, a compiled step: 62 ms against 39)."""


@functools.cache
def _kernels(deterministic: bool) -> KernelCache:
    return KernelCache(deterministic=deterministic)


def _typed(build: Callable[P, T]) -> Callable[P, T]:
    """Turn any failure to build a step into a typed error, except a lack of memory."""

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return build(*args, **kwargs)
        except (TrainmuxError, Warning, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise FusionError(
                f"expected a graph that can be fused and split, got {type(error).__name__}: "
                f"{first_line(error)}; train this model in plain torch, and please report it"
            ) from error

    return built


@dataclass(frozen=True)
class BuiltStep:
    """A step to begin with, how its operators were fused, and a compiled one to come, if any."""

    program: StepProgram
    records: tuple[FusionRecord, ...]
    num_nodes: int
    upgrade: Upgrade[StepProgram] | None = None


class ProgramBuilder:
    """Builds programs of a graph for members of one group.

    ``shared`` names the tensors that they have in common; ``stacked_batch`` is for one batch per member.
    """

    def __init__(
        self, traced: TracedGraph, config: FleetConfig, shared: Collection[str], *, stacked_batch: bool
    ) -> None:
        self._traced = traced
        self._config = config
        self._shared = frozenset(shared)
        self._stacked_batch = stacked_batch
        self._cache = _kernels(config.deterministic)

    @_typed
    def step(self, width: int, settings: UpdateSettings) -> BuiltStep:
        """The step of ``width`` members."""
        array, branches = choose_partition(self._traced, width, self._config)
        lowering, on_cpu = self._config.lowering, self._config.device.type == "cpu"

        def whole(program: StepProgram, how: str) -> StepProgram:
            notes = (_partition_text(width, array, branches), how, _precision_text(self._config))
            return replace(in_sub_arrays(program, width // array, branches), notes=notes)

        def compiled(step: StoredStep) -> StepProgram:
            self.compile([step])
            return whole(step.program(settings), step.lowered.text())

        def prepare() -> tuple[Callable[[], None], Callable[[], StepProgram]]:
            step = self.lowered_step(array, settings)
            return self._cache.fill(step.lowered.kernels), lambda: compiled(step)

        step = None if lowering == "aten" else self._stored(self._key(array, settings))
        if lowering == "inductor" or (step is not None and self._cache.has(step.lowered.kernels)):
            step = step or self.lowered_step(array, settings)
            return BuiltStep(compiled(step), step.records, step.num_nodes)
        fused = self._fuse(array, compiles=False)
        how = "runs through ATen" + ("" if lowering == "aten" else " until its kernels are compiled")
        program = whole(self._build(fused, settings, compiles=False), how)
        upgrade = None if lowering == "aten" else Upgrade(prepare, _CPU_PATIENCE_S if on_cpu else 0.0)
        return BuiltStep(program, fused.records, len(fused.module.graph.nodes), upgrade)

    @_typed
    def lowered_step(self, width: int, settings: UpdateSettings, *, for_plan: bool = False) -> StoredStep:
        """The step of one array of ``width`` members, lowered, not compiled; from disk where it is there.

        In a plan other work may come between forward and backward pass: losses are there before it.
        """
        key = self._key(width, settings, for_plan)
        stored = self._stored(key)
        if stored is not None:
            return stored
        fused = self._fuse(width, compiles=True)
        compare_instead_of_scatter(fused.module.graph)
        program = self._build(fused, settings, compiles=True)
        low = self._lower(program.module, keeps_results=for_plan)
        num_nodes = len(fused.module.graph.nodes)
        step = StoredStep(low, program.inputs, program.metrics, fused.records, num_nodes)
        store(key, step)
        return step

    def _stored(self, key: str) -> StoredStep | None:
        """A step that was lowered before, from disk."""
        return load(key, self._cache, self._config.device)

    def _key(self, width: int, settings: UpdateSettings, for_plan: bool = False) -> str:
        decisive = (width, settings, self._stacked_batch, for_plan, self._config, self._shared)
        return step_key(self._traced, *decisive)

    @_typed
    def aten_step(self, width: int, settings: UpdateSettings) -> StepProgram:
        """The step of one array of ``width`` members, operator by operator."""
        return self._build(self._fuse(width, compiles=False), settings, compiles=False)

    def _build(self, fused: FusedGraph, settings: UpdateSettings, *, compiles: bool) -> StepProgram:
        return build_step(
            fused,
            settings,
            reuses_gradients=not compiles,
            updates_rows=not self._config.deterministic,
        )

    def compile(self, steps: Iterable[StoredStep]) -> None:
        """Compile the kernels of lowered steps in parallel, those of the first while the next is lowered."""
        self._cache.compile_batches(step.lowered.kernels for step in steps)

    @_typed
    def forward(self, width: int) -> ForwardProgram:
        """Metrics of ``width`` members."""
        array, branches = choose_partition(self._traced, width, self._config)
        return in_sub_arrays(self._forward(array, build_forward), width // array, branches)

    @_typed
    def planned_forward(self, width: int, carried: UpdateSettings | None) -> ForwardProgram:
        """Metrics of one array of ``width`` members, to be run by a plan."""
        return self._forward(width, lambda fused: build_planned_forward(fused, carried))

    def _forward(self, width: int, build: Callable[[FusedGraph], ForwardProgram]) -> ForwardProgram:
        """Build a forward pass, compiled where the fleet waits for compiled kernels."""
        compiles = self._config.lowering == "inductor"
        program = build(self._fuse(width, compiles=compiles))
        if not compiles:
            return program
        low = self._lower(program.module)
        self._cache.compile(low.kernels)
        return replace(program, module=low.module)

    def _lower(self, module: torch.nn.Module, *, keeps_results: bool = False) -> Lowered:
        assert isinstance(module, fx.GraphModule)
        return lower(module, self._cache, keeps_results=keeps_results)

    def _fuse(self, width: int, *, compiles: bool) -> FusedGraph:
        batched, strides = [], {}
        for position, item in enumerate(self._traced.inputs):
            is_own = item.kind is not InputKind.TANGENT and item.name not in self._shared
            batched.append(self._stacked_batch if item.kind is InputKind.BATCH else is_own)
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                dtype = getattr(torch, item.dtype.removeprefix("torch."))
                strides[position] = stacked_strides(item.shape, dtype, self._config.device)
        patterns = None
        if compiles:
            left = _MAX_POOLS if self._config.device.type == "cpu" else ()
            patterns = {op: function for op, function in decompositions().items() if op not in left}
        return fuse(self._traced, width, batched, strides=strides, decompositions=patterns)


def _partition_text(width: int, array: int, branches: int) -> str:
    if array == width:
        return f"one array of width {width}"
    side_by_side = f", {branches} side by side" if branches > 1 else ", one after another"
    return f"{width // array} sub-arrays of width {array}{side_by_side}"


def _precision_text(config: FleetConfig) -> str:
    """Describe torch's switches for products of single-precision numbers."""
    if config.device.type != "cuda":
        return f"fp32 products at torch's precision {torch.get_float32_matmul_precision()!r}"
    products = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "full fp32"
    convolutions = "TF32" if torch.backends.cudnn.allow_tf32 else "full fp32"
    return f"fp32 products in {products}, fp32 convolutions in {convolutions} (torch's settings)"


def choose_partition(traced: TracedGraph, width: int, config: FleetConfig) -> tuple[int, int]:
    """The width of each sub-array and the number of parallel branches for ``width`` members."""
    wanted = config.width or (width if fuses_well(traced, config) else 1)
    array = max(size for size in range(1, min(wanted, width) + 1) if width % size == 0)
    branches = config.branches or (_NUM_BRANCHES if array < width else 1)
    return array, min(branches, width // array)


def fuses_well(traced: TracedGraph, config: FleetConfig) -> bool:
    """Whether one array of all members may be the quickest: not where convolutions are large."""
    return config.device.type != "cuda" or convolution_flops(traced) < _LARGE_CONVOLUTIONS_FLOPS


def convolution_flops(traced: TracedGraph) -> float:
    """Floating-point operations of one member's convolutions in a step, backward included."""

    def value(node: fx.Node) -> Any:
        return node.meta.get("val")

    targets = (aten.convolution.default, aten.convolution_backward.default)
    nodes = [node for node in traced.module.graph.nodes if node.target in targets]
    work = [work_of(node.target, fx.map_arg(node.args, value), value(node)) for node in nodes]
    return sum(each.flops for each in work if each is not None)
