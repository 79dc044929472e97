"""A fleet's step laid out for co-location: what all lanes of a job have in common.

A fleet's groups take their turns within an iteration: the feature maps of one are gone when the next begins,
so their stacks lie in the same bytes of the arena. Every group trains as one array.

The demand is that of a step on a batch like the example, with an update. Other steps (a short last batch, a
micro-batch without an update) run in its place: cut at the same kernels where they fit, else all at once
while the highest segment has the arena. One that needs more memory than that is refused.

Micro-batches may run in several lanes (§2.2). All lanes have one layout. What lasts beyond an iteration lies
at its bottom and is the same memory for all; the batch, feature maps, gradients and whatever else an
iteration makes are each lane's own. Where an iteration first touches what another may change, there is a
cut: up to it iterations may run at once, from it on they run in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmux.colocate._demand import MicroBatchLane, Segment
from trainmux.colocate._placement import round_up
from trainmux.colocate._step_plan import (
    PlacedStep,
    StaticArea,
    StepKernels,
    StepLayout,
    changed_buffers,
    cuts_of,
    first_ordered_rank,
    fit_cuts,
    lay_out_step,
    place_step,
    read_step_kernels,
    segments_of,
    tracking_bytes_for,
)
from trainmux.engine import Memory
from trainmux.errors import BatchError, ConfigError
from trainmux.fleet import Fleet, GroupPiece
from trainmux.scheduling.budget import in_words
from trainmux.tracing import flatten_batch

_MISJUDGED = 1.5
"""A step that takes so many times as long as its cuts were chosen for, or as much less, is cut anew."""


def bytes_of_batch(batch: Any) -> int:
    """The bytes of all tensors in a batch, as the loader gives it."""
    return sum(tensor.nbytes for tensor in flatten_batch(batch).tensors)


@dataclass(frozen=True)
class GroupPlan:
    """How a group's usual step is cut: where, and into which of the job's segments from ``first`` on.

    The first ``num_free`` of its segments have no order among micro-batches, where those have any.
    """

    cuts: tuple[int, ...]
    segments: tuple[Segment, ...]
    first: int
    num_free: int


class FusedJob:
    """A fleet as a job of ``num_lanes``, in an area of its own whose size is a multiple of ``unit_bytes``.

    ``tracking_bytes`` and ``region_bytes`` are as in `demand_of_iteration`; ``tracking_bytes`` ``None`` is
    what suits the device. Refused with `ConfigError`: what `SegmentRunner` refuses, and several lanes for a
    fleet whose micro-batches change buffers.
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
        self.example_bytes = bytes_of_batch(example)
        self.own = {piece.index: piece for piece in self.pieces.begin(example, applies=True)}
        self.kernels = {index: self.read(piece) for index, piece in self.own.items()}
        if num_lanes > 1:
            self._check_buffers()
        self._statics = StaticArea()
        self.shared_bytes = self._place_statics()
        self.lay_out(region_bytes)
        self.memory: Memory | None = None
        """The first lane's, where what lasts is."""
        self.num_open = 0
        """Iterations that have begun and not ended."""
        self.open_pieces: Counter[int] = Counter()
        """The same for each group's part."""

    def lay_out(self, region_bytes: int) -> None:
        """Place and cut the usual steps, in regions of that size; not once a lane has moved in."""
        self.region_bytes = region_bytes
        self._layouts = {
            index: lay_out_step(kernels, self._statics, region_bytes=region_bytes)
            for index, kernels in self.kernels.items()
        }
        ends = [layout.area_end for layout in self._layouts.values()]
        self.area_bytes = round_up(max(ends), self._unit_bytes)
        self._cut_all({index: layout.estimated_seconds for index, layout in self._layouts.items()})

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """What each group's usual step takes, as far as it is cut for it."""
        return tuple(self._seconds.values())

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        """Cut the usual steps for times that are known, if they are of as many groups."""
        if len(step_seconds) == len(self._layouts):
            self._cut_all(dict(zip(self._layouts, step_seconds, strict=True)))

    def cut_anew(self, seconds: Mapping[int, float]) -> bool:
        """The groups' usual steps were found to take so long: cut them for that, where it is much else.

        Returns whether they are cut otherwise now; everything stays in its place.
        """
        ratios = [taken / self._seconds[index] for index, taken in seconds.items()]
        if all(1 / _MISJUDGED <= ratio <= _MISJUDGED for ratio in ratios):
            return False
        cuts = [plan.cuts for plan in self.plans.values()]
        self._cut_all(seconds)
        return cuts != [plan.cuts for plan in self.plans.values()]

    def _cut_all(self, seconds: Mapping[int, float]) -> None:
        self._seconds = dict(seconds)
        """How long each group's usual step takes, as far as is known."""
        self.plans: dict[int, GroupPlan] = {}
        first = 0
        for index, layout in self._layouts.items():
            self.plans[index] = self._cut(layout, seconds[index], first)
            first += len(self.plans[index].segments)
        self.turn_of = [
            (index, number) for index, plan in self.plans.items() for number in range(len(plan.segments))
        ]

    def _check_buffers(self) -> None:
        changed = [name for kernels in self.kernels.values() for name in changed_buffers(kernels)]
        if changed:
            raise ConfigError(
                f"expected models whose micro-batches change no buffers, so that they can run at once, got "
                f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} changed by each; leave "
                "concurrent_micro_batches out, or keep such layers in eval()"
            )

    def _place_statics(self) -> int:
        """Places for all that lasts; returns the end of what lanes share, behind which comes what is fed."""
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
                        self._statics.take(key, kernels.graph.tensors[number].size_bytes)
        return shared_bytes

    def _cut(self, layout: StepLayout, seconds: float, first: int) -> GroupPlan:
        tracked = self._tracking_bytes
        if tracked is None:
            tracked = tracking_bytes_for(layout, self.pieces.device, seconds)
        cuts = cuts_of(layout, tracked)
        # Behind the first group's order, everything has one.
        rank = first_ordered_rank(layout.kernels) if self.num_lanes > 1 and first == 0 else 0
        if rank:
            cuts = tuple(sorted({*cuts, rank}))
        num_free = sum(cut <= rank for cut in cuts)
        return GroupPlan(cuts, segments_of(layout, cuts, seconds), first, num_free)

    # ---- what it asks for ---------------------------------------------------------------------------

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of an iteration on a batch like the example."""
        return tuple(segment for plan in self.plans.values() for segment in plan.segments)

    @property
    def peak_bytes(self) -> int:
        """What one lane needs of an arena."""
        return max(segment.height_bytes for segment in self.segments)

    @property
    def fingerprint(self) -> str:
        return "+".join(kernels.iteration.fingerprint for kernels in self.kernels.values())

    def own_area_bytes(self, lane: int) -> int:
        """The area of one lane: the first has what all of them share."""
        if lane == 0:
            return self.area_bytes
        return max(round_up(self.area_bytes - self.shared_bytes, self._unit_bytes), self._unit_bytes)

    def lane(self, name: str, index: int) -> MicroBatchLane | None:
        """What the scheduler has to know of a lane; ``None`` where there is but one."""
        if self.num_lanes == 1:
            return None
        first_ordered = next(iter(self.plans.values())).num_free
        return MicroBatchLane(
            name,
            index,
            self.num_lanes,
            self.pieces.accumulate,
            first_ordered,
            self.pieces.num_accumulated,
        )

    # ---- steps --------------------------------------------------------------------------------------

    def read(self, piece: GroupPiece) -> StepKernels:
        """The kernels of a group's step."""
        step, graph = piece.kernels()
        half = self.pieces.uses_half
        return read_step_kernels(step, graph, piece.index, piece.group.width, half=half)

    def place(self, index: int, kernels: StepKernels, beside_bytes: int) -> PlacedStep:
        """A step of a group over a lane's addresses; `BatchError` where these are too few for it.

        ``beside_bytes`` is what it may take outside of them.
        """
        plan = self.plans[index]
        layout = lay_out_step(kernels, self._statics, region_bytes=self.region_bytes)
        cuts = fit_cuts(layout, plan.cuts, plan.segments, num_free=plan.num_free)
        beside = kernels.scratch_bytes + kernels.result_bytes
        if cuts is None or layout.area_end > self.area_bytes or beside > beside_bytes:
            have = self.area_bytes + beside_bytes + self.peak_bytes
            wanted = layout.area_end + beside + max(layout.stack.kernel_heights)
            raise BatchError(
                f"expected batches whose step takes no more memory than that of the first one, "
                f"{in_words(have)}, got one of {in_words(wanted)}; let the largest batch come first"
            )
        changed = {number for kernel in kernels.graph.steps for number in kernel.changes}
        if changed & layout.transient:  # what is loaded before each run would be lost after it
            names = [kernels.graph.tensors[number].name for number in sorted(changed & layout.transient)]
            raise BatchError(
                f"expected a step that changes the same tensors as the first batch does, got one that also "
                f"changes {', '.join(names)}; give this job batches of one kind"
            )
        return place_step(layout, cuts, self.area_bytes)
