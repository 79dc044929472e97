"""The iterations of a fleet, run segment by segment in memory that the device lays out.

The groups of a fleet alternate within an iteration: the feature maps of one are gone when the next begins, so
their stacks lie in the same bytes of the arena. Every group trains as one array.

The demand is that of the *usual* step, one with an update on a batch like the example. Other steps (a short
last batch, a micro-batch without an update) run in its place: cut at the same kernels where they fit, else
all at once during the highest segment. A step that needs more memory is refused.

On a CUDA device segments are captured graphs (`_segment_graphs`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._feature_maps import ALIGNMENT_BYTES
from trainmux.colocate._protocols import MemoryNeed, StepOutcome
from trainmux.colocate._segment_graphs import GRAPHS_BYTES, SegmentGraphs, SegmentSet
from trainmux.colocate._step_layout import (
    PlacedStep,
    StaticArea,
    StepKernels,
    StepLayout,
    lay_out_step,
    read_step_kernels,
)
from trainmux.colocate._virtual_memory import granularity_bytes
from trainmux.engine import HostLanes, Memory, PlannedProgram
from trainmux.errors import BatchError, BudgetError
from trainmux.fleet import Fleet, GroupPiece
from trainmux.profiling import device_present
from trainmux.runtime import MATRIX_LIBRARIES_BYTES
from trainmux.sizes import exact_bytes, round_up
from trainmux.tracing import flatten_batch

_MAX_VARIANTS = 8

_MISJUDGED = 1.5
"""A step is cut anew if its duration is off by this factor from the one it was cut for."""

_SCRATCH_BYTES = 128 << 20
"""On a CUDA device, each job's allowance for workspaces of matrix libraries and unaccounted scratch."""

_CONVOLUTION_BYTES = 256 << 20
"""Further allowance for workspaces of convolutions, whose algorithms are chosen among those that fit."""

_SPARE_BYTES = 32 << 20
"""Part of the allowance that is kept for other steps than the one captured first."""

_NUM_LANDING_BUFFERS = 2

_NUM_RESULTS = 4
"""Results of steps that exist at a time on a CUDA device: of two iterations in flight, of one that callbacks
see, and the fleet's last."""


def runs_as_graphs(device: torch.device) -> bool:
    """Whether segments are captured there, in virtual memory."""
    return device.type == "cuda"


@dataclass(frozen=True)
class _StepInMemory:
    """A group's step, ready to run in the job's memory; on a CUDA device with ``graphs`` of its segments.

    ``fed`` are the places of tensors that are new with every step, by position among the step's arguments.
    """

    placed: PlacedStep
    planned: PlannedProgram
    fed: Mapping[int, Tensor]
    graphs: SegmentSet | None = None

    def run(self, number: int) -> None:
        """Run, or enqueue, one segment."""
        part = self.placed.segments[number]
        if self.graphs is not None:
            self.graphs.run(number)
        elif part.instructions:
            self.planned.run(part)

    def capture(self, piece: GroupPiece) -> float:
        """Capture every segment, on real inputs and with no member active, so that nothing changes.

        Accumulators, which also sum the values of inactive members, are restored. Returns the seconds of a
        replay.
        """
        assert self.graphs is not None
        step, graph = self.placed.kernels.step, self.placed.kernels.graph
        self.feed(piece)
        totals = [
            self.planned.between_steps(0, graph.inputs[position]) for position in step.accumulator_positions()
        ]
        kept = [total.to("cpu", copy=True) for total in totals]
        for position in step.mask_positions():  # fed anew with the next step
            self.planned.between_steps(0, graph.inputs[position]).zero_()
        try:
            self.graphs.capture_all()
            return self.graphs.replay_seconds()
        finally:
            for total, before in zip(totals, kept, strict=True):
                total.copy_(before)

    def feed(self, piece: GroupPiece) -> None:
        """Load a step's batch and numbers, and its transient tensors."""
        step, graph = self.placed.kernels.step, self.placed.kernels.graph
        for position, value in piece.feed(step).items():
            self.fed[position].copy_(value)
        if not self.placed.transient:
            return
        fed = self.fed.keys()
        for position, argument in enumerate(piece.group.held_arguments(step)):
            location = graph.inputs[position]
            if argument is not None and position not in fed and location.tensor in self.placed.transient:
                self.planned.between_steps(0, location).copy_(argument)
        self.load_constants(self.placed.transient)

    def take_over(self, piece: GroupPiece) -> None:
        """Copy the group's state to its places, and let the group use it there."""
        step, graph = self.placed.kernels.step, self.placed.kernels.graph
        fed = set(step.positions_fed_anew)
        places: dict[int, Tensor] = {}
        for position, argument in enumerate(piece.group.held_arguments(step)):
            if argument is not None and position not in fed:
                place = self.planned.between_steps(0, graph.inputs[position])
                places[id(argument)] = place.copy_(argument)
        self.load_constants()
        piece.group.rebase(lambda tensor: places.get(id(tensor), tensor))

    def load_constants(self, numbers: frozenset[int] | None = None) -> None:
        """Copy the graph's own tensors, or those among ``numbers``, to their places."""
        graph = self.placed.kernels.graph
        for name, location in graph.constants.items():
            if numbers is None or location.tensor in numbers:
                self.planned.between_steps(0, location).copy_(graph.module.get_buffer(name))


def bytes_of_batch(batch: Any) -> int:
    """The bytes of all tensors in a batch, as the loader gives it."""
    return sum(tensor.nbytes for tensor in flatten_batch(batch).tensors)


@dataclass(frozen=True)
class _GroupCuts:
    """Cuts of a group's usual step, and the job's segments between them."""

    cuts: tuple[int, ...]
    segments: tuple[Segment, ...]


class FusedWork:
    """A fleet as a job. Refused with `ConfigError`: fleets that `SegmentRunner` refuses.

    ``tracking_bytes`` are the bytes of feature maps between cuts, ``None`` to choose by device. ``poisons``
    fills freed bytes with NaN, for tests.
    """

    is_eager = False

    def __init__(
        self,
        fleet: Fleet,
        example: Any,
        *,
        tracking_bytes: int | None,
        region_bytes: int,
        poisons: bool = False,
    ) -> None:
        self._pieces = fleet._in_segments()
        device = self._pieces.device
        self._is_cuda = runs_as_graphs(device)
        self._unit_bytes = granularity_bytes(device) if self._is_cuda else ALIGNMENT_BYTES
        self._tracking_bytes = tracking_bytes
        self._poisons = poisons
        self._speed = device_present(device)
        self._example_bytes = bytes_of_batch(example)
        self._own = {piece.index: piece for piece in self._pieces.begin(example, applies=True)}
        self._kernels = {index: self._read(piece) for index, piece in self._own.items()}
        self._statics = StaticArea()
        for kernels in self._kernels.values():
            for number, key in kernels.static_keys.items():
                self._statics.take(key, kernels.size_of(number))
        self.use_regions(region_bytes)
        self._memory: Memory | None = None
        self._graphs: SegmentGraphs | None = None
        self._more_bytes = 0
        """Scratch that it asked for after the allowance was too little."""
        self._kept_bytes: int | None = None
        """Scratch that its kernels keep, once they were captured."""
        self._graphs_bytes = self._seen_graph_bytes = GRAPHS_BYTES
        """Allowance for the graphs themselves, and what they were seen to take."""
        self._steps: OrderedDict[tuple[int, Hashable], _StepInMemory] = OrderedDict()
        self._begun: dict[int, tuple[GroupPiece, _StepInMemory]] = {}
        self._ahead: tuple[Any, Hashable] | None = None
        """The batch of an iteration that was begun ahead, and the settings it was fed with."""

    # ---- cuts of the usual steps -------------------------------------------------------------------

    def use_regions(self, region_bytes: int) -> None:
        self._region_bytes = region_bytes
        self._layouts = {index: self._lay_out(kernels) for index, kernels in self._kernels.items()}
        ends = [layout.area_end for layout in self._layouts.values()]
        self._area_bytes = round_up(max(ends), self._unit_bytes)
        self._cut_all({index: kernels.estimated_seconds for index, kernels in self._kernels.items()})

    @property
    def step_seconds(self) -> tuple[float, ...]:
        return tuple(self._seconds.values())

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        """Cut the usual steps for known durations, if there is one for each group."""
        if len(step_seconds) == len(self._layouts):
            self._cut_all(dict(zip(self._layouts, step_seconds, strict=True)))

    def _cut_anew(self, seconds: Mapping[int, float]) -> bool:
        """Cut for measured durations of the usual steps where these differ much from the estimates.

        Returns whether the cuts have changed; everything stays in its place.
        """
        ratios = [taken / self._seconds[index] for index, taken in seconds.items()]
        if all(1 / _MISJUDGED <= ratio <= _MISJUDGED for ratio in ratios):
            return False
        before = [group.cuts for group in self._groups.values()]
        self._cut_all(seconds)
        return before != [group.cuts for group in self._groups.values()]

    def _cut_all(self, seconds: Mapping[int, float]) -> None:
        self._seconds = dict(seconds)
        self._groups: dict[int, _GroupCuts] = {}
        for index, layout in self._layouts.items():
            cuts = layout.cut(self._tracking_bytes, self._pieces.device, seconds[index])
            self._groups[index] = _GroupCuts(cuts, layout.segments(cuts, seconds[index]))
        self._piece_of = [
            (index, number) for index, group in self._groups.items() for number in range(len(group.segments))
        ]
        """For each of the job's segments: the group, and the segment of its step."""

    # ---- demands -----------------------------------------------------------------------------------

    @property
    def member_names(self) -> tuple[str, ...]:
        return self._pieces.fleet.names

    @property
    def need(self) -> MemoryNeed:
        return MemoryNeed(self._area_bytes, self._area_bytes + self._outside_bytes, self._peak_bytes)

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return tuple(segment for group in self._groups.values() for segment in group.segments)

    @property
    def _peak_bytes(self) -> int:
        return max(segment.height_bytes for segment in self._segments)

    @property
    def num_captures(self) -> int:
        """Graphs captured since the job was admitted."""
        return 0 if self._graphs is None else self._graphs.num_captures

    @property
    def pool_bytes(self) -> int:
        """Device memory of its graphs' pool."""
        return 0 if self._graphs is None else self._graphs.pool_bytes

    @property
    def graph_bytes(self) -> int:
        """Device memory of its graphs themselves."""
        return 0 if self._graphs is None else self._graphs.graph_bytes

    @property
    def _outside_bytes(self) -> int:
        """Memory outside of the job's addresses."""
        if not self._is_cuda:
            return self._more_bytes + self._scratch_bytes + self._result_bytes
        landing = _NUM_LANDING_BUFFERS * self._batch_bytes
        return landing + _NUM_RESULTS * self._result_bytes + self._graphs_bytes + self._kernel_bytes

    @property
    def _kernel_bytes(self) -> int:
        """The part of it that kernels may take on a CUDA device.

        At first this includes an allowance for unaccounted scratch: workspaces of compiled regions and of
        convolutions, and fragmentation of torch's allocator while a step is rehearsed.
        """
        if self._kept_bytes is not None:
            return self._kept_bytes
        has_convolutions = any(kernels.has_convolutions for kernels in self._kernels.values())
        allowance = _SCRATCH_BYTES + _CONVOLUTION_BYTES * has_convolutions
        return self._more_bytes + self._scratch_bytes + allowance

    @property
    def _scratch_bytes(self) -> int:
        return max(kernels.scratch_bytes for kernels in self._kernels.values())

    @property
    def _result_bytes(self) -> int:
        return sum(kernels.result_bytes for kernels in self._kernels.values())

    @property
    def _batch_bytes(self) -> int:
        """The batch of a usual step."""
        batches = {leaf.data_ptr(): leaf.nbytes for piece in self._own.values() for leaf in piece.batch}
        return sum(batches.values())

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """The demand of an unmeasured iteration like the example."""
        return JobDemand(
            name=name,
            fingerprint="+".join(kernels.iteration.fingerprint for kernels in self._kernels.values()),
            region_bytes=self._region_bytes,
            local_bytes=self.need.local_bytes,
            segments=self._segments,
            steps=steps,
            share=share,
        )

    # ---- running -----------------------------------------------------------------------------------

    def settle(self, memory: Memory) -> None:
        """Move the fleet's state to the job's area, where the groups use it.

        On a CUDA device the usual step is captured: the job must own all of its end of the arena now.
        """
        self._memory = memory
        if self._is_cuda:
            self._pieces.rest()  # first: the job's graphs can have the stream, with its workspaces
        self._make_steps()
        for index, piece in self._own.items():
            self._steps[index, piece.variant].take_over(piece)
        if not self._is_cuda:
            return
        seconds, graph_bytes = self._capture(), self.graph_bytes
        if self._cut_anew(seconds):
            self._close_graphs()
            self._make_steps()
            self._capture()
            # The driver may have kept the first graphs' memory.
            graph_bytes = max(graph_bytes, self.graph_bytes)
        assert self._graphs is not None
        self._check_graphs(graph_bytes)
        self._keep_less(self._graphs)

    def _make_steps(self) -> None:
        """Build the usual steps as they are cut now, none of them captured."""
        if self._is_cuda:
            self._graphs = SegmentGraphs(
                self._pieces.device,
                deterministic=self._pieces.is_deterministic,
                scratch_bytes=self._kernel_bytes,
                graphs_bytes=self._graphs_bytes,
            )
        for index, piece in self._own.items():
            self._steps[index, piece.variant] = self._build(index, self._kernels[index])

    def _capture(self) -> dict[int, float]:
        """Capture the usual steps; returns the duration of each group's."""
        assert self._graphs is not None
        self._graphs.empty_caches()
        own = self._own.items()
        return {index: self._steps[index, piece.variant].capture(piece) for index, piece in own}

    def _close_graphs(self) -> None:
        """Free all captured graphs and their memory."""
        self._steps.clear()
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
            torch.cuda.empty_cache()  # the next job may need the room

    def _keep_less(self, graphs: SegmentGraphs) -> None:
        """Give the unused part of the allowance to others, but for a little.

        Other steps take less, as their batches are no larger, and use the same memory. Not so where only the
        usual step is compiled: through ATen other steps need a place for every result.
        """
        if self._pieces.compiles_usual_only:
            return
        taken = max(self._scratch_bytes, graphs.pool_bytes) + MATRIX_LIBRARIES_BYTES
        self._kept_bytes = min(self._kernel_bytes, taken + _SPARE_BYTES)
        graphs.keep_to(self._kept_bytes)

    def _check_graphs(self, graph_bytes: int) -> None:
        if graph_bytes > self._graphs_bytes:
            self._seen_graph_bytes = graph_bytes
            raise BudgetError(
                "expected the job's graphs themselves to take at most "
                f"{exact_bytes(self._graphs_bytes)}, but "
                f"they take {exact_bytes(graph_bytes)}; raise tracking_bytes, for fewer of them"
            )

    def ask_for_more(self) -> None:
        """Ask for what graphs were seen to take, or double the allowance for unaccounted scratch."""
        if self._seen_graph_bytes > self._graphs_bytes:
            self._graphs_bytes = self._seen_graph_bytes + GRAPHS_BYTES
        else:
            self._more_bytes = 2 * self._more_bytes + _SCRATCH_BYTES

    def begin(self, batch: Any, *, is_ahead: bool = False) -> None:
        """Check a batch, find or build the step for it, and feed every group."""
        if self._is_cuda:
            self._check_size(batch)
        pieces = self._pieces.begin(batch)
        begun = {piece.index: (piece, self._step_for(piece)) for piece in pieces}
        for piece, step in begun.values():
            step.feed(piece)
        self._begun = begun
        self._ahead = (batch, self._told()) if is_ahead else None

    def renew(self) -> None:
        """Feed an iteration that was begun ahead once more, if members or settings have changed since."""
        if self._ahead is None:
            return
        (batch, told), self._ahead = self._ahead, None
        if told != self._told():
            self.begin(batch)

    def _told(self) -> Hashable:
        """The settings that the begun iteration would get if it began now."""
        piece, _ = next(iter(self._begun.values()))
        return self._pieces.told(applies=piece.applies)

    def run(self, segment: int) -> None:
        """Run the kernels of one segment; a group without members has none."""
        index, number = self._piece_of[segment]
        if index not in self._begun:
            return
        piece, step = self._begun[index]
        step.run(number)
        if number == len(self._groups[index].segments) - 1:
            results = [result.clone() for result in step.planned.results(0)]
            piece.end(step.placed.kernels.step, results)

    def end(self) -> StepOutcome:
        """Count the fleet's step."""
        losses = self._pieces.end([piece for piece, _ in self._begun.values()])
        self._begun = {}
        return StepOutcome(self.member_names, losses, self._pieces.fleet.metrics)

    def leave(self) -> None:
        """Release the job's memory: the fleet gets storage of its own again, and its members their
        weights."""
        self._begun, self._ahead = {}, None
        self._kept_bytes = None
        self._close_graphs()
        if self._memory is not None:
            self._pieces.go_back()
        self._pieces.fleet.sync()
        self._memory = None

    def _check_size(self, batch: Any) -> None:
        """Refuse a batch that has no room on the device before it goes there."""
        num_bytes = bytes_of_batch(batch)
        if num_bytes > self._example_bytes:
            raise BatchError(
                f"expected batches of at most {exact_bytes(self._example_bytes)}, as the first one, got one "
                f"of {exact_bytes(num_bytes)}; let the largest batch come first"
            )

    # ---- steps -------------------------------------------------------------------------------------

    def _read(self, piece: GroupPiece) -> StepKernels:
        """The kernels of a group's step."""
        step, graph = piece.kernels()
        half = self._pieces.uses_half
        return read_step_kernels(step, graph, piece.index, piece.group.width, self._speed, half=half)

    def _lay_out(self, kernels: StepKernels) -> StepLayout:
        return lay_out_step(kernels, self._statics, region_bytes=self._region_bytes)

    def _step_for(self, piece: GroupPiece) -> _StepInMemory:
        key = (piece.index, piece.variant)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._build(piece.index, self._read(piece))
            own = {(index, usual.variant) for index, usual in self._own.items()}
            while len(self._steps) > len(own) + _MAX_VARIANTS:
                del self._steps[next(old for old in self._steps if old not in own and old != key)]
        self._steps.move_to_end(key)
        return known

    def _build(self, index: int, kernels: StepKernels) -> _StepInMemory:
        """Place a step of a group in the job's memory; `BatchError` where that is too small."""
        assert self._memory is not None
        placed = self._place(index, kernels)
        planned = PlannedProgram(
            placed.program,
            [kernels.graph],
            self._memory,
            HostLanes(),
            segments=placed.segments,
            deterministic=self._pieces.is_deterministic,
            poisons=self._poisons,
        )
        fed = {
            position: planned.between_steps(0, kernels.graph.inputs[position])
            for position in kernels.step.positions_fed_anew
        }
        if self._graphs is None:
            return _StepInMemory(placed, planned, fed)
        runs = [partial(planned.run, part) if part.instructions else None for part in placed.segments]
        return _StepInMemory(placed, planned, fed, self._graphs.new_set(runs))

    def _place(self, index: int, kernels: StepKernels) -> PlacedStep:
        """Place a step of a group in the job's addresses; `BatchError` where it does not fit."""
        group, layout = self._groups[index], self._lay_out(kernels)
        cuts = layout.fit_cuts(group.cuts, group.segments)
        scratch, room = kernels.scratch_bytes + kernels.result_bytes, self._outside_bytes
        if cuts is None or layout.area_end > self._area_bytes or scratch > room:
            have = self._area_bytes + room + self._peak_bytes
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
        return layout.place(cuts, self._area_bytes)
