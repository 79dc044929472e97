"""Jobs as the scheduler sees them: an iteration as a row of segments, each with a height and a duration.

A segment is a run of kernels that is launched at once and whose end can be waited for (§6.1). A segment ends
where enough bytes of feature maps have been allocated or released since the last cut: the paper's event every
8 MB. Releases count as well as allocations because here an event also hands memory to the other job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainmux.colocate._feature_maps import REGION_BYTES, FeatureMapStack, Iteration, stack_feature_maps
from trainmux.errors import ConfigError, PlanError

TRACKING_BYTES = 8 << 20
"""Bytes of feature maps between two cuts: the paper's value for convolutional models."""


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
class MicroBatchLane:
    """One of ``num_lanes`` lanes in which micro-batches of ``job`` run in rotation.

    Lane ``index`` runs micro-batches ``index``, ``index + num_lanes`` and so on. Every ``accumulate``-th
    micro-batch updates, counting the ``num_before`` that were accumulated before the job began. From segment
    ``first_ordered`` on, an iteration touches tensors that every lane changes.
    """

    job: str
    index: int
    num_lanes: int
    accumulate: int
    first_ordered: int
    num_before: int = 0

    def opens_step(self, number: int) -> bool:
        """Whether micro-batch ``number`` is the first after an update."""
        return (self.num_before + number) % self.accumulate == 0

    def steps_of(self, steps: int) -> int:
        """The number of this lane's micro-batches among the first ``steps``."""
        return (steps - self.index + self.num_lanes - 1) // self.num_lanes


@dataclass(frozen=True)
class JobDemand:
    """A job's request to the scheduler.

    ``local_bytes`` belong to the job all the time. It runs ``steps`` iterations, or runs until it is removed
    (``None``). A job with twice the ``share`` gets twice the device time where jobs compete for memory. With
    ``is_measured`` the durations come from a run on this device, and no profiling iteration is needed. An
    iteration of an ``is_watched`` job begins after the end of the last one was reported: callbacks look at
    the job in between. Lanes of one job have ``micro_batches``, and come and go together. The scheduler keeps
    ``in_flight_limit`` segments in flight where given; otherwise it finds the limit while profiling.

    Refused with `ConfigError`: values out of range, and segments that do not form a whole iteration.
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
    micro_batches: MicroBatchLane | None = None
    in_flight_limit: int | None = None

    def __post_init__(self) -> None:
        if not self.segments or self.segments[-1].hold_bytes:
            raise ConfigError(
                f"job {self.name!r} must have at least one segment and hold nothing after the last, but got "
                f"{len(self.segments)} segments; cut a whole iteration"
            )
        following = [segment.height_bytes for segment in self.segments[1:]] + [0]
        for number, (segment, next_height) in enumerate(zip(self.segments, following, strict=True)):
            most = min(segment.height_bytes, next_height)
            if not 0 <= segment.hold_bytes <= most or segment.height_bytes % self.region_bytes:
                raise ConfigError(
                    f"segment {number} of job {self.name!r} must hold at most the heights on both sides of "
                    f"its end, in whole regions of {self.region_bytes} bytes, but got {segment}; take them "
                    "from a stack"
                )
            if not segment.solo_seconds > 0:
                raise ConfigError(
                    f"segment {number} of job {self.name!r} must take more than 0 seconds, but got "
                    f"{segment.solo_seconds}; give an estimate where nothing was measured"
                )
        limit = 1 if self.in_flight_limit is None else self.in_flight_limit
        steps = 1 if self.steps is None else self.steps
        if not self.share > 0 or min(limit, steps) < 1 or self.local_bytes < 0:
            raise ConfigError(
                f"job {self.name!r} must have a share above 0, at least 1 step and 1 segment in flight, and "
                f"0 or more local bytes, but got {self.share}, {self.steps}, {self.in_flight_limit} and "
                f"{self.local_bytes}; leave out a job that has nothing to do"
            )

    @property
    def job(self) -> str:
        """The job's name, for a lane the name of the job that it belongs to."""
        return self.name if self.micro_batches is None else self.micro_batches.job

    @property
    def peak_bytes(self) -> int:
        """The most arena bytes that it needs at one time."""
        return max(segment.height_bytes for segment in self.segments)

    @property
    def solo_seconds(self) -> float:
        """The duration of one iteration, alone on the device."""
        return sum(segment.solo_seconds for segment in self.segments)

    def with_solo_seconds(self, seconds: Sequence[float]) -> JobDemand:
        """A copy with measured durations, one per segment."""
        if len(seconds) != len(self.segments):
            raise PlanError(
                f"expected durations of {len(self.segments)} segments for job {self.name!r}, but got "
                f"{len(seconds)}; profile the job as it is cut now"
            )
        pairs = zip(self.segments, seconds, strict=True)
        segments = tuple(replace(segment, solo_seconds=taken) for segment, taken in pairs)
        return replace(self, segments=segments, is_measured=True)


def demand_of_iteration(
    name: str,
    iteration: Iteration,
    *,
    tracking_bytes: int = TRACKING_BYTES,
    region_bytes: int = REGION_BYTES,
    steps: int | None = None,
    share: float = 1.0,
    is_one_segment: bool = False,
) -> JobDemand:
    """The demand of a job that repeats ``iteration``.

    ``is_one_segment`` is for an eager job, which can only be held back between iterations.
    """
    stack = stack_feature_maps(iteration, region_bytes=region_bytes)
    num_kernels = len(iteration.kernel_seconds)
    cuts = (num_kernels,) if is_one_segment else cut_segments(iteration, tracking_bytes)
    return JobDemand(
        name=name,
        fingerprint=iteration.fingerprint,
        region_bytes=region_bytes,
        local_bytes=iteration.local_bytes(),
        segments=segments_between(cuts, stack, iteration.kernel_seconds),
        steps=steps,
        share=share,
    )


def segments_between(
    cuts: Sequence[int], stack: FeatureMapStack, kernel_seconds: Sequence[float], *, slowness: float = 1.0
) -> tuple[Segment, ...]:
    """Segments that end before the ranks in ``cuts``, each taking ``slowness`` times its kernels' seconds."""
    found, first = [], 0
    for end in cuts:
        taken = max(slowness * sum(kernel_seconds[first:end]), 1e-9)
        height = max(stack.kernel_heights[first:end])
        found.append(Segment(end - first, height, stack.holds[end - 1], taken))
        first = end
    return tuple(found)


def cut_segments(iteration: Iteration, tracking_bytes: int) -> tuple[int, ...]:
    """The rank after the last kernel of each segment.

    A segment ends once ``tracking_bytes`` of feature maps were allocated or released in it; 0 cuts after
    every kernel. A segment also ends where the last feature map is released, so that the update behind it
    leaves the arena to the other job. Refused with `ConfigError`: negative bytes.
    """
    if tracking_bytes < 0:
        raise ConfigError(
            f"tracking_bytes must be 0 or more, but got {tracking_bytes}; the paper uses {TRACKING_BYTES} "
            f"for convolutional models and {256 << 20} for recurrent ones"
        )
    num_kernels = len(iteration.kernel_seconds)
    changed = [0] * num_kernels
    for row in iteration.feature_maps:
        changed[row.allocated_by] += row.size_bytes
        changed[row.last_used_by] += row.size_bytes
    last_use = max((row.last_used_by for row in iteration.feature_maps), default=num_kernels - 1)
    cuts, since_cut = [], 0
    for rank in range(num_kernels):
        since_cut += changed[rank]
        if since_cut >= tracking_bytes or rank in (last_use, num_kernels - 1):
            cuts.append(rank + 1)
            since_cut = 0
    return tuple(cuts)
