"""A fused program becomes compiled regions between library calls."""

from trainmux.lowering._compile import Kernel, KernelCache
from trainmux.lowering._given_memory import Place
from trainmux.lowering._inductor import cache_folder, compiler_missing, decompositions
from trainmux.lowering._kinds import RESHAPES, is_view, may_share_memory
from trainmux.lowering._kinds import changes as changed_argument
from trainmux.lowering._lower import Conform, Lowered, RegionCall, lower
from trainmux.lowering._padding import extended, extended_product
from trainmux.lowering._rewrites import compare_instead_of_scatter, insert_call
from trainmux.lowering._stored import from_bytes, to_bytes
from trainmux.lowering._workers import on_cores_left
