"""A group: members that share one fused graph, in slots over stacked storage."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmux.engine import ForwardProgram, StepProgram, UpdateSettings
from trainmux.errors import OptimizerError
from trainmux.fleet._background import Upgrade
from trainmux.fleet._build import ProgramBuilder
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._member import Member
from trainmux.fleet._slots import Slot, StackedState, check_shapes, named_tensors
from trainmux.fleet._snapshot import OptimizerSnapshot
from trainmux.fleet._traces import Trace
from trainmux.ir import FusionRecord, InputKind, OutputKind
from trainmux.optim import (
    OptimizerStructure,
    check_hyperparameters,
    idle_settings,
    scalar_values,
    state_names,
    write_state,
)
from trainmux.runtime import stacked_zeros
from trainmux.tracing import BatchSpec, TracedGraph, unique_parameters

_MAX_PROGRAMS = 8
_INFINITE = float("inf")


@dataclass(frozen=True)
class GroupKey:
    """What members must have in common to be fused."""

    graph: str
    structure: OptimizerStructure
    own_batch: bool


class Group:
    """Slots, their storage and the programs over it. All tensors live on the fleet's device."""

    def __init__(self, key: GroupKey, traced: TracedGraph, config: FleetConfig, width: int) -> None:
        self.key = key
        self.traced = traced
        self.config = config
        self.width = width
        self.slots: list[Slot | None] = [None] * width
        self.unfused_because = ""
        self.last: dict[str, Tensor] = {}
        self._engine = config.make_engine()
        self._programs: OrderedDict[Hashable, StepProgram | ForwardProgram] = OrderedDict()
        self._upgrades: dict[Hashable, Upgrade[StepProgram]] = {}
        self._records: tuple[FusionRecord, ...] = ()
        self._num_nodes = 0
        self._gradients = tuple(o.name for o in traced.outputs if o.kind is OutputKind.GRADIENT)
        self._changing = frozenset(o.name for o in traced.outputs if o.kind is OutputKind.BUFFER)
        self._active: Tensor | None = None
        self._limits: Tensor | None = None
        self.traces: dict[BatchSpec, Trace] = {}
        self._tangent = torch.full((), 1.0 / config.accumulate, dtype=torch.float64, device=config.device)
        self.state = StackedState()
        neutral = [[value] for value in self._settings((), applies=True).neutral_scalars()]
        self._neutral = torch.tensor(neutral, dtype=torch.float64, device=config.device).reshape(-1, 1)

    # ---- storage -----------------------------------------------------------------------------------

    def allocate(self, members: Sequence[Member]) -> None:
        """Make storage for ``width`` members shaped like ``members``, whose common constants are shared."""
        first = members[0]
        tensors = [named_tensors(member) for member in members]
        parameters = [item.name for item in unique_parameters(first.model)]
        learning = set(self._gradients)
        for name, example in tensors[0].items():
            dtype = self.config.held_dtype(example.dtype)
            constant = name not in learning and name not in self._changing
            if constant and all(_same(example, other[name]) for other in tensors[1:]):
                self.state.shared[name] = example.detach().to(self.config.device, dtype, copy=True)
                continue
            rows = stacked_zeros(self.width, example.shape, dtype, self.config.device)
            (self.state.parameters if name in parameters else self.state.buffers)[name] = rows
        for key in self._state_keys():
            like = self.state.parameters[key[0]]
            self.state.states[key] = self._zeros_like(like)
        if self.config.accumulate > 1:
            for name in self._gradients:
                self.state.totals[name] = self._zeros_like(self.state.parameters[name])
        device = self.config.device
        self.state.alive = torch.ones(self.width, dtype=torch.bool, device=device)
        self.state.updates = torch.zeros(self.width, dtype=torch.int64, device=device)
        self.state.seeds = torch.zeros(self.width, dtype=torch.int64, device=device)

    def _zeros_like(self, rows: Tensor) -> Tensor:
        return stacked_zeros(rows.shape[0], rows.shape[1:], rows.dtype, rows.device)

    def kind_of(self, name: str) -> str:
        """Whether a name is a parameter's or a buffer's."""
        inputs = {item.name: item.kind for item in self.traced.inputs}
        return inputs[name].value

    def accepts_constants(self, member: Member) -> bool:
        """Whether the tensors that this group shares have the same values in ``member``."""
        found = named_tensors(member)
        return all(
            _same(value, found[name].to(value.device, value.dtype))
            for name, value in self.state.shared.items()
        )

    def unshare(self) -> None:
        """Give every member its own copy of what was shared, because a newcomer differs."""
        parameters = {item.name for item in self.traced.inputs if item.kind is InputKind.PARAMETER}
        for name, value in self.state.shared.items():
            rows = stacked_zeros(self.width, value.shape, value.dtype, self.config.device)
            rows.copy_(value.unsqueeze(0).expand_as(rows))
            (self.state.parameters if name in parameters else self.state.buffers)[name] = rows
        self.state.shared.clear()
        self._forget_programs()

    def resize(self, width: int) -> None:
        """Change the number of slots, keeping the members (moved together) and their state."""
        kept = [row for row, slot in enumerate(self.slots) if slot is not None]
        self.state = self.state.resized(width, kept, self.config.device)
        self.slots = [self.slots[row] for row in kept] + [None] * (width - len(kept))
        self.width = width
        self.last = {}
        self._forget_programs()
        self.forget_fed()

    def _forget_programs(self) -> None:
        self._engine.forget(list(self._programs.values()))
        self._programs.clear()
        self._upgrades.clear()

    # ---- members -----------------------------------------------------------------------------------

    @property
    def members(self) -> list[tuple[int, Slot]]:
        """Occupied rows."""
        return [(row, slot) for row, slot in enumerate(self.slots) if slot is not None]

    def free_row(self) -> int | None:
        """A row without a member, if there is one."""
        return next((row for row, slot in enumerate(self.slots) if slot is None), None)

    def load(
        self, row: int, member: Member, name: str, optimizer: OptimizerSnapshot, signature: Hashable
    ) -> None:
        """Copy a member's weights, buffers and optimizer state into a row."""
        member.name = name
        tensors = named_tensors(member)
        with torch.no_grad():
            for kind in (self.state.parameters, self.state.buffers):
                for key, rows in kind.items():
                    rows[row].copy_(tensors[key])
            for place, value in optimizer.states.items():
                target = self.state.states[place][row]
                if isinstance(value, Tensor):
                    target.copy_(value)
                else:
                    target.fill_(value)
            for total in self.state.totals.values():
                total[row].zero_()
            self.state.alive[row].fill_(True)
            self.state.updates[row].fill_(0)
            self.state.seeds[row].fill_(member.random_key)
        self.slots[row] = Slot(
            member, name, optimizer.structure, signature, optimizer.steps, counter=member.num_draws
        )
        self.last = {}
        self.forget_fed()

    def clear(self, row: int) -> None:
        """Free a row. Its stale numbers stay, and no other row reads them."""
        self.slots[row] = None
        self.forget_fed()

    def check_export(self, row: int) -> None:
        """Refuse, before anything is written, an export into a model that changed its shape."""
        slot = self.slots[row]
        assert slot is not None
        expected = {
            name: rows.shape[1:]
            for kind in (self.state.parameters, self.state.buffers)
            for name, rows in kind.items()
        }
        check_shapes(slot.name, slot.member, expected)

    def export(self, row: int) -> None:
        """Write a row back into the member's own model and optimizer."""
        slot = self.slots[row]
        assert slot is not None
        tensors = named_tensors(slot.member)
        parameters = unique_parameters(slot.member.model)
        done = int(self.state.updates[row])
        slot.member.num_draws = slot.counter
        with torch.no_grad():
            for kind in (self.state.parameters, self.state.buffers):
                for name, rows in kind.items():
                    tensors[name].copy_(rows[row])
            # Constants too: a restored checkpoint may have brought others.
            for name, value in self.state.shared.items():
                tensors[name].copy_(value)
        for index, group in enumerate(slot.structure.groups):
            for position in group.params:
                name = parameters[position].name
                if name not in self._gradients:
                    continue
                values = {state: self.state.states[name, state][row] for state in state_names(group)}
                write_state(
                    slot.member.optimizer,
                    index,
                    parameters[position].tensor,
                    values,
                    slot.base_steps[index] + done,
                )

    def stop(self, row: int, reason: str) -> None:
        """No more changes to a row; the member stays in it."""
        slot = self.slots[row]
        assert slot is not None
        slot.active = False
        slot.reason = reason
        self.forget_fed()

    # ---- programs ----------------------------------------------------------------------------------

    def _state_keys(self) -> tuple[tuple[str, str], ...]:
        return self._settings((), applies=True).state_keys()

    def _clips(self) -> tuple[bool, bool]:
        """Whether any member clips by norm, by value."""
        members = [slot.member for _, slot in self.members]
        return (
            any(member.clip_norm is not None for member in members),
            any(member.clip_value is not None for member in members),
        )

    def _settings(self, idle: tuple[frozenset[str], ...], *, applies: bool) -> UpdateSettings:
        names = [item.name for item in self.traced.inputs if item.kind is InputKind.PARAMETER]
        owner = {
            names[position]: index
            for index, group in enumerate(self.key.structure.groups)
            for position in group.params
        }
        clips_norm, clips_value = self._clips()
        return UpdateSettings(
            structure=self.key.structure,
            idle=idle,
            parameters=self._gradients,
            group_of=tuple(owner.get(name) for name in self._gradients),
            clips_norm=clips_norm,
            clips_value=clips_value,
            accumulates=self.config.accumulate > 1,
            applies=applies,
        )

    def _cached(
        self, key: Hashable, build: Callable[[], StepProgram | ForwardProgram]
    ) -> StepProgram | ForwardProgram:
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        program = build()
        self._programs[key] = program
        while len(self._programs) > _MAX_PROGRAMS:
            _, oldest = self._programs.popitem(last=False)
            self._engine.forget([oldest])
        return program

    def _upgrade(self, key: Hashable) -> None:
        """Put the compiled step in the place of the one that training began with, once it is there."""
        upgrade = self._upgrades.get(key)
        if upgrade is None or not upgrade.is_ready:
            return
        del self._upgrades[key]
        better = upgrade.result()
        if better is not None and key in self._programs:
            self._engine.forget([self._programs[key]])
            self._programs[key] = better

    def wait_until_compiled(self) -> None:
        """Until every step that is being compiled will run compiled."""
        for upgrade in self._upgrades.values():
            upgrade.wait()

    def _builder(self) -> ProgramBuilder:
        return ProgramBuilder(self.config, self.state.shared)

    def prepare(
        self, traced: TracedGraph, key: Hashable, *, stacked_batch: bool, applies: bool = True
    ) -> StepProgram:
        """The program for a batch like the one ``traced`` was made with, built if it is new."""
        return self._step_program(traced, key, self._idle(), applies=applies, stacked_batch=stacked_batch)

    def _step_program(
        self,
        traced: TracedGraph,
        key: Hashable,
        idle: tuple[frozenset[str], ...],
        *,
        applies: bool,
        stacked_batch: bool,
    ) -> StepProgram:
        def build() -> StepProgram:
            settings = self._settings(idle, applies=applies)
            built = self._builder().step(traced, self.width, settings, stacked_batch=stacked_batch)
            self._records, self._num_nodes = built.records, built.num_nodes
            if built.upgrade is not None:
                self._upgrades[full_key] = built.upgrade
            return built.program

        full_key = ("step", key, idle, applies, self._clips(), stacked_batch)
        self._upgrade(full_key)
        program = self._cached(full_key, build)
        assert isinstance(program, StepProgram)
        return program

    @property
    def records(self) -> tuple[FusionRecord, ...]:
        """How the operators of the last built step were fused."""
        return self._records

    @property
    def num_nodes(self) -> int:
        """Nodes of the last built step."""
        return self._num_nodes

    # ---- running -----------------------------------------------------------------------------------

    def step(self, program: StepProgram, batch: Sequence[Tensor], scalars: Tensor) -> None:
        """One micro-batch for all active members; ``last`` holds its results afterwards."""
        counters = self._feed([0 if slot is None else slot.counter for slot in self.slots], torch.int64)
        resolved = self._arguments(program, batch, counters)
        resolved += [self.state.states[state] for state in program.settings.state_keys()]
        if program.settings.accumulates:
            resolved += [self.state.totals[name] for name in program.settings.parameters]
        resolved += [scalars, self._neutral, *self._limits_and_active(), self.state.alive, self.state.updates]
        loss, norm, finite, *metrics = self._engine.run(program, resolved)
        for slot in self.slots:
            if slot is not None and slot.active:
                slot.counter += 1
                slot.num_updates += program.settings.applies
        self.last = {"loss": loss, "grad_norm": norm, "finite": finite}
        self.last.update(zip(program.metrics, metrics, strict=True))

    def evaluate(
        self, traced: TracedGraph, key: Hashable, batch: Sequence[Tensor], *, stacked_batch: bool
    ) -> dict[str, Tensor]:
        """Metrics of all members on one batch, ``[width]`` each."""
        program = self._cached(
            ("evaluate", key, stacked_batch),
            lambda: self._builder().forward(traced, self.width, stacked_batch=stacked_batch),
        )
        arguments = self._arguments(program, batch, torch.zeros_like(self.state.seeds))
        return dict(zip(program.metrics, self._engine.run(program, arguments), strict=True))

    def _arguments(
        self, program: StepProgram | ForwardProgram, batch: Sequence[Tensor], counters: Tensor
    ) -> list[Tensor]:
        """The tensors for a program's fused inputs, in order."""
        leaves = iter(batch)
        fed = {
            InputKind.SEED: self.state.seeds,
            InputKind.COUNTER: counters,
            InputKind.TANGENT: self._tangent,
        }
        return [
            next(leaves)
            if item.kind is InputKind.BATCH
            else fed[item.kind]
            if item.kind in fed
            else self._held(item.name)
            for item in program.inputs
        ]

    def _held(self, name: str) -> Tensor:
        for kind in (self.state.parameters, self.state.buffers, self.state.shared):
            if name in kind:
                return kind[name]
        raise KeyError(name)

    # ---- what the host feeds -----------------------------------------------------------------------

    def _idle(self) -> tuple[frozenset[str], ...]:
        result = []
        for index in range(len(self.key.structure.groups)):
            idle: frozenset[str] | None = None
            for _, slot in self.members:
                found = idle_settings(slot.member.optimizer.param_groups[index])
                idle = found if idle is None else idle & found
            result.append(idle or frozenset())
        return tuple(result)

    def scalars(self) -> Tensor:
        """``[num_scalars, width]`` for this step; refuses settings that are no numbers any more."""
        columns: list[list[float]] = []
        num_scalars = self._neutral.shape[0]
        for slot in self.slots:
            if slot is None or not slot.active:
                columns.append([0.0] * num_scalars)  # never read: the mask puts neutral ones in their place
                continue
            column: list[float] = []
            for index, group in enumerate(slot.structure.groups):
                torch_group = slot.member.optimizer.param_groups[index]
                try:
                    values = scalar_values(group, torch_group, slot.base_steps[index] + slot.num_updates)
                except OptimizerError as error:
                    error.add_note(f"in the settings of member {slot.name!r}")
                    raise
                column.extend(values)
            if not all(map(math.isfinite, column)):
                check_hyperparameters(slot.member.optimizer, member=slot.name)
            columns.append(column)
        rows = list(zip(*columns, strict=True)) if num_scalars else []
        return self._feed(rows, torch.float64).reshape(num_scalars, self.width)

    def _limits_and_active(self) -> tuple[Tensor, Tensor]:
        if self._limits is None or self._active is None:
            limits = [
                [
                    _INFINITE if slot is None or value(slot.member) is None else value(slot.member)
                    for slot in self.slots
                ]
                for value in (lambda m: m.clip_norm, lambda m: m.clip_value)
            ]
            self._limits = self._feed(limits, torch.float64)
            self._active = self._feed([slot is not None and slot.active for slot in self.slots], torch.bool)
        return self._limits, self._active

    def forget_fed(self) -> None:
        """Membership or limits changed: feed them anew with the next step."""
        self._limits = self._active = None

    def _feed(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Host numbers on the device. On CUDA from pinned memory, so that the host does not wait."""
        if self.config.device.type == "cuda":
            pinned = torch.tensor(values, dtype=dtype).pin_memory()
            return pinned.to(self.config.device, non_blocking=True)
        return torch.tensor(values, dtype=dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach(), b.detach()))
