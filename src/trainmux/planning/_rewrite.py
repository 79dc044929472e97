"""Draft to program: a place for every byte, and no wait that is not needed.

All parts of a program lie in one slab, and what crosses from part to part stays put.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from trainmux.ir import ALIGNMENT, ByteClass, Part, Profile, Program, Schedule, Tenancy
from trainmux.planning._draft import Draft, draft
from trainmux.planning._facts import Key, remembered
from trainmux.planning._fewer_waits import fewer_waits
from trainmux.planning._slab import Slab, Tenant, pack

_MOST_SLABS = 64


def place_parts(
    parts: Sequence[Part],
    alignment: int,
    first: Callable[[Key], bool] = lambda key: False,
    *,
    enough_bytes: int = 0,
) -> tuple[tuple[Part, ...], int]:
    """The parts with offsets, and the end of the highest tenancy; no lower one is sought than `enough_bytes`.

    What is there all the time lies at the bottom, in the order of its numbers, beginning with what ``first``
    names: programs over the same such tensors have them at the same offsets.

    The parts are laid out one behind the other on one axis of time. All that a tensor takes at either end of
    any part is one tenant with several spans: so it lies at the same offset where one part ends and the next
    one begins, the body following itself. What is not there at the ends is placed anew each time.
    """
    sizes: list[int] = []
    spans: list[list[tuple[int, int]]] = []
    numbers: list[list[int]] = []
    crossing: dict[Key, int] = {}
    start = 0
    for part in parts:
        num_instructions = len(part.instructions)
        own = []
        for tenancy in part.tenancies:
            key = (tenancy.sub_array, tenancy.tensor)
            crosses = tenancy.begin == -1 or tenancy.end == num_instructions
            number = crossing.get(key) if crosses else None
            if number is None:
                number = len(sizes)
                sizes.append(tenancy.size_bytes)
                spans.append([])
                if crosses:
                    crossing[key] = number
            # The moment ``start`` itself is for what is there before the first instruction.
            begin = start + 1 + tenancy.begin
            end = max(start + 1 + tenancy.end, begin + 1)
            if spans[number] and spans[number][-1][1] == begin:
                begin = spans[number].pop()[0]
            spans[number].append((begin, end))
            own.append(number)
        numbers.append(own)
        start += num_instructions + 1
    keys = {number: key for key, number in crossing.items()}
    offsets = _offsets(sizes, spans, keys, alignment, first, enough_bytes)
    placed = tuple(
        Part(
            part.instructions,
            tuple(
                Tenancy(t.sub_array, t.tensor, t.begin, t.end, offsets[number], t.size_bytes)
                for t, number in zip(part.tenancies, own, strict=True)
            ),
        )
        for part, own in zip(parts, numbers, strict=True)
    )
    return placed, max((t.offset + t.size_bytes for part in placed for t in part.tenancies), default=0)


def _offsets(
    sizes: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]],
    keys: Mapping[int, Key],
    alignment: int,
    first: Callable[[Key], bool],
    enough_bytes: int,
) -> list[int]:
    """Offsets by number: of what is there all the time in the order of its names, of the rest as it fits."""
    begin = min((span[0][0] for span in spans), default=0)
    end = max((span[-1][1] for span in spans), default=0)
    always = [number for number in keys if spans[number] == [(begin, end)]]
    always.sort(key=lambda number: (not first(keys[number]), keys[number]))
    order = [*always, *sorted(set(range(len(sizes))) - set(always))]
    tenants = tuple(Tenant(sizes[number], tuple(spans[number])) for number in order)
    offsets = dict(zip(order, _packed(tenants, alignment, enough_bytes).offsets, strict=True))
    return [offsets[number] for number in range(len(sizes))]


@lru_cache(maxsize=_MOST_SLABS)
def _packed(tenants: tuple[Tenant, ...], alignment: int, enough_bytes: int) -> Slab:
    """A planner asks again for what it placed for another budget: the last slabs are kept."""
    return pack(tenants, alignment, enough_bytes=enough_bytes)


_STATE = frozenset({ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE, ByteClass.BUFFER})
"""Tensors that outlive every program: they lie at the bottom of the slab, those of other classes above."""


@remembered
def rewrite(profiles: Sequence[Profile], schedule: Schedule) -> Program:
    """The program of a schedule; ``profiles`` has one profile per sub-array.

    Whoever uses a plan asks for the program that the planner has proved: it is made once.

    Refused with `PlanError`, naming the tensor and why: nodes or tensors that do not exist, an order that
    breaks the sub-arrays' own or the stages, swaps out of order or around nothing, uses of what is on the
    host, recomputations from sources that are not there or no longer what they were.
    """
    program = place(profiles, draft(profiles, schedule))
    return replace(program, body=fewer_waits(program.body, profiles))


def place(profiles: Sequence[Profile], made: Draft, *, enough_bytes: int = 0) -> Program:
    """The program of a draft of these profiles: offsets for all its bytes.

    `rewrite` seeks the smallest slab. Here the search ends at one of ``enough_bytes``.
    """
    (prologue, body, epilogue), slab_bytes = place_parts(
        made.parts(),
        ALIGNMENT,
        lambda key: profiles[key[0]].tensors[key[1]].byte_class in _STATE,
        enough_bytes=enough_bytes,
    )
    return Program(prologue, body, epilogue, made.resident, slab_bytes, made.host_bytes)
