"""Random training steps, and random right programs for them: what is swapped, recomputed, when, in which mix.

Nothing here plans well. Each tensor has a fate, each node gets what it needs just in time or somewhat
earlier, and every wait is written that could be needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from random import Random

from ir_programs import Tape, placed, statics
from mutants import PARTS, rebuilt, rows_of, with_part
from tests.random_steps import Shape, random_profile

from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Instruction,
    Lane,
    Multiplexing,
    Offload,
    Part,
    Phase,
    Prefetch,
    Profile,
    Program,
    Recompute,
    Wait,
)

Key = tuple[int, int]


class Fate(Enum):
    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


def random_step(random: Random, num_layers: int) -> Profile:
    shape = Shape(num_layers, skip=0.4, buffer=0.3, second_output=0.4, unrepeatable=0.2, workspace=0.5)
    return random_profile(random.randrange(2**32), shape=shape)


class _Writer:
    """Writes the parts of one program: keeps what is on the device, on the host, and what is needed when."""

    def __init__(self, random: Random, profiles: Sequence[Profile]) -> None:
        self._random = random
        self._profiles = profiles
        self._tape = Tape()
        self._fates: dict[Key, Fate] = {}
        self._last_forward: dict[Key, int] = {}
        self._last: dict[Key, int] = {}
        self._creator: dict[Key, int] = {}
        for sub_array, of in enumerate(profiles):
            self._read(sub_array, of)
        self._swapped = [
            key
            for key, fate in self._fates.items()
            if fate is Fate.SWAP and profiles[key[0]].tensors[key[1]].byte_class.is_static
        ]
        self._there: set[Key] = set(statics(profiles, self._swapped))
        self._unwaited: set[Key] = set()
        self._fresh_on_host: set[Key] = set(self._swapped)
        self._to_free: list[Key] = []

    @property
    def resident(self) -> list[Key]:
        return statics(self._profiles, self._swapped)

    def _read(self, sub_array: int, of: Profile) -> None:
        for rank, node in enumerate(of.nodes):
            for number in (*node.reads, *node.changes, *node.creates):
                key = (sub_array, number)
                self._last[key] = rank
                if node.phase is Phase.FORWARD:
                    self._last_forward[key] = rank
            for number in node.creates:
                self._creator[sub_array, number] = rank
        for number, each in enumerate(of.tensors):
            key = (sub_array, number)
            choices = [Fate.KEEP]
            if each.byte_class.is_static or each.byte_class is ByteClass.FEATURE_MAP:
                choices.append(Fate.SWAP)
            if each.byte_class is ByteClass.FEATURE_MAP:
                creator = of.nodes[self._creator[key]]
                choices += [Fate.RECOMPUTE] if creator.is_repeatable and not creator.changes else []
            self._fates[key] = self._random.choice(choices)
        # What is recomputed needs its sources for as long as it is needed itself.
        for rank in reversed(range(len(of.nodes))):
            for made in of.nodes[rank].creates:
                if self._fates[sub_array, made] is Fate.RECOMPUTE:
                    for number in of.nodes[rank].reads:
                        source = (sub_array, number)
                        self._last[source] = max(self._last[source], self._last[sub_array, made])

    def part(self, order: Sequence[Key]) -> list[Instruction]:
        """Instructions that compute these nodes in this order, each (sub-array, rank)."""
        self._tape = Tape()
        for position, (sub_array, rank) in enumerate(order):
            self._look_ahead(order[position:])
            node = self._profiles[sub_array].nodes[rank]
            for number in (*node.reads, *node.changes):
                self._bring((sub_array, number))
            for number in node.changes:
                key = (sub_array, number)
                self._tape.wait_for_copy(Lane.COMPUTE, Offload, key)
                self._fresh_on_host.discard(key)
            for number in node.creates:  # still there from the step before
                if (sub_array, number) in self._to_free:
                    self._to_free.remove((sub_array, number))
                    self._free((sub_array, number))
            if rank == 0:  # what was made in the step before is of no use any more, wherever it lies
                of_step = {key for key in self._creator if key[0] == sub_array}
                self._fresh_on_host -= of_step
            self._tape.do(Compute(sub_array, rank))
            for number in node.creates:
                self._there.add((sub_array, number))
            self._sweep(sub_array, rank)
            while self._to_free and self._random.random() < 0.6:
                self._free(self._to_free.pop(self._random.randrange(len(self._to_free))))
        for key in self._to_free:
            self._free(key)
        self._to_free.clear()
        return self._tape.instructions

    def _bring(self, key: Key) -> None:
        """Make sure that the compute lane may read a tensor."""
        if key in self._to_free:
            self._to_free.remove(key)
        if key not in self._there:
            if key in self._fresh_on_host:
                self._prefetch(key)
            else:
                rank = self._creator[key]
                for number in self._profiles[key[0]].nodes[rank].reads:
                    self._bring((key[0], number))
                self._tape.do(Recompute(key[0], rank, (key[1],)))
                self._there.add(key)
        if key in self._unwaited:
            self._tape.wait_for_copy(Lane.COMPUTE, Prefetch, key)
            self._unwaited.discard(key)

    def _prefetch(self, key: Key) -> None:
        self._tape.wait_for_copy(Lane.IN, Offload, key)
        self._tape.wait_for_compute(Lane.IN)
        self._tape.do(Prefetch(*key))
        self._there.add(key)
        self._unwaited.add(key)

    def _look_ahead(self, order: Sequence[Key]) -> None:
        """Now and then fetch something early that one of the next nodes of this part needs."""
        if not order or self._random.random() < 0.5:
            return
        sub_array, rank = order[self._random.randrange(min(4, len(order)))]
        if any(each[0] == sub_array and each[1] == 0 for each in order):
            return  # a new step begins meanwhile
        for number in self._profiles[sub_array].nodes[rank].reads:
            key = (sub_array, number)
            if key in self._fresh_on_host and key not in self._there:
                self._prefetch(key)

    def _sweep(self, sub_array: int, rank: int) -> None:
        """After a node: what is done with, or has its last use before the backward pass behind it, goes."""
        of = self._profiles[sub_array]
        is_forward = of.nodes[rank].phase is Phase.FORWARD
        for key in sorted(key for key in self._there if key[0] == sub_array and key not in self._to_free):
            each = of.tensors[key[1]]
            last = len(of.nodes) - 1 if each.byte_class is ByteClass.RESULT else self._last.get(key, -1)
            fate = self._fates[key]
            is_over = rank >= last
            pauses = is_forward and fate is not Fate.KEEP and rank >= self._last_forward.get(key, -1)
            if each.byte_class.is_static and fate is Fate.KEEP:
                continue
            if not (is_over or pauses):
                continue
            must_return = each.byte_class.is_static or not is_over
            if fate is Fate.SWAP and must_return and key not in self._fresh_on_host:
                self._tape.wait_for_compute(Lane.OUT)
                self._tape.do(Offload(*key))
                self._fresh_on_host.add(key)
            self._to_free.append(key)

    def _free(self, key: Key) -> None:
        self._tape.wait_for_copy(Lane.COMPUTE, Offload, key)
        if key in self._unwaited:
            self._tape.wait_for_copy(Lane.COMPUTE, Prefetch, key)
            self._unwaited.discard(key)
        self._tape.do(Free(*key))
        self._there.discard(key)


def _mixed(random: Random, *passes: Sequence[Key]) -> Iterator[Key]:
    queues = [list(each) for each in passes if each]
    while queues:
        queue = random.choice(queues)
        yield queue.pop(0)
        queues = [each for each in queues if each]


def random_program(random: Random, profiles: Sequence[Profile], multiplexing: Multiplexing) -> Program:
    """A right program: turns, or a ring in which the passes of a stage are mixed at random."""
    forward, backward = [], []
    for sub_array, of in enumerate(profiles):
        keys = [(sub_array, rank) for rank in range(len(of.nodes))]
        num_forward = sum(node.phase is Phase.FORWARD for node in of.nodes)
        forward.append(keys[:num_forward])
        backward.append(keys[num_forward:])
    writer = _Writer(random, profiles)
    if multiplexing is Multiplexing.TURNS:
        order = [key for both in zip(forward, backward, strict=True) for each in both for key in each]
        return placed(profiles, [[], writer.part(order), []], writer.resident)
    body = []
    for number in range(len(profiles)):
        following = (number + 1) % len(profiles)
        if following == number:
            body += [*backward[number], *forward[number]]
        else:
            body += list(_mixed(random, backward[number], forward[following]))
    prologue = writer.part(forward[0])
    parts = [prologue, writer.part(body), writer.part(backward[0])]
    return placed(profiles, parts, writer.resident)


def random_edit(random: Random, program: Program) -> Program:
    """The program with one instruction dropped or moved, one wait for another, or one tensor elsewhere."""
    name = random.choice([name for name in PARTS if getattr(program, name).instructions])
    part: Part = getattr(program, name)
    rows = rows_of(part)
    at = random.randrange(len(rows))
    waits = [number for number, (_, instruction) in enumerate(rows) if isinstance(instruction, Wait)]
    match random.choice(["drop", "move", "wait", "place"]):
        case "drop":
            del rows[at]
        case "move":
            row = rows.pop(at)
            rows.insert(max(0, min(len(rows), at + random.choice([-3, -2, -1, 1, 2, 3]))), row)
        case "wait" if waits:
            number = random.choice(waits)
            old, wait = rows[number]
            assert isinstance(wait, Wait)
            rows[number] = (old, replace(wait, on=max(0, wait.on - random.randint(1, 3))))
        case _:
            tenancies = list(part.tenancies)
            number = random.randrange(len(tenancies))
            tenancies[number] = replace(tenancies[number], offset=random.choice(tenancies).offset)
            return with_part(program, name, replace(part, tenancies=tuple(tenancies)))
    return with_part(program, name, rebuilt(part, rows))
