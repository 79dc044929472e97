"""Every private API of torch's Inductor that lowering needs, in one place (torch 2.11 to 2.15).

Nothing else in the package imports these names; ``tests/cpu/lowering/test_inductor.py`` and
``test_variants.py`` hold each of them to what we rely on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import pickle
import platform
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload

from trainmux.runtime import ignored_warnings, process_lock, random_words_of_elements, source_version
from trainmux.tracing import RESIZES, FakeTensorMode

aten = torch.ops.aten

Compiled = Callable[[list[Tensor]], Any]

# Inductor would take them, but a library or a single ATen kernel does them better, or right (see RESIZES), or
# they may not be moved.
_NOT_FUSED = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.sort.default,
        aten.sort.stable,
        *RESIZES,
    }
)
# Not known to Inductor by themselves: decomposed when a region is traced.
OWN_DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.trainmux.random_words.default: random_words_of_elements
}


@functools.cache
def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Operators that are taken apart before a graph is cut."""
    from torch._inductor.decomposition import select_decomp_table

    # Some decompositions (pooling's) look into this module and expect that somebody has imported it.
    importlib.import_module("torch._inductor.lowering")
    table: dict[OpOverload, Callable[..., Any]] = dict(select_decomp_table())
    table[aten.baddbmm.default] = _product_and_sum
    return {op: function for op, function in table.items() if op not in RESIZES}


def _product_and_sum(offset: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``baddbmm`` would first write the offset to memory, only to read it again; the next region adds it."""
    product = torch.bmm(a, b)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return product + (offset if beta == 1 else offset * beta)


@functools.cache
def is_fusable(target: Any) -> bool:
    """Whether Inductor writes a kernel of its own for an operator, instead of calling a library."""
    from torch._inductor import lowering

    if not isinstance(target, OpOverload) or target in _NOT_FUSED:
        return False
    if target._schema.is_mutable:
        return _without_mutation(target)
    if target in OWN_DECOMPOSITIONS or target in decompositions():
        return True
    return target in lowering.lowerings and target not in lowering.fallbacks


def _without_mutation(target: OpOverload) -> bool:
    """Whether the functional counterpart of an in-place operator is fusable."""
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    if overload == "out" or overload.endswith("_out"):
        overload = overload.removesuffix("out").removesuffix("_") or "default"
    elif name.endswith("_"):
        name = name.removesuffix("_")
    else:
        return False
    packet = getattr(aten, name, None)
    return packet is not None and overload in packet.overloads() and is_fusable(getattr(packet, overload))


def compiler_missing(device: torch.device) -> str:
    """Why regions cannot be compiled for ``device`` here; empty if they can."""
    if device.type == "cpu":
        return "" if shutil.which("g++") or shutil.which("clang++") else "there is no C++ compiler"
    from torch.utils._triton import has_triton

    return "" if has_triton() else "Triton is not installed or does not know this device"


def cache_folder() -> Path:
    """The folder of Inductor's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


@contextmanager
def settings(*, deterministic: bool, combines: bool) -> Iterator[None]:
    """Inductor's configuration for regions. Process-wide while active: one thread at a time.

    ``combines`` lets one kernel do the work of many small ones that have nothing to do with each other.
    """
    from torch._inductor import config

    changes: dict[str, Any] = {
        "fx_graph_cache": True,
        "comprehensive_padding": False,  # the layout of what regions hand on is ours to choose
        "combo_kernels": combines,
    }
    if deterministic and hasattr(config, "deterministic"):
        changes["deterministic"] = True
    with process_lock, config.patch(changes):
        yield


def surroundings() -> str:
    """All that decides the code of a region besides the region: versions, the device, this package's source,
    torch's switches and Inductor's configuration as they are now.
    """
    facts: list[object] = [
        sys.version,
        platform.machine(),
        torch.__version__,
        torch.version.git_version,
        torch.version.cuda,
        _triton_version(),
        source_version("lowering"),  # what hands regions to Inductor; operators are part of their keys
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        getattr(torch.utils.deterministic, "fill_uninitialized_memory", None),
        torch.get_float32_matmul_precision(),
        sorted(_configuration().items()),
        sorted((name, value) for name, value in os.environ.items() if name in _DECISIVE_VARIABLES),
    ]
    if torch.cuda.is_available():
        facts += [torch.cuda.get_device_name(), torch.cuda.get_device_capability()]
    return repr(facts)


def _configuration() -> dict[str, Any]:
    """Inductor's configuration as its own cache sees it.

    From torch 2.15 on, torch's function imports the whole compiler to name the class that chooses kernels.
    Where the configuration has none, and the module where others register is not there, that is ``None``.
    """
    config: Any = importlib.import_module("torch._inductor.config")
    factories = ("inductor_choices_class", *getattr(config, "_cache_config_factory_keys", ()))
    is_usual = all(getattr(config, name, None) is None for name in factories)
    imports = hasattr(config, "_cache_config_serializer") and "torch._inductor.choices" not in sys.modules
    found: dict[str, Any]
    if imports and is_usual:
        found = config._get_dict(ignored_prefixes=list(config._cache_config_ignore_prefix))
    else:
        found = config.save_config_portable(ignore_private_configs=False)
    return found


# Triton reads these when it compiles; Inductor's configuration does not know of them.
_DECISIVE_VARIABLES = frozenset(
    {"TRITON_DEFAULT_FP_FUSION", "TRITON_F32_DEFAULT", "TRITON_PTXAS_PATH", "TRITON_ENABLE_LLVM_DEBUG"}
)


@functools.cache
def _triton_version() -> str:
    for package in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@dataclass(frozen=True)
class LoadedCode:
    """Code from disk. Torch's own object for it, when it is called, wants parts of the compiler imported."""

    current_callable: Compiled

    def __call__(self, tensors: list[Tensor]) -> Any:
        return self.current_callable(tensors)


def code_of(compiled: Compiled) -> bytes:
    """Compiled code with all that ``load_code`` needs in another process; empty where torch kept none."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraph

    key = getattr(compiled, "_fx_graph_cache_key", None)
    if not isinstance(compiled, CompiledFxGraph) or not key:
        return b""
    # What Inductor wrote itself: once its kernels have been launched, the object can no longer be pickled.
    folder = Path(FxGraphCache._get_tmp_dir_for_key(key))
    try:
        entries = sorted(folder.iterdir())  # several, where processes compiled it at once: any will do
        return entries[0].read_bytes() if entries else b""
    except OSError:
        return b""


def load_code(code: bytes) -> LoadedCode:
    """Load compiled code from ``code_of``. Imports no more of the compiler than the code needs to run.

    May fail in any way on code that is damaged.
    """
    with ignored_warnings():  # as in ``compile_graph``
        from torch._inductor import config

        # Nothing is to be compiled: no processes for it either, which the next import would start.
        with process_lock, config.patch(compile_threads=1):
            from torch._inductor.codecache import PyCodeCache
            from torch._inductor.output_code import CompiledFxGraphConstants
            from torch._inductor.triton_bundler import TritonBundler

            graph = pickle.loads(code)
            if graph._triton_bundle:
                TritonBundler.read_and_emit(graph._triton_bundle)
            constants = CompiledFxGraphConstants()
            key, path = PyCodeCache.write(_without_unused_imports(graph.source_code))
            module = PyCodeCache.load_by_key_path(key, path, graph.cache_linemap, constants.unwrap(graph))
            # The module's runner is for CUDA graphs of torch's own. Its owner takes it apart in the end, and
            # equal code in this process has one module and one runner.
            graph.current_callable = module.call
            graph.recursively_apply_fns = graph.compiled_fn_runner = None
            graph.post_compile((), constants, graph.fx_kwargs)
    return LoadedCode(graph.current_callable)


def generated_module(compiled: Any) -> dict[str, Any]:
    """The names of the module that generated code lives in; empty for code of another kind."""
    function = getattr(compiled, "current_callable", None)
    function = getattr(function, "__func__", function)
    found = getattr(function, "__globals__", None)
    return found if isinstance(found, dict) else {}


class Variants:
    """Kernels in generated code that exist in several variants; the fastest is found when they first run.

    Inductor keeps the choice between configurations of its own list on disk, but not the one between a
    reduction and the same in smaller blocks, which it adds when it sees how many registers the first one
    takes: each process would measure these again.
    """

    def __init__(self, compiled: Any) -> None:
        self._open = {
            name: kernel
            for name, kernel in generated_module(compiled).items()
            if isinstance(getattr(kernel, "launchers", None), list) and len(kernel.launchers) > 1
        }

    @property
    def are_open(self) -> bool:
        return bool(self._open)

    def take(self, choices: Mapping[str, str]) -> None:
        """Apply earlier choices; kernels for which none matches a variant stay open."""
        for name, kernel in list(self._open.items()):
            chosen = [each for each in kernel.launchers if _in_words(each.config) == choices.get(name)]
            if chosen:
                kernel.launchers = chosen[:1]
                del self._open[name]

    def made(self) -> dict[str, str]:
        """The choices that have been made since, by kernel."""
        return {
            name: _in_words(kernel.launchers[0].config)
            for name, kernel in self._open.items()
            if len(kernel.launchers) == 1
        }


_SHORT_BENCHMARK = {
    # Of the benchmarker that torch 2.11 has by default, in milliseconds.
    "warmup": 1,
    "rep": 6,
    # Of the one that newer versions have: numbers of runs, and milliseconds.
    "estimation_iters": 3,
    "memory_warmup_iters": 3,
    "benchmark_iters": 12,
    "max_benchmark_duration": 6,
}
_thread = threading.local()


@contextmanager
def short_benchmarks() -> Iterator[None]:
    """In this thread, let kernels choose among their variants by a few runs of each, not by two hundred.

    Inductor's usual number takes most of the time of a first step: a kernel that changes large tensors in
    place may have them copied to the host and back for every run.
    """
    module = sys.modules.get("torch._inductor.runtime.benchmarking")  # there if a kernel has variants
    if module is not None:
        _shorten(module.benchmarker)
    before, _thread.is_short = getattr(_thread, "is_short", False), True
    try:
        yield
    finally:
        _thread.is_short = before


@functools.cache
def _shorten(benchmarker: Any) -> None:
    """Have a benchmarker ask which thread it runs in."""
    usual = benchmarker.benchmark_gpu

    def benchmark_gpu(*args: Any, **how: Any) -> Any:
        short = _SHORT_BENCHMARK if getattr(_thread, "is_short", False) else {}
        return usual(*args, **{**how, **short})

    benchmarker.benchmark_gpu = benchmark_gpu


def _in_words(config: Any) -> str:
    sizes = sorted(config.kwargs.items())
    return repr((sizes, config.num_warps, config.num_stages))


_SELDOM_USED = {
    "extern_kernels": "from torch._inductor.select_algorithm import extern_kernels\n",
    "align": "from torch._inductor.codegen.memory_planning import _align as align\n",
}


def _without_unused_imports(source: str) -> str:
    """Generated code always imports parts of the compiler that take seconds to load, and seldom uses them."""
    for name, line in _SELDOM_USED.items():
        rest = source.replace(line, "", 1)
        if not re.search(rf"\b{name}\b", rest):
            source = rest
    return source


def compile_graph(module: fx.GraphModule, inputs: Sequence[Tensor], mode: FakeTensorMode) -> Compiled:
    """Compile a functional graph, whose only effects are copies into its inputs.

    ``inputs`` are fakes of ``mode``. The result takes the real tensors as a list, which it empties.
    """
    # Torch warns about itself when it is imported; where warnings are errors, nothing would compile.
    with tracing(TracingContext(mode)), torch.no_grad(), ignored_warnings():
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.utils import BoxedBool

        compiled: Compiled = compile_fx_inner(
            module,
            list(inputs),
            static_input_idxs=list(range(len(inputs))),
            cudagraphs=BoxedBool(False),
            is_inference=True,
        )
    return compiled
