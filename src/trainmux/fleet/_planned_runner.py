"""Steps by a plan: one group for each sub-array, their tensors in the plan's slab."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from trainmux.engine import (
    CaptureRoom,
    ForwardProgram,
    Memory,
    PlannedEngine,
    StepProgram,
    Transfers,
    WatchedLanes,
    release_cached,
)
from trainmux.errors import BudgetError, PlanError
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._feed import GroupFeed
from trainmux.fleet._group import Group
from trainmux.fleet._other_steps import PlannedPrograms
from trainmux.fleet._plan import Plan
from trainmux.fleet._planning import FleetPlanner
from trainmux.fleet._runner import Batches, GroupPart, RowTraces, half_step, merge_rows
from trainmux.fleet._state_moves import copy_into_places, host_copies
from trainmux.ir import MemoryUse, Timeline
from trainmux.planning import measured_timeline
from trainmux.runtime import deferred_interrupts, workspaces_bytes
from trainmux.sizes import round_up

_MAX_VARIANTS = 4
_MAX_GRAPHS = 24
"""A capture room keeps graphs that are no longer wanted; with more than this, all are captured anew."""

MakePlanner = Callable[[Sequence[Group]], FleetPlanner]


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _others_bytes(device: torch.device) -> int:
    """Return what is reserved for others; workspaces of shared streams do not count."""
    return _reserved_bytes(device) - (sum(workspaces_bytes(device)) if device.type == "cuda" else 0)


def _new_slab(slab_bytes: int, device: torch.device) -> Tensor:
    """Allocate the slab as whole elements of every type: some operators look at a tensor's whole storage."""
    largest = torch.complex128.itemsize
    try:
        memory = torch.zeros(round_up(slab_bytes, largest), dtype=torch.uint8, device=device)
        return memory[:slab_bytes]
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    raise BudgetError(
        f"expected {slab_bytes} bytes on the device for the plan's tensors, got {free} free of {total}; "
        "leave the device to this process, or plan for a smaller budget"
    )


class PlannedRunner:
    """Runs groups by planned programs: the plan's own, and others in the same memory.

    State lies where the program in use has it between steps: in the slab, or in host memory where it is
    offloaded or not known to the program. ``finish`` before anything else reads or changes it.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        variant: Hashable,
        own: PlannedPrograms,
        config: FleetConfig,
        make_planner: MakePlanner,
        *,
        poisons: bool = False,
    ) -> None:
        self._make_planner = make_planner
        self.plan = plan
        self.groups = tuple(groups)
        self._config = config
        self._transfers = Transfers(config.device)
        self._poisons = poisons
        self._others_bytes = _others_bytes(config.device)
        self._slab = _new_slab(max(1, own.program.slab_bytes), config.device)
        self._is_weighed = False
        # One for all variants: they run one after another, and share what lies outside the slab.
        captures = config.device.type == "cuda" and config.engine != "reference"
        self._room = CaptureRoom(config.device, deterministic=config.deterministic) if captures else None
        self._watching: WatchedLanes | None = None
        self._own = variant
        self._engines: OrderedDict[Hashable, tuple[PlannedPrograms, PlannedEngine]] = OrderedDict()
        self._engines[variant] = (own, self._new_engine(own))
        self._in_use = variant
        self._adopt()

    @property
    def memory(self) -> MemoryUse | None:
        """Memory on the device, once a step was captured."""
        return self._engines[self._in_use][1].memory

    @property
    def slab_bytes(self) -> int:
        return self._slab.numel()

    def excess_bytes(self) -> int:
        """Return what the groups take beyond their budget; looks only after something new has run."""
        if self._is_weighed:
            return 0
        self._is_weighed = True
        return max(0, self._held_bytes() - self.plan.budget_bytes)

    def _held_bytes(self) -> int:
        if self._config.device.type != "cuda":
            return self.slab_bytes
        return _reserved_bytes(self._config.device) - self._others_bytes

    def prepare(self, parts: Sequence[GroupPart]) -> Callable[[Batches], None]:
        """Find the program for a step, or fit another one into the budget."""
        variant = tuple(part.variant() for part in parts)
        if variant not in self._engines:
            planner = self._make_planner([part.group for part in parts])
            graphs, stacked = [part.trace.graph for part in parts], [part.feed.stacked for part in parts]
            steps = planner.other_programs(self.plan, graphs, stacked, applies=parts[0].applies)
            with deferred_interrupts():
                self.learn(variant, steps)
        return partial(self.step, variant)

    def learn(self, variant: Hashable, steps: PlannedPrograms) -> None:
        """Add a program; the least recently used one of too many goes."""
        if steps.program.slab_bytes > self.slab_bytes:
            self.finish()
            self._grow(steps.program.slab_bytes)
        self._engines[variant] = (steps, self._new_engine(steps))
        self._is_weighed = False
        while len(self._engines) > _MAX_VARIANTS:
            needed = (self._own, self._in_use, variant)
            del self._engines[next(key for key in self._engines if key not in needed)]
        if self._room is not None and self._room.num_kept > _MAX_GRAPHS:
            self.finish()
            for _, engine in self._engines.values():
                engine.forget_graphs()
            self._room.drop_kept()

    def watch(self, step: Callable[[], object]) -> Timeline:
        """Run ``step``, a step of the fleet, and return when each instruction of the plan's program ran."""
        self._watching = self._engines[self._own][1].watched_lanes()
        try:
            step()
            if self._watching is None:
                raise PlanError(
                    "expected a step on a batch like the one that was planned for, got another, which the "
                    "plan says nothing about; watch one like the example batch"
                )
            spans, seconds = self._watching.read()
        finally:
            self._watching = None  # a step that was refused must not leave the next one watched
        profiles = [self.plan.profiles[sub_array.profile] for sub_array in self.plan.partition]
        return measured_timeline(self.plan.program.body, profiles, spans, seconds)

    def step(self, variant: Hashable, batches: Batches) -> None:
        """Run one step of every group, with the numbers that were read last."""
        if variant != self._own:
            self._watching = None
        steps, engine = self._turn_to(variant)
        programs = zip(self.groups, steps.steps, strict=True)
        pairs = [(group, step) for group, step in programs if isinstance(step, StepProgram)]
        for group in self.groups:
            group.push_numbers()
        fed = [group.fed(step, batches[id(group)]) for group, step in pairs]
        with self._told_if_torn(engine):
            results = engine.step(fed, self._watching)
        for (group, step), found in zip(pairs, results, strict=True):
            group.count(step)
            group.note(step, found)

    def evaluate(
        self,
        groups: Sequence[Group],
        traces: Sequence[RowTraces],
        feeds: Sequence[GroupFeed],
        batches: Batches,
    ) -> list[dict[str, Tensor]]:
        """Compute the metrics of all groups on one batch, within the plan's budget.

        A planned program has one forward pass of each group. Where members of a group differ in evaluation,
        there are as many programs as the group with the most traces needs; others run their last one again.
        """
        merged: list[dict[str, Tensor]] = [{} for _ in groups]
        for number in range(max(len(found) for found in traces)):
            chosen = [found[min(number, len(found) - 1)] for found in traces]
            pairs = zip(chosen, feeds, strict=True)
            variant = ("evaluate", *((trace.key, f.example.spec, f.stacked) for (trace, _), f in pairs))
            if variant not in self._engines:
                graphs, stacked = [trace.graph for trace, _ in chosen], [feed.stacked for feed in feeds]
                forwards = self._make_planner(groups).other_programs(self.plan, graphs, stacked)
                with deferred_interrupts():
                    self.learn(variant, forwards)
            with deferred_interrupts():  # state may move, and must not stop half-way
                values = self._forward(variant, batches)
            for known, (_, rows), new in zip(merged, chosen, values, strict=True):
                merge_rows(known, new, rows)
        return merged

    def _forward(self, variant: Hashable, batches: Batches) -> list[dict[str, Tensor]]:
        forwards, engine = self._turn_to(variant)
        pairs = list(zip(self.groups, forwards.steps, strict=True))
        results = engine.step([group.fed(forward, batches[id(group)]) for group, forward in pairs])
        return [
            dict(zip(forward.metrics, found, strict=True))
            for forward, found in zip(forwards.steps, results, strict=True)
        ]

    def _turn_to(self, variant: Hashable) -> tuple[PlannedPrograms, PlannedEngine]:
        """Switch to the program of a variant, and move the groups' state to where it has it."""
        if variant != self._in_use:
            self.finish()
            self._in_use = variant
            self._adopt()
        self._engines.move_to_end(variant)
        return self._engines[variant]

    def finish(self) -> None:
        """Run what is in flight to its end; the first group's norms and masks become current."""
        steps, engine = self._engines[self._in_use]
        was_in_flight = engine.in_flight
        with self._told_if_torn(engine):
            engine.finish()
        if was_in_flight:
            first = steps.steps[0]
            assert isinstance(first, StepProgram)
            self.groups[0].note(first, engine.results(0))

    @contextmanager
    def _told_if_torn(self, engine: PlannedEngine) -> Iterator[None]:
        """Inside, an error that leaves members between two steps becomes `HalfStepError`."""
        try:
            yield
        except BaseException as error:
            if engine.is_torn:
                raise half_step(error, torn=self.groups) from error
            raise

    def release(self) -> None:
        """Finish, move the groups' state to host memory and free everything else."""
        self.finish()
        self._to_host()
        self._let_go()

    def _grow(self, slab_bytes: int) -> None:
        """Make a larger slab; the groups' state waits in host memory meanwhile."""
        kept = {variant: steps for variant, (steps, _) in self._engines.items()}
        smaller = self.slab_bytes
        self._to_host()
        self._let_go()
        refusal: BudgetError | None = None
        try:
            self._slab = _new_slab(slab_bytes, self._config.device)
        except BudgetError as error:
            refusal = error
            self._slab = _new_slab(smaller, self._config.device)
        for variant, steps in kept.items():
            self._engines[variant] = (steps, self._new_engine(steps))
        self._adopt()
        if refusal is not None:
            raise refusal

    def _to_host(self) -> None:
        """Move the groups' state to host memory."""
        for group in self.groups:
            tensors = [*group.state.stacked(), *group.state.shared.values()]
            copies = dict(zip(map(id, tensors), host_copies(tensors, self._transfers), strict=True))
            group.rebase(lambda tensor, copies=copies: copies[id(tensor)])  # type: ignore[misc]

    def _let_go(self) -> None:
        """Free the engines, their graphs and the slab."""
        self._engines.clear()
        if self._room is not None:
            self._room.drop_kept()
        self._slab = torch.zeros(0, dtype=torch.uint8)
        release_cached(self._config.device)

    # ---- memory ------------------------------------------------------------------------------------

    def _new_engine(self, steps: PlannedPrograms) -> PlannedEngine:
        like = next((engine for _, engine in self._engines.values()), None)
        memory = Memory.over(self._slab, steps.program, steps.graphs, max(steps.branches))
        return PlannedEngine(
            steps.program,
            steps.steps,
            steps.graphs,
            memory,
            branches=steps.branches,
            like=like,
            deterministic=self._config.deterministic,
            room=self._room,
            poisons=self._poisons,
        )

    def _adopt(self) -> None:
        """Move state and constants to where the engine in use has them; the groups use them there.

        Places of two programs may overlap in another order, so tensors move by way of host memory. Tensors
        for which the engine has no place stay there.
        """
        steps, engine = self._engines[self._in_use]
        moved: list[dict[int, Tensor]] = [{} for _ in self.groups]
        waiting: list[tuple[Tensor, Tensor]] = []
        inside: list[Tensor] = []
        programs: Sequence[StepProgram | ForwardProgram] = steps.steps
        for sub_array, (group, step) in enumerate(zip(self.groups, programs, strict=True)):
            fed = set(step.positions_fed_anew)
            for position, argument in enumerate(group.held_arguments(step)):
                if argument is None or position in fed:
                    continue
                place = engine.argument(sub_array, position)
                is_shared = place.dim() > argument.dim()  # each branch has its own
                moved[sub_array][id(argument)] = place[0] if is_shared else place
                if place.data_ptr() != argument.data_ptr():
                    waiting.append((place, argument))
                    if argument.device == self._slab.device:
                        inside.append(argument)
        copies = dict(zip(map(id, inside), host_copies(inside, self._transfers), strict=True))
        for group, places in zip(self.groups, moved, strict=True):
            for tensor in (*group.state.stacked(), *group.state.shared.values()):
                if id(tensor) not in places:
                    places[id(tensor)] = self._outside(tensor)
        engine.load_constants()
        copy_into_places(
            [(place, copies.get(id(argument), argument)) for place, argument in waiting], self._transfers
        )
        for group, places in zip(self.groups, moved, strict=True):
            group.rebase(lambda tensor, places=places: places[id(tensor)])  # type: ignore[misc]

    def _outside(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host if it lies in the slab."""
        in_slab = tensor.untyped_storage().data_ptr() == self._slab.untyped_storage().data_ptr()
        return tensor.to("cpu", copy=True) if in_slab else tensor
