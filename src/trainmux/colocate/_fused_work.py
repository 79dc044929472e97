"""The iterations of a fleet, run segment by segment in memory that the device lays out.

A fleet's groups take their turns within an iteration: the feature maps of one are gone when the next begins,
so their stacks lie in the same bytes of the arena. Every group trains as one array.

The demand is that of a step on a batch like the example, with an update. Other steps (a short last batch, a
micro-batch without an update) run in its place: cut at the same kernels where they fit, else all at once
while the highest segment has the arena. One that needs more memory than that is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._device import JobMemory, MemoryNeed
from trainmux.colocate._placement import ALIGNMENT_BYTES, round_up
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
)
from trainmux.colocate._work import StepOutcome
from trainmux.engine import HostLanes, PlannedProgram
from trainmux.errors import BatchError, ConfigError
from trainmux.fleet import Fleet
from trainmux.fleet._in_pieces import FleetInPieces, GroupPiece
from trainmux.scheduling.budget import in_words

_MAX_VARIANTS = 8


@dataclass(frozen=True)
class _Runner:
    """A group's step, ready to run in the job's memory."""

    placed: PlacedStep
    planned: PlannedProgram

    def feed(self, piece: GroupPiece) -> None:
        """Put a step's batch and numbers into their places, and what has no lasting place."""
        step, graph = self.placed.kernels.step, self.placed.kernels.graph
        for position, value in piece.feed(step).items():
            self.planned.between_steps(0, graph.inputs[position]).copy_(value)
        if not self.placed.transient:
            return
        fed = set(step.positions_fed_anew())
        for position, argument in enumerate(piece.group.held_arguments(step)):
            location = graph.inputs[position]
            if argument is not None and position not in fed and location.tensor in self.placed.transient:
                self.planned.between_steps(0, location).copy_(argument)
        self.load_constants(self.placed.transient)

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
    """A fleet as a job. ``tracking_bytes`` and ``region_bytes`` are as in `demand_of_iteration`.

    ``poisons`` fills freed bytes with ones, for tests. Refused with `ConfigError`: a fleet on another device
    than a CPU, and what `FleetInPieces` refuses.
    """

    is_eager = False

    def __init__(
        self, fleet: Fleet, example: Any, *, tracking_bytes: int, region_bytes: int, poisons: bool = False
    ) -> None:
        self._pieces = FleetInPieces(fleet)
        if self._pieces.device.type != "cpu":
            raise ConfigError(
                f"expected a job on the CPU, got one on {self._pieces.device}: in this version co-location "
                'runs on the CPU only; build the fleet with device="cpu", or train jobs one after the other'
            )
        self._region_bytes = region_bytes
        self._poisons = poisons
        self._statics = StaticArea()
        self._memory: JobMemory | None = None
        self._runners: OrderedDict[tuple[int, Hashable], _Runner] = OrderedDict()
        self._own = {piece.index: piece for piece in self._pieces.begin(example, applies=True)}
        self._kernels = {index: self._read(piece) for index, piece in self._own.items()}
        for kernels in self._kernels.values():
            for number, key in kernels.static_keys.items():
                self._statics.take(key, kernels.graph.tensors[number].size_bytes)
        layouts = {
            index: lay_out_step(kernels, self._statics, region_bytes=region_bytes)
            for index, kernels in self._kernels.items()
        }
        self._area_bytes = round_up(max(layout.area_end for layout in layouts.values()), ALIGNMENT_BYTES)
        self._plans: dict[int, _GroupPlan] = {}
        first = 0
        for index, layout in layouts.items():
            cuts = cuts_of(layout, tracking_bytes)
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
        beside = sum(kernels.result_bytes for kernels in self._kernels.values())
        beside += max(kernels.scratch_bytes for kernels in self._kernels.values())
        return MemoryNeed(self._area_bytes, self._area_bytes + beside, self._peak_bytes)

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

    def settle(self, memory: JobMemory) -> None:
        """Take the fleet's state to the job's area; the groups use it there."""
        self._memory = memory
        for index, piece in self._own.items():
            runner = self._runners[index, piece.variant] = self._runner(index, self._kernels[index])
            step, graph = runner.placed.kernels.step, runner.placed.kernels.graph
            fed = set(step.positions_fed_anew())
            places: dict[int, Tensor] = {}
            for position, argument in enumerate(piece.group.held_arguments(step)):
                if argument is not None and position not in fed:
                    place = runner.planned.between_steps(0, graph.inputs[position])
                    places[id(argument)] = place.copy_(argument)
            runner.load_constants()
            piece.group.rebase(lambda tensor, places=places: places.get(id(tensor), tensor))  # type: ignore[misc]

    def begin(self, batch: Any) -> None:
        """Check a batch, find or build the step for it, and feed every group."""
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
        part = runner.placed.segments[number]
        if part.instructions:
            runner.planned.run(part)
        if number == len(self._plans[index].segments) - 1:
            results = [result.clone() for result in runner.planned.results(0)]
            piece.end(runner.placed.kernels.step, results)

    def end(self) -> StepOutcome:
        """Count the fleet's step."""
        losses = self._pieces.end([piece for piece, _ in self._begun.values()])
        self._begun = {}
        return StepOutcome(losses, self._pieces.fleet.metrics)

    def leave(self) -> None:
        """Give the fleet storage of its own, and its members their weights."""
        if self._memory is not None:
            self._pieces.go_back()
        self._runners.clear()
        self._memory = None
        self._pieces.fleet.sync()

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
        return _Runner(placed, planned)
