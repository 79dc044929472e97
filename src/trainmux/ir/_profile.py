"""Facts that planning needs: kernels in order, the memory they touch, how long each takes (Tables A, B).

A tensor here is a storage: views of it are not tensors of their own. Nodes are kernels (compiled regions,
library calls, blocks of parallel branches) in the order in which a step without any plan runs them; a
node's position in that order is its *rank*. All numbers are of one sub-array of the profile's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainmux.ir._files import file_format
from trainmux.ir._graph import Phase


class ByteClass(Enum):
    """The role of a tensor in the budget."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer state"
    BUFFER = "buffer"
    BATCH = "batch"
    CONSTANT = "constant"
    FEATURE_MAP = "feature map"
    """Made in the forward pass, read in the backward pass."""
    GRADIENT_MAP = "gradient map"
    """Made in the backward pass and read there: the gradient of a feature map."""
    GRADIENT = "gradient"
    """Of a parameter: made in the backward pass, read by the update."""
    TEMPORARY = "temporary"
    """Made and read for the last time in the same phase."""
    RESULT = "result"
    """Handed to the user: losses, metrics. Lives until the step's end."""

    @property
    def is_static(self) -> bool:
        """Whether the tensor exists before the step and after it."""
        return self in _STATIC


_STATIC = frozenset(
    {
        ByteClass.PARAMETER,
        ByteClass.OPTIMIZER_STATE,
        ByteClass.BUFFER,
        ByteClass.BATCH,
        ByteClass.CONSTANT,
    }
)


@dataclass(frozen=True)
class ProfiledTensor:
    """A storage, and the seconds a copy of it takes over the link: each direction alone, and both at once."""

    name: str
    byte_class: ByteClass
    size_bytes: int
    swap_out_seconds: float
    swap_in_seconds: float
    swap_out_duplex_seconds: float
    swap_in_duplex_seconds: float


@dataclass(frozen=True)
class ProfiledNode:
    """A kernel. ``reads``, ``creates`` and ``changes`` are positions in the profile's tensors.

    ``creates`` are new with this node; ``changes`` are overwritten or updated in place (a parameter by its
    update, a gradient by an accumulation) and are not listed in ``reads`` again. ``workspace_bytes`` are
    taken while it runs, beyond those. A node that is not ``is_repeatable`` may not run a second time to
    recompute what it created.
    """

    name: str
    phase: Phase
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    changes: tuple[int, ...]
    seconds: float
    workspace_bytes: int = 0
    is_repeatable: bool = True


@dataclass(frozen=True)
class DeviceFacts:
    """The machine a profile is for.

    ``memory_bytes`` is what the device has, ``host_bytes`` the share of the host's memory that swapped
    tensors may take.
    """

    name: str
    memory_bytes: int
    host_bytes: int


@file_format("profile", version=4, remedy="profile again")
@dataclass(frozen=True)
class Profile:
    """One step of one sub-array of ``width`` members.

    ``source`` is ``"measured"`` or ``"analytic"``; ``fingerprint`` names graph, width, device and versions:
    two profiles with the same one are interchangeable. While tensors are copied, nodes take
    ``slowdown_by_copies`` times their seconds. ``concurrent_seconds`` are pairs: a number of these steps side
    by side, and the seconds until all have ended, where that was measured. A node that waits for a copy takes
    ``sync_seconds`` longer, however long ago the copy ended, and so does one that a copy waits for. The
    driver held ``driver_bytes`` for code and libraries once its nodes had run.

    With ``num_branches`` above 1 the members are not fused: each trains on a branch of its own, all branches
    at the same time, and every number is that of all together (`profiling.side_by_side`), but for
    ``sync_seconds``, which are those of one. There may be fewer members than branches; bytes are those of
    all branches then, too.
    """

    fingerprint: str
    source: str
    width: int
    device: DeviceFacts
    tensors: tuple[ProfiledTensor, ...]
    nodes: tuple[ProfiledNode, ...]
    slowdown_by_copies: float = 1.0
    concurrent_seconds: tuple[tuple[int, float], ...] = ()
    num_branches: int = 1
    sync_seconds: float = 0.0
    driver_bytes: int = 0
