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
from trainmux.colocate._device import LaneMemory, MemoryNeed
from trainmux.colocate._fused_job import FusedJob, bytes_of_batch
from trainmux.colocate._placement import ALIGNMENT_BYTES
from trainmux.colocate._segment_graphs import GRAPHS_BYTES, SegmentGraphs, SegmentSet
from trainmux.colocate._step_plan import PlacedStep, StepKernels
from trainmux.colocate._virtual_memory import granularity_bytes
from trainmux.colocate._work import StepOutcome
from trainmux.engine import HostLanes, Memory, PlannedProgram
from trainmux.errors import BatchError, BudgetError
from trainmux.fleet import Fleet, GroupPiece
from trainmux.runtime import MATRIX_LIBRARIES_BYTES
from trainmux.scheduling.budget import in_words

_MAX_VARIANTS = 8

_BESIDE_BYTES = 128 << 20
"""On a CUDA device, for the kernels of each job: the matrix libraries' workspaces, and what nobody knows."""

_CONVOLUTION_BYTES = 256 << 20
"""The same for workspaces of a job's convolutions, whose algorithms are chosen among those that fit."""

_SPARE_BYTES = 32 << 20
"""Of what was asked for the kernels of a job, left to other steps than the one that was captured first."""

_NUM_LANDING_PLACES = 2

_NUM_RESULTS = 4
"""Results of steps that there may be at a time on a CUDA device: of two iterations in flight, of one that is
being told, and the fleet's last."""


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

    def capture(self, piece: GroupPiece) -> float:
        """Capture every segment, on inputs that are real and with no member active: nothing changes.

        Accumulators, which take in what inactive members compute, are put back. Returns how many seconds a
        replay takes.
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
        """Put a step's batch and numbers into their places, and what has no lasting place.

        ``num_ahead`` is as of `GroupPiece.feed`.
        """
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


class FusedWork:
    """Lane ``index`` of a job. Lanes settle in order and leave in the opposite one.

    ``poisons`` fills freed bytes with ones, for tests.
    """

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
        """What it asked for beside its area after it had been found too little."""
        self._kept_bytes: int | None = None
        """What its kernels keep beside the area, once they were captured."""
        self._graphs_bytes = self._seen_graph_bytes = GRAPHS_BYTES
        """What is kept for graphs themselves, and what they were seen to take."""
        self._runners: OrderedDict[tuple[int, Hashable], _Runner] = OrderedDict()
        self._begun: dict[int, tuple[GroupPiece, _Runner]] = {}
        self._ahead: tuple[Any, Hashable] | None = None
        """Of an iteration that was begun ahead: its batch, and what it was told beside it."""

    # ---- what it asks for ---------------------------------------------------------------------------

    @property
    def member_names(self) -> tuple[str, ...]:
        return self._pieces.fleet.names

    @property
    def need(self) -> MemoryNeed:
        area_bytes = self._job.own_area_bytes(self._index)
        return MemoryNeed(area_bytes, area_bytes + self._beside_bytes, self._job.peak_bytes)

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
        """What is taken outside of the lane's addresses."""
        if not self._is_cuda:
            return self._more_bytes + self._scratch_bytes + self._result_bytes
        landing = _NUM_LANDING_PLACES * self._batch_bytes
        return landing + _NUM_RESULTS * self._result_bytes + self._graphs_bytes + self._kernel_bytes

    @property
    def _kernel_bytes(self) -> int:
        """Of that, on a CUDA device, what its kernels may take.

        To begin with much of that is for what nobody knows: workspaces of compiled regions and of
        convolutions, and pieces that torch's allocator cannot use while a step is rehearsed.
        """
        if self._kept_bytes is not None:
            return self._kept_bytes
        has_convolutions = any(kernels.has_convolutions for kernels in self._job.kernels.values())
        allowance = _BESIDE_BYTES + _CONVOLUTION_BYTES * has_convolutions
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
        """Of an iteration on a batch like the example, not measured yet; of its part of the job's steps."""
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
        """All lanes of a job are cut alike."""
        self._job.cut_for(step_seconds)

    def use_regions(self, region_bytes: int) -> None:
        """All lanes of a job have one layout."""
        if self._index == 0:
            self._job.lay_out(region_bytes)

    # ---- running ------------------------------------------------------------------------------------

    def settle(self, memory: Memory) -> None:
        """Take the fleet's state to the area of the first lane; the groups use it there.

        On a CUDA device the usual step is captured: all of the lane's end of the arena must be its own now.
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
        self._make_runners()
        if self._index == 0:
            for index, piece in job.own.items():
                self._runners[index, piece.variant].take_over(piece)
        if not self._is_cuda:
            return
        seconds, graph_bytes = self._capture(), self.graph_bytes
        # Other lanes come later, and are cut as the first one is.
        if self._index == 0 and job.cut_anew(seconds):
            self._close_graphs()
            self._make_runners()
            self._capture()
            graph_bytes = max(graph_bytes, self.graph_bytes)  # the driver may have kept what those had
        assert self._graphs is not None
        self._check_graphs(graph_bytes)
        self._keep_less(self._graphs)

    def _make_runners(self) -> None:
        """The usual steps as they are cut now, none of them captured."""
        if self._is_cuda:
            self._graphs = SegmentGraphs(
                self._pieces.device,
                deterministic=self._pieces.is_deterministic,
                beside_bytes=self._kernel_bytes,
                graphs_bytes=self._graphs_bytes,
            )
        for index, piece in self._job.own.items():
            self._runners[index, piece.variant] = self._runner(index, self._job.kernels[index])

    def _capture(self) -> dict[int, float]:
        """Capture the usual steps; how long each group's takes."""
        assert self._graphs is not None
        self._graphs.empty_caches()
        own = self._job.own.items()
        return {index: self._runners[index, piece.variant].capture(piece) for index, piece in own}

    def _close_graphs(self) -> None:
        """Let go of all that was captured, and of its memory."""
        self._runners.clear()
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
            torch.cuda.empty_cache()  # whoever comes next may need the room

    def _keep_less(self, graphs: SegmentGraphs) -> None:
        """The usual step is captured: what it did not take is for others, but for a little.

        Other steps take less, as their batches are no larger, and use the same memory. Not so where only the
        usual one is compiled: what others do through ATen needs a place for every result.
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
                f"expected the job's graphs themselves to take at most {in_words(self._graphs_bytes)}, but "
                f"they take {in_words(graph_bytes)}; raise tracking_bytes, for fewer of them"
            )

    def ask_for_more(self) -> None:
        """Ask for what graphs were seen to take, or for twice of what was kept for workspaces: compiled
        regions have some that nobody knows."""
        if self._seen_graph_bytes > self._graphs_bytes:
            self._graphs_bytes = self._seen_graph_bytes + GRAPHS_BYTES
        else:
            self._more_bytes = 2 * self._more_bytes + _BESIDE_BYTES

    def begin(self, batch: Any, *, is_ahead: bool = False) -> None:
        """Check a batch, find or build the step for it, and feed every group."""
        if self._is_cuda:
            self._check_size(batch)
        job = self._job
        pieces = self._pieces.begin(batch, num_ahead=job.num_open)
        begun = {piece.index: (piece, self._runner_for(piece)) for piece in pieces}
        for piece, runner in begun.values():
            runner.feed(piece, num_ahead=job.open_pieces[piece.index])
        job.open_pieces.update(begun.keys())
        job.num_open += 1
        self._begun = begun
        self._ahead = (batch, self._told()) if is_ahead else None

    def renew(self) -> None:
        """Feed an iteration that was begun ahead once more, where members or settings have changed since."""
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
        """What the iteration that was begun would be told if it began now."""
        piece, _ = next(iter(self._begun.values()))
        return self._pieces.told(applies=piece.applies)

    def run(self, segment: int) -> None:
        """Run the kernels of one segment; those of a group without members are none."""
        index, number = self._job.turn_of[segment]
        if index not in self._begun:
            return
        piece, runner = self._begun[index]
        runner.run(number)
        if number == len(self._job.plans[index].segments) - 1:
            results = [result.clone() for result in runner.planned.results(0)]
            piece.end(runner.placed.kernels.step, results)
            self._job.open_pieces[index] -= 1

    def end(self) -> StepOutcome:
        """Count the fleet's step."""
        losses = self._pieces.end([piece for piece, _ in self._begun.values()])
        self._job.num_open -= 1
        self._begun = {}
        return StepOutcome(self.member_names, losses, self._pieces.fleet.metrics)

    def leave(self) -> None:
        """Let go of the lane's memory; with the first lane, the fleet gets storage of its own again, and its
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
                f"expected batches of at most {in_words(self._job.example_bytes)}, as the first one, got one "
                f"of {in_words(num_bytes)}; let the largest batch come first"
            )

    # ---- steps --------------------------------------------------------------------------------------

    def _runner_for(self, piece: GroupPiece) -> _Runner:
        key = (piece.index, piece.variant)
        known = self._runners.get(key)
        if known is None:
            known = self._runners[key] = self._runner(piece.index, self._job.read(piece))
            own = {(index, usual.variant) for index, usual in self._job.own.items()}
            while len(self._runners) > len(own) + _MAX_VARIANTS:
                del self._runners[next(old for old in self._runners if old not in own and old != key)]
        self._runners.move_to_end(key)
        return known

    def _runner(self, index: int, kernels: StepKernels) -> _Runner:
        """A step of a group in the lane's memory; `BatchError` where that is too small for it."""
        assert self._memory is not None
        placed = self._job.place(index, kernels, self._beside_bytes)
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


def fused_lanes(
    fleet: Fleet,
    example: Any,
    *,
    tracking_bytes: int | None,
    region_bytes: int,
    poisons: bool = False,
    num_lanes: int = 1,
) -> tuple[FusedWork, ...]:
    """A fleet as a job, whose micro-batches run in ``num_lanes``; refused as by `FusedJob`."""
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
