"""Every private API of torch's Inductor that lowering needs, in one place (torch 2.11 to 2.13).

Nothing else in the package imports these names; ``tests/cpu/lowering/test_inductor.py`` holds each of
them to what we rely on.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload

from trainmux.runtime import random_words_of_elements
from trainmux.tracing import FakeTensorMode

aten = torch.ops.aten

Compiled = Callable[[list[Tensor]], Any]

# Inductor would take them, but a library or a single ATen kernel does them better, or they may not be moved.
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
    return table


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
    """Whether the operator that functionalization puts in the place of an in-place one is fusable."""
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
    """Where Inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def settings(*, deterministic: bool, combines: bool) -> AbstractContextManager[Any]:
    """Inductor's configuration for regions. Process-wide while active.

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
    manager: AbstractContextManager[Any] = config.patch(changes)
    return manager


def compile_graph(module: fx.GraphModule, inputs: Sequence[Tensor], mode: FakeTensorMode) -> Compiled:
    """Compile a functional graph, whose only effects are copies into its inputs.

    ``inputs`` are fakes of ``mode``. The result takes the real tensors as a list, which it empties.
    """
    with tracing(TracingContext(mode)), torch.no_grad(), warnings.catch_warnings():
        # Torch warns about itself when it is imported; where warnings are errors, nothing would compile.
        warnings.simplefilter("ignore")
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
