"""Where a job's feature maps lie in the shared arena, and how high they reach at every kernel (D10, §6.3).

Feature maps are all live when the forward pass ends, so a plain stack of them is as small as a placement can
be. Their order decides how soon memory comes back: what is used last in the backward pass lies at the base,
so that the stack shrinks from its top while the backward pass runs. The *height* at a kernel is the top of
the highest live feature map. Two jobs whose stacks grow from opposite ends of one arena need height plus
height, no more; holes below a height stay unused. So a tensor that is there early and used for the last time
early in the backward pass, a weight of the last layer in another precision, say, would have the height of
all that comes after it from the first kernels on: those that are small against the hole below them lie at
the base instead, where they cost their own size for a while.

A *region* is a contiguous piece of the arena. Heights are whole regions: 64 MB by default, less for jobs that
would have only a few of them; 512 KB or single tensors as the paper's ablations (Table 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from trainmux.colocate._tensors import Allocation, Iteration
from trainmux.errors import ConfigError

ALIGNMENT_BYTES = 512
REGION_BYTES = 64 << 20
SMALL_REGION_BYTES = 512 << 10
PER_TENSOR = ALIGNMENT_BYTES
"""As a region size: heights follow tensors, rounded up to the alignment alone."""


_HOLE_RATIOS = (math.inf, 64, 16, 4)
"""So many times its own size must the hole below a feature map be for it to lie at the base: the quickest to
give memory back of these is taken."""
_LEAST_REGIONS = 32
"""A job's height should have as many steps; where it has fewer, jobs wait for memory that nobody uses."""
_MOST_REGIONS = 2048
"""Of all jobs together: each is a call of the driver when memory is laid out."""


class StackOrder(Enum):
    """Which feature map lies nearest to the base."""

    LAST_BACKWARD_USE = "last backward use"
    """The one released last: memory comes back soonest."""
    ALLOCATION = "allocation"
    """The one made first, the order of the paper's regions: memory is taken latest."""
    SMALLEST_AREA = "smallest area"
    """Whichever of the two holds fewer byte-seconds over the iteration."""


def round_up(size_bytes: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``size_bytes``."""
    return -(-size_bytes // unit) * unit


def region_bytes_for(peaks: Iterable[int], unit_bytes: int) -> int:
    """The size of regions for jobs that have such peaks: the paper's, halved while the smallest job has few
    of them; a multiple of ``unit_bytes``."""
    known = [peak for peak in peaks if peak > 0]
    size = REGION_BYTES
    while known and min(known) < _LEAST_REGIONS * size and size // 2 % unit_bytes == 0:
        if sum(known) > _MOST_REGIONS * (size // 2):
            break
        size //= 2
    return size


@dataclass(frozen=True)
class Region:
    """A piece of the stack, and the ranks of the kernels that first allocate from it and last use it."""

    offset: int
    size_bytes: int
    allocated_by: int
    last_used_by: int


@dataclass(frozen=True)
class Lifespan:
    """Seconds from an iteration's start to a region's allocation and deallocation: Time(R(a)), Time(R(d))."""

    allocated_at: float
    deallocated_at: float


@dataclass(frozen=True)
class Stack:
    """A job's feature maps with their offsets from the base, ``extent_bytes`` in all.

    ``kernel_heights[rank]`` are the bytes above the base that must be the job's while that kernel runs,
    ``holds[rank]`` those that must stay its own after it, until the next one begins.
    """

    feature_maps: tuple[Allocation, ...]
    offsets: tuple[int, ...]
    extent_bytes: int
    region_bytes: int
    kernel_heights: tuple[int, ...]
    holds: tuple[int, ...]

    def regions(self) -> tuple[Region, ...]:
        """The region table, from the base upwards; a single tensor per region where they are `PER_TENSOR`."""
        if self.region_bytes == PER_TENSOR:
            rows = sorted(zip(self.offsets, self.feature_maps, strict=True), key=lambda row: row[0])
            return tuple(
                Region(offset, round_up(row.size_bytes, ALIGNMENT_BYTES), row.allocated_by, row.last_used_by)
                for offset, row in rows
                if row.size_bytes
            )
        num_regions = round_up(self.extent_bytes, self.region_bytes) // self.region_bytes
        first = [-1] * num_regions
        last = [-1] * num_regions
        for offset, row in zip(self.offsets, self.feature_maps, strict=True):
            if row.size_bytes == 0:
                continue
            for index in range(
                offset // self.region_bytes, (offset + row.size_bytes - 1) // self.region_bytes + 1
            ):
                first[index] = row.allocated_by if first[index] < 0 else min(first[index], row.allocated_by)
                last[index] = max(last[index], row.last_used_by)
        return tuple(
            Region(index * self.region_bytes, self.region_bytes, first[index], last[index])
            for index in range(num_regions)
            if first[index] >= 0
        )

    def lifespans(self, kernel_seconds: tuple[float, ...]) -> tuple[Lifespan, ...]:
        """When each region of the table is taken and given back, for kernels that take ``kernel_seconds``."""
        begins = [0.0]
        for seconds in kernel_seconds:
            begins.append(begins[-1] + seconds)
        return tuple(
            Lifespan(begins[region.allocated_by], begins[region.last_used_by + 1])
            for region in self.regions()
        )


def stack_feature_maps(
    iteration: Iteration,
    *,
    region_bytes: int = REGION_BYTES,
    order: StackOrder = StackOrder.LAST_BACKWARD_USE,
) -> Stack:
    """Offsets for an iteration's feature maps.

    Refused with `ConfigError`: a region size that is not a positive multiple of the alignment.
    """
    if region_bytes < ALIGNMENT_BYTES or region_bytes % ALIGNMENT_BYTES:
        raise ConfigError(
            f"a region must be a positive multiple of {ALIGNMENT_BYTES} bytes, but got {region_bytes}; "
            f"{REGION_BYTES} is the default"
        )
    if order is StackOrder.SMALLEST_AREA:
        both = [
            stack_feature_maps(iteration, region_bytes=region_bytes, order=single)
            for single in (StackOrder.LAST_BACKWARD_USE, StackOrder.ALLOCATION)
        ]
        return min(both, key=lambda stack: _area(stack, iteration.kernel_seconds))
    rows = iteration.feature_maps
    if order is StackOrder.ALLOCATION:
        sequence = sorted(range(len(rows)), key=lambda i: (rows[i].allocated_by, -rows[i].last_used_by, i))
        return _stacked(iteration, sequence, region_bytes)
    sequence = sorted(range(len(rows)), key=lambda i: (-rows[i].last_used_by, rows[i].allocated_by, i))
    holes = _holes_below(rows, sequence)
    found: dict[tuple[int, ...], Stack] = {}
    for ratio in _HOLE_RATIOS:
        lowest = [i for i in sequence if holes[i] > ratio * rows[i].size_bytes]
        if tuple(lowest) not in found:
            at_base = set(lowest)
            others = [i for i in sequence if i not in at_base]
            found[tuple(lowest)] = _stacked(iteration, [*lowest, *others], region_bytes)
    return min(found.values(), key=lambda stack: _area(stack, iteration.kernel_seconds))


def _holes_below(rows: Sequence[Allocation], sequence: Sequence[int]) -> list[int]:
    """Of each feature map, the bytes that lie below it, in this sequence, and are not taken when it is."""
    holes = [0] * len(rows)
    size = 2 + max((row.allocated_by for row in rows), default=0)
    taken = [0] * size  # bytes below by the rank that takes them, as a tree of sums
    below = 0
    for i in sequence:
        place = rows[i].allocated_by + 1
        earlier, node = 0, place
        while node:
            earlier += taken[node]
            node &= node - 1
        holes[i] = below - earlier
        below += rows[i].size_bytes
        node = place
        while node < size:
            taken[node] += rows[i].size_bytes
            node += node & -node
    return holes


def _stacked(iteration: Iteration, sequence: Sequence[int], region_bytes: int) -> Stack:
    """The feature maps one above another."""
    rows = iteration.feature_maps
    offsets, top = [0] * len(rows), 0
    for i in sequence:
        offsets[i] = top
        top += round_up(rows[i].size_bytes, ALIGNMENT_BYTES)
    heights, holds = _heights(rows, offsets, len(iteration.kernel_seconds), region_bytes)
    return Stack(rows, tuple(offsets), top, region_bytes, heights, holds)


def _heights(
    rows: tuple[Allocation, ...], offsets: list[int], num_kernels: int, region_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The top of what is live while each kernel runs, and of what is live from its end to the next one."""
    by_top = sorted(
        (
            (round_up(offset + row.size_bytes, region_bytes), row.allocated_by, row.last_used_by)
            for offset, row in zip(offsets, rows, strict=True)
            if row.size_bytes
        ),
        reverse=True,
    )
    heights = _highest(((top, first, last + 1) for top, first, last in by_top), num_kernels)
    holds = _highest(by_top, num_kernels)
    return tuple(heights), tuple(holds)


def _highest(spans: Iterable[tuple[int, int, int]], num_kernels: int) -> list[int]:
    """For each rank the first value among ``spans`` (value, start, end) that covers it; 0 where none does.

    Spans come highest value first, so a rank is set once and skipped ever after.
    """
    values = [0] * num_kernels
    next_unset = list(range(num_kernels + 1))
    for value, start, end in spans:
        rank = start
        while True:
            while next_unset[rank] != rank:
                next_unset[rank] = next_unset[next_unset[rank]]
                rank = next_unset[rank]
            if rank >= end:
                break
            values[rank] = value
            next_unset[rank] = rank + 1
    return values


def _area(stack: Stack, kernel_seconds: tuple[float, ...]) -> float:
    return sum(height * seconds for height, seconds in zip(stack.kernel_heights, kernel_seconds, strict=True))
