"""Runs a program on symbolic values and finds every race between lanes: the oracle for verifier and planners.

It shares nothing with the verifier: no versions, no vector clocks, no rules. The slab is cut where any tensor
begins or ends, and each piece holds the last value written to it; the order of instructions is a graph whose
paths are followed; every pair of instructions that touch a piece is tried. A program without a race has one
outcome, which is compared with that of the steps run without a plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Instruction,
    Lane,
    Offload,
    Part,
    Profile,
    Program,
    Recompute,
    Tenancy,
    Wait,
    lane_of,
)

Value = object
Key = tuple[int, int]
Access = tuple[Tenancy | Key, bool]
"""A place that an instruction touches (a tenancy in the slab, or a tensor's copy on the host), and whether it
writes there."""
NUM_STEPS = 3


class FaultError(Exception):
    """The program does something that has no meaning, or gets another value than the plain step."""


def fault(program: Program, profiles: Sequence[Profile]) -> str:
    """What goes wrong with no, one or two passes through the body; empty if nothing does."""
    for passes in range(NUM_STEPS):
        machine = _Machine(program, profiles)
        try:
            for part in (program.prologue, *[program.body] * passes, program.epilogue):
                machine.run(part)
            machine.check_end(program, passes + bool(program.prologue.instructions))
        except FaultError as error:
            return f"{passes} passes: {error}"
    return ""


def _outputs(profile: Profile, rank: int, inputs: tuple[Value, ...]) -> dict[int, Value]:
    """What a node makes of its inputs: a hash stands for the value, so that programs can be long."""
    node = profile.nodes[rank]
    return {number: hash((rank, number, inputs)) for number in (*node.creates, *node.changes)}


class _PlainSteps:
    """One sub-array's steps without a plan: what each node reads in each, and what is there after each."""

    def __init__(self, sub_array: int, profile: Profile) -> None:
        values: dict[int, Value] = {
            number: ("before", sub_array, number)
            for number, tensor in enumerate(profile.tensors)
            if tensor.byte_class.is_static
        }
        self.inputs: dict[tuple[int, int], tuple[Value, ...]] = {}
        self.after: list[dict[int, Value]] = []
        for step in range(NUM_STEPS):
            for rank, node in enumerate(profile.nodes):
                inputs = tuple(values[number] for number in (*node.reads, *node.changes))
                self.inputs[step, rank] = inputs
                values.update(_outputs(profile, rank, inputs))
            self.after.append(dict(values))


class _Machine:
    """The slab and the host, from before the first step on."""

    def __init__(self, program: Program, profiles: Sequence[Profile]) -> None:
        self._profiles = profiles
        tenancies = [
            each for part in (program.prologue, program.body, program.epilogue) for each in part.tenancies
        ]
        self._cuts = sorted(
            {cut for each in tenancies for cut in (each.offset, each.offset + each.size_bytes)}
        )
        self._slab: list[Value] = [None] * len(self._cuts)
        self._empty: dict[Key, Value] = {}  # of tensors without bytes
        self._host: dict[Key, Value] = {}
        self._num_steps = [0] * len(profiles)
        self._rank = [0] * len(profiles)
        self._plain = [_PlainSteps(number, profile) for number, profile in enumerate(profiles)]
        begins = _by_begin(program.prologue).get(-1, {})
        for sub_array, profile in enumerate(profiles):
            for number, tensor in enumerate(profile.tensors):
                key = (sub_array, number)
                if tensor.byte_class.is_static and key in program.resident:
                    self._write(begins[key], ("before", *key))
                elif tensor.byte_class.is_static:
                    self._host[key] = ("before", *key)

    def _pieces(self, tenancy: Tenancy) -> range:
        start, end = tenancy.offset, tenancy.offset + tenancy.size_bytes
        return range(bisect_left(self._cuts, start), bisect_left(self._cuts, end))

    def _write(self, tenancy: Tenancy, value: Value) -> None:
        if not tenancy.size_bytes:
            self._empty[tenancy.sub_array, tenancy.tensor] = value
        for piece in self._pieces(tenancy):
            self._slab[piece] = value

    def _read(self, tenancy: Tenancy) -> Value:
        if not tenancy.size_bytes:
            return self._empty.get((tenancy.sub_array, tenancy.tensor))
        values = {self._slab[piece] for piece in self._pieces(tenancy)}
        if len(values) != 1:
            raise FaultError(f"{tenancy} holds pieces of {len(values)} values")
        return values.pop()

    def run(self, part: Part) -> None:
        """Run one part in issue order; raises `FaultError` for a race and for whatever has no meaning."""
        ended = _ended_before(part.instructions)
        seen: dict[object, list[tuple[int, Tenancy | Key, bool]]] = {}
        began = _by_begin(part)
        there = dict(began.get(-1, {}))
        for position, instruction in enumerate(part.instructions):
            own = began.get(position, {})
            there |= {key: tenancy for key, tenancy in own.items() if tenancy.end > position}
            for place, writes in self._carry_out(instruction, there, own):
                for piece in self._pieces(place) if isinstance(place, Tenancy) else [place]:
                    before = seen.setdefault(piece, [])
                    for earlier, other, wrote in before:
                        # A Free touches nothing: it only has to come after all that its tensor is used for.
                        if isinstance(instruction, Free) and other != place:
                            continue
                        is_conflict = earlier != position and (writes or wrote)
                        if is_conflict and not ended[position] >> earlier & 1:
                            raise FaultError(f"[{earlier}] and [{position}] race for {place}")
                    if not isinstance(instruction, Free):
                        before.append((position, place, writes))
            if isinstance(instruction, Free):
                del there[instruction.sub_array, instruction.tensor]

    def check_end(self, program: Program, num_steps: int) -> None:
        """After the epilogue: as many steps as there should be, and every static tensor where it belongs."""
        last = len(program.epilogue.instructions)
        tenancies = [one for one in program.epilogue.tenancies if one.end == last and one.begin < last]
        left = {(one.sub_array, one.tensor): one for one in tenancies}
        for sub_array, profile in enumerate(self._profiles):
            # Only the first sub-array of a ring has a step in flight between two passes.
            expected = num_steps if sub_array == 0 else num_steps - bool(program.prologue.instructions)
            if self._num_steps[sub_array] != expected or self._rank[sub_array]:
                raise FaultError(f"sub-array {sub_array} made {self._num_steps[sub_array]} steps")
            for number, tensor in enumerate(profile.tensors):
                key = (sub_array, number)
                if not tensor.byte_class.is_static:
                    continue
                if key in program.resident and key not in left:
                    raise FaultError(f"{tensor.name} is not there at the end")
                if not tensor.size_bytes:  # nothing is copied where there are no bytes
                    continue
                value = self._read(left[key]) if key in program.resident else self._host.get(key)
                before = ("before", *key)
                if value != (self._plain[sub_array].after[expected - 1][number] if expected else before):
                    raise FaultError(f"{tensor.name} of sub-array {sub_array} has another value at the end")

    def _carry_out(
        self, instruction: Instruction, there: dict[Key, Tenancy], own: dict[Key, Tenancy]
    ) -> list[Access]:
        """Do it at once; returns what it touches."""
        match instruction:
            case Compute(sub_array, rank):
                return self._compute(sub_array, rank, there, own)
            case Recompute(sub_array, rank, _):
                begun = self._num_steps[sub_array] - (self._rank[sub_array] == 0)
                return self._run_node(sub_array, rank, begun, there, own)
            case Wait():
                return []
        key = (instruction.sub_array, instruction.tensor)
        tenancy = _find(there, key)
        if isinstance(instruction, Offload):
            self._host[key] = self._read(tenancy)
            return [(tenancy, False), (key, True)]
        if isinstance(instruction, Free):
            return [(tenancy, True)]
        if key not in self._host:
            raise FaultError(f"nothing on the host for {instruction}")
        self._write(tenancy, self._host[key])
        return [(tenancy, True), (key, False)]

    def _compute(
        self, sub_array: int, rank: int, there: dict[Key, Tenancy], own: dict[Key, Tenancy]
    ) -> list[Access]:
        if rank != self._rank[sub_array]:
            raise FaultError(f"node {rank} runs where {self._rank[sub_array]} is next")
        step = self._num_steps[sub_array]
        accesses = self._run_node(sub_array, rank, step, there, own)
        self._rank[sub_array] += 1
        profile = self._profiles[sub_array]
        if self._rank[sub_array] == len(profile.nodes):
            self._rank[sub_array] = 0
            self._num_steps[sub_array] += 1
            for number, tensor in enumerate(profile.tensors):
                if tensor.byte_class is not ByteClass.RESULT:
                    continue
                value = self._read(_find(there, (sub_array, number)))
                if value != self._plain[sub_array].after[step][number]:
                    raise FaultError(f"result {tensor.name} of sub-array {sub_array} is wrong")
        return accesses

    def _run_node(
        self, sub_array: int, rank: int, step: int, there: dict[Key, Tenancy], own: dict[Key, Tenancy]
    ) -> list[Access]:
        profile = self._profiles[sub_array]
        node = profile.nodes[rank]
        read = [_find(there, (sub_array, number)) for number in node.reads]
        changed = [_find(there, (sub_array, number)) for number in node.changes]
        inputs = tuple(self._read(tenancy) for tenancy in (*read, *changed))
        if inputs != self._plain[sub_array].inputs.get((step, rank)):
            raise FaultError(f"node {rank} of sub-array {sub_array} reads other values than in step {step}")
        scratch = [_find(own, (sub_array, -1))] if node.workspace_bytes else []
        made = [own.get((sub_array, number)) or _find(there, (sub_array, number)) for number in node.creates]
        values = _outputs(profile, rank, inputs)
        for tenancy in scratch:
            self._write(tenancy, "scratch")
        for tenancy in (*made, *changed):
            self._write(tenancy, values[tenancy.tensor])
        return [(each, False) for each in read] + [(each, True) for each in (*made, *changed, *scratch)]


def _by_begin(part: Part) -> dict[int, dict[Key, Tenancy]]:
    """The tenancies that begin at each position."""
    found: dict[int, dict[Key, Tenancy]] = {}
    for each in part.tenancies:
        found.setdefault(each.begin, {})[each.sub_array, each.tensor] = each
    return found


def _find(there: dict[Key, Tenancy], key: Key) -> Tenancy:
    if key not in there:
        raise FaultError(f"tensor {key} is not there")
    return there[key]


def _ended_before(instructions: Sequence[Instruction]) -> list[int]:
    """For each instruction the set, as bits, of those that have ended when it begins."""
    ended: list[int] = []
    last: dict[Lane, int] = {}
    for position, instruction in enumerate(instructions):
        before = 0
        predecessors = [last[lane_of(instruction)]] if lane_of(instruction) in last else []
        if isinstance(instruction, Wait):
            if instruction.on >= position:
                raise FaultError(f"[{position}] waits for what comes later")
            predecessors.append(instruction.on)
        for predecessor in predecessors:
            before |= ended[predecessor] | 1 << predecessor
        ended.append(before)
        last[lane_of(instruction)] = position
    return ended
