"""A group: members that share one fused graph, in slots over stacked storage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainmux.engine import ForwardProgram, StepProgram, Transfers, UpdateSettings
from trainmux.errors import MemberError
from trainmux.fleet._build import ProgramBuilder
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._member import Member
from trainmux.fleet._numbers import GroupNumbers
from trainmux.fleet._programs import Program, ProgramCache, groups_of, held_arguments, with_batch
from trainmux.fleet._slots import Slot, StackedState, named_tensors, same_values
from trainmux.fleet._traces import Trace
from trainmux.fusion.optimizers import OptimizerStructure, StateEntry, state_entries, write_state
from trainmux.ir import FusionRecord, GroupSummary, InputKind, MemoryUse, OutputKind
from trainmux.runtime import stacked_zeros
from trainmux.tracing import BatchSpec, TracedGraph, unique_parameters

if TYPE_CHECKING:
    from trainmux.fleet._newcomer import Newcomer

_HOST = torch.device("cpu")


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
        self.traces: dict[BatchSpec, Trace] = {}
        self.state = StackedState.blank(width, config.device)
        own = (InputKind.PARAMETER, InputKind.BUFFER)
        self._kinds = {item.name: item.kind.value for item in traced.inputs if item.kind in own}
        self._gradients = tuple(o.name for o in traced.outputs if o.kind is OutputKind.GRADIENT)
        self._transfers = Transfers(config.device)
        owners = groups_of(self._gradients, traced, key.structure)
        self.usual = UpdateSettings(  # with all optimizer state, and no clipping
            structure=key.structure,
            idle=(),
            parameters=self._gradients,
            group_of=owners,
            entries=tuple(map(self._entries_of, self._gradients, owners)),
            clips_norm=False,
            clips_value=False,
            accumulates=config.accumulate > 1,
            applies=True,
        )
        self._tangent = torch.full((), 1.0 / config.accumulate, dtype=torch.float64, device=config.device)
        neutral = [[value] for value in self.usual.neutral_scalars()]
        self._neutral = torch.tensor(neutral, dtype=torch.float64, device=config.device).reshape(-1, 1)
        self._make_numbers()

    def _entries_of(self, parameter: str, index: int | None) -> tuple[StateEntry, ...]:
        """Optimizer state of a parameter in the precision that it is held in."""
        if index is None:
            return ()
        item = next(item for item in self.traced.inputs if item.name == parameter)
        dtype = self.config.held_dtype(getattr(torch, item.dtype.removeprefix("torch.")))
        like = torch.empty(item.shape, dtype=dtype, device="meta")
        return state_entries(self.key.structure.groups[index], like)

    def _make_numbers(self) -> None:
        """Make what the host feeds, and the counters of an evaluation's draws, for the current width."""
        self._numbers = GroupNumbers(self.key.structure, self.width, self.config.device)
        self._evaluation = torch.zeros(self.width, dtype=torch.int64, device=self.config.device)

    # ---- storage -----------------------------------------------------------------------------------

    def allocate(self, members: Sequence[Member]) -> None:
        """Make storage for ``width`` members shaped like ``members``, whose common constants are shared."""
        state, device = self.state, self.config.device
        kinds = (OutputKind.GRADIENT, OutputKind.BUFFER)
        changing = {output.name for output in self.traced.outputs if output.kind in kinds}
        first, *others = (named_tensors(member) for member in members)
        for name, example in first.items():
            dtype = self.config.held_dtype(example.dtype)
            if name not in changing and all(same_values(example, other[name]) for other in others):
                state.shared[name] = example.detach().to(device, dtype, copy=True)
            else:
                state.tensors[name] = stacked_zeros(self.width, example.shape, dtype, device)
        for name, entry in self.usual.state_entries():
            dtype = entry.dtype or state.tensors[name].dtype
            state.states[name, entry.name] = stacked_zeros(self.width, entry.shape, dtype, device)
        if self.config.accumulate > 1:
            state.totals = {name: self._zeros_like(name) for name in self._gradients}

    def _zeros_like(self, parameter: str) -> Tensor:
        rows = self.state.tensors[parameter]
        return stacked_zeros(rows.shape[0], rows.shape[1:], rows.dtype, rows.device)

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that get gradients."""
        return self._gradients

    def kind_of(self, name: str) -> str:
        """Whether a name is a "parameter"'s or a "buffer"'s."""
        return self._kinds[name]

    def accepts_constants(self, member: Member) -> bool:
        """Whether the tensors that this group shares have the same values in ``member``."""
        found = named_tensors(member)
        return all(
            same_values(value, found[name].to(value.device, value.dtype))
            for name, value in self.state.shared.items()
        )

    def unshare(self) -> None:
        """Give every member its own copy of what was shared, because a newcomer differs."""
        for name, value in self.state.shared.items():
            rows = stacked_zeros(self.width, value.shape, value.dtype, value.device)
            self.state.tensors[name] = rows.copy_(value.unsqueeze(0).expand_as(rows))
        self.state.shared.clear()
        self.programs.clear()

    def resize(self, width: int) -> None:
        """Change the number of slots, keeping the members (moved together) and their state."""
        kept = [row for row, _ in self.members]
        self._restack(kept, width, self.state.alive.device)
        self.slots = [self.slots[row] for row in kept] + [None] * (width - len(kept))
        self.width = width
        self.last = {}
        self._make_numbers()
        self.forget_fed()

    def restack(self, device: torch.device) -> None:
        """Put the state into storage of its own on ``device``."""
        self._restack(range(self.width), self.width, device)

    def _restack(self, rows: Sequence[int], width: int, device: torch.device) -> None:
        sources = [(self.state, row) for row in rows]
        self.state = self.state.with_rows(sources, width, device, self._transfers)
        self.programs.clear()

    def state_on(self, device: torch.device, width: int) -> StackedState:
        """The state, if it is on ``device``, else a copy of its first rows as steps there want it."""
        if self.state.alive.device.type == device.type:
            return self.state
        rows = [(self.state, row) for row in range(width)]
        return self.state.with_rows(rows, width, device, self._transfers)

    def taken(self, rows: Sequence[int]) -> Group:
        """Make a group of these rows' members alone, with copies of their state in host memory."""
        return self.gathered([(self, row) for row in rows])

    def gathered(self, places: Sequence[tuple[Group, int]]) -> Group:
        """Make a group like this one of members of several, with copies of their state in host memory."""
        other = Group(self.key, self.traced, self.config, len(places))
        other.slots = [group.slots[row] for group, row in places]
        sources = [(group.state, row) for group, row in places]
        other.state = self.state.with_rows(sources, len(places), _HOST, self._transfers)
        for name in ("traces", "records", "num_nodes", "notes", "unfused_because", "stacked_batch"):
            setattr(other, name, getattr(self, name))
        return other

    def vacate(self) -> None:
        """Free all storage: the members have moved to another group."""
        self.rebase(lambda tensor: tensor.new_empty(0))
        self.programs = ProgramCache(self.config)  # the old one's graphs hold memory
        self.slots = [None] * self.width
        self._members = None

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

    def load(self, row: int, newcomer: Newcomer) -> None:
        """Copy a member's weights, buffers and optimizer state into a row."""
        member, state = newcomer.member, self.state
        member.name = newcomer.name
        tensors = named_tensors(member)
        pairs = [(rows[row], tensors[name]) for name, rows in state.tensors.items()]
        with torch.no_grad():
            for key, value in newcomer.states.items():
                if isinstance(value, Tensor):
                    pairs.append((state.states[key][row], value))
                else:
                    state.states[key][row].fill_(value)
            self._transfers.copy(pairs)
            for total in state.totals.values():
                total[row].zero_()
            state.alive[row].fill_(True)
            state.updates[row].fill_(0)
            state.seeds[row].fill_(member.random_key)
        slot = Slot(member, newcomer.name, newcomer.watch, newcomer.steps, counter=member.num_draws)
        self.slots[row] = slot
        self.last = {}
        self.forget_fed()

    def clear(self, row: int) -> None:
        """Free a row. Its stale numbers stay, and no other row reads them."""
        self.slots[row] = None
        self.forget_fed()

    def check_export(self, row: int) -> None:
        """Refuse, before anything is written, an export into a model that changed its shape."""
        slot = self.slot(row)
        found = named_tensors(slot.member)
        for name, rows in self.state.tensors.items():
            shape = tuple(rows.shape[1:])
            if name not in found or found[name].shape != shape:
                got = tuple(found[name].shape) if name in found else "none"
                raise MemberError(
                    f"member {slot.name!r}: expected a tensor {name} of shape {shape} in its model, got "
                    f"{got}; do not change a model while it is in the fleet (drop it first)"
                )

    def export(self, row: int) -> None:
        """Write a row back into the member's own model and optimizer."""
        slot, state = self.slot(row), self.state
        tensors = named_tensors(slot.member)
        parameters = unique_parameters(slot.member.model)
        done = int(state.updates[row])
        slot.member.num_draws = slot.counter
        pairs = [(tensors[name], rows[row]) for name, rows in state.tensors.items()]
        # Constants too: a restored checkpoint may have brought others.
        pairs += [(tensors[name], value) for name, value in state.shared.items()]
        for index, group in enumerate(self.key.structure.groups):
            for item in (parameters[position] for position in group.params):
                if item.name not in self._gradients:
                    continue
                entries = self.usual.entries[self._gradients.index(item.name)]
                values = {entry.name: state.states[item.name, entry.name][row] for entry in entries}
                steps = slot.base_steps[index] + done
                pairs += write_state(slot.member.optimizer, index, group, item.tensor, values, steps)
        self._transfers.copy(pairs)
        slot.watch.settle()

    def stop(self, row: int, reason: str) -> None:
        """No more changes to a row; the member stays in it."""
        slot = self.slot(row)
        slot.active, slot.waits, slot.reason = False, False, reason
        self.forget_fed()

    def stopped(self) -> dict[str, str]:
        """Members that train no more and why; waits for the device."""
        alive, updates = self.state.alive.tolist(), self.state.updates.tolist()
        for row, slot in self.members:
            if not alive[row]:
                slot.reason = f"not finite at step {max(slot.base_steps, default=0) + updates[row] + 1}"
        return {slot.name: slot.reason for _, slot in self.members if slot.reason is not None}

    def summary(self, planned: MemoryUse | None) -> GroupSummary:
        """Record how the group trains; ``planned`` is the memory of all groups together, under a plan."""
        return GroupSummary(
            tuple(slot.name for _, slot in self.members),
            self.width,
            ", ".join(dict.fromkeys(part.kind for part in self.key.structure.groups)),
            self.num_nodes,
            self.records,
            self.unfused_because,
            self.notes,
            planned or self.programs.engine.memory,
        )

    # ---- programs ----------------------------------------------------------------------------------

    def settings(self, *, applies: bool = True, carries_state: bool = True) -> UpdateSettings:
        """Read the members' settings as they are now; refuses settings that are not numbers."""
        self._numbers.read(self.members)
        clips_norm, clips_value = self._numbers.clips
        return replace(
            self.usual,
            idle=self._numbers.idle,
            clips_norm=clips_norm,
            clips_value=clips_value,
            applies=applies,
            carries_state=carries_state,
        )

    def builder(self) -> ProgramBuilder:
        """Builds the group's programs."""
        return ProgramBuilder(self.config, self.state.shared)

    def prepare(self, trace: Trace, *, stacked_batch: bool, applies: bool = True) -> StepProgram:
        """Find or build the program for a batch like the one that was traced.

        Reads the members' settings as they are now, for the program and for the step that comes next.
        """
        self.stacked_batch = stacked_batch
        key = ("step", trace.key, self.variant(applies=applies), stacked_batch)

        def build() -> StepProgram:
            settings = self.settings(applies=applies)
            built = self.builder().step(trace.graph, self.width, settings, stacked_batch=stacked_batch)
            self.records, self.num_nodes = built.records, built.num_nodes
            if built.upgrade is not None:
                self.programs.expect(key, built.upgrade)
            return built.program

        program = self.programs.get(key, build)
        self.notes = program.notes
        return program

    def forward_program(self, trace: Trace, spec: BatchSpec, *, stacked_batch: bool) -> ForwardProgram:
        """Find or build the program that computes metrics of all members, ``[width]`` each."""
        return self.programs.get(
            ("evaluate", trace.key, spec, stacked_batch),
            lambda: self.builder().forward(trace.graph, self.width, stacked_batch=stacked_batch),
        )

    def variant(self, *, applies: bool = True) -> Hashable:
        """Read the members' settings and return what a step's program depends on."""
        self._numbers.read(self.members)
        return (self._numbers.idle, self._numbers.clips, applies)

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
        settings = self.settings(applies=applies, carries_state=carries_state)
        stacked = self.stacked_batch if stacked_batch is None else stacked_batch
        graph, builder = self.traced if traced is None else traced, self.builder()
        if kernels == "aten":
            return builder.aten_step(graph, width, settings, stacked_batch=stacked)
        step = builder.lowered_step(graph, width, settings, stacked_batch=stacked, for_plan=True)
        if kernels == "compiled":
            builder.compile([step])
        return step.program(settings)

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
        self.last = dict(zip(("loss", "grad_norm", "finite", *program.metrics), results, strict=True))

    def number_evaluation(self, index: int) -> None:
        """Draws for the batch ``index`` of an evaluation: below those of training, which count from 0."""
        self._evaluation.fill_(-1 - index)

    def arguments(self, program: Program, batch: Sequence[Tensor]) -> list[Tensor]:
        """List all tensors that a program takes, in order."""
        return with_batch(self.programs.held_arguments(program, self.held_arguments), batch)

    def held_arguments(self, program: Program, state: StackedState | None = None) -> list[Tensor | None]:
        """List the arguments of a program, with ``None`` for each leaf of the batch.

        ``state`` is a copy to use in place of the group's own.
        """
        own = {"neutral": self._neutral, "tangent": self._tangent, "evaluation": self._evaluation}
        return held_arguments(program, state or self.state, {**self._numbers.tensors, **own})

    def forget_fed(self) -> None:
        """Write what the host feeds anew, after members came, left or stopped."""
        self._members = None
        self._numbers.forget()
