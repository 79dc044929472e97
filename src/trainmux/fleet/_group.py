"""A group: members that share one fused graph, in slots over stacked storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainmux.engine import ForwardProgram, StepProgram, Transfers, UpdateSettings
from trainmux.errors import BatchError, MemberError
from trainmux.fleet._build import ProgramBuilder
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._free_numbers import FreeNumbers, GroupTrace
from trainmux.fleet._member import Member
from trainmux.fleet._numbers import GroupNumbers
from trainmux.fleet._programs import Program, ProgramCache, with_batch
from trainmux.fleet._shared import view_key
from trainmux.fleet._slots import Slot, StackedState, named_tensors, same_values, volatile_names
from trainmux.fleet._traces import Trace
from trainmux.fleet._widths import Widths
from trainmux.fusion.optimizers import OptimizerStructure, StateEntry, state_entries, write_state
from trainmux.ir import FreeNumber, FusionRecord, GroupSummary, InputKind, MemoryUse, OutputKind
from trainmux.runtime import ALIGNMENT_BYTES, stacked_zeros
from trainmux.tracing import BatchSpec, TracedGraph, number_name

if TYPE_CHECKING:
    from trainmux.fleet._newcomer import Newcomer
    from trainmux.fleet._watch import Checksums

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class GroupKey:
    """Key of members that can be fused.

    ``base`` has names and views of the constants that they have in common with each other, or with members of
    other groups, in memory.
    """

    graph: str
    structure: OptimizerStructure
    own_batch: bool
    base: tuple[tuple[str, Hashable], ...] = ()


Constants = dict[tuple[Hashable, torch.dtype], Tensor]
"""Constants on the device, by the view of the members' memory that they are copies of, and their type."""


def changing_names(traced: TracedGraph) -> frozenset[str]:
    """Names of the parameters and buffers that a step changes."""
    kinds = (OutputKind.GRADIENT, OutputKind.BUFFER)
    return frozenset(output.name for output in traced.outputs if output.kind in kinds)


def _on_device(home: Tensor, dtype: torch.dtype, device: torch.device, known: Constants) -> Tensor:
    """Return a constant on the device: the members' own memory if it can be used there, else the one copy."""
    key = (view_key(home), dtype)
    if key not in known:
        found = home.detach().to(device, dtype).contiguous()
        known[key] = found.clone() if found.data_ptr() % ALIGNMENT_BYTES else found
    return known[key]


class Group:
    """Slots, their storage, and the programs for it, which a runner runs."""

    def __init__(self, key: GroupKey, traced: TracedGraph, config: FleetConfig, width: int) -> None:
        self.key = key
        self.config = config
        self.width = width
        self.widths = Widths(width, can_shrink=not config.deterministic)
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
        self.example_spec: BatchSpec | None = None
        self.member_graph = traced
        """The graph of one member, with the literals of any."""
        self._free = FreeNumbers(width)
        self._traces: dict[BatchSpec, GroupTrace] = {}
        self.state = StackedState.blank(width, config.device)
        own = (InputKind.PARAMETER, InputKind.BUFFER)
        self._kinds = {item.name: item.kind.value for item in traced.inputs if item.kind in own}
        self._gradients = tuple(o.name for o in traced.outputs if o.kind is OutputKind.GRADIENT)
        self._transfers = Transfers(config.device)
        self._known: dict[str, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        named = [item.name for item in traced.inputs if item.kind is InputKind.PARAMETER]
        owner = {named[i]: index for index, each in enumerate(key.structure.groups) for i in each.params}
        owners = tuple(map(owner.get, self._gradients))
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
        item = next(item for item in self.member_graph.inputs if item.name == parameter)
        dtype = self.config.held_dtype(getattr(torch, item.dtype.removeprefix("torch.")))
        like = torch.empty(item.shape, dtype=dtype, device="meta")
        return state_entries(self.key.structure.groups[index], like)

    def _make_numbers(self) -> None:
        """Make what the host feeds, and the counters of an evaluation's draws, for the current width."""
        num_free = len(self._free.values)
        self._numbers = GroupNumbers(self.key.structure, self.width, num_free, self.config.device)
        self._numbers.set_free(self._free.values)
        self._evaluation = torch.zeros(self.width, dtype=torch.int64, device=self.config.device)

    # ---- storage -----------------------------------------------------------------------------------

    def allocate(self, members: Sequence[Member], known: Constants) -> None:
        """Make storage for ``width`` members shaped like ``members``, whose common constants are shared.

        Of a constant in memory that members have in common, the fleet has one copy: ``known`` has those that
        are there, and gets the others.
        """
        state, device, base = self.state, self.config.device, dict(self.key.base)
        changing = changing_names(self.member_graph)
        first, *others = (named_tensors(member) for member in members)
        shapes = {item.name: item.shape for item in self.traced.inputs}
        for name, example in first.items():
            dtype = self.config.held_dtype(example.dtype)
            if name in base:
                state.shared[name] = _on_device(example, dtype, device, known)
            elif name not in changing and all(same_values(example, other[name]) for other in others):
                state.shared[name] = example.detach().to(
                    device, dtype, copy=True, memory_format=torch.contiguous_format
                )
            else:
                state.tensors[name] = stacked_zeros(self.width, shapes[name], dtype, device)
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

    @property
    def homes(self) -> dict[str, Tensor]:
        """The members' own memory of the constants that they have in common; it has the group's values."""
        if not self.key.base or not self.members:
            return {}
        found = named_tensors(self.members[0][1].member)
        return {name: found[name].detach() for name, _ in self.key.base}

    def constants(self) -> Constants:
        """Constants of this group that other groups may use: those on the device."""
        return {
            (view_key(home), self.state.shared[name].dtype): self.state.shared[name]
            for name, home in self.homes.items()
            if self.state.shared[name].device == self.config.device
        }

    def other_constants(self, newcomer: Newcomer) -> list[str]:
        """Names of shared tensors that have other values in a newcomer, which has the group's key."""
        found, base = newcomer.tensors, dict(self.key.base)
        return [
            name
            for name, value in self.state.shared.items()
            if name not in base and not same_values(self._on_host(name), found[name].cpu().to(value.dtype))
        ]

    def has_constant(self, name: str, value: Tensor) -> bool:
        """Whether the members have this value of a tensor in common; keeps no copy, which may be large."""
        return name in self.state.shared and same_values(self.state.shared[name].cpu(), value.cpu())

    def _on_host(self, name: str) -> Tensor:
        """Return a shared tensor's values on the host, read from the device once for as long as they stay."""
        value = self.state.shared[name]
        seen, version, copy = self._known.get(name, (None, 0, value))
        if seen is None or seen() is not value or version != value._version:
            copy = value.cpu()
            self._known[name] = (weakref.ref(value), value._version, copy)
        return copy

    def set_constants(self, values: Mapping[str, Tensor]) -> None:
        """Give shared tensors these values, here and in the members' own memory."""
        for name, value in values.items():
            self.state.shared[name].copy_(value)
        for _, slot in self.members if values else ():
            found = named_tensors(slot.member)
            for name, value in values.items():
                found[name].detach().copy_(value)
            slot.watch.settle(written=values)

    def unshare(self, names: Collection[str]) -> None:
        """Give every member its own copy of shared tensors, because a newcomer's differ."""
        if not names:
            return
        for name in names:
            value = self.state.shared.pop(name)
            rows = stacked_zeros(self.width, value.shape, value.dtype, value.device)
            self.state.tensors[name] = rows.copy_(value.unsqueeze(0).expand_as(rows))
        self.programs.set_aside()

    def resize(self, width: int) -> None:
        """Change the number of slots, keeping the members (moved together) and their state."""
        kept = [row for row, _ in self.members]
        self._restack(kept, width, self.state.alive.device, self.state.shared)
        self.slots = [self.slots[row] for row in kept] + [None] * (width - len(kept))
        self.width = width
        self.widths.note(width)
        self.last = {}
        self._free.resized(kept, width)
        self._make_numbers()
        self.forget_fed()

    def restack(self, device: torch.device, known: Constants) -> None:
        """Put the state into storage of its own on ``device``, but for constants that ``known`` has there."""
        self._restack(range(self.width), self.width, device, self._shared_on(device, known))

    def _shared_on(self, device: torch.device, known: Constants) -> dict[str, Tensor]:
        homes = self.homes
        return {
            name: _on_device(homes[name], value.dtype, device, known) if name in homes else value.to(device)
            for name, value in self.state.shared.items()
        }

    def _restack(
        self, rows: Sequence[int], width: int, device: torch.device, shared: Mapping[str, Tensor]
    ) -> None:
        sources = [(self.state, row) for row in rows]
        self.state = self.state.with_rows(sources, width, device, self._transfers, shared)
        self.programs.set_aside()

    def state_on(self, device: torch.device, width: int) -> StackedState:
        """The state, if it is on ``device``, else a copy of its first rows as steps there want it."""
        if self.state.alive.device.type == device.type:
            return self.state
        rows = [(self.state, row) for row in range(width)]
        return self.state.with_rows(rows, width, device, self._transfers, self._shared_on(device, {}))

    def gathered(self, places: Sequence[tuple[Group, int]]) -> Group:
        """Make a group like this one of members of several, with copies of their state in host memory."""
        other = Group(self.key, self.member_graph, self.config, len(places))
        other._free = self._free.taken([(group._free, row) for group, row in places])
        other._make_numbers()
        other.slots = [group.slots[row] for group, row in places]
        sources = [(group.state, row) for group, row in places]
        at_home = self._at_home()
        shared = {
            name: at_home[name] if name in at_home else value.to(_HOST)
            for name, value in self.state.shared.items()
        }
        other.state = self.state.with_rows(sources, len(places), _HOST, self._transfers, shared)
        for name in ("example_spec", "records", "num_nodes", "notes", "unfused_because", "stacked_batch"):
            setattr(other, name, getattr(self, name))
        return other

    def vacate(self) -> None:
        """Free all storage: the members have moved to another group."""
        self.rebase(lambda tensor: tensor.new_empty(0))
        self.programs = ProgramCache(self.config)  # the old one's graphs hold memory
        self.slots = [None] * self.width
        self._members = None

    def _at_home(self) -> dict[str, Tensor]:
        """Constants in the members' own memory, where types agree."""
        shared = self.state.shared
        return {name: home.to(shared[name].dtype) for name, home in self.homes.items()}

    def homes_by_id(self) -> dict[int, Tensor]:
        """Constants in the members' own memory, by the id of the tensor of the state that they stand for."""
        return {id(self.state.shared[name]): home for name, home in self._at_home().items()}

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
        tensors = newcomer.tensors
        slot = Slot(
            member,
            newcomer.name,
            newcomer.watch,
            {newcomer.example.spec: newcomer.trace},
            newcomer.steps,
            counter=member.num_draws,
            wider=newcomer.wider,
            own_shapes={name: tuple(tensors[name].shape) for name in newcomer.wider},
        )
        pairs = [(slot.cut(name, rows[row]), tensors[name]) for name, rows in state.tensors.items()]
        blank = [state.tensors[name][row] for name in newcomer.wider]
        blank += [total[row] for total in state.totals.values()]
        filled: list[tuple[Tensor, float]] = []
        for key, value in newcomer.states.items():
            target = state.states[key][row]
            if key[0] in newcomer.wider:
                blank.append(target)
            if isinstance(value, Tensor):
                pairs.append((slot.cut(key[0], target), value))
            elif value:
                filled.append((slot.cut(key[0], target), value))
            else:
                blank.append(target)
        with torch.no_grad():
            if blank:
                torch._foreach_zero_(blank)
            for target, value in filled:
                target.fill_(value)
            self._transfers.send(pairs)
            state.alive[row].fill_(True)
            state.updates[row].fill_(0)
            state.seeds[row].fill_(member.random_key)
        self.slots[row] = slot
        self.example_spec = self.example_spec or newcomer.example.spec
        self._free.forget(row)
        self._traces.clear()
        self.last = {}
        self.forget_fed()

    def take_over(self, row: int, source: Group, source_row: int) -> None:
        """Have a member go on from the state of another one, on the device; its seed and draws stay its own.

        Copied is what ``state_dict`` has, so no buffers that are not persistent, but for those that training
        changes. Refuses members that are not of one structure (``MemberError``).
        """
        slot, other, state, given = self.slot(row), source.slot(source_row), self.state, source.state
        if (self.key, slot.own_shapes) != (source.key, other.own_shapes):
            raise MemberError(
                f"expected members of one structure, got {other.name!r} and {slot.name!r}, which differ in "
                "code, optimizer, rank or frozen base; copy between members that train alike"
            )
        kept = volatile_names(slot.member) - changing_names(self.member_graph)
        names = [name for name in (*state.tensors, *state.shared) if name not in kept]
        constants = self._constants_of(source, source_row, names)
        if constants and len(self.members) > 1:
            raise MemberError(
                f"expected members with the same constants, got other values of {next(iter(constants))} in "
                f"{other.name!r} than in {slot.name!r}, which shares them; copy between members of one group"
            )
        self.set_constants(constants)
        pairs = [
            (state.tensors[name][row], source.value(name, source_row))
            for name in names
            if name in state.tensors
        ]
        pairs += [(rows[row], given.states[key][source_row]) for key, rows in state.states.items()]
        pairs += [(rows[row], given.totals[name][source_row]) for name, rows in state.totals.items()]
        pairs += [
            (state.alive[row], given.alive[source_row]),
            (state.updates[row], given.updates[source_row]),
        ]
        self._transfers.send(pairs)
        for name in ("base_steps", "num_updates", "active", "waits", "reason"):
            setattr(slot, name, getattr(other, name))
        slot.origin = object()
        self.forget_fed()

    def value(self, name: str, row: int) -> Tensor:
        """A parameter or buffer of a member, or of all members."""
        return self.state.tensors[name][row] if name in self.state.tensors else self.state.shared[name]

    def _constants_of(self, source: Group, row: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Values that a member of another group has for constants of this one, where they differ."""
        found = {}
        for name in names if self is not source else ():
            if name in self.state.shared and name not in dict(self.key.base):
                value = (
                    source._on_host(name) if name in source.state.shared else source.value(name, row).cpu()
                )
                if not same_values(self._on_host(name), value):
                    found[name] = value
        return found

    def clear(self, row: int) -> None:
        """Free a row. Its stale numbers stay, and no other row reads them."""
        self.slots[row] = None
        self.forget_fed()

    def check_export(self, row: int) -> None:
        """Refuse, before anything is written, an export into a model that changed its shape."""
        slot = self.slot(row)
        found = named_tensors(slot.member)
        for name, rows in self.state.tensors.items():
            shape = slot.own_shapes.get(name, tuple(rows.shape[1:]))
            if name not in found or found[name].shape != shape:
                got = tuple(found[name].shape) if name in found else "none"
                raise MemberError(
                    f"member {slot.name!r}: expected a tensor {name} of shape {shape} in its model, got "
                    f"{got}; do not change a model while it is in the fleet (drop it first)"
                )

    def export(self, row: int, sums: Checksums) -> None:
        """Write a row back into the member's own model and optimizer."""
        slot, state = self.slot(row), self.state
        tensors = named_tensors(slot.member)
        parameters = list(slot.member.model.named_parameters())
        done = int(state.updates[row])
        slot.member.num_draws = slot.counter
        pairs = [(tensors[name], slot.cut(name, rows[row])) for name, rows in state.tensors.items()]
        # Constants are there already, but for those that somebody has edited.
        edited = slot.watch.edited(state.shared, sums)
        pairs += [(tensors[name], state.shared[name]) for name in edited]
        for index, group in enumerate(self.key.structure.groups):
            for name, parameter in (parameters[position] for position in group.params):
                if name not in self._gradients:
                    continue
                entries = self.usual.entries[self._gradients.index(name)]
                values = {e.name: slot.cut(name, state.states[name, e.name][row]) for e in entries}
                steps = slot.base_steps[index] + done
                pairs += write_state(slot.member.optimizer, index, group, parameter, values, steps)
        self._transfers.copy(pairs)
        slot.watch.settle(written=state.tensors)

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

    def summary(self, planned: MemoryUse | None, split_because: str) -> GroupSummary:
        """Record how the group trains; ``planned`` is the memory of all groups together, under a plan."""
        numbers: tuple[FreeNumber, ...] = ()
        if self.example_spec is not None and self._example_trace() is not None:
            (first, *_), rows = self.members, [row for row, _ in self.members]
            numbers = self._free.described(self.example_spec, first[1].traces[self.example_spec], rows)
        padded = ", ".join(slot.name for _, slot in self.members if slot.wider)
        padding = [f"adapters of {padded} are padded with zeros to the largest rank"] if padded else []
        return GroupSummary(
            tuple(slot.name for _, slot in self.members),
            self.width,
            ", ".join(dict.fromkeys(part.kind for part in self.key.structure.groups)),
            self.num_nodes,
            self.records,
            self.unfused_because,
            (*self.notes, *padding),
            planned or self.programs.engine.memory,
            self.programs.engine.not_captured,
            numbers,
            split_because,
        )

    # ---- graphs ------------------------------------------------------------------------------------

    @property
    def traced(self) -> TracedGraph:
        """The graph of a step on a batch like the example."""
        trace = self._example_trace()
        return self.member_graph if trace is None else trace.graph

    def _example_trace(self) -> GroupTrace | None:
        spec = self.example_spec
        if spec is None or not self.members or any(spec not in slot.traces for _, slot in self.members):
            return None
        return self.trace_for(spec, lambda slot: slot.traces[spec])

    def trace_for(self, spec: BatchSpec, find: Callable[[Slot], Trace]) -> GroupTrace:
        """The graph of a step on batches of this kind; ``find`` traces a member's."""
        if spec not in self._traces:
            for _, slot in self.members:
                if spec not in slot.traces:
                    slot.traces[spec] = find(slot)
            rows = [row for row, _ in self.members]
            traces = [slot.traces[spec] for _, slot in self.members]
            if len({trace.key for trace in traces}) != 1:
                names = ", ".join(slot.name for _, slot in self.members)
                raise MemberError(
                    f"members {names}: expected models that compute alike on {spec.leaves}, got different "
                    "graphs for them; do not change models while they are in the fleet"
                )
            self._check_trained(spec, traces[0].graph)
            self._traces[spec] = self.merged(spec, rows, traces)
        return self._traces[spec]

    def forget_traces(self, slot: Slot, *, but: BatchSpec) -> None:
        """Have a member traced anew on batches of any other kind."""
        for spec in slot.traces.keys() - {but}:
            del slot.traces[spec]
            self._traces.pop(spec, None)

    def _check_trained(self, spec: BatchSpec, graph: TracedGraph) -> None:
        """Refuse a graph that changes other parameters, or more buffers, than that of the example batch."""
        gradients = {output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
        more = sorted(changing_names(graph) - changing_names(self.member_graph))
        missing = sorted(set(self._gradients) - gradients)
        if more or missing:
            found = [f"also changes {', '.join(more)}"] if more else []
            found += [f"does not train {', '.join(missing)}"] if missing else []
            names = ", ".join(slot.name for _, slot in self.members)
            shapes = ", ".join(f"{leaf.path} {leaf.shape}" for leaf in spec.leaves)
            raise BatchError(
                f"members {names}: expected a batch that changes what the example batch does, got one "
                f"({shapes}) that {' and '.join(found)}; use the same parameters and buffers for every "
                "batch, and multiply by zero what is not to count"
            )

    def trace_with(self, newcomer: Newcomer) -> GroupTrace:
        """The graph of a step once a newcomer has come into a free row."""
        spec, row = newcomer.example.spec, self.free_row()
        assert row is not None
        found = [(row, newcomer.trace)]
        found += [(row, slot.traces[spec]) for row, slot in self.members if spec in slot.traces]
        self._free.forget(row)
        return self.merged(spec, *zip(*found, strict=True))

    def merged(self, purpose: Hashable, rows: Sequence[int], traces: Sequence[Trace]) -> GroupTrace:
        """One graph for members in ``rows`` whose graphs differ in numbers only."""
        num_free = len(self._free.values)
        found = self._free.merged(purpose, rows, traces)
        if len(self._free.values) > num_free:
            self._make_numbers()  # at other addresses
            self.programs.set_aside()
            self.forget_fed()
        self._numbers.set_free(self._free.values)
        return found

    def accepts(self, newcomer: Newcomer) -> bool:
        """Whether a newcomer fits the group's programs, with its constants and the numbers of its code."""
        fits = self._free.accepts(newcomer.example.spec, newcomer.trace)
        return fits and not self.other_constants(newcomer)

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

    def builder(self, traced: TracedGraph, *, stacked_batch: bool) -> ProgramBuilder:
        """Builds programs of one of the group's graphs."""
        return ProgramBuilder(traced, self.config, self.state.shared, stacked_batch=stacked_batch)

    def prepare(self, trace: GroupTrace, *, stacked_batch: bool, applies: bool = True) -> StepProgram:
        """Find or build the program for a batch like the one that was traced.

        Reads the members' settings as they are now, for the program and for the step that comes next.
        """
        self.stacked_batch = stacked_batch
        key = ("step", trace.key, self.variant(applies=applies), stacked_batch, *self._form())

        def build() -> StepProgram:
            builder = self.builder(trace.graph, stacked_batch=stacked_batch)
            built = builder.step(self.width, self.settings(applies=applies))
            self.records, self.num_nodes = built.records, built.num_nodes
            if built.upgrade is not None:
                self.programs.expect(key, built.upgrade)
            return built.program

        program = self.programs.get(key, build)
        self.notes = program.notes
        return program

    def forward_program(self, trace: GroupTrace, spec: BatchSpec, *, stacked_batch: bool) -> ForwardProgram:
        """Find or build the program that computes metrics of all members, ``[width]`` each."""
        return self.programs.get(
            ("evaluate", trace.key, spec, stacked_batch, *self._form()),
            lambda: self.builder(trace.graph, stacked_batch=stacked_batch).forward(self.width),
        )

    def _form(self) -> tuple[Hashable, ...]:
        """The key of programs besides graph, settings and batch: slots, and names of shared tensors."""
        return self.width, tuple(self.state.shared)

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
        builder = self.builder(traced or self.traced, stacked_batch=stacked)
        if kernels == "aten":
            return builder.aten_step(width, settings)
        step = builder.lowered_step(width, settings, for_plan=True)
        if kernels == "compiled":
            builder.compile([step])
        return step.program(settings)

    # ---- running -----------------------------------------------------------------------------------

    def push_numbers(self) -> None:
        """Send the members' numbers as they were read last."""
        self._numbers.push()

    def push_free(self) -> None:
        """Send the numbers of the members' code, if they differ in any."""
        if len(self._free.values):
            self.push_numbers()

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
        state, fed = state or self.state, self._numbers.tensors
        own = {
            InputKind.BATCH: None,
            InputKind.SEED: state.seeds,
            InputKind.COUNTER: fed["counters"] if program.counts_draws else self._evaluation,
            InputKind.TANGENT: self._tangent,
        }
        by_name = {**state.shared, **state.tensors}
        by_name |= {number_name(column): row for column, row in enumerate(fed["free"])}
        given = {**fed, "neutral": self._neutral, "alive": state.alive, "updates": state.updates}
        return [
            *(own[item.kind] if item.kind in own else by_name[item.name] for item in program.inputs),
            *(state.states[key] for key in program.state_keys()),
            *(state.totals[name] for name in program.total_names()),
            *(given[name] for name in program.number_names()),
        ]

    def forget_fed(self) -> None:
        """Write what the host feeds anew, after members came, left or stopped."""
        self._members = None
        self._numbers.forget()
