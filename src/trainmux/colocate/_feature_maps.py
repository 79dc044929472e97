"""Which tensors of an iteration jobs can share memory for (Zico §6.2), and where these lie (D10, §6.3).

Three facts classify a tensor: whether its source operator is in the forward pass, whether another operator
reads it, and whether such a reader is in the backward pass. Feature maps can be shared. Tensors that outlive
an iteration have a class of their own, which the paper lacks, and never enter the shared arena.

Feature maps are all live when the forward pass ends, so a plain stack is as small as a placement can be. Its
order decides how soon memory comes back: the feature map used last lies at the base, so the stack shrinks
from its top during the backward pass. The *height* at a kernel is the top of the highest live feature map.
Two jobs whose stacks grow from opposite ends of one arena need the sum of their heights; holes below a height
stay unused. A small tensor that is made early and released early would therefore cost the height of all that
lies below it (a half-precision bias of the last layer, for example). Such tensors lie at the base instead.

Heights are whole *regions* of the arena: 64 MB as in the paper, smaller for jobs with few of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from trainmux.errors import ConfigError
from trainmux.ir import ByteClass, Phase, Profile
from trainmux.sizes import round_up

ALIGNMENT_BYTES = 512
"""Also the smallest region size: heights then follow single tensors."""
REGION_BYTES = 64 << 20

_HOLE_RATIOS = (math.inf, 64, 16, 4)
"""A feature map lies at the base if the hole below it is this many times its size; the ratio that gives the
least height over an iteration is taken."""
_LEAST_REGIONS = 32
"""Regions that a job's peak should have: with fewer, jobs wait for memory that nobody uses."""
_MOST_REGIONS = 2048
"""Regions of all jobs together: each is a driver call when memory is laid out."""


class TensorClass(Enum):
    """The role of a tensor in memory sharing."""

    FEATURE_MAP = "feature map"
    """Made in the forward pass and read by other operators in the backward pass: lies in the arena."""
    TEMPORARY = "temporary"
    """Anything else that an iteration makes and frees, gradients included: job-local."""
    RESIDENT = "resident"
    """Lives before or after the iteration (weights, optimizer state, losses): job-local."""


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
    def feature_maps(self) -> tuple[Allocation, ...]:
        """The allocations that lie in the shared arena."""
        return tuple(row for row in self.allocations if row.tensor_class is TensorClass.FEATURE_MAP)


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


# ---- where feature maps lie ----------------------------------------------------------------------------


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
class FeatureMapStack:
    """The offsets of a job's feature maps from the base of its end of the arena.

    ``kernel_heights[rank]`` bytes above the base belong to the job while that kernel runs, ``holds[rank]``
    from its end to the beginning of the next.
    """

    offsets: tuple[int, ...]
    kernel_heights: tuple[int, ...]
    holds: tuple[int, ...]


def stack_feature_maps(iteration: Iteration, *, region_bytes: int = REGION_BYTES) -> FeatureMapStack:
    """Offsets for an iteration's feature maps.

    Refused with `ConfigError`: a region size that is not a positive multiple of the alignment.
    """
    if region_bytes < ALIGNMENT_BYTES or region_bytes % ALIGNMENT_BYTES:
        raise ConfigError(
            f"a region must be a positive multiple of {ALIGNMENT_BYTES} bytes, but got {region_bytes}; "
            f"{REGION_BYTES} is the default"
        )
    rows = iteration.feature_maps
    sequence = sorted(range(len(rows)), key=lambda i: (-rows[i].last_used_by, rows[i].allocated_by, i))
    holes = _holes_below(rows, sequence)
    found: dict[tuple[int, ...], FeatureMapStack] = {}
    for ratio in _HOLE_RATIOS:
        lowest = tuple(i for i in sequence if holes[i] > ratio * rows[i].size_bytes)
        if lowest not in found:
            at_base = set(lowest)
            others = [i for i in sequence if i not in at_base]
            found[lowest] = _stacked(iteration, [*lowest, *others], region_bytes)

    def area(stack: FeatureMapStack) -> float:
        return sum(
            height * seconds
            for height, seconds in zip(stack.kernel_heights, iteration.kernel_seconds, strict=True)
        )

    return min(found.values(), key=area)


def _holes_below(rows: Sequence[Allocation], sequence: Sequence[int]) -> list[int]:
    """For each feature map, the bytes below it in this sequence that are not allocated yet when it is."""
    holes, below = [0] * len(rows), 0
    taken = np.zeros(1 + max((row.allocated_by for row in rows), default=0), dtype=np.int64)
    for i in sequence:
        holes[i] = below - int(taken[: rows[i].allocated_by + 1].sum())
        taken[rows[i].allocated_by] += rows[i].size_bytes
        below += rows[i].size_bytes
    return holes


def _stacked(iteration: Iteration, sequence: Sequence[int], region_bytes: int) -> FeatureMapStack:
    """Stack the feature maps in this sequence."""
    rows = iteration.feature_maps
    offsets, top = [0] * len(rows), 0
    for i in sequence:
        offsets[i] = top
        top += round_up(rows[i].size_bytes, ALIGNMENT_BYTES)
    heights = np.zeros(len(iteration.kernel_seconds), dtype=np.int64)
    holds = heights.copy()
    for i in sequence:  # upwards: what lies higher overwrites what lies below
        row = rows[i]
        if row.size_bytes:
            height = round_up(offsets[i] + row.size_bytes, region_bytes)
            heights[row.allocated_by : row.last_used_by + 1] = height
            holds[row.allocated_by : row.last_used_by] = height
    return FeatureMapStack(tuple(offsets), tuple(heights.tolist()), tuple(holds.tolist()))
