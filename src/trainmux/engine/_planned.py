"""A planned program, run: every tensor at its offset of one slab, swaps to a slab of the host's.

The program says for each moment where the bytes of each tensor lie; values are looked at through their
`Location`, so a tensor that was swapped or recomputed to another offset is found there by everyone who reads
it, views included. On a CPU the instructions run in the order in which they are issued; on a CUDA device on
three streams, by hand or captured.

Members of a sub-array that train side by side (`profiling.side_by_side`) have a kernel graph for one branch.
Every instruction is done for each branch that its sub-array has a member on, in the branch's share of both
slabs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.engine._into import handed_over, run_into
from trainmux.engine._lanes import HostLanes
from trainmux.errors import BudgetError, PlanError, first_line
from trainmux.ir import (
    ALIGNMENT,
    Compute,
    Free,
    Lane,
    Offload,
    Part,
    Prefetch,
    Program,
    Recompute,
    Wait,
)
from trainmux.lowering import Place
from trainmux.profiling import KernelGraph, Location, PassingPlace, locations_of
from trainmux.runtime import deterministic_algorithms, storage_bytes
from trainmux.sizes import round_up

Key = tuple[int, int]
"""A sub-array and one of its tensors."""


@dataclass
class Memory:
    """The two memories of a program: the slab on the device, and the host's for what is swapped."""

    slab: Tensor
    host: Tensor
    host_offsets: Mapping[Key, int]

    @classmethod
    def over(
        cls, slab: Tensor, program: Program, graphs: Sequence[KernelGraph], num_branches: int = 1
    ) -> Memory:
        """The memories of a program in a slab that is there; the host's is pinned for a CUDA device."""
        if slab.numel() < program.slab_bytes:
            raise PlanError(
                f"expected a slab of at least {program.slab_bytes} bytes, got {slab.numel()}; make it larger"
            )
        offsets, end = host_offsets(program, graphs)
        size = max(1, num_branches * end)
        return cls(slab, _host_memory(size, is_pinned=slab.device.type == "cuda"), offsets)

    def at(self, offset: int, size_bytes: int) -> Tensor:
        """The bytes of the device's memory that a tensor at ``offset`` lies in."""
        return self.slab[offset : offset + size_bytes]


def _host_memory(num_bytes: int, *, is_pinned: bool) -> Tensor:
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except (RuntimeError, MemoryError) as error:
        reason = first_line(error)
    raise BudgetError(
        f"expected {num_bytes} bytes of {'pinned ' if is_pinned else ''}host memory for what the plan swaps, "
        f"got none ({reason}); free memory on the host, or plan for a larger budget"
    )


def _parts_of(program: Program) -> tuple[Part, Part, Part]:
    return program.prologue, program.body, program.epilogue


def host_offsets(program: Program, graphs: Sequence[KernelGraph]) -> tuple[dict[Key, int], int]:
    """A place in the host's memory for each tensor that is ever copied there, and the end of the last."""
    swapped = {
        (instruction.sub_array, instruction.tensor)
        for part in _parts_of(program)
        for instruction in part.instructions
        if isinstance(instruction, Offload | Prefetch)
    }
    offsets: dict[Key, int] = {}
    end = 0
    for sub_array, tensor in sorted(swapped):
        offsets[sub_array, tensor] = end
        end += round_up(graphs[sub_array].tensors[tensor].size_bytes, ALIGNMENT)
    return offsets, end


@dataclass
class _Progress:
    """One walk through a part: where each tensor lies now.

    ``aside`` are values on another device, ``handed`` the bytes of what a node hands over to the next one
    without ever putting it in its place, by branch; ``position`` is that of the instruction.
    """

    where: dict[Key, int]
    aside: dict[tuple[int, int, fx.Node], list[Tensor]] = field(default_factory=dict)
    handed: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    position: int = 0


class PlannedProgram:
    """Runs the parts of one program over its memory.

    ``segments`` are further parts over the same tensors, of which a step may be made too. ``poisons`` fills
    freed bytes with ones, which are NaN for every floating type, so that a use after a free shows. There are
    as many branches as the ``lanes`` have; ``branches`` are how many each sub-array uses, if not all.
    """

    def __init__(
        self,
        program: Program,
        graphs: Sequence[KernelGraph],
        memory: Memory,
        lanes: HostLanes,
        *,
        branches: Sequence[int] | None = None,
        segments: Sequence[Part] = (),
        deterministic: bool = False,
        poisons: bool = False,
    ) -> None:
        self.program = program
        self.graphs = tuple(graphs)
        self.memory = memory
        self._lanes = lanes
        self._num_branches = lanes.num_branches
        self._branches = [range(number) for number in branches or [lanes.num_branches] * len(graphs)]
        self._branch_bytes = _rows_of(memory.slab, lanes.num_branches)
        self._host_branch_bytes = _rows_of(memory.host, lanes.num_branches)
        self._deterministic = deterministic
        self._poisons = poisons
        handed = [handed_over(graph) for graph in graphs]
        self._parts = {
            id(part): _Timetable(part, handed, lanes.num_branches)
            for part in (*_parts_of(program), *segments)
        }
        self._statics = self._static_offsets()
        self._swapped_statics = self._find_swapped_statics()
        self._aside: dict[tuple[int, int, fx.Node], list[Tensor]] = {}
        self._modules = [dict(graph.module.named_modules()) for graph in graphs]
        self._places_of = [
            [locations_of(graph.values[step.node]) for step in graph.steps] for graph in graphs
        ]
        self._results = [
            [
                torch.zeros((len(branches), *at.shape), dtype=at.dtype, device=memory.slab.device)
                for at in graph.outputs
            ]
            for graph, branches in zip(graphs, self._branches, strict=True)
        ]
        """Each result of all branches, one behind another."""
        self._writers = [_last_writers(graph) for graph in graphs]
        self.has_changed = False
        """Whether a part that failed had begun to change tensors in place."""

    # ---- what lies where between steps --------------------------------------------------------------

    def between_steps(self, sub_array: int, location: Location, axis: int | None = 0) -> Tensor:
        """A static value where it is between steps, on the device or the host.

        Of several branches it is that of all of them, side by side along ``axis``, of which each has one row;
        along a new first axis where it is ``None``.
        """
        key = (sub_array, location.tensor)
        if key in self._statics:
            first = location.look(self._device_bytes(key, self._statics[key]))
            return self._of_all(sub_array, first, self._branch_bytes, axis)
        if key in self.memory.host_offsets:
            first = location.look(self._host_bytes(key))
            return self._of_all(sub_array, first, self._host_branch_bytes, axis)
        name = self.graphs[sub_array].tensors[location.tensor].name
        raise PlanError(f"expected {name} to be on the device or the host between steps, got neither")

    def _of_all(self, sub_array: int, first: Tensor, apart_bytes: int, axis: int | None) -> Tensor:
        """A value of all of a sub-array's branches, given that of the first."""
        num_branches = len(self._branches[sub_array])
        if num_branches == 1:
            return first
        apart = apart_bytes // first.element_size()
        shape, strides = list(first.shape), list(first.stride())
        if axis is None:
            shape, strides, axis = [1, *shape], [0, *strides], 0
        shape[axis], strides[axis] = num_branches, apart
        return first.as_strided(shape, strides, first.storage_offset())

    def results(self, sub_array: int) -> tuple[Tensor, ...]:
        """Results of the last step of a sub-array; its next step overwrites them."""
        return tuple(result.flatten(0, 1) for result in self._results[sub_array])

    # ---- running -----------------------------------------------------------------------------------

    def run(
        self,
        part: Part,
        before: Mapping[tuple[int, int], Callable[[], None]] | None = None,
        lanes: HostLanes | None = None,
    ) -> None:
        """Enqueue one part, on the current stream and the copy lanes, or on other ``lanes``.

        ``before`` has work for the compute lane that belongs before a node is computed, by (sub-array, rank).
        Where an instruction fails, static tensors are brought to where they are between steps, with the
        values that they have by then.
        """
        lanes = lanes or self._lanes
        self.has_changed = False
        timetable = self._parts[id(part)]
        walk = _Progress(dict(timetable.there), self._aside)
        try:
            with (
                torch.no_grad(),
                deterministic_algorithms(self._deterministic),
                lanes.part(timetable.awaited),
            ):
                self._issue(part, timetable, walk, before or {}, lanes)
        except BaseException:
            is_cuda = self.memory.slab.device.type == "cuda"
            if not (is_cuda and torch.cuda.is_current_stream_capturing()):  # else nothing has run
                self.has_changed = any(
                    isinstance(each, Compute) and self.graphs[each.sub_array].steps[each.node].changes
                    for each in part.instructions[: walk.position + 1]
                )
                self._bring_back(walk)
            raise

    def _issue(
        self,
        part: Part,
        timetable: _Timetable,
        walk: _Progress,
        before: Mapping[tuple[int, int], Callable[[], None]],
        lanes: HostLanes,
    ) -> None:
        """One instruction after another, in issue order."""
        for position, instruction in enumerate(part.instructions):
            walk.position = position
            taken = timetable.takes.get(position, {})
            lane = Lane.COMPUTE
            match instruction:
                case Compute(sub_array, node):
                    walk.where.update(taken)
                    stays = timetable.hands_over.get(position, frozenset())
                    if (sub_array, node) in before:
                        with lanes.together():
                            before[sub_array, node]()
                    with lanes.on(lane, position):
                        for branch in self._branches[sub_array]:
                            with lanes.branch(branch):
                                self._compute(walk, sub_array, node, branch, stays)
                case Recompute(sub_array, node, keeps):
                    created = {t: taken[sub_array, t] for t in self.graphs[sub_array].steps[node].creates}
                    with lanes.on(lane, position):
                        for branch in self._branches[sub_array]:
                            with lanes.branch(branch):
                                self._run_node(walk, sub_array, node, created, branch)
                    walk.where.update({(sub_array, tensor): created[tensor] for tensor in keeps})
                case Offload(sub_array, tensor):
                    lane, key = Lane.OUT, (sub_array, tensor)
                    with lanes.on(lane, position):
                        for branch in self._branches[sub_array]:
                            source = self._device_bytes(key, walk.where[key], branch)
                            self._host_bytes(key, branch).copy_(source, non_blocking=True)
                case Prefetch(sub_array, tensor):
                    lane, key = Lane.IN, (sub_array, tensor)
                    with lanes.on(lane, position):
                        for branch in self._branches[sub_array]:
                            target = self._device_bytes(key, taken[key], branch)
                            target.copy_(self._host_bytes(key, branch), non_blocking=True)
                    walk.where.update(taken)
                case Free(sub_array, tensor):
                    offset = walk.where.pop((sub_array, tensor))
                    for branch in self._branches[sub_array] if self._poisons else ():
                        with lanes.branch(branch):
                            self._device_bytes((sub_array, tensor), offset, branch).fill_(0xFF)
                case Wait(lane, on):
                    lanes.wait(lane, on)
            lanes.issued(lane, position)

    def _compute(
        self, walk: _Progress, sub_array: int, rank: int, branch: int, stays: frozenset[int]
    ) -> None:
        step = self.graphs[sub_array].steps[rank]
        created = {t: walk.where[sub_array, t] for t in step.creates}
        self._run_node(walk, sub_array, rank, created, branch, stays)
        for tensor in step.reads:
            walk.handed.pop(((sub_array, tensor), branch), None)
        for position in self._writers[sub_array].get(rank, ()):
            location = self.graphs[sub_array].outputs[position]
            value = self._look(walk, sub_array, location, branch)
            self._results[sub_array][position][branch].copy_(value)

    def _run_node(
        self,
        walk: _Progress,
        sub_array: int,
        rank: int,
        created: Mapping[int, int],
        branch: int,
        stays: frozenset[int] = frozenset(),
    ) -> None:
        """Run a node with what it creates at the offsets ``created``; results in ``stays`` may stay where the
        operator has put them."""
        graph = self.graphs[sub_array]
        step = graph.steps[rank]
        node = step.node

        def value(source: fx.Node) -> Any:
            aside = iter(walk.aside.get((sub_array, branch, source), ()))

            def real(item: Any) -> Any:
                if not isinstance(item, Location):
                    return item
                if item.device != self.memory.slab.device:
                    return next(aside)
                return self._look(walk, sub_array, item, branch)

            return pytree.tree_map(real, graph.values[source])

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
        target: Any = self._modules[sub_array][str(node.target)] if node.op == "call_module" else node.target
        places: list[Place | None] = []
        for location in self._places_of[sub_array][rank]:
            if location.tensor not in created or location.device != self.memory.slab.device:
                places.append(None)
                continue
            memory = self._device_bytes((sub_array, location.tensor), created[location.tensor], branch)
            kind = PassingPlace if location.tensor in stays else Place
            places.append(kind(memory, location.look(memory)))
        results = run_into(target, args, kwargs, places)
        for number, place, result in zip(step.results, places, results, strict=True):
            if isinstance(place, PassingPlace) and result is not place.value:
                size = graph.tensors[number].size_bytes
                walk.handed[(sub_array, number), branch] = storage_bytes(result.untyped_storage())[:size]
        self._keep_aside(walk, sub_array, branch, node, results)

    def _keep_aside(
        self, walk: _Progress, sub_array: int, branch: int, node: fx.Node, results: Sequence[Tensor]
    ) -> None:
        """Values on another device than the slab's stay what the operator returned."""
        other = [result for result in results if result.device != self.memory.slab.device]
        if not other:
            return
        walk.aside[sub_array, branch, node] = other
        for user in node.users:  # parts of the tuple
            if user in self.graphs[sub_array].values and user.op == "call_function" and len(user.args) == 2:
                location = self.graphs[sub_array].values[user]
                if isinstance(location, Location) and location.device != self.memory.slab.device:
                    numbers = [item.tensor for item in locations_of(self.graphs[sub_array].values[node])]
                    walk.aside[sub_array, branch, user] = [results[numbers.index(location.tensor)]]

    def _bring_back(self, walk: _Progress) -> None:
        """Static tensors to their places between steps, from wherever a broken walk has left them.

        A tensor that is on the device has its latest values there, one that is not has them on the host.
        """
        device = self.memory.slab.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        moved = []
        for key in self._swapped_statics:
            home, now = self._statics.get(key), walk.where.get(key)
            for branch in self._branches[key[0]] if now != home else ():
                on_host = self._host_bytes(key, branch)
                source = on_host if now is None else self._device_bytes(key, now, branch)
                target = on_host if home is None else self._device_bytes(key, home, branch)
                moved.append((target, source.to("cpu", copy=True)))
        for target, value in moved:
            target.copy_(value)

    # ---- memory ------------------------------------------------------------------------------------

    def _look(self, walk: _Progress, sub_array: int, location: Location, branch: int) -> Tensor:
        key = (sub_array, location.tensor)
        handed = walk.handed.get((key, branch))
        memory = self._device_bytes(key, walk.where[key], branch) if handed is None else handed
        return location.look(memory)

    def _device_bytes(self, key: Key, offset: int, branch: int = 0) -> Tensor:
        """A tensor of one branch, in the branch's share of the slab: as far into it as all are into all."""
        begin = branch * self._branch_bytes + offset // self._num_branches
        return self.memory.at(begin, self.graphs[key[0]].tensors[key[1]].size_bytes)

    def _host_bytes(self, key: Key, branch: int = 0) -> Tensor:
        offset = branch * self._host_branch_bytes + self.memory.host_offsets[key]
        return self.memory.host[offset : offset + self.graphs[key[0]].tensors[key[1]].size_bytes]

    def _static_offsets(self) -> dict[Key, int]:
        """Offsets of the static tensors that are on the device before the first step and after the last."""
        first = self.program.prologue if self.program.prologue.instructions else self.program.body
        there = self._parts[id(first)].there
        return {key: there[key] for key in self.program.resident}

    def _find_swapped_statics(self) -> tuple[Key, ...]:
        """Static tensors that are not always where they are between steps."""
        found = [
            (sub_array, location.tensor)
            for sub_array, graph in enumerate(self.graphs)
            for location in (*graph.inputs, *graph.constants.values())
        ]
        return tuple(key for key in dict.fromkeys(found) if key in self.memory.host_offsets)


class _Timetable:
    """Lookup tables of one part: tensors there when it begins, offsets taken by each instruction, waits.

    ``hands_over`` has, by position, which of what nodes may hand over, as ``handed`` says of each sub-array,
    they do: where only recomputed nodes of the same sub-array come before the one that it is for.
    """

    def __init__(
        self, part: Part, handed: Sequence[Mapping[int, frozenset[int]]], num_branches: int = 1
    ) -> None:
        self.there: dict[Key, int] = {}
        self.takes: dict[int, dict[Key, int]] = {}
        for tenancy in part.tenancies:
            if tenancy.tensor < 0:
                continue
            key = (tenancy.sub_array, tenancy.tensor)
            if tenancy.offset % (num_branches * ALIGNMENT):
                raise PlanError(
                    f"expected tensors at multiples of {ALIGNMENT} bytes on each of {num_branches} branches, "
                    f"got {key} at {tenancy.offset}; plan again"
                )
            taken = self.there if tenancy.begin < 0 else self.takes.setdefault(tenancy.begin, {})
            taken[key] = tenancy.offset
        self.awaited = frozenset(i.on for i in part.instructions if isinstance(i, Wait))
        self.hands_over = _hand_overs(part, handed)


def _hand_overs(part: Part, handed: Sequence[Mapping[int, frozenset[int]]]) -> dict[int, frozenset[int]]:
    """By position of a node: the tensors that it hands over to the next node in this part."""
    found: dict[int, frozenset[int]] = {}
    position, owner, expected = -1, -1, -1  # of the node before, and the rank that comes next
    for number, instruction in enumerate(part.instructions):
        if isinstance(instruction, Compute):
            if (instruction.sub_array, instruction.node) == (owner, expected):
                found[position] = handed[owner].get(expected - 1, frozenset())
            position, owner, expected = number, instruction.sub_array, instruction.node + 1
        elif isinstance(instruction, Recompute):
            owner = owner if instruction.sub_array == owner else -1
        elif isinstance(instruction, Offload | Free) and instruction.sub_array == owner:
            owner = -1 if instruction.tensor in handed[owner].get(expected - 1, ()) else owner
    return found


def _rows_of(memory: Tensor, num_branches: int) -> int:
    """Distance between the branches' shares of a slab, in bytes."""
    return memory.numel() // (num_branches * ALIGNMENT) * ALIGNMENT if num_branches > 1 else 0


def _last_writers(graph: KernelGraph) -> dict[int, list[int]]:
    """By rank: the results of the step, by position, whose storage is last written by this node."""
    last: dict[int, int] = {}
    for rank, step in enumerate(graph.steps):
        last.update(dict.fromkeys((*step.creates, *step.changes), rank))
    found: dict[int, list[int]] = {}
    for position, location in enumerate(graph.outputs):
        rank = last.get(location.tensor, len(graph.steps) - 1)  # an argument that is returned
        found.setdefault(rank, []).append(position)
    return found
