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
from trainmux.fleet._group import Group
from trainmux.fleet._other_steps import PlannedPrograms, Wanted
from trainmux.fleet._plan import Plan
from trainmux.fleet._runner import Batches, GroupPart, half_step
from trainmux.ir import MemoryUse, Timeline
from trainmux.planning import measured_timeline
from trainmux.runtime import bytes_outside_torch, deferred_interrupts, workspaces_bytes
from trainmux.sizes import round_up

_MAX_VARIANTS = 4
_MAX_GRAPHS = 24
"""A capture room keeps graphs that are no longer wanted; with more than this, all are captured anew."""

FitOthers = Callable[[Sequence[Wanted], bool | None], PlannedPrograms]
"""Fits other steps, or with ``None`` forward passes, of the groups into the plan's budget."""


def _others_bytes(device: torch.device) -> int:
    """Return what is reserved for others; workspaces of shared streams do not count."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - sum(workspaces_bytes(device))


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
        fit_others: FitOthers,
        *,
        poisons: bool = False,
    ) -> None:
        self._fit_others = fit_others
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
        reserved = torch.cuda.memory_reserved(self._config.device) - self._others_bytes
        return reserved + (bytes_outside_torch(self._config.device) or 0)

    def prepare(self, parts: Sequence[GroupPart]) -> Callable[[Batches], None]:
        """Find the program for a step, or fit another one into the budget."""
        variant = tuple(part.variant() for part in parts)
        self._learn(variant, parts, parts[0].applies)
        return partial(self.step, variant)

    def _learn(self, variant: Hashable, parts: Sequence[GroupPart], applies: bool | None) -> None:
        """Fit another program into the budget; the least recently used one of too many goes."""
        if variant in self._engines:
            return
        steps = self._fit_others(
            [(part.group, part.trace.graph, part.feed.stacked) for part in parts], applies
        )
        with deferred_interrupts():
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
        for group in self.groups:
            group.push_numbers()
        fed = self._fed(steps, batches)
        with self._told_if_torn(engine):
            results = engine.step(fed, self._watching)
        for group, step, found in zip(self.groups, steps.steps, results, strict=True):
            assert isinstance(step, StepProgram)
            group.count(step)
            group.note(step, found)

    def forward(self, parts: Sequence[GroupPart], batches: Batches) -> list[dict[str, Tensor]]:
        """Compute the metrics of each group on its batch, within the plan's budget."""
        variant = ("evaluate", *((part.trace.key, part.spec, part.feed.stacked) for part in parts))
        self._learn(variant, parts, None)
        with deferred_interrupts():  # state may move, and must not stop half-way
            forwards, engine = self._turn_to(variant)
            for group in self.groups:
                group.push_free()
            results = engine.step(self._fed(forwards, batches))
        return [
            dict(zip(forward.metrics, found, strict=True))
            for forward, found in zip(forwards.steps, results, strict=True)
        ]

    def _fed(self, steps: PlannedPrograms, batches: Batches) -> list[dict[int, Tensor]]:
        together = zip(self.groups, steps.steps, batches, strict=True)
        return [group.fed(step, batch) for group, step, batch in together]

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
            homes = group.homes_by_id()
            tensors = [tensor for tensor in group.state.everything() if id(tensor) not in homes]
            copies = dict(zip(map(id, tensors), _host_copies(tensors, self._transfers), strict=True))
            copies |= homes
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
        copies: dict[int, Tensor] = {}
        moved: list[dict[int, Tensor]] = [{} for _ in self.groups]
        waiting: list[tuple[Tensor, Tensor]] = []
        inside: list[Tensor] = []
        programs: Sequence[StepProgram | ForwardProgram] = steps.steps
        for sub_array, (group, step) in enumerate(zip(self.groups, programs, strict=True)):
            fed = set(step.positions_fed_anew)
            copies |= group.homes_by_id()
            for position, argument in enumerate(group.held_arguments(step)):
                if argument is None or position in fed:
                    continue
                place = engine.argument(sub_array, position)
                is_shared = place.dim() > argument.dim()  # each branch has its own
                moved[sub_array][id(argument)] = place[0] if is_shared else place
                if place.data_ptr() != argument.data_ptr():
                    waiting.append((place, argument))
                    if argument.device == self._slab.device and id(argument) not in copies:
                        inside.append(argument)
        copies |= dict(zip(map(id, inside), _host_copies(inside, self._transfers), strict=True))
        for group, places in zip(self.groups, moved, strict=True):
            for tensor in group.state.everything():
                if id(tensor) not in places:
                    places[id(tensor)] = self._outside(tensor)
        engine.load_constants()
        values = [(place, copies.get(id(argument), argument)) for place, argument in waiting]
        self._transfers.copy([pair for both in values for pair in _dense_pairs(*both)])
        for group, places in zip(self.groups, moved, strict=True):
            group.rebase(lambda tensor, places=places: places[id(tensor)])  # type: ignore[misc]

    def _outside(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host if it lies in the slab."""
        in_slab = tensor.untyped_storage().data_ptr() == self._slab.untyped_storage().data_ptr()
        return tensor.to("cpu", copy=True) if in_slab else tensor


def _host_copies(tensors: Sequence[Tensor], transfers: Transfers) -> list[Tensor]:
    """Copy tensors to the host."""
    copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
    transfers.copy([pair for both in zip(copies, tensors, strict=True) for pair in _dense_pairs(*both)])
    return copies


def _dense_pairs(place: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split the copy of a value into its place into copies of dense rows of bytes, as far as there are any.

    Rows of a stacked tensor lie some bytes apart where their length is odd, and far apart where members train
    on parallel branches. Torch would put such rows together first, in memory that no budget has.
    """
    if place.dim() > value.dim():  # one value for all branches
        return [pair for row in place for pair in _dense_pairs(row, value)]
    if _is_dense(place) and _is_dense(value):
        if place.stride() != value.stride():
            return [(place, value)]
        return [(place.as_strided((place.numel(),), (1,)), value.as_strided((value.numel(),), (1,)))]
    if place.dim() and _is_dense(place[0]) and _is_dense(value[0]):
        return [pair for rows in zip(place, value, strict=True) for pair in _dense_pairs(*rows)]
    return [(place, value)]


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not tensor.numel() or span == tensor.numel()
