"""Which tensors of an iteration jobs share memory for (Zico §6.2), and where these lie (D10, §6.3).

Everything that an iteration makes and frees lies in the shared arena: feature maps, which the backward pass
reads, and temporaries, gradients included. Tensors that outlive an iteration stay with the job, as do the
results of its steps.

Two jobs grow from opposite ends of one arena, so they need the sum of their *heights*: the height at a kernel
is the top of the highest live tensor. Holes below a height are of no use to the other job, but the job's own
short-lived tensors use them. So tensors are placed from the longest-lived to the shortest-lived, each into
the smallest gap that fits. The stack of feature maps then shrinks from its top during the backward pass.

Past its peak a job only gives memory back: small rises there are levelled, for a job that never asks for more
cannot be held up. Heights are whole *regions* of the arena: 64 MB as in the paper, smaller for jobs with few
of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import numpy as np

from trainmux.errors import ConfigError
from trainmux.ir import ByteClass, Phase, Profile
from trainmux.planning import Tenant, place_in_order
from trainmux.sizes import round_up

ALIGNMENT_BYTES = 512
"""Also the smallest region size: heights then follow single tensors."""
REGION_BYTES = 64 << 20

_LEAST_REGIONS = 32
"""Regions that a job's peak should have: with fewer, jobs wait for memory that nobody uses."""
_MOST_REGIONS = 2048
"""Regions of all jobs together: each is a driver call when memory is laid out."""


class TensorClass(Enum):
    """The role of a tensor in memory sharing."""

    FEATURE_MAP = "feature map"
    """Made in the forward pass and read by other operators in the backward pass."""
    TEMPORARY = "temporary"
    """Anything else that an iteration makes and frees, gradients included."""
    RESIDENT = "resident"
    """Lives before or after the iteration (weights, optimizer state, losses): stays with the job."""


@dataclass(frozen=True)
class Allocation:
    """A tensor of one iteration, with the ranks of the kernels that make it and use it last."""

    name: str
    size_bytes: int
    allocated_by: int
    last_used_by: int
    tensor_class: TensorClass = TensorClass.TEMPORARY


@dataclass(frozen=True)
class Iteration:
    """One iteration of a job: the duration of each kernel, and its allocations.

    ``resident_bytes`` exist all the time. Iterations with equal ``fingerprint`` allocate alike.
    """

    fingerprint: str
    kernel_seconds: tuple[float, ...]
    allocations: tuple[Allocation, ...]
    resident_bytes: int = 0

    @property
    def shared(self) -> tuple[Allocation, ...]:
        """The allocations that lie in the shared arena."""
        return tuple(row for row in self.allocations if row.tensor_class is not TensorClass.RESIDENT)


def iteration_of_profile(profile: Profile) -> Iteration:
    """The iteration of a profiled step. The update counts as part of the backward pass."""
    created: dict[int, int] = {}
    uses: dict[int, list[int]] = {}
    for rank, node in enumerate(profile.nodes):
        created.update(dict.fromkeys(node.creates, rank))
        for number in (*node.reads, *node.changes):
            uses.setdefault(number, []).append(rank)
    last_rank = len(profile.nodes) - 1
    allocations, resident_bytes = [], 0
    for number, tensor in enumerate(profile.tensors):
        if tensor.byte_class.is_static or number not in created:
            resident_bytes += tensor.size_bytes
            continue
        source = created[number]
        readers = [rank for rank in uses.get(number, ()) if rank != source]
        last_use = max(readers, default=source)
        if tensor.byte_class is ByteClass.RESULT:
            last_use, tensor_class = last_rank, TensorClass.RESIDENT
        elif profile.nodes[source].phase is Phase.FORWARD and any(
            profile.nodes[rank].phase is not Phase.FORWARD for rank in readers
        ):
            tensor_class = TensorClass.FEATURE_MAP
        else:
            tensor_class = TensorClass.TEMPORARY
        allocations.append(Allocation(tensor.name, tensor.size_bytes, source, last_use, tensor_class))
    return Iteration(
        profile.fingerprint,
        tuple(node.seconds for node in profile.nodes),
        tuple(allocations),
        resident_bytes,
    )


# ---- where they lie ------------------------------------------------------------------------------------


def region_bytes_for(peaks: Iterable[int], unit_bytes: int) -> int:
    """The region size for jobs with these peaks: a multiple of ``unit_bytes``, the paper's size or halved
    until the smallest job has enough regions."""
    known = [peak for peak in peaks if peak > 0]
    size = REGION_BYTES
    while known and min(known) < _LEAST_REGIONS * size and size // 2 % unit_bytes == 0:
        if sum(known) > _MOST_REGIONS * (size // 2):
            break
        size //= 2
    return size


@dataclass(frozen=True)
class ArenaPlacement:
    """The offsets of a job's shared allocations from the base of its end of the arena.

    ``kernel_heights[rank]`` bytes above the base belong to the job while that kernel runs, ``holds[rank]``
    from its end to the beginning of the next.
    """

    offsets: tuple[int, ...]
    kernel_heights: tuple[int, ...]
    holds: tuple[int, ...]


def place_in_arena(iteration: Iteration, *, region_bytes: int = REGION_BYTES) -> ArenaPlacement:
    """Offsets for the shared allocations of an iteration.

    Two orders are tried, lifetimes in kernels and in seconds; the one with the least height over the
    iteration is taken. Refused with `ConfigError`: a region size that is not a positive multiple of the
    alignment.
    """
    if region_bytes < ALIGNMENT_BYTES or region_bytes % ALIGNMENT_BYTES:
        raise ConfigError(
            f"a region must be a positive multiple of {ALIGNMENT_BYTES} bytes, but got {region_bytes}; "
            f"{REGION_BYTES} is the default"
        )
    begins = [0.0, *accumulate(iteration.kernel_seconds)]
    orders: tuple[Callable[[Allocation], float], ...] = (
        lambda row: row.last_used_by - row.allocated_by,
        lambda row: begins[row.last_used_by + 1] - begins[row.allocated_by],
    )

    def area(placement: ArenaPlacement) -> float:
        return float(np.dot(placement.kernel_heights, iteration.kernel_seconds))

    return min((_placed(iteration, lifetime, region_bytes) for lifetime in orders), key=area)


def _placed(
    iteration: Iteration, lifetime: Callable[[Allocation], float], region_bytes: int
) -> ArenaPlacement:
    """Place the longest-lived first, and of those the largest."""
    rows = iteration.shared
    tenants = [
        Tenant(round_up(row.size_bytes, ALIGNMENT_BYTES), ((row.allocated_by, row.last_used_by + 1),))
        for row in rows
    ]
    order = sorted(range(len(rows)), key=lambda i: (-lifetime(rows[i]), -rows[i].size_bytes, i))
    offsets = place_in_order(tenants, order)
    heights = np.zeros(len(iteration.kernel_seconds), dtype=np.int64)
    holds = heights.copy()
    for row, offset in zip(rows, offsets, strict=True):
        if row.size_bytes:
            height = round_up(offset + row.size_bytes, region_bytes)
            for tops, end in ((heights, row.last_used_by + 1), (holds, row.last_used_by)):
                np.maximum(tops[row.allocated_by : end], height, out=tops[row.allocated_by : end])
    if heights.size:
        peak = int(heights.argmax())
        heights[peak:] = np.maximum.accumulate(heights[peak:][::-1])[::-1]
        holds[peak:-1] = heights[peak + 1 :]
    return ArenaPlacement(tuple(offsets), tuple(heights.tolist()), tuple(holds.tolist()))
