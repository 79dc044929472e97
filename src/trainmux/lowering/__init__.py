"""A fused program becomes compiled regions between library calls."""

from trainmux.lowering._compile import Kernel, KernelCache
from trainmux.lowering._inductor import compiler_missing, decompositions
from trainmux.lowering._lower import Lowered, lower
from trainmux.lowering._rewrites import compare_instead_of_scatter

__all__ = [
    "Kernel",
    "KernelCache",
    "Lowered",
    "compare_instead_of_scatter",
    "compiler_missing",
    "decompositions",
    "lower",
]
