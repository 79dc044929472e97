"""A group: members that share one fused graph, in slots over stacked storage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmux.engine import TAIL_INPUTS, ForwardProgram, StepProgram, UpdateSettings
from trainmux.fleet._background import Upgrade
from trainmux.fleet._build import ProgramBuilder
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._member import Member
from trainmux.fleet._numbers import GroupNumbers
from trainmux.fleet._slots import Slot, StackedState, check_shapes, named_tensors
from trainmux.fleet._snapshot import OptimizerSnapshot
from trainmux.fleet._traces import Trace
from trainmux.ir import FusionRecord, InputKind, MemoryUse, OutputKind
from trainmux.optim import OptimizerStructure, state_names, write_state
from trainmux.runtime import Transfers, stacked_zeros
from trainmux.tracing import BatchSpec, TracedGraph, unique_parameters

_MAX_PROGRAMS = 8

Program = StepProgram | ForwardProgram


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
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        # By the program's id, with the program itself: its id must not be given to another one.
        self._held_arguments: dict[int, tuple[Program, list[Tensor | None]]] = {}
        self._members: list[tuple[int, Slot]] | None = None
        self._upgrades: dict[Hashable, Upgrade[StepProgram]] = {}
        self._records: tuple[FusionRecord, ...] = ()
        self._num_nodes = 0
        self._notes: tuple[str, ...] = ()
        self.stacked_batch = False
        self._gradients = tuple(o.name for o in traced.outputs if o.kind is OutputKind.GRADIENT)
        self._changing = frozenset(o.name for o in traced.outputs if o.kind is OutputKind.BUFFER)
        self.traces: dict[BatchSpec, Trace] = {}
        self._tangent = torch.full((), 1.0 / config.accumulate, dtype=torch.float64, device=config.device)
        self.state = StackedState()
        self._transfers = Transfers(config.device)
        self._make_numbers()
        neutral = [[value] for value in self._settings().neutral_scalars()]
        self._neutral = torch.tensor(neutral, dtype=torch.float64, device=config.device).reshape(-1, 1)

    def _make_numbers(self) -> None:
        """What the host feeds, at the width there is now, and the counters of an evaluation, which stay 0."""
        device = self.config.device
        self._numbers = GroupNumbers(self.key.structure, self.width, device)
        self._no_draws = torch.zeros(self.width, dtype=torch.int64, device=device)

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
        self._make_numbers()
        self.forget_fed()

    def _forget_programs(self) -> None:
        for program in self._programs.values():
            self._forget(program)
        self._programs.clear()
        self._upgrades.clear()

    def _forget(self, program: Program) -> None:
        self._engine.forget([program])
        self._held_arguments.pop(id(program), None)

    # ---- members -----------------------------------------------------------------------------------

    @property
    def members(self) -> list[tuple[int, Slot]]:
        """Occupied rows."""
        if self._members is None:
            self._members = [(row, slot) for row, slot in enumerate(self.slots) if slot is not None]
        return self._members

    def free_row(self) -> int | None:
        """A row without a member, if there is one."""
        return next((row for row, slot in enumerate(self.slots) if slot is None), None)

    def load(
        self, row: int, member: Member, name: str, optimizer: OptimizerSnapshot, signature: Hashable
    ) -> None:
        """Copy a member's weights, buffers and optimizer state into a row."""
        member.name = name
        tensors = named_tensors(member)
        kinds = (self.state.parameters, self.state.buffers)
        pairs = [(rows[row], tensors[key]) for kind in kinds for key, rows in kind.items()]
        with torch.no_grad():
            for place, value in optimizer.states.items():
                target = self.state.states[place][row]
                if isinstance(value, Tensor):
                    pairs.append((target, value))
                else:
                    target.fill_(value)
            self._transfers.copy(pairs)
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
        kinds = (self.state.parameters, self.state.buffers)
        pairs = [(tensors[name], rows[row]) for kind in kinds for name, rows in kind.items()]
        # Constants too: a restored checkpoint may have brought others.
        pairs += [(tensors[name], value) for name, value in self.state.shared.items()]
        for index, group in enumerate(slot.structure.groups):
            for position in group.params:
                name = parameters[position].name
                if name not in self._gradients:
                    continue
                values = {state: self.state.states[name, state][row] for state in state_names(group)}
                pairs += write_state(
                    slot.member.optimizer,
                    index,
                    parameters[position].tensor,
                    values,
                    slot.base_steps[index] + done,
                )
        self._transfers.copy(pairs)

    def stop(self, row: int, reason: str) -> None:
        """No more changes to a row; the member stays in it."""
        slot = self.slots[row]
        assert slot is not None
        slot.active = False
        slot.reason = reason
        self.forget_fed()

    # ---- programs ----------------------------------------------------------------------------------

    def _state_keys(self) -> tuple[tuple[str, str], ...]:
        return self._settings().state_keys()

    def _settings(
        self,
        idle: tuple[frozenset[str], ...] = (),
        clips: tuple[bool, bool] = (False, False),
        *,
        applies: bool = True,
    ) -> UpdateSettings:
        names = [item.name for item in self.traced.inputs if item.kind is InputKind.PARAMETER]
        owner = {
            names[position]: index
            for index, group in enumerate(self.key.structure.groups)
            for position in group.params
        }
        clips_norm, clips_value = clips
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

    def _cached(self, key: Hashable, build: Callable[[], Program]) -> Program:
        known = self._programs.get(key)
        if known is not None:
            self._programs.move_to_end(key)
            return known
        program = build()
        self._programs[key] = program
        while len(self._programs) > _MAX_PROGRAMS:
            self._forget(self._programs.popitem(last=False)[1])
        return program

    def _upgrade(self, key: Hashable) -> None:
        """Put the compiled step in the place of the one that training began with, once it is there.

        It is begun at a step's second use: what runs once, such as a short last batch, is never compiled.
        """
        upgrade = self._upgrades.get(key)
        if upgrade is None:
            return
        upgrade.start()
        if not upgrade.is_ready:
            return
        del self._upgrades[key]
        better = upgrade.result()
        if better is not None and key in self._programs:
            self._forget(self._programs[key])
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
        """The program for a batch like the one ``traced`` was made with, built if it is new.

        Reads the members' settings as they are now, for the program and for the step that comes next;
        refuses those that are no numbers any more.
        """
        self._numbers.read(self.members)
        self.stacked_batch = stacked_batch
        idle, clips = self._numbers.idle, self._numbers.clips

        def build() -> StepProgram:
            settings = self._settings(idle, clips, applies=applies)
            built = self._builder().step(traced, self.width, settings, stacked_batch=stacked_batch)
            self._records, self._num_nodes = built.records, built.num_nodes
            if built.upgrade is not None:
                self._upgrades[full_key] = built.upgrade
            return built.program

        full_key = ("step", key, idle, applies, clips, stacked_batch)
        self._upgrade(full_key)
        program = self._cached(full_key, build)
        assert isinstance(program, StepProgram)
        self._notes = program.notes
        return program

    def sub_array_program(self, width: int, *, compiles: bool) -> StepProgram:
        """The step of ``width`` members as one array, lowered; its kernels compiled where ``compiles``."""
        self._numbers.read(self.members)
        settings = self._settings(self._numbers.idle, self._numbers.clips)
        builder = self._builder()
        step = builder.lowered_step(self.traced, width, settings, stacked_batch=self.stacked_batch)
        if compiles:
            builder.compile(step)
        return step.program(settings)

    @property
    def records(self) -> tuple[FusionRecord, ...]:
        """How the operators of the last built step were fused."""
        return self._records

    @property
    def notes(self) -> tuple[str, ...]:
        """How the last prepared step runs."""
        return self._notes

    @property
    def memory(self) -> MemoryUse | None:
        """What the device holds for it, once a step was captured."""
        return self._engine.memory

    @property
    def num_nodes(self) -> int:
        """Nodes of the last built step."""
        return self._num_nodes

    # ---- running -----------------------------------------------------------------------------------

    def step(self, program: StepProgram, batch: Sequence[Tensor]) -> None:
        """One micro-batch for all active members, with what ``prepare`` read; ``last`` holds its results."""
        self._numbers.push(self.members)
        loss, norm, finite, *metrics = self._engine.run(program, self._arguments(program, batch))
        applies = program.settings.applies
        for _, slot in self.members:
            if slot.active:
                slot.counter += 1
                slot.num_updates += applies
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
        arguments = self._arguments(program, batch)
        return dict(zip(program.metrics, self._engine.run(program, arguments), strict=True))

    def arguments_of(self, program: StepProgram, batch: Sequence[Tensor]) -> list[Tensor]:
        """The arguments of a program that is not kept, at the group's whole width."""
        leaves = iter(batch)
        return [next(leaves) if a is None else a for a in self._find_arguments(program)]

    def _arguments(self, program: Program, batch: Sequence[Tensor]) -> list[Tensor]:
        """All tensors that a program takes, in order: the batch, and those that are always the same."""
        held = self._held_arguments.get(id(program))
        if held is None:
            held = self._held_arguments[id(program)] = (program, self._find_arguments(program))
        leaves = iter(batch)
        return [next(leaves) if argument is None else argument for argument in held[1]]

    def _find_arguments(self, program: Program) -> list[Tensor | None]:
        """The arguments of a program; ``None`` for each leaf of the batch."""
        state, numbers = self.state, self._numbers.tensors
        is_step = isinstance(program, StepProgram)
        own = {
            InputKind.BATCH: None,
            InputKind.SEED: state.seeds,
            InputKind.COUNTER: numbers["counters"] if is_step else self._no_draws,
            InputKind.TANGENT: self._tangent,
        }
        found = [own[item.kind] if item.kind in own else self._held(item.name) for item in program.inputs]
        if isinstance(program, StepProgram):
            found += [state.states[key] for key in program.settings.state_keys()]
            if program.settings.accumulates:
                found += [state.totals[name] for name in program.settings.parameters]
            given = {**numbers, "neutral": self._neutral, "alive": state.alive, "updates": state.updates}
            found += [given[name] for name in TAIL_INPUTS]
        return found

    def _held(self, name: str) -> Tensor:
        for kind in (self.state.parameters, self.state.buffers, self.state.shared):
            if name in kind:
                return kind[name]
        raise KeyError(name)

    def forget_fed(self) -> None:
        """Members came, left or stopped: what the host feeds has to be written anew."""
        self._members = None
        self._numbers.forget()


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach(), b.detach()))
