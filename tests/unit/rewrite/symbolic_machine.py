"""A machine that runs a program on symbolic values, byte for byte, with the lanes racing.

Values are hashes of (node, values read). The device is a row of blocks that remember what was written last:
whoever writes to bytes in use destroys them here, too. Lanes run their own instructions in order, and
nothing but waits holds them back: which lane goes on next is drawn by lot. A program that lacks a wait gives
wrong values in some of these races.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Instruction,
    Lane,
    Offload,
    Part,
    Phase,
    Prefetch,
    Profile,
    Program,
    Recompute,
    Tenancy,
    Wait,
)

BLOCK = 512
Key = tuple[int, int]


@dataclass(frozen=True)
class PlainRun:
    """What steps without any plan read and leave: ``inputs`` by (sub-array, node, step)."""

    inputs: dict[tuple[int, int, int], tuple[int, ...]]
    results: dict[tuple[int, int, int], int]
    static: dict[tuple[int, int, int], int]


def run_plainly(profiles: Sequence[Profile], num_steps: int) -> PlainRun:
    """Run every sub-array's nodes in rank order; static values are those after each number of steps."""
    plain = PlainRun({}, {}, {})
    for s, profile in enumerate(profiles):
        values = {
            tensor: hash(("at first", s, tensor))
            for tensor, facts in enumerate(profile.tensors)
            if facts.byte_class.is_static
        }
        for step in range(num_steps + 1):
            for tensor, facts in enumerate(profile.tensors):
                if facts.byte_class.is_static:
                    plain.static[s, tensor, step] = values[tensor]
            for rank, node in enumerate(profile.nodes):
                read = tuple(values[tensor] for tensor in (*node.reads, *node.changes))
                plain.inputs[s, rank, step] = read
                for tensor in (*node.creates, *node.changes):
                    values[tensor] = output_value(s, rank, tensor, read)
            for tensor, facts in enumerate(profile.tensors):
                if facts.byte_class is ByteClass.RESULT:
                    plain.results[s, tensor, step] = values[tensor]
    return plain


def output_value(sub_array: int, rank: int, tensor: int, read: Iterable[int]) -> int:
    return hash((sub_array, rank, tensor, *read))


class Machine:
    """Runs parts one after another and compares what every node reads with the plain run."""

    def __init__(self, program: Program, profiles: Sequence[Profile], rng: random.Random) -> None:
        self._program = program
        self._profiles = profiles
        self._rng = rng
        self._plain = run_plainly(profiles, num_steps=5)
        self._blocks: dict[int, object] = {}
        self._host: dict[Key, int] = {}
        self._steps = [0] * len(profiles)
        self.num_compared = 0
        resident = set(program.resident)
        at_first = {(t.sub_array, t.tensor): t for t in program.prologue.tenancies if t.begin == -1}
        assert set(at_first) == resident
        for s, profile in enumerate(profiles):
            for tensor, facts in enumerate(profile.tensors):
                if facts.byte_class.is_static:
                    value = self._plain.static[s, tensor, 0]
                    if (s, tensor) in resident:
                        self._write(at_first[s, tensor], value)
                    else:
                        self._host[s, tensor] = value

    def run(self, num_passes: int) -> None:
        """The whole program with so many passes through the body, and the state it must leave."""
        is_ring = bool(self._program.prologue.instructions)
        self._run_part(self._program.prologue)
        for _ in range(num_passes):
            self._run_part(self._program.body)
            self._check_results()
        self._run_part(self._program.epilogue)
        at_last = {
            (t.sub_array, t.tensor): t
            for t in self._program.epilogue.tenancies
            if t.end == len(self._program.epilogue.instructions)
        }
        assert set(at_last) == set(self._program.resident)
        for s, profile in enumerate(self._profiles):
            num_steps = num_passes + (1 if is_ring and s == 0 else 0)
            for tensor, facts in enumerate(profile.tensors):
                if facts.byte_class.is_static:
                    expected = self._plain.static[s, tensor, num_steps]
                    if (s, tensor) in at_last:
                        assert self._read(at_last[s, tensor], expected) == expected
                    elif facts.size_bytes:  # nothing is copied where there are no bytes
                        assert self._host[s, tensor] == expected

    def _run_part(self, part: Part) -> None:
        """All instructions, the lanes' turns drawn by lot, each as far as its waits allow."""
        queues: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        for position, instruction in enumerate(part.instructions):
            queues[lane_of(instruction)].append(position)
        tenancies: dict[Key, list[Tenancy]] = {}
        for tenancy in part.tenancies:
            tenancies.setdefault((tenancy.sub_array, tenancy.tensor), []).append(tenancy)
        self._tenancies = tenancies
        ended = [False] * len(part.instructions)
        favourite = self._rng.choice(list(Lane))
        while any(queues.values()):
            ready = []
            for lane, queue in queues.items():
                if queue:
                    head = part.instructions[queue[0]]
                    if not isinstance(head, Wait) or ended[head.on]:
                        ready.append(lane)
            assert ready, "the lanes wait for one another for ever"
            lane = favourite if favourite in ready and self._rng.random() < 0.7 else self._rng.choice(ready)
            if self._rng.random() < 0.1:
                favourite = self._rng.choice(list(Lane))
            position = queues[lane].pop(0)
            self._execute(position, part.instructions[position])
            ended[position] = True

    def _execute(self, position: int, instruction: Instruction) -> None:
        if isinstance(instruction, Compute | Recompute):
            self._node(position, instruction)
        elif isinstance(instruction, Offload):
            key = (instruction.sub_array, instruction.tensor)
            self._host[key] = self._read(self._held(key, position))
        elif isinstance(instruction, Prefetch):
            key = (instruction.sub_array, instruction.tensor)
            assert key in self._host, "fetched before it was ever copied out"
            self._write(self._taken(key, position), self._host[key])

    def _node(self, position: int, instruction: Compute | Recompute) -> None:
        s, rank = instruction.sub_array, instruction.node
        node = self._profiles[s].nodes[rank]
        step = self._steps[s]
        expected = self._plain.inputs[s, rank, step]
        read = tuple(
            self._read(self._held((s, tensor), position), value)
            for tensor, value in zip((*node.reads, *node.changes), expected, strict=True)
        )
        assert read == expected, f"{node.name} of sub-array {s}, step {step}, at {position}"
        self.num_compared += 1
        for tensor in self._tenancies.get((s, -1), ()):
            if tensor.begin == position:
                self._write(tensor, hash(("workspace", position)))
        for tensor in node.changes:
            self._write(self._held((s, tensor), position), output_value(s, rank, tensor, read))
        for tensor in node.creates:
            self._write(self._taken((s, tensor), position), output_value(s, rank, tensor, read))
        if isinstance(instruction, Compute) and rank == len(self._profiles[s].nodes) - 1:
            self._steps[s] += 1

    def _check_results(self) -> None:
        """What a step hands over can be read when the pass in which it ended is over."""
        for s, profile in enumerate(self._profiles):
            for tensor, facts in enumerate(profile.tensors):
                if facts.byte_class is ByteClass.RESULT and (s, tensor) in self._tenancies:
                    last = self._tenancies[s, tensor][-1]
                    maker = next(n for n in profile.nodes if tensor in n.creates)
                    is_ahead = s == 0 and bool(self._program.prologue.instructions)
                    ahead = is_ahead and maker.phase is Phase.FORWARD
                    expected = self._plain.results[s, tensor, self._steps[s] - (0 if ahead else 1)]
                    assert self._read(last, expected) == expected

    def _held(self, key: Key, position: int) -> Tenancy:
        """The tenancy of a tensor that is there already at a position."""
        return next(t for t in self._tenancies[key] if t.begin < position < t.end)

    def _taken(self, key: Key, position: int) -> Tenancy:
        """The tenancy that a position begins."""
        return next(t for t in self._tenancies[key] if t.begin == position)

    def _write(self, tenancy: Tenancy, value: int) -> None:
        for i in range(-(-tenancy.size_bytes // BLOCK)):
            self._blocks[tenancy.offset // BLOCK + i] = (value, i)

    def _read(self, tenancy: Tenancy, if_empty: int = 0) -> int:
        """The value at a place; one that nobody has if parts of it were overwritten."""
        found = [
            self._blocks.get(tenancy.offset // BLOCK + i) for i in range(-(-tenancy.size_bytes // BLOCK))
        ]
        if not found:
            return if_empty
        first = found[0]
        assert isinstance(first, tuple)
        value = first[0]
        assert isinstance(value, int)
        if found != [(value, i) for i in range(len(found))]:
            return hash(("destroyed", repr(found)))
        return value


def lane_of(instruction: Instruction) -> Lane:
    if isinstance(instruction, Wait):
        return instruction.lane
    if isinstance(instruction, Offload):
        return Lane.OUT
    if isinstance(instruction, Prefetch):
        return Lane.IN
    assert isinstance(instruction, Compute | Recompute | Free)
    return Lane.COMPUTE
