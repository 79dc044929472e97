"""The iterations of a fleet, run segment by segment in memory that the device lays out.

A fleet's groups take their turns within an iteration: the feature maps of one are gone when the next begins,
so their stacks lie in the same bytes of the arena. Every group trains as one array.

The demand is that of a step on a batch like the example, with an update. Other steps (a short last batch, a
micro-batch without an update) run in its place: cut at the same kernels where they fit, else all at once
while the highest segment has the arena. One that needs more memory than that is refused.

On a CUDA device segments are captured graphs (`_segment_graphs`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._device import MemoryNeed
from trainmux.colocate._placement import ALIGNMENT_BYTES, round_up
from trainmux.colocate._segment_graphs import GRAPHS_BYTES, SegmentGraphs, SegmentSet
from trainmux.colocate._step_plan import (
    PlacedStep,
    StaticArea,
    StepKernels,
    cuts_of,
    fit_cuts,
    lay_out_step,
    place_step,
    read_step_kernels,
    segments_of,
    tracking_bytes_for,
)
from trainmux.colocate._virtual_memory import granularity_bytes
from trainmux.colocate._work import StepOutcome
from trainmux.engine import HostLanes, Memory, PlannedProgram
from trainmux.errors import BatchError, BudgetError
from trainmux.fleet import Fleet
from trainmux.fleet._in_pieces import FleetInPieces, GroupPiece
from trainmux.scheduling.budget import in_words
from trainmux.tracing import flatten_batch

_MAX_VARIANTS = 8

_BESIDE_BYTES = 128 << 20
"""On a CUDA device, for the kernels of each job: the matrix libraries' workspaces, and what nobody knows."""

_CONVOLUTION_BYTES = 256 << 20
"""The same for workspaces of a job's convolutions, whose algorithms are chosen among those that fit."""

_NUM_LANDING_PLACES = 2

_NUM_RESULTS = 4
"""Results of steps that there may be at a time on a CUDA device: of two iterations in flight, of one that is
being told, and the fleet's last."""


def bytes_of_batch(batch: Any) -> int:
    """The bytes of all tensors in a batch, as the loader gives it."""
    return sum(tensor.nbytes for tensor in flatten_batch(batch).tensors)


def runs_as_graphs(device: torch.device) -> bool:
    """Whether segments are captured there, in virtual memory."""
    return device.type == "cuda"


@dataclass(frozen=True)
class _Runner:
    """A group's step, ready to run in the job's memory; on a CUDA device with ``graphs`` of its segments.

    ``fed`` are the places of what is new with every step, by position among the step's arguments.
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

    def capture(self, piece: GroupPiece) -> None:
        """Capture every segment, on inputs that are real and with no member active: nothing changes.

        Accumulators, which take in what inactive members compute, are put back.
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
        finally:
            for total, before in zip(totals, kept, strict=True):
                total.copy_(before)

    def feed(self, piece: GroupPiece) -> None:
        """Put a step's batch and numbers into their places, and what has no lasting place."""
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
        """Copy the group's state to its places, and have the group use it there."""
        step, graph = self.placed.kernels.step, self.placed.kernels.graph
        fed = set(step.positions_fed_anew())
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


@dataclass(frozen=True)
class _GroupPlan:
    """How a group's usual step is cut: where, and into which of the job's segments from ``first`` on."""

    cuts: tuple[int, ...]
    segments: tuple[Segment, ...]
    first: int


class FusedWork:
    """A fleet as a job. ``tracking_bytes`` and ``region_bytes`` are as in `demand_of_iteration`;
    ``tracking_bytes`` ``None`` is what suits the device.

    ``poisons`` fills freed bytes with ones, for tests. Refused with `ConfigError`: what `FleetInPieces`
    refuses.
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
        self._pieces = FleetInPieces(fleet)
        self._is_cuda = runs_as_graphs(self._pieces.device)
        self._region_bytes = region_bytes
        self._poisons = poisons
        self._statics = StaticArea()
        self._memory: Memory | None = None
        self._graphs: SegmentGraphs | None = None
        self._more_bytes = 0
        """What it asked for beside its area after it had been found too little."""
        self._graphs_bytes = self._seen_graph_bytes = GRAPHS_BYTES
        """What is kept for graphs themselves, and what they were seen to take."""
        self._runners: OrderedDict[tuple[int, Hashable], _Runner] = OrderedDict()
        self._example_bytes = bytes_of_batch(example)
        self._own = {piece.index: piece for piece in self._pieces.begin(example, applies=True)}
        self._kernels = {index: self._read(piece) for index, piece in self._own.items()}
        for kernels in self._kernels.values():
            for number, key in kernels.static_keys.items():
                self._statics.take(key, kernels.graph.tensors[number].size_bytes)
        layouts = {
            index: lay_out_step(kernels, self._statics, region_bytes=region_bytes)
            for index, kernels in self._kernels.items()
        }
        unit = granularity_bytes(self._pieces.device) if self._is_cuda else ALIGNMENT_BYTES
        self._area_bytes = round_up(max(layout.area_end for layout in layouts.values()), unit)
        self._plans: dict[int, _GroupPlan] = {}
        first = 0
        for index, layout in layouts.items():
            tracked = tracking_bytes
            if tracked is None:
                tracked = tracking_bytes_for(layout, self._pieces.device)
            cuts = cuts_of(layout, tracked)
            segments = segments_of(layout, cuts)
            self._plans[index] = _GroupPlan(cuts, segments, first)
            first += len(segments)
        self._num_segments = first
        self._turn_of = [
            (index, number) for index, plan in self._plans.items() for number in range(len(plan.segments))
        ]
        self._begun: dict[int, tuple[GroupPiece, _Runner]] = {}

    # ---- what it asks for ---------------------------------------------------------------------------

    @property
    def member_names(self) -> tuple[str, ...]:
        return self._pieces.fleet.names

    @property
    def need(self) -> MemoryNeed:
        return MemoryNeed(self._area_bytes, self._area_bytes + self._beside_bytes, self._peak_bytes)

    @property
    def num_captures(self) -> int:
        """Graphs captured since the job was let in."""
        return 0 if self._graphs is None else self._graphs.num_captures

    @property
    def pool_bytes(self) -> int:
        """What its graphs' pool has of the device."""
        return 0 if self._graphs is None else self._graphs.pool_bytes

    @property
    def graph_bytes(self) -> int:
        """What its graphs themselves have."""
        return 0 if self._graphs is None else self._graphs.graph_bytes

    @property
    def _beside_bytes(self) -> int:
        """What is taken outside of the job's addresses."""
        if not self._is_cuda:
            return self._more_bytes + self._scratch_bytes + self._result_bytes
        landing = _NUM_LANDING_PLACES * self._batch_bytes
        return landing + _NUM_RESULTS * self._result_bytes + self._graphs_bytes + self._kernel_bytes

    @property
    def _kernel_bytes(self) -> int:
        """Of that, on a CUDA device, what its kernels may take."""
        has_convolutions = any(kernels.has_convolutions for kernels in self._kernels.values())
        allowance = _BESIDE_BYTES + _CONVOLUTION_BYTES * has_convolutions
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

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return tuple(segment for plan in self._plans.values() for segment in plan.segments)

    @property
    def _peak_bytes(self) -> int:
        return max(segment.height_bytes for segment in self._segments)

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """Of an iteration on a batch like the example, not measured yet."""
        return JobDemand(
            name=name,
            fingerprint="+".join(kernels.iteration.fingerprint for kernels in self._kernels.values()),
            region_bytes=self._region_bytes,
            local_bytes=self.need.local_bytes,
            segments=self._segments,
            steps=steps,
            share=share,
        )

    # ---- running ------------------------------------------------------------------------------------

    def settle(self, memory: Memory) -> None:
        """Take the fleet's state to the job's area; the groups use it there.

        On a CUDA device the usual step is captured: all of the job's end of the arena must be its own now.
        """
        self._memory = memory
        if self._is_cuda:
            self._pieces.rest()  # first: the job's graphs can have the stream, with its workspaces
            self._graphs = SegmentGraphs(
                self._pieces.device,
                deterministic=self._pieces.is_deterministic,
                beside_bytes=self._kernel_bytes,
                graphs_bytes=self._graphs_bytes,
            )
        for index, piece in self._own.items():
            self._runners[index, piece.variant] = runner = self._runner(index, self._kernels[index])
            runner.take_over(piece)
        if self._graphs is not None:
            self._graphs.empty_caches()
            for index, piece in self._own.items():
                self._runners[index, piece.variant].capture(piece)
            self._check_graphs(self._graphs)

    def _check_graphs(self, graphs: SegmentGraphs) -> None:
        if graphs.graph_bytes > self._graphs_bytes:
            self._seen_graph_bytes = graphs.graph_bytes
            raise BudgetError(
                f"expected the job's graphs themselves to take at most {in_words(self._graphs_bytes)}, but "
                f"they take {in_words(graphs.graph_bytes)}; raise tracking_bytes, for fewer of them"
            )

    def ask_for_more(self) -> None:
        """Ask for what graphs were seen to take, or for twice of what was kept for workspaces: compiled
        regions have some that nobody knows."""
        if self._seen_graph_bytes > self._graphs_bytes:
            self._graphs_bytes = self._seen_graph_bytes + GRAPHS_BYTES
        else:
            self._more_bytes = 2 * self._more_bytes + _BESIDE_BYTES

    def begin(self, batch: Any) -> None:
        """Check a batch, find or build the step for it, and feed every group."""
        if self._is_cuda:
            self._check_size(batch)
        pieces = self._pieces.begin(batch)
        begun = {piece.index: (piece, self._runner_for(piece)) for piece in pieces}
        for piece, runner in begun.values():
            runner.feed(piece)
        self._begun = begun

    def run(self, segment: int) -> None:
        """Run the kernels of one segment; those of a group without members are none."""
        index, number = self._turn_of[segment]
        if index not in self._begun:
            return
        piece, runner = self._begun[index]
        runner.run(number)
        if number == len(self._plans[index].segments) - 1:
            results = [result.clone() for result in runner.planned.results(0)]
            piece.end(runner.placed.kernels.step, results)

    def end(self) -> StepOutcome:
        """Count the fleet's step."""
        losses = self._pieces.end([piece for piece, _ in self._begun.values()])
        self._begun = {}
        return StepOutcome(self.member_names, losses, self._pieces.fleet.metrics)

    def leave(self) -> None:
        """Give the fleet storage of its own, and its members their weights."""
        self._begun = {}
        self._runners.clear()
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
            torch.cuda.empty_cache()  # the fleet's storage may need the room
        if self._memory is not None:
            self._pieces.go_back()
        self._memory = None
        self._pieces.fleet.sync()

    def _check_size(self, batch: Any) -> None:
        """Refuse a batch that has no room on the device before it goes there."""
        num_bytes = bytes_of_batch(batch)
        if num_bytes > self._example_bytes:
            raise BatchError(
                f"expected batches of at most {in_words(self._example_bytes)}, as the first one, got one of "
                f"{in_words(num_bytes)}; let the largest batch come first"
            )

    # ---- steps --------------------------------------------------------------------------------------

    def _read(self, piece: GroupPiece) -> StepKernels:
        step, graph = piece.kernels()
        half = self._pieces.uses_half
        return read_step_kernels(step, graph, piece.index, piece.group.width, half=half)

    def _runner_for(self, piece: GroupPiece) -> _Runner:
        key = (piece.index, piece.variant)
        known = self._runners.get(key)
        if known is None:
            known = self._runners[key] = self._runner(piece.index, self._read(piece))
            own = {(index, usual.variant) for index, usual in self._own.items()}
            while len(self._runners) > len(own) + _MAX_VARIANTS:
                del self._runners[next(old for old in self._runners if old not in own and old != key)]
        self._runners.move_to_end(key)
        return known

    def _runner(self, index: int, kernels: StepKernels) -> _Runner:
        """A step of a group in the job's memory; `BatchError` where that is too small for it."""
        assert self._memory is not None
        plan = self._plans[index]
        layout = lay_out_step(kernels, self._statics, region_bytes=self._region_bytes)
        cuts = fit_cuts(layout, plan.cuts, plan.segments)
        beside = kernels.scratch_bytes + kernels.result_bytes
        room_beside = self.need.local_bytes - self._area_bytes
        if cuts is None or layout.area_end > self._area_bytes or beside > room_beside:
            have = self.need.local_bytes + self._peak_bytes
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
        placed = place_step(layout, cuts, self._area_bytes)
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
            for position in kernels.step.positions_fed_anew()
        }
        if self._graphs is None:
            return _Runner(placed, planned, fed)
        runs = [partial(planned.run, part) if part.instructions else None for part in placed.segments]
        return _Runner(placed, planned, fed, self._graphs.new_set(runs))
