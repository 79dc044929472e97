"""A slow machine that runs a program with symbols for values, and finds whatever two lanes race for.

It shares nothing with the verifier: no versions, no vector clocks, no rules. Bytes are bytes, each holding
the last value written there; the order of instructions is a graph whose paths are followed; every pair of
instructions that touch the same bytes is tried. A program without a race has one outcome, which is compared
with the outcome of the steps run plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mutants import lane_of

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
)

Value = object
Key = tuple[int, int]
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


@dataclass(frozen=True)
class _Access:
    """Bytes that an instruction touches: of the slab, or, where ``host`` says so, of a tensor's host place.

    ``tenant`` is the tensor and the position at which it took these bytes.
    """

    host: Key | None
    start: int
    end: int
    writes: bool
    tenant: tuple[Key, int]

    def conflicts(self, other: _Access) -> bool:
        meets = self.host == other.host and self.start < other.end and other.start < self.end
        return meets and (self.writes or other.writes)


def _touch(tenancy: Tenancy, *, writes: bool) -> _Access:
    tenant = ((tenancy.sub_array, tenancy.tensor), tenancy.begin)
    return _Access(None, tenancy.offset, tenancy.offset + tenancy.size_bytes, writes, tenant)


def _touch_host(key: Key, *, writes: bool) -> _Access:
    return _Access(key, 0, 1, writes, (key, -1))


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
        self._slab: list[Value] = [None] * program.slab_bytes
        self._host: dict[Key, Value] = {}
        self._num_steps = [0] * len(profiles)
        self._rank = [0] * len(profiles)
        self._plain = [_PlainSteps(number, profile) for number, profile in enumerate(profiles)]
        begins = _at(program.prologue, -1)
        for sub_array, profile in enumerate(profiles):
            for number, tensor in enumerate(profile.tensors):
                key = (sub_array, number)
                if tensor.byte_class.is_static and key in program.resident:
                    self._write(begins[key], ("before", *key))
                elif tensor.byte_class.is_static:
                    self._host[key] = ("before", *key)

    def _write(self, tenancy: Tenancy, value: Value) -> None:
        self._slab[tenancy.offset : tenancy.offset + tenancy.size_bytes] = [value] * tenancy.size_bytes

    def _read(self, tenancy: Tenancy) -> Value:
        values = set(self._slab[tenancy.offset : tenancy.offset + tenancy.size_bytes])
        if len(values) != 1:
            raise FaultError(f"{tenancy} holds pieces of {len(values)} values")
        return values.pop()

    def run(self, part: Part) -> None:
        """Run one part in issue order; raises `FaultError` for a race and for whatever has no meaning."""
        ended = _ended_before(part.instructions)
        seen: list[tuple[int, _Access]] = []
        there = _at(part, -1)
        for position, instruction in enumerate(part.instructions):
            own = _at(part, position)
            there |= {key: tenancy for key, tenancy in own.items() if tenancy.end > position}
            accesses = self._carry_out(instruction, there, own)
            for access in accesses:
                for earlier, other in seen:
                    # A Free touches nothing: it only has to come after all that its tensor is used for.
                    if isinstance(instruction, Free) and other.tenant != access.tenant:
                        continue
                    if access.conflicts(other) and not ended[position] >> earlier & 1:
                        raise FaultError(f"[{earlier}] and [{position}] race for {access}")
            if isinstance(instruction, Free):
                del there[instruction.sub_array, instruction.tensor]
            else:
                seen += [(position, access) for access in accesses]

    def check_end(self, program: Program, num_steps: int) -> None:
        """After the epilogue: as many steps as there should be, and every static tensor where it belongs."""
        last = len(program.epilogue.instructions)
        left = {
            (tenancy.sub_array, tenancy.tensor): tenancy
            for tenancy in program.epilogue.tenancies
            if tenancy.end == last and tenancy.begin < last
        }
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
                value = self._read(left[key]) if key in program.resident else self._host.get(key)
                before = ("before", *key)
                if value != (self._plain[sub_array].after[expected - 1][number] if expected else before):
                    raise FaultError(f"{tensor.name} of sub-array {sub_array} has another value at the end")

    def _carry_out(
        self, instruction: Instruction, there: dict[Key, Tenancy], own: dict[Key, Tenancy]
    ) -> list[_Access]:
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
            return [_touch(tenancy, writes=False), _touch_host(key, writes=True)]
        if isinstance(instruction, Free):
            return [_touch(tenancy, writes=True)]
        if key not in self._host:
            raise FaultError(f"nothing on the host for {instruction}")
        self._write(tenancy, self._host[key])
        return [_touch(tenancy, writes=True), _touch_host(key, writes=False)]

    def _compute(
        self, sub_array: int, rank: int, there: dict[Key, Tenancy], own: dict[Key, Tenancy]
    ) -> list[_Access]:
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
                if (
                    self._read(_find(there, (sub_array, number)))
                    != self._plain[sub_array].after[step][number]
                ):
                    raise FaultError(f"result {tensor.name} of sub-array {sub_array} is wrong")
        return accesses

    def _run_node(
        self, sub_array: int, rank: int, step: int, there: dict[Key, Tenancy], own: dict[Key, Tenancy]
    ) -> list[_Access]:
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
        written = (*made, *changed, *scratch)
        return [_touch(each, writes=False) for each in read] + [_touch(each, writes=True) for each in written]


def _at(part: Part, position: int) -> dict[Key, Tenancy]:
    """The tenancies that begin at a position."""
    return {(each.sub_array, each.tensor): each for each in part.tenancies if each.begin == position}


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
