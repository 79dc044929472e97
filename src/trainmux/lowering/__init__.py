"""A fused program becomes compiled regions between library calls."""

from trainmux.lowering._compile import Kernel, KernelCache
from trainmux.lowering._inductor import compiler_missing, decompositions
from trainmux.lowering._lower import Lowered, lower

__all__ = ["Kernel", "KernelCache", "Lowered", "compiler_missing", "decompositions", "lower"]
