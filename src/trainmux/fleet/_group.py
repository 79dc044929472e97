"""A group: members that share one fused graph, in slots over stacked storage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainmux.engine import ForwardProgram, StepProgram, Transfers, UpdateSettings
from trainmux.fleet._build import ProgramBuilder
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._member import Member
from trainmux.fleet._numbers import GroupNumbers
from trainmux.fleet._programs import Program, ProgramCache, groups_of, held_arguments, with_batch
from trainmux.fleet._slots import (
    OptimizerSnapshot,
    Slot,
    StackedState,
    check_shapes,
    named_tensors,
    same_values,
)
from trainmux.fleet._traces import Trace
from trainmux.fleet._watch import MemberWatch
from trainmux.fusion.optimizers import OptimizerStructure, state_names, write_state
from trainmux.ir import FusionRecord, InputKind, OutputKind
from trainmux.runtime import stacked_zeros
from trainmux.tracing import BatchSpec, TracedGraph, unique_parameters


@dataclass(frozen=True)
class GroupKey:
    """Key of members that can be fused."""

    graph: str
    structure: OptimizerStructure
    own_batch: bool


class Group:
    """Slots, their storage, and the programs for it, which a runner runs."""

    def __init__(self, key: GroupKey, traced: TracedGraph, config: FleetConfig, width: int) -> None:
        self.key = key
        self.traced = traced
        self.config = config
        self.width = width
        self.slots: list[Slot | None] = [None] * width
        self.unfused_because = ""
        self.last: dict[str, Tensor] = {}
        self.programs = ProgramCache(config)
        self._members: list[tuple[int, Slot]] | None = None
        self.records: tuple[FusionRecord, ...] = ()
        """How the operators of the last built step were fused."""
        self.num_nodes = 0
        """Nodes of the last built step."""
        self.notes: tuple[str, ...] = ()
        """How the last prepared step runs, in words."""
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
        """Make what the host feeds, and the counters of an evaluation's draws, for the current width."""
        self._numbers = GroupNumbers(self.key.structure, self.width, self.config.device)
        self._evaluation = torch.zeros(self.width, dtype=torch.int64, device=self.config.device)

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
            if constant and all(same_values(example, other[name]) for other in tensors[1:]):
                self.state.shared[name] = example.detach().to(self.config.device, dtype, copy=True)
                continue
            rows = stacked_zeros(self.width, example.shape, dtype, self.config.device)
            (self.state.parameters if name in parameters else self.state.buffers)[name] = rows
        for key in self._settings().state_keys():
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
            same_values(value, found[name].to(value.device, value.dtype))
            for name, value in self.state.shared.items()
        )

    def unshare(self) -> None:
        """Give every member its own copy of what was shared, because a newcomer differs."""
        parameters = {item.name for item in self.traced.inputs if item.kind is InputKind.PARAMETER}
        for name, value in self.state.shared.items():
            rows = stacked_zeros(self.width, value.shape, value.dtype, value.device)
            rows.copy_(value.unsqueeze(0).expand_as(rows))
            (self.state.parameters if name in parameters else self.state.buffers)[name] = rows
        self.state.shared.clear()
        self.programs.clear()

    def resize(self, width: int) -> None:
        """Change the number of slots, keeping the members (moved together) and their state."""
        kept = [row for row, slot in enumerate(self.slots) if slot is not None]
        self.state = self.state.resized(width, kept, self.state.alive.device)
        self.slots = [self.slots[row] for row in kept] + [None] * (width - len(kept))
        self.width = width
        self.last = {}
        self.programs.clear()
        self._make_numbers()
        self.forget_fed()

    def taken(self, rows: Sequence[int]) -> Group:
        """Make a group of these rows' members alone, with copies of their state in host memory."""
        other = Group(self.key, self.traced, self.config, len(rows))
        other.slots = [self.slots[row] for row in rows]
        host = torch.device("cpu")
        other.state = self.state.resized(len(rows), list(rows), host, self._transfers.copy)
        other.state.shared = {name: value.cpu() for name, value in self.state.shared.items()}
        other.traces = self.traces
        other.records, other.num_nodes, other.notes = self.records, self.num_nodes, self.notes
        other.unfused_because = self.unfused_because
        other.stacked_batch = self.stacked_batch
        return other

    def vacate(self) -> None:
        """Free all storage: the members have moved to another group."""
        self.rebase(lambda tensor: tensor.new_empty(0))
        self.programs = ProgramCache(self.config)  # the old one's graphs hold memory
        self.slots = [None] * self.width
        self._members = None

    def restack(self, device: torch.device) -> None:
        """Put the state into storage of its own on ``device``."""
        shared = {name: value.to(device) for name, value in self.state.shared.items()}
        self.state = self.state.resized(self.width, list(range(self.width)), device, self._transfers.copy)
        self.state.shared = shared
        self.programs.clear()

    def rebase(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put every tensor of the state where ``change`` says; programs made before are forgotten."""
        self.state = self.state.mapped(change)
        self.programs.clear()

    # ---- members -----------------------------------------------------------------------------------

    @property
    def members(self) -> list[tuple[int, Slot]]:
        """Occupied rows."""
        if self._members is None:
            self._members = [(row, slot) for row, slot in enumerate(self.slots) if slot is not None]
        return self._members

    def slot(self, row: int) -> Slot:
        """Return the slot of an occupied row."""
        slot = self.slots[row]
        assert slot is not None
        return slot

    def free_row(self) -> int | None:
        """A row without a member, if there is one."""
        return next((row for row, slot in enumerate(self.slots) if slot is None), None)

    def load(
        self, row: int, member: Member, name: str, optimizer: OptimizerSnapshot, watch: MemberWatch
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
            member, name, optimizer.structure, watch, optimizer.steps, counter=member.num_draws
        )
        self.last = {}
        self.forget_fed()

    def clear(self, row: int) -> None:
        """Free a row. Its stale numbers stay, and no other row reads them."""
        self.slots[row] = None
        self.forget_fed()

    def check_export(self, row: int) -> None:
        """Refuse, before anything is written, an export into a model that changed its shape."""
        slot = self.slot(row)
        expected = {
            name: rows.shape[1:]
            for kind in (self.state.parameters, self.state.buffers)
            for name, rows in kind.items()
        }
        check_shapes(slot.name, slot.member, expected)

    def export(self, row: int) -> None:
        """Write a row back into the member's own model and optimizer."""
        slot = self.slot(row)
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
                    group,
                    parameters[position].tensor,
                    values,
                    slot.base_steps[index] + done,
                )
        self._transfers.copy(pairs)
        slot.watch.settle()

    def stop(self, row: int, reason: str) -> None:
        """No more changes to a row; the member stays in it."""
        slot = self.slot(row)
        slot.active, slot.waits, slot.reason = False, False, reason
        self.forget_fed()

    # ---- programs ----------------------------------------------------------------------------------

    def _settings(
        self,
        idle: tuple[frozenset[str], ...] = (),
        clips: tuple[bool, bool] = (False, False),
        *,
        applies: bool = True,
    ) -> UpdateSettings:
        clips_norm, clips_value = clips
        return UpdateSettings(
            structure=self.key.structure,
            idle=idle,
            parameters=self._gradients,
            group_of=groups_of(self._gradients, self.traced, self.key.structure),
            clips_norm=clips_norm,
            clips_value=clips_value,
            accumulates=self.config.accumulate > 1,
            applies=applies,
        )

    def _builder(self) -> ProgramBuilder:
        return ProgramBuilder(self.config, self.state.shared)

    def prepare(self, trace: Trace, *, stacked_batch: bool, applies: bool = True) -> StepProgram:
        """Find or build the program for a batch like the one that was traced.

        Reads the members' settings as they are now, for the program and for the step that comes next;
        refuses settings that are not numbers.
        """
        self._numbers.read(self.members)
        self.stacked_batch = stacked_batch
        idle, clips = self._numbers.idle, self._numbers.clips
        key = ("step", trace.key, idle, applies, clips, stacked_batch)

        def build() -> StepProgram:
            settings = self._settings(idle, clips, applies=applies)
            built = self._builder().step(trace.graph, self.width, settings, stacked_batch=stacked_batch)
            self.records, self.num_nodes = built.records, built.num_nodes
            if built.upgrade is not None:
                self.programs.expect(key, built.upgrade)
            return built.program

        self.programs.upgrade(key)
        program = self.programs.get(key, build)
        self.notes = program.notes
        return program

    def forward_program(self, trace: Trace, spec: BatchSpec, *, stacked_batch: bool) -> ForwardProgram:
        """Find or build the program that computes metrics of all members, ``[width]`` each."""
        return self.programs.get(
            ("evaluate", trace.key, spec, stacked_batch),
            lambda: self._builder().forward(trace.graph, self.width, stacked_batch=stacked_batch),
        )

    def variant(self, *, applies: bool = True) -> Hashable:
        """Read the members' settings and return what a step's program depends on."""
        self._numbers.read(self.members)
        return (self._numbers.idle, self._numbers.clips, applies)

    def compile_widths(self, widths: Sequence[int]) -> None:
        """Compile the steps of arrays of these widths, all kernels in parallel."""
        self._numbers.read(self.members)
        settings = self._settings(self._numbers.idle, self._numbers.clips)
        builder, stacked = self._builder(), self.stacked_batch
        steps = [
            builder.lowered_step(self.traced, width, settings, stacked_batch=stacked, for_plan=True)
            for width in widths
        ]
        builder.compile(*steps)

    def sub_array_program(
        self,
        width: int,
        *,
        kernels: str,
        traced: TracedGraph | None = None,
        stacked_batch: bool | None = None,
        applies: bool = True,
        carries_state: bool = True,
    ) -> StepProgram:
        """The step of ``width`` members as one array, for the settings as they are now.

        ``kernels`` is "aten", "lowered" (regions, not compiled) or "compiled".
        """
        self._numbers.read(self.members)
        settings = self._settings(self._numbers.idle, self._numbers.clips, applies=applies)
        settings = replace(settings, carries_state=carries_state)
        stacked = self.stacked_batch if stacked_batch is None else stacked_batch
        graph, builder = self.traced if traced is None else traced, self._builder()
        if kernels == "aten":
            return builder.aten_step(graph, width, settings, stacked_batch=stacked)
        step = builder.lowered_step(graph, width, settings, stacked_batch=stacked, for_plan=True)
        if kernels == "compiled":
            builder.compile(step)
        return step.program(settings)

    def planned_forward(
        self, traced: TracedGraph, width: int, *, stacked_batch: bool, carries_state: bool
    ) -> ForwardProgram:
        """Metrics of ``width`` members as one array, to be run by a plan.

        With ``carries_state`` its arguments are all of the group's state, what it does not touch included.
        """
        carried = self._settings() if carries_state else None
        return self._builder().planned_forward(traced, width, carried, stacked_batch=stacked_batch)

    # ---- running -----------------------------------------------------------------------------------

    def push_numbers(self) -> None:
        """Send the members' numbers as they were read last."""
        self._numbers.push()

    def told(self, *, applies: bool) -> Hashable:
        """Return all that a step would be fed now but its batch; equal as long as nothing changes."""
        return (self.width, self.variant(applies=applies), self._numbers.told(self.members))

    def fed(self, program: Program, batch: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return what is new with every step, by position among a program's arguments."""
        arguments = self.arguments(program, batch)
        return {position: arguments[position] for position in program.positions_fed_anew}

    def count(self, program: StepProgram) -> None:
        """Count a step of every active member."""
        self._numbers.count(self.members, int(program.settings.applies))

    def note(self, program: StepProgram, results: Sequence[Tensor]) -> None:
        """Keep what a step returned as ``last``."""
        loss, norm, finite, *metrics = results
        self.last = {"loss": loss, "grad_norm": norm, "finite": finite}
        self.last.update(zip(program.metrics, metrics, strict=True))

    def number_evaluation(self, index: int) -> None:
        """Draws for the batch ``index`` of an evaluation: below those of training, which count from 0."""
        self._evaluation.fill_(-1 - index)

    def arguments(self, program: Program, batch: Sequence[Tensor]) -> list[Tensor]:
        """List all tensors that a program takes, in order."""
        return with_batch(self.programs.held_arguments(program, self.held_arguments), batch)

    def held_arguments(self, program: Program) -> list[Tensor | None]:
        """List the arguments of a program, with ``None`` for each leaf of the batch."""
        own = {"neutral": self._neutral, "tangent": self._tangent, "evaluation": self._evaluation}
        return held_arguments(program, self.state, {**self._numbers.tensors, **own})

    def forget_fed(self) -> None:
        """Write what the host feeds anew, after members came, left or stopped."""
        self._members = None
        self._numbers.forget()
