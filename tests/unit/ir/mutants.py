"""Ways to break a right program, each with the kinds of violation of which at least one must be found.

Every mutator takes a program and its profiles (one per sub-array) and yields mutants, one for each place
where it applies; on a program without such a place it yields none. Positions, waits and tenancies are kept
consistent with the mutation, so that a mutant is wrong for its own reason.

A dropped wait or offload may have been redundant: `symbolic_machine` can tell. All other mutants are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.symbolic_machine import lane_of

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
    ViolationKind,
    Wait,
)

PARTS = ("prologue", "body", "epilogue")
Row = tuple[int | None, Instruction]
"""An instruction with its position in the program that is mutated; ``None`` where it is new."""


@dataclass(frozen=True)
class Mutant:
    """A broken program; ``budget_bytes`` is the budget to verify it with, ``None`` for its own slab."""

    name: str
    program: Program
    kinds: frozenset[ViolationKind]
    budget_bytes: int | None = None


Mutator = Callable[[Program, Sequence[Profile]], Iterator[Mutant]]


def rows_of(part: Part) -> list[Row]:
    return list(enumerate(part.instructions))


def rebuilt(part: Part, rows: Sequence[Row], extra: Sequence[Tenancy] = ()) -> Part:
    """The part with these rows instead of its own; waits and tenancies still speak of the old positions.

    A wait for a row that is gone becomes one for what came before that on its lane, if there is anything. A
    tenancy whose first row is gone goes with it; one whose last row is gone lasts to the part's end.
    ``extra`` are tenancies in new positions.
    """
    kept = {old for old, _ in rows if old is not None}
    instead: dict[int, int | None] = {}
    last: dict[Lane, int | None] = dict.fromkeys(Lane)
    for old, instruction in enumerate(part.instructions):
        if old in kept and not isinstance(instruction, Wait):
            last[lane_of(instruction)] = old
        instead[old] = old if old in kept else last[lane_of(instruction)]
    final = list(rows)
    while True:  # a wait may be for a wait that goes because there is nothing left that it could be for
        left = {old for old, _ in final if old is not None}
        fewer = [
            (old, instruction)
            for old, instruction in final
            if not isinstance(instruction, Wait) or instead[instruction.on] in left
        ]
        if len(fewer) == len(final):
            break
        final = fewer
    new = {old: position for position, (old, _) in enumerate(final) if old is not None}
    instructions: list[Instruction] = []
    for _, instruction in final:
        if isinstance(instruction, Wait):
            on = instead[instruction.on]
            assert on is not None
            instruction = replace(instruction, on=new[on])
        instructions.append(instruction)
    new[-1] = -1
    new[len(part.instructions)] = len(final)
    tenancies = [
        replace(tenancy, begin=new[tenancy.begin], end=new.get(tenancy.end, len(final)))
        for tenancy in part.tenancies
        if tenancy.begin in new
    ]
    return Part(tuple(instructions), (*tenancies, *extra))


def with_part(program: Program, name: str, part: Part) -> Program:
    top = max((tenancy.offset + tenancy.size_bytes for tenancy in part.tenancies), default=0)
    match name:
        case "prologue":
            changed = replace(program, prologue=part)
        case "body":
            changed = replace(program, body=part)
        case _:
            changed = replace(program, epilogue=part)
    return replace(changed, slab_bytes=max(program.slab_bytes, top))


def _parts(program: Program) -> Iterator[tuple[str, Part]]:
    for name in PARTS:
        yield name, getattr(program, name)


def _without(part: Part, positions: set[int]) -> Part:
    return rebuilt(part, [row for row in rows_of(part) if row[0] not in positions])


def _needs(profiles: Sequence[Profile], instruction: Compute | Recompute) -> tuple[int, ...]:
    node = profiles[instruction.sub_array].nodes[instruction.node]
    return (*node.reads, *node.changes)


def dropped_waits(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Each wait on its own; some may have been redundant."""
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Wait):
                changed = with_part(program, name, _without(part, {position}))
                yield Mutant(
                    f"{name}[{position}] {instruction} dropped",
                    changed,
                    frozenset({ViolationKind.MISSING_WAIT}),
                )


def missing_prefetches(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A tensor that never comes back; in use afterwards, or at least freed."""
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Prefetch):
                changed = with_part(program, name, _without(part, {position}))
                yield Mutant(
                    f"{name}[{position}] {instruction} dropped",
                    changed,
                    frozenset({ViolationKind.NOT_RESIDENT, ViolationKind.FREE, ViolationKind.BOUNDARY}),
                )


def missing_offloads(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A copy that is never made: there is none on the host, or an old one."""
    kinds = {
        ViolationKind.NOT_RESIDENT,
        ViolationKind.WRONG_VERSION,
        ViolationKind.FREE,
        ViolationKind.BOUNDARY,
    }
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Offload):
                changed = with_part(program, name, _without(part, {position}))
                yield Mutant(f"{name}[{position}] {instruction} dropped", changed, frozenset(kinds))


def prefetches_before_their_offload_ended(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Lane IN waits for nothing between a tensor's copy out and its copy back."""
    for name, part in _parts(program):
        offloads: dict[tuple[int, int], int] = {}
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Offload):
                offloads[instruction.sub_array, instruction.tensor] = position
            if not isinstance(instruction, Prefetch):
                continue
            offload = offloads.get((instruction.sub_array, instruction.tensor))
            if offload is None:
                continue
            waits = {
                between
                for between in range(offload, position)
                if isinstance(part.instructions[between], Wait)
                and lane_of(part.instructions[between]) is Lane.IN
            }
            yield Mutant(
                f"{name}[{position}] {instruction} does not wait for its offload",
                with_part(program, name, _without(part, waits)),
                frozenset({ViolationKind.MISSING_WAIT}),
            )


def uses_after_free(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A tensor is freed just before its last use instead of after it."""
    for name, part in _parts(program):
        last_use: dict[tuple[int, int], int] = {}
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Compute | Recompute):
                for number in _needs(profiles, instruction):
                    last_use[instruction.sub_array, number] = position
            if not isinstance(instruction, Free):
                continue
            use = last_use.pop((instruction.sub_array, instruction.tensor), None)
            if use is None:
                continue
            rows = [row for row in rows_of(part) if row[0] != position]
            rows.insert(use, (position, instruction))
            yield Mutant(
                f"{name}[{position}] {instruction} moved before the use at {use}",
                with_part(program, name, rebuilt(part, rows)),
                frozenset({ViolationKind.NOT_RESIDENT}),
            )


def recomputes_without_a_source(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A source of a recompute is freed just before it."""
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if not isinstance(instruction, Recompute):
                continue
            for number in _needs(profiles, instruction):
                rows = rows_of(part)
                rows.insert(position, (None, Free(instruction.sub_array, number)))
                yield Mutant(
                    f"{name}[{position}] {instruction} without tensor {number}",
                    with_part(program, name, rebuilt(part, rows)),
                    frozenset({ViolationKind.NOT_RESIDENT}),
                )


def recomputes_that_wait_for_no_source(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """The compute lane waits for nothing between the prefetch of a source and the recompute."""
    for name, part in _parts(program):
        prefetches: dict[tuple[int, int], int] = {}
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Prefetch):
                prefetches[instruction.sub_array, instruction.tensor] = position
            if isinstance(instruction, Compute):
                for number in _needs(profiles, instruction):
                    prefetches.pop((instruction.sub_array, number), None)
            if not isinstance(instruction, Recompute):
                continue
            for number in _needs(profiles, instruction):
                prefetch = prefetches.pop((instruction.sub_array, number), None)
                if prefetch is None:
                    continue
                waits = {
                    between
                    for between in range(prefetch, position)
                    if isinstance(part.instructions[between], Wait)
                    and lane_of(part.instructions[between]) is Lane.COMPUTE
                }
                yield Mutant(
                    f"{name}[{position}] {instruction} does not wait for tensor {number}",
                    with_part(program, name, _without(part, waits)),
                    frozenset({ViolationKind.MISSING_WAIT}),
                )


def _run_again(
    program: Program, profiles: Sequence[Profile], name: str, part: Part, position: int, again: Recompute
) -> Program:
    """The program with ``again`` behind ``position``, its outputs and workspace above everything else."""
    node = profiles[again.sub_array].nodes[again.node]
    of = profiles[again.sub_array].tensors
    takers = [(number, of[number].size_bytes) for number in node.creates]
    takers += [(-1, node.workspace_bytes)] if node.workspace_bytes else []
    offset = program.slab_bytes
    extra = []
    for number, size in takers:
        extra.append(Tenancy(again.sub_array, number, position + 1, position + 1, offset, size))
        offset += size
    rows = rows_of(part)
    rows.insert(position + 1, (None, again))
    return with_part(program, name, rebuilt(part, rows, extra))


def parameters_read_after_their_update(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A node that reads a tensor before it is updated is run again after the update."""
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if not isinstance(instruction, Compute):
                continue
            nodes = profiles[instruction.sub_array].nodes
            for number in nodes[instruction.node].changes:
                readers = [
                    rank
                    for rank, node in enumerate(nodes[: instruction.node])
                    if number in node.reads and not node.changes and node.is_repeatable
                ]
                if readers:
                    again = Recompute(instruction.sub_array, readers[0], ())
                    yield Mutant(
                        f"{name}[{position}] {again} after the change of tensor {number}",
                        _run_again(program, profiles, name, part, position, again),
                        frozenset({ViolationKind.WRONG_VERSION}),
                    )


def buffers_updated_twice(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A node that changes something in place runs twice: as a recompute, and as a second compute."""
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if not isinstance(instruction, Compute):
                continue
            node = profiles[instruction.sub_array].nodes[instruction.node]
            if not node.changes:
                continue
            again = Recompute(instruction.sub_array, instruction.node, ())
            yield Mutant(
                f"{name}[{position}] {again} of a node with changes",
                _run_again(program, profiles, name, part, position, again),
                frozenset({ViolationKind.NOT_REPEATABLE}),
            )
            rows = rows_of(part)
            rows.insert(position + 1, (None, instruction))
            yield Mutant(
                f"{name}[{position}] {instruction} twice",
                with_part(program, name, rebuilt(part, rows)),
                frozenset({ViolationKind.ORDER}),
            )


def a_byte_over_budget(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """One byte less in the budget; one byte less in the slab; one byte less on the host."""
    yield Mutant("budget", program, frozenset({ViolationKind.BUDGET}), program.slab_bytes - 1)
    smaller = replace(program, slab_bytes=program.slab_bytes - 1)
    yield Mutant("slab", smaller, frozenset({ViolationKind.PLACEMENT}), program.slab_bytes)
    if program.host_bytes:
        smaller = replace(program, host_bytes=program.host_bytes - 1)
        yield Mutant("host", smaller, frozenset({ViolationKind.HOST_MEMORY}))


def overlapping_tensors(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Each tenancy in turn moved onto one that is live when it begins."""
    for name, part in _parts(program):
        for index, tenancy in enumerate(part.tenancies):
            victim = next(
                (
                    other
                    for number, other in enumerate(part.tenancies)
                    if number != index
                    and other.size_bytes
                    and tenancy.size_bytes
                    and other.begin <= tenancy.begin
                    and (other.end > tenancy.begin or other.begin == other.end == tenancy.begin)
                ),
                None,
            )
            if victim is not None:
                moved = replace(tenancy, offset=victim.offset)
                tenancies = (*part.tenancies[:index], moved, *part.tenancies[index + 1 :])
                yield Mutant(
                    f"{name}: {tenancy} moved onto {victim}",
                    with_part(program, name, replace(part, tenancies=tenancies)),
                    frozenset({ViolationKind.OVERLAP}),
                )


def exchanged_nodes(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Two consecutive nodes of a sub-array change places; what they take goes along."""
    for name, part in _parts(program):
        last: dict[int, int] = {}
        for position, instruction in enumerate(part.instructions):
            if not isinstance(instruction, Compute):
                continue
            before = last.get(instruction.sub_array)
            last[instruction.sub_array] = position
            if before is None:
                continue
            yield Mutant(
                f"{name}[{before}] and [{position}] exchanged",
                with_part(program, name, _exchanged(part, before, position)),
                frozenset({ViolationKind.ORDER}),
            )


def _exchanged(part: Part, first: int, second: int) -> Part:
    """Two rows exchanged; waits keep naming the positions they named, tenancies go with their makers."""
    instructions = list(part.instructions)
    instructions[first], instructions[second] = instructions[second], instructions[first]
    places = {first: second, second: first}
    tenancies = []
    for tenancy in part.tenancies:
        begin = places.get(tenancy.begin, tenancy.begin)
        end = begin if tenancy.begin == tenancy.end else tenancy.end
        tenancies.append(replace(tenancy, begin=begin, end=end))
    return Part(tuple(instructions), tuple(tenancies))


def missing_nodes(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A node that never runs."""
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Compute):
                yield Mutant(
                    f"{name}[{position}] {instruction} dropped",
                    with_part(program, name, _without(part, {position})),
                    frozenset({ViolationKind.ORDER}),
                )


def leaks(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """A tensor that is not freed: the next to take it, or the next part, finds it there."""
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Free):
                yield Mutant(
                    f"{name}[{position}] {instruction} dropped",
                    with_part(program, name, _without(part, {position})),
                    frozenset({ViolationKind.LEAK, ViolationKind.BOUNDARY}),
                )


def double_frees(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Bytes that are given back twice."""
    for name, part in _parts(program):
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Free):
                rows = rows_of(part)
                rows.insert(position + 1, (None, instruction))
                yield Mutant(
                    f"{name}[{position}] {instruction} twice",
                    with_part(program, name, rebuilt(part, rows)),
                    frozenset({ViolationKind.FREE}),
                )


def wrong_sizes(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """Each tenancy a byte too small."""
    for name, part in _parts(program):
        for index, tenancy in enumerate(part.tenancies):
            if tenancy.size_bytes:
                smaller = replace(tenancy, size_bytes=tenancy.size_bytes - 1)
                tenancies = (*part.tenancies[:index], smaller, *part.tenancies[index + 1 :])
                yield Mutant(
                    f"{name}: {tenancy} a byte smaller",
                    with_part(program, name, replace(part, tenancies=tenancies)),
                    frozenset({ViolationKind.PLACEMENT}),
                )


def wrong_offsets_across_the_boundary(program: Program, profiles: Sequence[Profile]) -> Iterator[Mutant]:
    """What outlives a part lies elsewhere in one of two parts that follow each other."""
    for name, part in _parts(program):
        for index, tenancy in enumerate(part.tenancies):
            crosses = tenancy.begin == -1 or tenancy.end == len(part.instructions)
            if crosses and tenancy.size_bytes:
                moved = replace(tenancy, offset=program.slab_bytes)
                tenancies = (*part.tenancies[:index], moved, *part.tenancies[index + 1 :])
                yield Mutant(
                    f"{name}: {tenancy} moved to {moved.offset}",
                    with_part(program, name, replace(part, tenancies=tenancies)),
                    frozenset({ViolationKind.BOUNDARY}),
                )


ALWAYS_WRONG: tuple[Mutator, ...] = (
    missing_prefetches,
    prefetches_before_their_offload_ended,
    uses_after_free,
    recomputes_without_a_source,
    recomputes_that_wait_for_no_source,
    parameters_read_after_their_update,
    buffers_updated_twice,
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
"""What these drop may have been redundant: another wait implied it, a copy was never read."""
