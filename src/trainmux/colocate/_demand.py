"""Jobs as the scheduler sees them: an iteration as a row of segments, each with a height and a duration.

A segment is a run of kernels that is launched at once and whose end can be waited for (§6.1). A segment ends
where enough bytes of the arena have been allocated or released since the last cut: the paper's event every
8 MB. Releases count as well as allocations because here an event also hands memory to the other job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainmux.colocate._placement import ArenaPlacement, Iteration
from trainmux.errors import ConfigError

TRACKING_BYTES = 8 << 20
"""Bytes of the arena between two cuts: the paper's value for convolutional models."""


class SegmentRef(NamedTuple):
    """One segment of one iteration of a job; iterations and segments count from 0."""

    job: str
    iteration: int
    segment: int


@dataclass(frozen=True)
class Segment:
    """``num_kernels`` kernels that are launched at once.

    The job owns ``height_bytes`` of the arena while they run and ``hold_bytes`` afterwards. ``solo_seconds``
    is their duration with nothing else on the device.
    """

    num_kernels: int
    height_bytes: int
    hold_bytes: int
    solo_seconds: float


@dataclass(frozen=True)
class JobDemand:
    """A job's request to the scheduler.

    ``local_bytes`` belong to the job all the time: ``area_bytes`` at the bottom of its addresses, the rest
    for the scratch of its kernels and its results. It runs ``steps`` iterations, or runs until it is removed
    (``None``). A job with twice the ``share`` gets twice the device time where jobs compete for memory. With
    ``is_measured`` the durations come from a run on this device, and no profiling iteration is needed. An
    iteration of an ``is_watched`` job begins after the end of the last one was reported: callbacks look at
    the job in between. After its last segment an iteration holds nothing.
    """

    name: str
    fingerprint: str
    region_bytes: int
    local_bytes: int
    segments: tuple[Segment, ...]
    steps: int | None = None
    share: float = 1.0
    is_measured: bool = False
    is_watched: bool = False
    area_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most arena bytes that it needs at one time."""
        return max(segment.height_bytes for segment in self.segments)

    @property
    def solo_seconds(self) -> float:
        """The duration of one iteration, alone on the device."""
        return sum(segment.solo_seconds for segment in self.segments)


def segments_between(
    cuts: Sequence[int], placement: ArenaPlacement, kernel_seconds: Sequence[float], *, slowness: float = 1.0
) -> tuple[Segment, ...]:
    """Segments that end before the ranks in ``cuts``, each taking ``slowness`` times its kernels' seconds."""
    found, first = [], 0
    for end in cuts:
        taken = max(slowness * sum(kernel_seconds[first:end]), 1e-9)
        height = max(placement.kernel_heights[first:end])
        found.append(Segment(end - first, height, placement.holds[end - 1], taken))
        first = end
    return tuple(found)


def cut_segments(iteration: Iteration, tracking_bytes: int) -> tuple[int, ...]:
    """The rank after the last kernel of each segment.

    A segment ends once ``tracking_bytes`` of the arena were allocated or released in it; 0 cuts after every
    kernel. A segment also ends where the last tensor is freed, so that what follows leaves the arena to the
    other job. Refused with `ConfigError`: negative bytes.
    """
    if tracking_bytes < 0:
        raise ConfigError(
            f"tracking_bytes must be 0 or more, but got {tracking_bytes}; the paper uses {TRACKING_BYTES} "
            f"for convolutional models and {256 << 20} for recurrent ones"
        )
    num_kernels = len(iteration.kernel_seconds)
    changed = [0] * num_kernels
    for row in iteration.shared:
        changed[row.allocated_by] += row.size_bytes
        changed[row.last_used_by] += row.size_bytes
    last_use = max((row.last_used_by for row in iteration.shared), default=num_kernels - 1)
    cuts, since_cut = [], 0
    for rank in range(num_kernels):
        since_cut += changed[rank]
        if since_cut >= tracking_bytes or rank in (last_use, num_kernels - 1):
            cuts.append(rank + 1)
            since_cut = 0
    return tuple(cuts)
