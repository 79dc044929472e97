"""A fleet under a plan: one group for each sub-array, their tensors in the plan's slab."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
from trainmux.fleet._plan import Plan
from trainmux.fleet._slots import Slot, StackedState
from trainmux.fleet._state_moves import copy_into_places, host_copies
from trainmux.fleet._whole_step import half_step
from trainmux.ir import MemoryUse, Program, Timeline
from trainmux.profiling import KernelGraph
from trainmux.runtime import workspaces_bytes
from trainmux.simulate import measured_timeline

_MAX_VARIANTS = 4
_MAX_GRAPHS = 24
"""A room keeps graphs that are no longer wanted; with more than this all go, and are captured anew."""


@dataclass(frozen=True)
class PlannedSteps:
    """The steps of all sub-arrays, their kernels, and the program that runs them.

    Where members train side by side, steps and kernels are those of one branch, and ``branches`` are how many
    each sub-array has a member on.
    """

    steps: tuple[StepProgram, ...]
    graphs: tuple[KernelGraph, ...]
    program: Program
    branches: tuple[int, ...]


@dataclass(frozen=True)
class PlannedForwards:
    """Forward passes alone of all sub-arrays, their kernels, and the program that runs them."""

    steps: tuple[ForwardProgram, ...]
    graphs: tuple[KernelGraph, ...]
    program: Program
    branches: tuple[int, ...]


Planned = PlannedSteps | PlannedForwards


def join_groups(groups: Sequence[Group]) -> list[Group]:
    """One group of all that share a graph, as far as they can be fused; their state in the host's memory."""
    found: dict[Hashable, list[Group]] = {}
    for number, group in enumerate(groups):
        key: Hashable = (group.key, number) if group.unfused_because else group.key
        found.setdefault(key, []).append(group)
    return [_joined(same) for same in found.values()]


def _joined(groups: Sequence[Group]) -> Group:
    """One group of all members of ``groups``, with copies of their state in the host's memory."""
    first = groups[0].state.shared
    if not all(_same_constants(group.state.shared, first) for group in groups[1:]):
        for group in groups:
            group.unshare()
    parts = [group.taken([row for row, _ in group.members]) for group in groups if group.members]
    if len(parts) < 2:
        return parts[0] if parts else groups[0].taken([])
    whole = Group(parts[0].key, parts[0].traced, parts[0].config, sum(part.width for part in parts))
    whole.slots = [slot for part in parts for slot in part.slots]
    whole.state = StackedState.joined([part.state for part in parts])
    whole.traces, whole.stacked_batch = parts[0].traces, parts[0].stacked_batch
    whole.annotate(*parts[0].notes)
    return whole


def _same_constants(shared: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return shared.keys() == other.keys() and all(
        torch.equal(value.cpu(), other[name].cpu()) for name, value in shared.items()
    )


def rejoined(groups: Sequence[Group]) -> list[Group]:
    """The same groups, or `join_groups` of them where some are still apart as a plan had them."""
    keys = [group.key for group in groups if not group.unfused_because]
    return list(groups) if len(set(keys)) == len(keys) else join_groups(groups)


def split_groups(groups: Sequence[Group], plan: Plan) -> list[Group]:
    """One group per sub-array of ``plan``, in its order, with their members' state in the host's memory."""
    places = {slot.name: (group, row) for group in groups for row, slot in group.members}
    found = []
    for sub_array in plan.partition:
        owner, _ = places[sub_array.members[0]]
        found.append(owner.taken([places[name][1] for name in sub_array.members]))
    return found


def put_back(groups: Sequence[Group], slots: Sequence[list[Slot | None]], split: Sequence[Group]) -> None:
    """Undo a split: the groups get the slots that they had, with their state in the host's memory."""
    for group, held in zip(groups, slots, strict=True):
        own = {id(slot) for slot in held if slot is not None}
        parts = [part for part in split if any(id(slot) in own for slot in part.slots)]
        if not parts:
            continue
        found = [id(slot) for part in parts for slot in part.slots]
        # An empty slot takes anybody's numbers: whoever comes into it brings new ones.
        rows = [0 if slot is None else found.index(id(slot)) for slot in held]
        group.state = StackedState.joined([part.state for part in parts]).resized(
            len(held), rows, torch.device("cpu")
        )
        group.slots = list(held)
        group.forget_fed()


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _others_bytes(device: torch.device) -> int:
    """What is reserved for others; workspaces of streams that are lent to one after another are not."""
    return _reserved_bytes(device) - (sum(workspaces_bytes(device)) if device.type == "cuda" else 0)


def _new_slab(slab_bytes: int, device: torch.device) -> Tensor:
    """In memory of whole elements of every type: some operators look at all that a tensor lies in."""
    largest = torch.complex128.itemsize
    try:
        memory = torch.zeros(-(-slab_bytes // largest) * largest, dtype=torch.uint8, device=device)
        return memory[:slab_bytes]
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    raise BudgetError(
        f"expected {slab_bytes} bytes on the device for the plan's tensors, got {free} free of {total}; "
        "leave the device to this process, or plan for a smaller budget"
    )


class PlannedGroups:
    """Groups that train by planned programs: the plan's own, and others beside it in the same memory.

    Their state lies where the program in use has it between steps: in the slab, or in the host's memory
    where it is swapped, or where the program does not know it. ``finish`` before anything else reads or
    changes it.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        variant: Hashable,
        own: PlannedSteps,
        config: FleetConfig,
        *,
        poisons: bool = False,
    ) -> None:
        self.plan = plan
        self.groups = tuple(groups)
        self._config = config
        self._transfers = Transfers(config.device)
        self._poisons = poisons
        self._others_bytes = _others_bytes(config.device)
        self._slab = _new_slab(max(1, own.program.slab_bytes), config.device)
        self._is_weighed = False
        # One for all variants: they run one after another, in the same memory beside the slab.
        captures = config.device.type == "cuda" and config.engine != "reference"
        self._room = CaptureRoom(config.device, deterministic=config.deterministic) if captures else None
        self._watching: WatchedLanes | None = None
        self._own = variant
        self._engines: OrderedDict[Hashable, tuple[Planned, PlannedEngine]] = OrderedDict()
        self._engines[variant] = (own, self._new_engine(own))
        self._in_use = variant
        self._adopt()

    @property
    def memory(self) -> MemoryUse | None:
        """What the device holds, once a step was captured."""
        return self._engines[self._in_use][1].memory

    @property
    def slab_bytes(self) -> int:
        return self._slab.numel()

    def excess_bytes(self) -> int:
        """What the device holds for these groups beyond their budget, when something new has just run."""
        if self._is_weighed:
            return 0
        self._is_weighed = True
        return max(0, self._held_bytes() - self.plan.budget_bytes)

    def _held_bytes(self) -> int:
        if self._config.device.type != "cuda":
            return self.slab_bytes
        return _reserved_bytes(self._config.device) - self._others_bytes

    def knows(self, variant: Hashable) -> bool:
        """Whether there is a program for a variant of the step, or for an evaluation."""
        return variant in self._engines

    def learn(self, variant: Hashable, steps: Planned) -> None:
        """Take in a program beside the plan's own; the least recently used one of too many goes."""
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

    def watch_next(self) -> None:
        """Have the next step of the plan's own program watched; ``watched`` tells what was seen."""
        self._watching = self._engines[self._own][1].watched_lanes()

    def watch_no_more(self) -> None:
        """The next step is an ordinary one."""
        self._watching = None

    def watched(self) -> Timeline:
        """When each instruction of the last watched step ran."""
        if self._watching is None:
            raise PlanError(
                "expected a step on a batch like the one that was planned for, got another, which the plan "
                "says nothing about; watch one like the example batch"
            )
        spans, seconds = self._watching.read()
        self._watching = None
        profiles = [self.plan.profiles[sub_array.profile] for sub_array in self.plan.partition]
        return measured_timeline(self.plan.program.body, profiles, spans, seconds)

    def step(self, variant: Hashable, batches: Mapping[int, Sequence[Tensor]]) -> None:
        """One step of every group on its batch, by ``id(group)``, with the numbers that were read last."""
        if variant != self._own:
            self._watching = None
        steps, engine = self._turn_to(variant)
        assert isinstance(steps, PlannedSteps)
        pairs = list(zip(self.groups, steps.steps, strict=True))
        fed = [group.fed(step, batches[id(group)]) for group, step in pairs]
        with self._told_if_torn(engine):
            results = engine.step(fed, self._watching)
        for (group, step), found in zip(pairs, results, strict=True):
            group.count(step)
            group.note(step, found)

    def evaluate(self, variant: Hashable, batches: Mapping[int, Sequence[Tensor]]) -> list[dict[str, Tensor]]:
        """Every group's metrics on its batch, by ``id(group)``; nothing that lasts changes."""
        forwards, engine = self._turn_to(variant)
        assert isinstance(forwards, PlannedForwards)
        pairs = list(zip(self.groups, forwards.steps, strict=True))
        results = engine.step([group.fed_forward(forward, batches[id(group)]) for group, forward in pairs])
        return [
            dict(zip(forward.metrics, found, strict=True))
            for forward, found in zip(forwards.steps, results, strict=True)
        ]

    def _turn_to(self, variant: Hashable) -> tuple[Planned, PlannedEngine]:
        """The program of a variant, with the groups' state where it has it."""
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
            assert isinstance(steps, PlannedSteps)
            self.groups[0].note(steps.steps[0], engine.results(0))

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
        """Finish, and take the groups' state to the host's memory; all else goes."""
        self.finish()
        self._to_host()
        self._let_go()

    def _grow(self, slab_bytes: int) -> None:
        """A larger slab for all: their state waits on the host meanwhile."""
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
        """Copies of all state in the host's memory, for the groups to use."""
        for group in self.groups:
            tensors = [*group.state.stacked(), *group.state.shared.values()]
            copies = dict(zip(map(id, tensors), host_copies(tensors, self._transfers), strict=True))
            group.rebase(lambda tensor, copies=copies: copies[id(tensor)])  # type: ignore[misc]

    def _let_go(self) -> None:
        """Drop the engines, their graphs and the slab, and return their memory to the device."""
        self._engines.clear()
        if self._room is not None:
            self._room.drop_kept()
        self._slab = torch.zeros(0, dtype=torch.uint8)
        release_cached(self._config.device)

    # ---- memory ------------------------------------------------------------------------------------

    def _new_engine(self, steps: Planned) -> PlannedEngine:
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
        """Take state and constants to where the engine in use has them; the groups use them there.

        Places of two programs may overlap in another order: what moves goes through the host's memory. So
        does what the engine has no place for, and it stays there.
        """
        steps, engine = self._engines[self._in_use]
        moved: list[dict[int, Tensor]] = [{} for _ in self.groups]
        waiting: list[tuple[Tensor, Tensor]] = []
        inside: list[Tensor] = []
        programs: Sequence[StepProgram | ForwardProgram] = steps.steps
        for sub_array, (group, step) in enumerate(zip(self.groups, programs, strict=True)):
            fed = set(step.positions_fed_anew())
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
        """The same tensor, as a copy on the host where its bytes are the slab's."""
        in_slab = tensor.untyped_storage().data_ptr() == self._slab.untyped_storage().data_ptr()
        return tensor.to("cpu", copy=True) if in_slab else tensor
