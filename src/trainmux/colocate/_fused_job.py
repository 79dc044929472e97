"""A fleet's step laid out for co-location: everything that the lanes of a job have in common.

The groups of a fleet alternate within an iteration: the feature maps of one are gone when the next begins, so
their stacks lie in the same bytes of the arena. Every group trains as one array.

The demand is that of a step with an update on a batch like the example. Other steps (a short last batch, a
micro-batch without an update) run in its place: cut at the same kernels where they fit, else all at once
during the highest segment. A step that needs more memory is refused.

Micro-batches may run in several lanes (§2.2), which all have one layout. Tensors that outlive an iteration
lie at its bottom and are the same memory for all lanes. The batch, feature maps, gradients and all else that
an iteration makes are each lane's own. There is a cut where an iteration first touches tensors that another
lane may change: before it iterations may run at once, behind it they run in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmux.colocate._demand import MicroBatchLane, Segment
from trainmux.colocate._step_layout import (
    PlacedStep,
    StaticArea,
    StepKernels,
    StepLayout,
    lay_out_step,
    read_step_kernels,
)
from trainmux.engine import Memory
from trainmux.errors import BatchError, ConfigError
from trainmux.fleet import Fleet, GroupPiece
from trainmux.profiling import device_present
from trainmux.sizes import exact_bytes, round_up
from trainmux.tracing import flatten_batch

_MISJUDGED = 1.5
"""A step is cut anew if its duration is off by this factor from the one it was cut for."""


def bytes_of_batch(batch: Any) -> int:
    """The bytes of all tensors in a batch, as the loader gives it."""
    return sum(tensor.nbytes for tensor in flatten_batch(batch).tensors)


@dataclass(frozen=True)
class GroupCuts:
    """Cuts of a group's usual step, and the job's segments between them, from ``first`` on.

    The first ``num_free`` segments have no order among micro-batches.
    """

    cuts: tuple[int, ...]
    segments: tuple[Segment, ...]
    first: int
    num_free: int


class FusedJob:
    """A fleet as a job of ``num_lanes``, in an area whose size is a multiple of ``unit_bytes``.

    ``tracking_bytes`` are the bytes of feature maps between cuts, ``None`` to choose by device. Refused with
    `ConfigError`: fleets that `SegmentRunner` refuses, and several lanes for a fleet whose micro-batches
    change buffers.
    """

    def __init__(
        self,
        fleet: Fleet,
        example: Any,
        *,
        tracking_bytes: int | None,
        region_bytes: int,
        unit_bytes: int,
        num_lanes: int,
    ) -> None:
        self.pieces = fleet._in_segments()
        self.num_lanes = num_lanes
        self._tracking_bytes = tracking_bytes
        self._unit_bytes = unit_bytes
        self._speed = device_present(self.pieces.device)
        self.example_bytes = bytes_of_batch(example)
        self.own = {piece.index: piece for piece in self.pieces.begin(example, applies=True)}
        self.kernels = {index: self.read(piece) for index, piece in self.own.items()}
        if num_lanes > 1:
            self._check_buffers()
        self._statics = StaticArea()
        self.shared_bytes = self._place_statics()
        self.lay_out(region_bytes)
        self.memory: Memory | None = None
        """The first lane's memory, which holds the shared tensors."""
        self.num_open = 0
        """Iterations that have begun and not ended."""
        self.open_pieces: Counter[int] = Counter()
        """Open iterations by group."""

    def lay_out(self, region_bytes: int) -> None:
        """Place and cut the usual steps, in regions of that size; not once a lane has moved in."""
        self.region_bytes = region_bytes
        self._layouts = {
            index: lay_out_step(kernels, self._statics, region_bytes=region_bytes)
            for index, kernels in self.kernels.items()
        }
        ends = [layout.area_end for layout in self._layouts.values()]
        self.area_bytes = round_up(max(ends), self._unit_bytes)
        self._cut_all({index: kernels.estimated_seconds for index, kernels in self.kernels.items()})

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """The duration of each group's usual step that it is cut for."""
        return tuple(self._seconds.values())

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        """Cut the usual steps for known durations, if there is one for each group."""
        if len(step_seconds) == len(self._layouts):
            self._cut_all(dict(zip(self._layouts, step_seconds, strict=True)))

    def cut_anew(self, seconds: Mapping[int, float]) -> bool:
        """Cut for measured durations of the usual steps where these differ much from the estimates.

        Returns whether the cuts have changed; everything stays in its place.
        """
        ratios = [taken / self._seconds[index] for index, taken in seconds.items()]
        if all(1 / _MISJUDGED <= ratio <= _MISJUDGED for ratio in ratios):
            return False
        before = [group.cuts for group in self.groups.values()]
        self._cut_all(seconds)
        return before != [group.cuts for group in self.groups.values()]

    def _cut_all(self, seconds: Mapping[int, float]) -> None:
        self._seconds = dict(seconds)
        self.groups: dict[int, GroupCuts] = {}
        first = 0
        for index, layout in self._layouts.items():
            self.groups[index] = self._cut(layout, seconds[index], first)
            first += len(self.groups[index].segments)
        self.piece_of = [
            (index, number) for index, group in self.groups.items() for number in range(len(group.segments))
        ]
        """For each of the job's segments: the group, and the segment of its step."""

    def _check_buffers(self) -> None:
        changed = [name for kernels in self.kernels.values() for name in kernels.changed_buffers]
        if changed:
            raise ConfigError(
                f"expected models whose micro-batches change no buffers, so that they can run at once, got "
                f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} changed by each; leave "
                "concurrent_micro_batches out, or keep such layers in eval()"
            )

    def _place_statics(self) -> int:
        """Place all static tensors; returns the end of the part that lanes share, before fed tensors."""
        fed = {
            (index, kernels.graph.inputs[position].tensor)
            for index, kernels in self.kernels.items()
            for position in kernels.step.positions_fed_anew()
        }
        shared_bytes = 0
        for is_fed in (False, True):
            shared_bytes = self._statics.end
            for index, kernels in self.kernels.items():
                for number, key in kernels.static_keys.items():
                    if ((index, number) in fed) is is_fed:
                        self._statics.take(key, kernels.size_of(number))
        return shared_bytes

    def _cut(self, layout: StepLayout, seconds: float, first: int) -> GroupCuts:
        cuts = layout.cut(self._tracking_bytes, self.pieces.device, seconds)
        # Everything behind the ordered part of the first group is ordered.
        rank = layout.kernels.first_ordered_rank if self.num_lanes > 1 and first == 0 else 0
        if rank:
            cuts = tuple(sorted({*cuts, rank}))
        num_free = sum(cut <= rank for cut in cuts)
        return GroupCuts(cuts, layout.segments(cuts, seconds), first, num_free)

    # ---- demands -----------------------------------------------------------------------------------

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of an iteration on a batch like the example."""
        return tuple(segment for group in self.groups.values() for segment in group.segments)

    @property
    def peak_bytes(self) -> int:
        """The most arena bytes that one lane needs."""
        return max(segment.height_bytes for segment in self.segments)

    @property
    def fingerprint(self) -> str:
        return "+".join(kernels.iteration.fingerprint for kernels in self.kernels.values())

    def own_area_bytes(self, lane: int) -> int:
        """The area of one lane; the first holds the shared tensors."""
        if lane == 0:
            return self.area_bytes
        return max(round_up(self.area_bytes - self.shared_bytes, self._unit_bytes), self._unit_bytes)

    def lane(self, name: str, index: int) -> MicroBatchLane | None:
        """The scheduler's record of a lane; ``None`` for a job with one lane."""
        if self.num_lanes == 1:
            return None
        first_ordered = next(iter(self.groups.values())).num_free
        pieces = self.pieces
        return MicroBatchLane(
            name, index, self.num_lanes, pieces.accumulate, first_ordered, pieces.num_accumulated
        )

    # ---- steps -------------------------------------------------------------------------------------

    def read(self, piece: GroupPiece) -> StepKernels:
        """The kernels of a group's step."""
        step, graph = piece.kernels()
        half = self.pieces.uses_half
        return read_step_kernels(step, graph, piece.index, piece.group.width, self._speed, half=half)

    def place(self, index: int, kernels: StepKernels, scratch_bytes: int) -> PlacedStep:
        """Place a step of a group in a lane's addresses, with ``scratch_bytes`` outside of them.

        `BatchError` where it does not fit.
        """
        group = self.groups[index]
        layout = lay_out_step(kernels, self._statics, region_bytes=self.region_bytes)
        cuts = layout.fit_cuts(group.cuts, group.segments, num_free=group.num_free)
        scratch = kernels.scratch_bytes + kernels.result_bytes
        if cuts is None or layout.area_end > self.area_bytes or scratch > scratch_bytes:
            have = self.area_bytes + scratch_bytes + self.peak_bytes
            wanted = layout.area_end + scratch + max(layout.stack.kernel_heights)
            raise BatchError(
                f"expected batches whose step takes no more memory than that of the first one, "
                f"{exact_bytes(have)}, got one of {exact_bytes(wanted)}; let the largest batch come first"
            )
        lost = kernels.changed & layout.transient  # loaded before each run, so changes would be lost
        if lost:
            names = [kernels.graph.tensors[number].name for number in sorted(lost)]
            raise BatchError(
                f"expected a step that changes the same tensors as the first batch does, got one that also "
                f"changes {', '.join(names)}; give this job batches of one kind"
            )
        return layout.place(cuts, self.area_bytes)
