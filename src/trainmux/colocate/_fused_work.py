"""The iterations of a fleet, run segment by segment in memory that the device lays out.

The groups of a fleet alternate within an iteration: what one makes is freed when the next begins, so they use
the same bytes of the arena. Every group trains as one array.

The demand is that of the *usual* step, one with an update on a batch like the example. Other steps (a short
last batch, a micro-batch without an update) run in its place: cut at the same kernels where they fit, else
all at once during the highest segment. A step that needs more memory is refused.

On a CUDA device segments are captured graphs (`_segment_graphs`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._placement import ALIGNMENT_BYTES
from trainmux.colocate._protocols import JobWork, StepOutcome
from trainmux.colocate._segment_graphs import GRAPHS_BYTES, SegmentGraphs, SegmentSet
from trainmux.colocate._step_layout import (
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
from trainmux.ir import Part
from trainmux.profiling import device_present
from trainmux.runtime import MATRIX_LIBRARIES_BYTES
from trainmux.sizes import exact_bytes, round_up
from trainmux.tracing import flatten_batch

_MAX_OTHER_STEPS = 8
"""Steps next to the usual ones that are kept, and captured on a CUDA device: further ones are built anew for
each iteration and run kernel by kernel."""

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


class _StepInMemory:
    """A group's step, ready to run in the job's memory; on a CUDA device with ``graphs`` of its segments.

    ``transient`` tensors are loaded before each run.
    """

    def __init__(
        self,
        kernels: StepKernels,
        transient: frozenset[int],
        planned: PlannedProgram,
        parts: Sequence[Part],
        graphs: SegmentGraphs | None,
    ) -> None:
        self.step, self._graph = kernels.step, kernels.graph
        self._transient = transient
        self.planned = planned
        self._runs = [partial(planned.run, part) if part.instructions else None for part in parts]
        self._captured = None if graphs is None else SegmentSet(graphs, self._runs)
        self._fed = {position: self._place(position) for position in self.step.positions_fed_anew}
        """The places of tensors that are new with every step, by position among its arguments."""

    def _place(self, position: int) -> Tensor:
        """The place of one of the step's arguments."""
        return self.planned.between_steps(0, self._graph.inputs[position])

    def run(self, number: int) -> None:
        """Run, or enqueue, one segment."""
        run = self._runs[number]
        if self._captured is not None:
            self._captured.run(number)
        elif run is not None:
            run()

    def capture(self, piece: GroupPiece) -> float:
        """Capture every segment, on real inputs and with no member active, so that nothing changes.

        Accumulators, which also sum the values of inactive members, are restored. Returns the seconds of a
        replay.
        """
        assert self._captured is not None
        self.feed(piece)
        totals = [self._place(position) for position in self.step.accumulator_positions()]
        kept = [total.to("cpu", copy=True) for total in totals]
        for position in self.step.mask_positions():  # fed anew with the next step
            self._place(position).zero_()
        try:
            self._captured.capture_all()
            return self._captured.replay_seconds()
        finally:
            for total, before in zip(totals, kept, strict=True):
                total.copy_(before)

    def feed(self, piece: GroupPiece) -> None:
        """Load a step's batch and numbers, and its transient tensors."""
        for position, value in piece.feed(self.step).items():
            self._fed[position].copy_(value)
        if self._transient:
            self._load(piece, self._transient)

    def take_over(self, piece: GroupPiece) -> None:
        """Copy the group's state to its places, and let the group use it there."""
        places = self._load(piece)
        piece.group.rebase(lambda tensor: places.get(id(tensor), tensor))

    def _load(self, piece: GroupPiece, numbers: frozenset[int] | None = None) -> dict[int, Tensor]:
        """Copy the group's state and the graph's own tensors, or those among ``numbers``, to their places.

        Returns the places by the identity of the state's tensors.
        """
        places: dict[int, Tensor] = {}
        for position, argument in enumerate(piece.group.held_arguments(self.step)):
            is_wanted = numbers is None or self._graph.inputs[position].tensor in numbers
            if argument is not None and position not in self._fed and is_wanted:
                places[id(argument)] = self._place(position).copy_(argument)
        for name, location in self._graph.constants.items():
            if numbers is None or location.tensor in numbers:
                constant = self._graph.module.get_buffer(name)
                self.planned.between_steps(0, location).copy_(constant)
        return places


def bytes_of_batch(batch: Any) -> int:
    """The bytes of all tensors in a batch, as the loader gives it."""
    return sum(tensor.nbytes for tensor in flatten_batch(batch).tensors)


@dataclass
class _UsualStep:
    """A group's usual step: its kernels, their places, and the job's segments between ``cuts``."""

    piece: GroupPiece
    kernels: StepKernels
    layout: StepLayout = field(init=False)
    cuts: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()


class FusedWork(JobWork):
    """A fleet as a job. Refused with `ConfigError`: fleets that `SegmentRunner` refuses.

    ``tracking_bytes`` are the bytes of the arena between cuts, ``None`` to choose by device. ``poisons``
    fills freed bytes with NaN, for tests.
    """

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
        pieces = self._pieces.begin(example, applies=True)
        self._usual = {piece.index: _UsualStep(piece, self._read(piece)) for piece in pieces}
        every = [usual.kernels for usual in self._usual.values()]
        self._statics = StaticArea()
        for kernels in every:
            for number, key in kernels.static_keys.items():
                self._statics.take(key, kernels.size_of(number))
        self._fingerprint = "+".join(kernels.iteration.fingerprint for kernels in every)
        self._scratch_bytes = max(kernels.scratch_bytes for kernels in every)
        self._result_bytes = sum(kernels.result_bytes for kernels in every)
        self._has_convolutions = any(kernels.has_convolutions for kernels in every)
        batch = {leaf.data_ptr(): leaf.nbytes for piece in pieces for leaf in piece.batch}
        self._batch_bytes = sum(batch.values())
        self.use_regions(region_bytes)
        self._memory: Memory | None = None
        self._graphs: SegmentGraphs | None = None
        self._more_bytes = 0
        """Scratch that it asked for after the allowance was too little."""
        self._kept_bytes: int | None = None
        """Scratch that its kernels keep, once they were captured."""
        self._graphs_bytes = self._seen_graph_bytes = GRAPHS_BYTES
        """Allowance for the graphs themselves, and what they were seen to take."""
        self._steps: dict[tuple[int, Hashable], _StepInMemory] = {}
        self._begun: dict[int, tuple[GroupPiece, _StepInMemory]] = {}
        self._ahead: tuple[Any, Hashable] | None = None
        """The batch of an iteration that was begun ahead, and the settings it was fed with."""

    # ---- cuts of the usual steps -------------------------------------------------------------------

    def use_regions(self, region_bytes: int) -> None:
        self._region_bytes = region_bytes
        for usual in self._usual.values():
            usual.layout = self._lay_out(usual.kernels)
        self._area_bytes = round_up(
            max(usual.layout.area_end + usual.kernels.constant_bytes for usual in self._usual.values()),
            self._unit_bytes,
        )
        self.cut_for([usual.kernels.estimated_seconds for usual in self._usual.values()])

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        """Cut the usual steps for these durations, if there is one for each group."""
        if len(step_seconds) != len(self._usual):
            return
        self.step_seconds = tuple(step_seconds)
        for usual, seconds in zip(self._usual.values(), step_seconds, strict=True):
            usual.cuts = usual.layout.cut(self._tracking_bytes, self._pieces.device, seconds)
            usual.segments = usual.layout.segments(usual.cuts, seconds)
        self._piece_of = [
            (index, number) for index, usual in self._usual.items() for number in range(len(usual.segments))
        ]
        """For each of the job's segments: the group, and the segment of its step."""

    def _cut_anew(self, step_seconds: Sequence[float]) -> bool:
        """Cut for measured durations of the usual steps where these differ much from the estimates.

        Returns whether the cuts have changed; everything stays in its place.
        """
        ratios = [taken / known for taken, known in zip(step_seconds, self.step_seconds, strict=True)]
        if all(1 / _MISJUDGED <= ratio <= _MISJUDGED for ratio in ratios):
            return False
        before = [usual.cuts for usual in self._usual.values()]
        self.cut_for(step_seconds)
        return before != [usual.cuts for usual in self._usual.values()]

    # ---- demands -----------------------------------------------------------------------------------

    @property
    def member_names(self) -> tuple[str, ...]:
        return self._pieces.fleet.names

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return tuple(segment for usual in self._usual.values() for segment in usual.segments)

    @property
    def _peak_bytes(self) -> int:
        return max(segment.height_bytes for segment in self._segments)

    @property
    def num_captures(self) -> int:
        """Graphs captured since the job was admitted."""
        return 0 if self._graphs is None else self._graphs.room.num_captures

    @property
    def pool_bytes(self) -> int:
        """Device memory of its graphs' pool."""
        return 0 if self._graphs is None else self._graphs.room.pool_bytes

    @property
    def graph_bytes(self) -> int:
        """Device memory of its graphs themselves."""
        return 0 if self._graphs is None else self._graphs.room.graph_bytes

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
        allowance = _SCRATCH_BYTES + _CONVOLUTION_BYTES * self._has_convolutions
        return self._more_bytes + self._scratch_bytes + allowance

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """The demand of an unmeasured iteration like the example."""
        return JobDemand(
            name=name,
            fingerprint=self._fingerprint,
            region_bytes=self._region_bytes,
            local_bytes=self._area_bytes + self._outside_bytes,
            segments=self._segments,
            steps=steps,
            share=share,
            area_bytes=self._area_bytes,
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
        for usual in self._usual.values():
            self._step_for(usual.piece).take_over(usual.piece)
        if not self._is_cuda:
            return
        seconds, graph_bytes = self._capture(), self.graph_bytes
        if self._cut_anew(seconds):
            self._close_graphs()
            self._make_steps()
            self._capture()
            # The driver may have kept the first graphs' memory.
            graph_bytes = max(graph_bytes, self.graph_bytes)
        if graph_bytes > self._graphs_bytes:
            self._seen_graph_bytes = graph_bytes
            raise BudgetError(
                f"expected the job's graphs themselves to take at most {exact_bytes(self._graphs_bytes)}, "
                f"but they take {exact_bytes(graph_bytes)}; raise tracking_bytes, for fewer of them"
            )
        self._keep_less()

    def _make_steps(self) -> None:
        """Build the usual steps as they are cut now, none of them captured."""
        if self._is_cuda:
            self._graphs = SegmentGraphs(
                self._pieces.device,
                deterministic=self._pieces.is_deterministic,
                scratch_bytes=self._kernel_bytes,
                graphs_bytes=self._graphs_bytes,
            )
        for index, usual in self._usual.items():
            self._steps[index, usual.piece.variant] = self._build(index, usual.kernels)

    def _capture(self) -> list[float]:
        """Capture the usual steps; returns the duration of each group's."""
        torch.cuda.current_stream(self._pieces.device).synchronize()
        torch.cuda.empty_cache()  # cached memory would add to the job's own
        return [self._step_for(usual.piece).capture(usual.piece) for usual in self._usual.values()]

    def _close_graphs(self) -> None:
        """Free all captured graphs and their memory."""
        self._steps.clear()
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
            torch.cuda.empty_cache()  # the next job may need the room

    def _keep_less(self) -> None:
        """Give the unused part of the allowance to others, but for a little.

        Other steps take less, as their batches are no larger, and use the same memory. Not so where only the
        usual step is compiled: through ATen other steps need a place for every result.
        """
        assert self._graphs is not None
        if self._pieces.compiles_usual_only:
            return
        taken = max(self._scratch_bytes, self.pool_bytes) + MATRIX_LIBRARIES_BYTES
        self._kept_bytes = self._graphs.scratch_bytes = min(self._kernel_bytes, taken + _SPARE_BYTES)

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
        if number == len(self._usual[index].segments) - 1:
            results = [result.clone() for result in step.planned.results(0)]
            piece.end(step.step, results)

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
            known = self._build(piece.index, self._read(piece))
            if len(self._steps) < len(self._usual) + _MAX_OTHER_STEPS:
                self._steps[key] = known
        return known

    def _build(self, index: int, kernels: StepKernels) -> _StepInMemory:
        """Place a step of a group in the job's memory; `BatchError` where that is too small."""
        assert self._memory is not None
        usual = self._usual[index]
        layout = usual.layout if kernels is usual.kernels else self._lay_out(kernels)
        cuts = layout.fit_cuts(usual.cuts, usual.segments)
        scratch, room = kernels.scratch_bytes + kernels.result_bytes, self._outside_bytes
        if cuts is None or layout.area_end > self._area_bytes or scratch > room:
            have = self._area_bytes + room + self._peak_bytes
            wanted = layout.area_end + scratch + max(layout.arena.kernel_heights)
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
        program, parts = layout.place(cuts, self._area_bytes)
        planned = PlannedProgram(
            program,
            [kernels.graph],
            self._memory,
            HostLanes(),
            segments=parts,
            deterministic=self._pieces.is_deterministic,
            poisons=self._poisons,
        )
        return _StepInMemory(kernels, layout.transient, planned, parts, self._graphs)
