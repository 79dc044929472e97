"""Random right programs, written by the planner from random decisions about random steps; random edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from ir_programs import Case
from mutants import PARTS, rebuilt, rows_of, with_part
from tests.random_steps import Shape, random_profile, split_passes

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    Multiplexing,
    Part,
    Profile,
    Program,
    Recomputation,
    Schedule,
    Swap,
    Wait,
)
from trainmux.planning import rewrite

Node = tuple[int, int]


def random_case(random: Random, max_layers: int, num_decisions: int = 4) -> Case:
    """One to three sub-arrays in turns or in a ring, with those decisions that make sense."""
    shape = {"skip": 0.4, "buffer": 0.3, "second_output": 0.4, "unrepeatable": 0.2, "workspace": 0.5}
    profiles = tuple(
        random_profile(random.randrange(2**32), shape=Shape(random.randint(1, max_layers), **shape))
        for _ in range(random.randint(1, 3))
    )
    multiplexing = random.choice(list(Multiplexing))
    schedule = Schedule(multiplexing, _order(random, profiles, multiplexing), (), ())
    program = rewrite(profiles, schedule)
    for _ in range(num_decisions):
        tried = _decided(random, profiles, schedule)
        try:
            program = rewrite(profiles, tried)
        except PlanError:
            continue
        schedule = tried
    return Case(program, profiles)


def _order(random: Random, profiles: Sequence[Profile], multiplexing: Multiplexing) -> tuple[Node, ...]:
    """Sub-array after sub-array, or the two passes of each stage of a ring mixed at random."""
    passes = split_passes(profiles)
    if multiplexing is Multiplexing.TURNS:
        return tuple(node for forward, backward in passes for node in (*forward, *backward))
    order: list[Node] = []
    for number, (_, backward) in enumerate(passes):
        queues = [backward, passes[(number + 1) % len(passes)][0]]
        while any(queues):
            # A single sub-array's forward pass belongs to its next step.
            queue = random.choice([each for each in queues if each]) if len(passes) > 1 else None
            order.append((queue or queues[0] or queues[1]).pop(0))
    return tuple(order)


def _decided(random: Random, profiles: Sequence[Profile], schedule: Schedule) -> Schedule:
    """The schedule with one tensor swapped or recomputed between two of its uses."""
    order = schedule.order
    sub_array = random.randrange(len(profiles))
    profile = profiles[sub_array]
    kinds = [each.byte_class for each in profile.tensors]
    tensor = random.choice([t for t, c in enumerate(kinds) if c.is_static or c is ByteClass.FEATURE_MAP])
    uses = [
        position
        for position, (number, rank) in enumerate(order)
        if number == sub_array
        and tensor in (*profile.nodes[rank].reads, *profile.nodes[rank].changes, *profile.nodes[rank].creates)
    ]
    if not uses:
        return schedule
    which = random.randrange(len(uses))
    makers = [rank for rank, node in enumerate(profile.nodes) if tensor in node.creates]
    if makers and random.random() < 0.5:
        again = Recomputation(sub_array, tensor, (makers[0],), order[uses[which]])
        return replace(schedule, recomputes=(*schedule.recomputes, again))
    gap = (uses[(which + 1) % len(uses)] - uses[which] - 1) % len(order)
    cuts = sorted(random.randint(0, gap) for _ in range(3))
    out, release, back = (
        order[(uses[which] + cut + (number > 0)) % len(order)] for number, cut in enumerate(cuts)
    )
    return replace(schedule, swaps=(*schedule.swaps, Swap(sub_array, tensor, out, release, back)))


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
