"""What a job asks of the scheduler: its iteration as a row of segments, each with a height and a time.

A segment is a run of kernels that is issued at once and whose end can be waited for (§6.1). Cuts lie where
enough feature-map bytes have been allocated or released since the last one: the paper's event every 8 MB
for convolutional and every 256 MB for recurrent models, every kernel as its ablation (Table 1). Releases
count as well as allocations because here an event is also what gives memory to the other job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainmux.colocate._placement import REGION_BYTES, Stack, StackOrder, stack_feature_maps
from trainmux.colocate._tensors import Iteration
from trainmux.errors import ConfigError, PlanError

FINE_TRACKING_BYTES = 8 << 20
"""Between two cuts, for convolutional models."""
COARSE_TRACKING_BYTES = 256 << 20
"""Between two cuts, for recurrent models with their many light kernels."""
EVERY_KERNEL = 0
"""As bytes between two cuts: each kernel is a segment."""
PAIR_GAIN = 1.18
"""What two MobileNets at once gained on an H200, both replayed as graphs: the prior for planning."""


@dataclass(frozen=True)
class Segment:
    """``num_kernels`` kernels that are issued at once.

    ``height_bytes`` of the arena are the job's while they run, ``hold_bytes`` after. ``solo_seconds`` is how
    long they take with nothing else on the device.
    """

    num_kernels: int
    height_bytes: int
    hold_bytes: int
    solo_seconds: float


@dataclass(frozen=True)
class MicroBatchLane:
    """One of ``num_lanes`` in which micro-batches of ``job`` run in turns.

    Its own are ``index``, ``index + num_lanes`` and so on. Every ``accumulate``-th updates, counting the
    ``num_before`` that were added up before the job began. From segment ``first_ordered`` on an iteration
    touches what all lanes change.
    """

    job: str
    index: int
    num_lanes: int
    accumulate: int
    first_ordered: int
    num_before: int = 0

    def opens_step(self, number: int) -> bool:
        """Whether micro-batch ``number`` is the first since an update."""
        return (self.num_before + number) % self.accumulate == 0

    def steps_of(self, steps: int) -> int:
        """How many of ``steps`` micro-batches are this lane's."""
        return (steps - self.index + self.num_lanes - 1) // self.num_lanes


@dataclass(frozen=True)
class JobDemand:
    """A job as the scheduler sees it.

    ``local_bytes`` are its own all the time. ``steps`` iterations are run, or as many as come before the job
    is removed (``None``). A job with twice the ``share`` of another gets twice the device time where both
    want the same memory. ``is_measured`` says that the times come from a run on this device: no profiling
    iteration is needed. An iteration of a job that ``is_watched`` begins when the last one was told to have
    ended: somebody looks at the job in between. ``compute_demand`` is the part of the device that the job
    keeps busy by itself; only planning for three or more jobs uses it. Lanes of one job have
    ``micro_batches``; they come and go together. ``in_flight_limit`` segments are kept in flight where that
    is known already; else it is looked for while the job is profiled.
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
    compute_demand: float = 1 / PAIR_GAIN
    micro_batches: MicroBatchLane | None = None
    in_flight_limit: int | None = None

    def __post_init__(self) -> None:
        if not self.segments or self.segments[-1].hold_bytes:
            raise ConfigError(
                f"job {self.name!r} must have at least one segment and hold nothing after the last, but got "
                f"{len(self.segments)} segments; cut a whole iteration"
            )
        for number, segment in enumerate(self.segments):
            bound = segment.height_bytes
            if number + 1 < len(self.segments):
                bound = min(bound, self.segments[number + 1].height_bytes)
            if not 0 <= segment.hold_bytes <= bound or segment.height_bytes % self.region_bytes:
                raise ConfigError(
                    f"segment {number} of job {self.name!r} must hold at most the heights beside it, in "
                    f"whole regions of {self.region_bytes} bytes, but got {segment}; take them from a stack"
                )
            if not segment.solo_seconds > 0:
                raise ConfigError(
                    f"segment {number} of job {self.name!r} must take more than 0 seconds, but got "
                    f"{segment.solo_seconds}; give an estimate where nothing was measured"
                )
        if not self.share > 0 or not 0 < self.compute_demand <= 1:
            raise ConfigError(
                f"job {self.name!r} must have a share above 0 and a compute demand in (0, 1], but got "
                f"{self.share} and {self.compute_demand}; 1.0 is an ordinary share"
            )
        if self.in_flight_limit is not None and self.in_flight_limit < 1:
            raise ConfigError(
                f"job {self.name!r} must keep 1 segment or more in flight, but got {self.in_flight_limit}; "
                "leave it out to have it looked for"
            )
        if self.local_bytes < 0 or (self.steps is not None and self.steps < 1):
            raise ConfigError(
                f"job {self.name!r} must have local bytes of 0 or more and at least 1 step, but got "
                f"{self.local_bytes} and {self.steps}; leave out a job that has nothing to do"
            )

    @property
    def job(self) -> str:
        """The job that it is, or is a lane of."""
        return self.name if self.micro_batches is None else self.micro_batches.job

    @property
    def peak_bytes(self) -> int:
        """The arena bytes that it needs at its peak."""
        return max(segment.height_bytes for segment in self.segments)

    @property
    def solo_seconds(self) -> float:
        """One iteration, alone on the device."""
        return sum(segment.solo_seconds for segment in self.segments)

    def with_steps(self, steps: int | None) -> JobDemand:
        """The same job, to be run for ``steps`` iterations."""
        return replace(self, steps=steps)

    def with_solo_seconds(self, seconds: Sequence[float]) -> JobDemand:
        """The same job with times that were measured, one per segment."""
        if len(seconds) != len(self.segments):
            raise PlanError(
                f"expected times of {len(self.segments)} segments for job {self.name!r}, but got "
                f"{len(seconds)}; profile the job as it is cut now"
            )
        segments = tuple(
            replace(segment, solo_seconds=taken)
            for segment, taken in zip(self.segments, seconds, strict=True)
        )
        return replace(self, segments=segments, is_measured=True)


def demand_of_iteration(
    name: str,
    iteration: Iteration,
    *,
    tracking_bytes: int = FINE_TRACKING_BYTES,
    region_bytes: int = REGION_BYTES,
    order: StackOrder = StackOrder.LAST_BACKWARD_USE,
    local_bytes: int | None = None,
    steps: int | None = None,
    share: float = 1.0,
    is_measured: bool = False,
    is_one_segment: bool = False,
) -> JobDemand:
    """A job that runs ``iteration`` again and again.

    ``local_bytes`` is what the engine reserves for it outside the arena; without it, the most bytes live
    there. ``is_one_segment`` is for a job that can only be held back between iterations: one that runs
    eagerly.
    """
    stack = stack_feature_maps(iteration, region_bytes=region_bytes, order=order)
    cuts = cut_segments(iteration, tracking_bytes)
    if is_one_segment:
        cuts = (len(iteration.kernel_seconds),)
    return JobDemand(
        name=name,
        fingerprint=iteration.fingerprint,
        region_bytes=region_bytes,
        local_bytes=iteration.local_bytes() if local_bytes is None else local_bytes,
        segments=segments_between(cuts, stack, iteration.kernel_seconds),
        steps=steps,
        share=share,
        is_measured=is_measured,
    )


def segments_between(
    cuts: Sequence[int], stack: Stack, kernel_seconds: Sequence[float], *, slowness: float = 1.0
) -> tuple[Segment, ...]:
    """Kernels in pieces that end after the ranks in ``cuts``, each taking ``slowness`` times its seconds."""
    found, first = [], 0
    for end in cuts:
        taken = max(slowness * sum(kernel_seconds[first:end]), 1e-9)
        height = max(stack.kernel_heights[first:end])
        found.append(Segment(end - first, height, stack.holds[end - 1], taken))
        first = end
    return tuple(found)


def cut_segments(iteration: Iteration, tracking_bytes: int) -> tuple[int, ...]:
    """The rank after the last kernel of each segment.

    A segment ends as soon as feature maps of ``tracking_bytes`` were allocated or released in it, and where
    the last of them is released: what comes then, the update as a rule, leaves the arena to the other job.
    `EVERY_KERNEL` cuts after each. Refused with `ConfigError`: negative bytes.
    """
    if tracking_bytes < 0:
        raise ConfigError(
            f"bytes between two cuts must be 0 or more, but got {tracking_bytes}; {FINE_TRACKING_BYTES} "
            f"suits convolutional models, {COARSE_TRACKING_BYTES} recurrent ones"
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
