"""Ways to break a right program, each with the kinds of violation of which at least one must be found.

Every mutator takes a program and its profiles (one per sub-array) and yields mutants, one for each place
where it applies; on a program without such a place it yields none. Positions, waits and tenancies are kept
consistent with the mutation, so that a mutant is wrong for its own reason.

A dropped wait or offload may have been redundant: `symbolic_machine` can tell. All other mutants are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainmux.ir import (
    Compute,
    Free,
    Instruction,
    Lane,
    Offload,
    Part,
    Prefetch,
    Profile,
    Program,
    Recompute,
    Tenancy,
    Wait,
    lane_of,
)
from trainmux.ir import ViolationKind as Kind

PARTS = ("prologue", "body", "epilogue")
Row = tuple[int | None, Instruction]
"""An instruction with its position in the program that is mutated; ``None`` where it is new."""


@dataclass(frozen=True)
class Mutant:
    """A broken program; ``budget_bytes`` is the budget to verify it with, ``None`` for its own slab."""

    name: str
    program: Program
    kinds: frozenset[Kind]
    budget_bytes: int | None = None


Mutator = Callable[[Program, Sequence[Profile]], Iterator[Mutant]]


def rows_of(part: Part) -> list[Row]:
    return list(enumerate(part.instructions))


def rebuilt(part: Part, rows: Sequence[Row]) -> Part:
    """The part with these rows instead of its own; waits and tenancies still speak of the old positions.

    A wait for a row that is gone becomes one for what came before that on its lane, if there is anything. A
    tenancy whose first row is gone goes with it; one whose last row is gone lasts to the part's end.
    """
    kept = {old for old, _ in rows if old is not None}
    instead: dict[int, int | None] = {}
    last: dict[Lane, int | None] = dict.fromkeys(Lane)
    for old, instruction in enumerate(part.instructions):
        if not isinstance(instruction, Wait):
            last[lane_of(instruction)] = old if old in kept else last[lane_of(instruction)]
        instead[old] = last[lane_of(instruction)]
    final = [row for row in rows if not isinstance(row[1], Wait) or instead[row[1].on] is not None]
    new: dict[int | None, int] = {old: at for at, (old, _) in enumerate(final) if old is not None}
    instructions = [
        replace(instruction, on=new[instead[instruction.on]])
        if isinstance(instruction, Wait)
        else instruction
        for _, instruction in final
    ]
    new[-1] = -1
    new[len(part.instructions)] = len(final)
    tenancies = [
        replace(tenancy, begin=new[tenancy.begin], end=new.get(tenancy.end, len(final)))
        for tenancy in part.tenancies
        if tenancy.begin in new
    ]
    return Part(tuple(instructions), tuple(tenancies))


def with_part(program: Program, name: str, part: Part) -> Program:
    top = max((tenancy.offset + tenancy.size_bytes for tenancy in part.tenancies), default=0)
    changes: dict[str, Any] = {name: part}
    return replace(program, slab_bytes=max(program.slab_bytes, top), **changes)


def places(program: Program, verbs: Any) -> Iterator[tuple[str, Part, int, Any]]:
    """Each instruction of these types, with the part and the position that it is at."""
    for name in PARTS:
        part: Part = getattr(program, name)
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, verbs):
                yield name, part, position, instruction


def _mutant(what: str, program: Program, name: str, part: Part, *kinds: Kind) -> Mutant:
    return Mutant(f"{name}: {what}", with_part(program, name, part), frozenset(kinds))


def _without(part: Part, positions: set[int]) -> Part:
    return rebuilt(part, [row for row in rows_of(part) if row[0] not in positions])


def _needs(profiles: Sequence[Profile], instruction: Compute | Recompute) -> tuple[int, ...]:
    node = profiles[instruction.sub_array].nodes[instruction.node]
    return (*node.reads, *node.changes)


def _dropping(name: str, verb: type, *kinds: Kind) -> Mutator:
    def mutate(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
        for where, part, at, instruction in places(program, verb):
            yield _mutant(f"[{at}] {instruction} dropped", program, where, _without(part, {at}), *kinds)

    mutate.__name__ = name
    return mutate


dropped_waits = _dropping("dropped_waits", Wait, Kind.MISSING_WAIT)
missing_nodes = _dropping("missing_nodes", Compute, Kind.ORDER)
missing_prefetches = _dropping(
    "missing_prefetches", Prefetch, Kind.NOT_RESIDENT, Kind.FREE, Kind.BOUNDARY
)  # in use afterwards, or at least freed
missing_offloads = _dropping(
    "missing_offloads", Offload, Kind.NOT_RESIDENT, Kind.WRONG_VERSION, Kind.FREE, Kind.BOUNDARY
)  # there is no copy on the host, or an old one
leaks = _dropping("leaks", Free, Kind.LEAK, Kind.BOUNDARY)


def double_frees(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    for name, part, at, free in places(program, Free):
        rows = rows_of(part)
        rows.insert(at + 1, (None, free))
        yield _mutant(f"[{at}] {free} twice", program, name, rebuilt(part, rows), Kind.FREE)


def uses_after_free(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A tensor is freed just before its last use instead of after it."""
    last_use: dict[tuple[str, int, int], int] = {}
    for name, part, at, instruction in places(program, (Compute, Recompute, Free)):
        if not isinstance(instruction, Free):
            needs = _needs(profiles, instruction)
            last_use |= {(name, instruction.sub_array, number): at for number in needs}
            continue
        use = last_use.pop((name, instruction.sub_array, instruction.tensor), None)
        if use is not None:
            rows = [row for row in rows_of(part) if row[0] != at]
            rows.insert(use, (at, instruction))
            what = f"[{at}] {instruction} moved before the use at {use}"
            yield _mutant(what, program, name, rebuilt(part, rows), Kind.NOT_RESIDENT)


def exchanged_nodes(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Two consecutive nodes of a sub-array change places; what they take goes along."""
    last: dict[tuple[str, int], int] = {}
    for name, part, second, compute in places(program, Compute):
        first = last.get((name, compute.sub_array))
        last[name, compute.sub_array] = second
        if first is not None:
            rows = rows_of(part)
            rows[first], rows[second] = rows[second], rows[first]
            what = f"[{first}] and [{second}] exchanged"
            yield _mutant(what, program, name, rebuilt(part, rows), Kind.ORDER)


def a_byte_over_budget(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """One byte less in the budget; one byte less in the slab; one byte less on the host."""
    yield Mutant("budget", program, frozenset({Kind.BUDGET}), program.slab_bytes - 1)
    smaller = replace(program, slab_bytes=program.slab_bytes - 1)
    yield Mutant("slab", smaller, frozenset({Kind.PLACEMENT}), program.slab_bytes)
    if program.host_bytes:
        smaller = replace(program, host_bytes=program.host_bytes - 1)
        yield Mutant("host", smaller, frozenset({Kind.HOST_MEMORY}))


def _placed_otherwise(
    program: Program, kind: Kind, change: Callable[[Part, Tenancy], Tenancy | None]
) -> Iterator[Mutant]:
    for name in PARTS:
        part: Part = getattr(program, name)
        for index, old in enumerate(part.tenancies):
            new = change(part, old) if old.size_bytes else None
            if new is not None:
                tenancies = (*part.tenancies[:index], new, *part.tenancies[index + 1 :])
                yield _mutant(f"{old} now {new}", program, name, replace(part, tenancies=tenancies), kind)


def overlapping_tensors(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Each tenancy in turn moved onto one that is live when it begins."""

    def onto_another(part: Part, tenancy: Tenancy) -> Tenancy | None:
        for other in part.tenancies:
            is_live = other.end > tenancy.begin or other.begin == other.end == tenancy.begin
            if other is not tenancy and other.size_bytes and other.begin <= tenancy.begin and is_live:
                return replace(tenancy, offset=other.offset)
        return None

    return _placed_otherwise(program, Kind.OVERLAP, onto_another)


def wrong_sizes(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Each tenancy a byte too small."""
    return _placed_otherwise(
        program, Kind.PLACEMENT, lambda part, each: replace(each, size_bytes=each.size_bytes - 1)
    )


def wrong_offsets_across_the_boundary(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A tensor that outlives a part lies elsewhere in the part that follows."""

    def elsewhere(part: Part, tenancy: Tenancy) -> Tenancy | None:
        crosses = tenancy.begin == -1 or tenancy.end == len(part.instructions)
        return replace(tenancy, offset=program.slab_bytes) if crosses else None

    return _placed_otherwise(program, Kind.BOUNDARY, elsewhere)


ALWAYS_WRONG: tuple[Mutator, ...] = (
    missing_prefetches,
    uses_after_free,
    a_byte_over_budget,
    overlapping_tensors,
    exchanged_nodes,
    missing_nodes,
    leaks,
    double_frees,
    wrong_sizes,
    wrong_offsets_across_the_boundary,
)
"""Every mutator whose mutants are wrong without exception."""

WRONG_UNLESS_REDUNDANT: tuple[Mutator, ...] = (dropped_waits, missing_offloads)
"""Mutators that may drop something redundant: another wait implied it, a copy was never read."""
