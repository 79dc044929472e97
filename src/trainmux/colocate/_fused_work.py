"""The iterations of a fleet, run segment by segment in memory that the device lays out.

One `FusedWork` is one lane of a job (`_fused_job`). On a CUDA device segments are captured graphs
(`_segment_graphs`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._feature_maps import ALIGNMENT_BYTES
from trainmux.colocate._fused_job import FusedJob, bytes_of_batch
from trainmux.colocate._protocols import MemoryNeed, StepOutcome
from trainmux.colocate._segment_graphs import GRAPHS_BYTES, SegmentGraphs, SegmentSet
from trainmux.colocate._step_layout import PlacedStep, StepKernels
from trainmux.colocate._virtual_memory import granularity_bytes
from trainmux.engine import HostLanes, Memory, PlannedProgram
from trainmux.errors import BatchError, BudgetError
from trainmux.fleet import Fleet, GroupPiece
from trainmux.runtime import MATRIX_LIBRARIES_BYTES
from trainmux.sizes import exact_bytes

_MAX_VARIANTS = 8

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


class LaneMemory(Memory):
    """The addresses of a further lane of a job; shared tensors lie where the first lane has them.

    To the lane, everything lies as it does for the first: ``shared_bytes`` of shared tensors, the rest of an
    area of ``area_bytes``, the arena. Its ``own`` memory has an area of ``own_area_bytes`` for the rest.
    """

    def __init__(
        self, first: Memory, own: Memory, shared_bytes: int, area_bytes: int, own_area_bytes: int
    ) -> None:
        super().__init__(own.slab, own.host, own.host_offsets)
        self._first, self._own = first, own
        self._shared_bytes, self._area_bytes = shared_bytes, area_bytes
        self._own_area_bytes = own_area_bytes

    def at(self, offset: int, size_bytes: int) -> Tensor:
        """The bytes of a tensor at one of the lane's addresses."""
        if offset < self._shared_bytes:
            return self._first.at(offset, size_bytes)
        if offset < self._area_bytes:
            return self._own.at(offset - self._shared_bytes, size_bytes)
        return self._own.at(offset - self._area_bytes + self._own_area_bytes, size_bytes)


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

    def feed(self, piece: GroupPiece, *, num_ahead: int = 0) -> None:
        """Load a step's batch and numbers, and its transient tensors; ``num_ahead`` as of
        `GroupPiece.feed`."""
        step, graph = self.placed.kernels.step, self.placed.kernels.graph
        for position, value in piece.feed(step, num_ahead=num_ahead).items():
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


class FusedWork:
    """Lane ``index`` of a job. Lanes settle in order and leave in reverse. ``poisons`` fills freed bytes with
    NaN, for tests."""

    is_eager = False

    def __init__(self, job: FusedJob, index: int, *, poisons: bool) -> None:
        self._job = job
        self._pieces = job.pieces
        self._index = index
        self._is_cuda = runs_as_graphs(job.pieces.device)
        self._poisons = poisons
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

    # ---- demands -----------------------------------------------------------------------------------

    @property
    def member_names(self) -> tuple[str, ...]:
        return self._pieces.fleet.names

    @property
    def need(self) -> MemoryNeed:
        area_bytes = self._job.own_area_bytes(self._index)
        return MemoryNeed(area_bytes, area_bytes + self._outside_bytes, self._job.peak_bytes)

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
        """Memory outside of the lane's addresses."""
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
        has_convolutions = any(kernels.has_convolutions for kernels in self._job.kernels.values())
        allowance = _SCRATCH_BYTES + _CONVOLUTION_BYTES * has_convolutions
        return self._more_bytes + self._scratch_bytes + allowance

    @property
    def _scratch_bytes(self) -> int:
        return max(kernels.scratch_bytes for kernels in self._job.kernels.values())

    @property
    def _result_bytes(self) -> int:
        return sum(kernels.result_bytes for kernels in self._job.kernels.values())

    @property
    def _batch_bytes(self) -> int:
        """The batch of a usual step."""
        batches = {leaf.data_ptr(): leaf.nbytes for piece in self._job.own.values() for leaf in piece.batch}
        return sum(batches.values())

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """The demand of an unmeasured iteration like the example, for its part of the job's steps."""
        lane = self._job.lane(name, self._index)
        if lane is not None and steps is not None:
            steps = lane.steps_of(steps)
        return JobDemand(
            name=name if self._index == 0 else f"{name} (lane {self._index + 1})",
            fingerprint=self._job.fingerprint,
            region_bytes=self._job.region_bytes,
            local_bytes=self.need.local_bytes,
            segments=self._job.segments,
            steps=steps,
            share=share / self._job.num_lanes,
            micro_batches=lane,
        )

    @property
    def step_seconds(self) -> tuple[float, ...]:
        return self._job.step_seconds

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        self._job.cut_for(step_seconds)

    def use_regions(self, region_bytes: int) -> None:
        if self._index == 0:  # all lanes of a job have one layout
            self._job.lay_out(region_bytes)

    # ---- running -----------------------------------------------------------------------------------

    def settle(self, memory: Memory) -> None:
        """Move the fleet's state to the area of the first lane, where the groups use it.

        On a CUDA device the usual step is captured: the lane must own all of its end of the arena now.
        """
        job = self._job
        if self._index == 0:
            job.memory = self._memory = memory
        else:
            assert job.memory is not None
            own_bytes = job.own_area_bytes(self._index)
            self._memory = LaneMemory(job.memory, memory, job.shared_bytes, job.area_bytes, own_bytes)
        if self._is_cuda and self._index == 0:
            self._pieces.rest()  # first: the job's graphs can have the stream, with its workspaces
        self._make_steps()
        if self._index == 0:
            for index, piece in job.own.items():
                self._steps[index, piece.variant].take_over(piece)
        if not self._is_cuda:
            return
        seconds, graph_bytes = self._capture(), self.graph_bytes
        # Other lanes come later, and are cut as the first one is.
        if self._index == 0 and job.cut_anew(seconds):
            self._close_graphs()
            self._make_steps()
            self._capture()
            graph_bytes = max(
                graph_bytes, self.graph_bytes
            )  # the driver may have kept the first graphs' memory
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
        for index, piece in self._job.own.items():
            self._steps[index, piece.variant] = self._build(index, self._job.kernels[index])

    def _capture(self) -> dict[int, float]:
        """Capture the usual steps; returns the duration of each group's."""
        assert self._graphs is not None
        self._graphs.empty_caches()
        own = self._job.own.items()
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
        job = self._job
        pieces = self._pieces.begin(batch, num_ahead=job.num_open)
        begun = {piece.index: (piece, self._step_for(piece)) for piece in pieces}
        for piece, step in begun.values():
            step.feed(piece, num_ahead=job.open_pieces[piece.index])
        job.open_pieces.update(begun.keys())
        job.num_open += 1
        self._begun = begun
        self._ahead = (batch, self._told()) if is_ahead else None

    def renew(self) -> None:
        """Feed an iteration that was begun ahead once more, if members or settings have changed since."""
        if self._ahead is None:
            return
        (batch, told), self._ahead = self._ahead, None
        if told != self._told():
            job = self._job
            job.open_pieces.subtract(self._begun.keys())
            job.num_open -= 1
            self._begun = {}
            self.begin(batch)

    def _told(self) -> Hashable:
        """The settings that the begun iteration would get if it began now."""
        piece, _ = next(iter(self._begun.values()))
        return self._pieces.told(applies=piece.applies)

    def run(self, segment: int) -> None:
        """Run the kernels of one segment; a group without members has none."""
        index, number = self._job.piece_of[segment]
        if index not in self._begun:
            return
        piece, step = self._begun[index]
        step.run(number)
        if number == len(self._job.groups[index].segments) - 1:
            results = [result.clone() for result in step.planned.results(0)]
            piece.end(step.placed.kernels.step, results)
            self._job.open_pieces[index] -= 1

    def end(self) -> StepOutcome:
        """Count the fleet's step."""
        losses = self._pieces.end([piece for piece, _ in self._begun.values()])
        self._job.num_open -= 1
        self._begun = {}
        return StepOutcome(self.member_names, losses, self._pieces.fleet.metrics)

    def leave(self) -> None:
        """Release the lane's memory. With the first lane, the fleet gets storage of its own again, and its
        members their weights."""
        self._begun, self._ahead = {}, None
        self._kept_bytes = None
        self._close_graphs()
        if self._index == 0:
            job = self._job
            if self._memory is not None:
                self._pieces.go_back()
            job.memory = None
            job.num_open = 0
            job.open_pieces.clear()
            self._pieces.fleet.sync()
        self._memory = None

    def _check_size(self, batch: Any) -> None:
        """Refuse a batch that has no room on the device before it goes there."""
        num_bytes = bytes_of_batch(batch)
        if num_bytes > self._job.example_bytes:
            raise BatchError(
                f"expected batches of at most {exact_bytes(self._job.example_bytes)}, as the first "
                "one, got one "
                f"of {exact_bytes(num_bytes)}; let the largest batch come first"
            )

    # ---- steps -------------------------------------------------------------------------------------

    def _step_for(self, piece: GroupPiece) -> _StepInMemory:
        key = (piece.index, piece.variant)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._build(piece.index, self._job.read(piece))
            own = {(index, usual.variant) for index, usual in self._job.own.items()}
            while len(self._steps) > len(own) + _MAX_VARIANTS:
                del self._steps[next(old for old in self._steps if old not in own and old != key)]
        self._steps.move_to_end(key)
        return known

    def _build(self, index: int, kernels: StepKernels) -> _StepInMemory:
        """Place a step of a group in the lane's memory; `BatchError` where that is too small."""
        assert self._memory is not None
        placed = self._job.place(index, kernels, self._outside_bytes)
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
            return _StepInMemory(placed, planned, fed)
        runs = [partial(planned.run, part) if part.instructions else None for part in placed.segments]
        return _StepInMemory(placed, planned, fed, self._graphs.new_set(runs))


def fused_lanes(
    fleet: Fleet,
    example: Any,
    *,
    tracking_bytes: int | None,
    region_bytes: int,
    poisons: bool = False,
    num_lanes: int = 1,
) -> tuple[FusedWork, ...]:
    """A fleet as a job whose micro-batches run in ``num_lanes``; refused as by `FusedJob`."""
    device = fleet._config.device
    unit_bytes = granularity_bytes(device) if runs_as_graphs(device) else ALIGNMENT_BYTES
    job = FusedJob(
        fleet,
        example,
        tracking_bytes=tracking_bytes,
        region_bytes=region_bytes,
        unit_bytes=unit_bytes,
        num_lanes=num_lanes,
    )
    return tuple(FusedWork(job, index, poisons=poisons) for index in range(num_lanes))
