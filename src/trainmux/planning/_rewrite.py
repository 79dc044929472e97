"""Schedule to program: every instruction, every wait, every byte (µ-TWO §3.2 (6), Algorithm H corrected).

What differs from the paper: recomputations run behind the waits for their sources, offloads have an end that
frees and prefetches wait for, backward passes free what they are done with, and prologue and epilogue are
made from the same decisions. Where a tensor has several swaps or recomputations, each begins where the one
before it ended. Static tensors that are swapped are on the host before a ring's prologue and after its
epilogue; in turns, where there is neither, they are where the body has them when it meets itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainmux.errors import PlanError
from trainmux.ir import ALIGNMENT, ByteClass, Multiplexing, Part, Profile, Program, Schedule
from trainmux.planning._fewer_waits import fewer_waits
from trainmux.planning._issue import issue
from trainmux.planning._place import place_parts
from trainmux.planning._recipes import recipe
from trainmux.planning._remember import remembered
from trainmux.planning._rows import body_row, check_recomputation, epilogue_row, prologue_row
from trainmux.planning._stays import Residency
from trainmux.planning._views import Key, positions_in_body, view_profiles

_STATE = frozenset({ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE, ByteClass.BUFFER})
"""Tensors that outlive every program: they lie at the bottom of the slab, those of other classes above."""


@dataclass(frozen=True)
class Draft:
    """A program of which every byte is known but not its offset (`UNPLACED`).

    Memory and time can be simulated as for the parts of a program; what will be reserved is a little more
    than the live bytes and is known only from `rewrite`.
    """

    prologue: Part
    body: Part
    epilogue: Part
    resident: tuple[Key, ...]
    host_bytes: int


def rewrite(profiles: Sequence[Profile], schedule: Schedule) -> Program:
    """The program of a schedule; ``profiles`` has one profile per sub-array.

    Refused with `PlanError`, naming the record and why: nodes or tensors that do not exist, an order that
    breaks the sub-arrays' own or the stages, swaps out of order or around nothing, uses of what is on the
    host, recomputations from sources that are not there or no longer what they were.
    """
    return _rewritten(schedule, *profiles)


@remembered
def _rewritten(schedule: Schedule, *profiles: Profile) -> Program:
    """Whoever uses a plan asks for the program that the planner has proved."""
    program = place(profiles, draft(profiles, schedule))
    return replace(program, body=fewer_waits(program.body, profiles))


def place(profiles: Sequence[Profile], made: Draft, *, enough_bytes: int = 0) -> Program:
    """The program of a draft of these profiles: offsets for all its bytes.

    `rewrite` seeks the smallest slab. Here the search ends at one of ``enough_bytes``.
    """
    parts = (made.prologue, made.body, made.epilogue)
    (prologue, body, epilogue), slab_bytes = place_parts(
        parts,
        ALIGNMENT,
        lambda key: profiles[key[0]].tensors[key[1]].byte_class in _STATE,
        enough_bytes=enough_bytes,
    )
    return Program(prologue, body, epilogue, made.resident, slab_bytes, made.host_bytes)


def draft(profiles: Sequence[Profile], schedule: Schedule) -> Draft:
    """Rewrite without placement, which takes most of the time: for planners that try many schedules."""
    if not profiles:
        raise PlanError("a schedule needs at least one sub-array, but got no profiles; pass one for each")
    views = view_profiles(profiles)
    positions = positions_in_body(views, schedule)
    for record in schedule.recomputes:
        check_recomputation(record, views, positions)
    recipes = [recipe(record, views) for record in schedule.recomputes]
    is_ring = schedule.multiplexing is Multiplexing.RING

    row = body_row(views, schedule, positions, recipes)
    residency = Residency(views, schedule.swaps)
    residency.check_recomputations(row, is_ring)
    settled, around = residency.settle_body(row, is_ring)
    always = frozenset(
        (sub_array, tensor)
        for sub_array, view in enumerate(views)
        for tensor, maker in enumerate(view.made_by)
        if maker == -1 and (sub_array, tensor) not in residency.swapped
    )
    body = issue(row, settled, always | around, views)
    if is_ring:
        outside: frozenset[Key] = frozenset()
        before, after = prologue_row(row, views, settled.stays), epilogue_row(row, views, settled.stays)
    else:
        outside = around
        before = after = ()
    prologue = issue(before, residency.settle(before, outside, around), always | outside, views)
    epilogue = issue(after, residency.settle(after, around, outside), always | around, views)
    host_bytes = sum(profiles[s].tensors[tensor].size_bytes for s, tensor in residency.swapped)
    return Draft(prologue, body, epilogue, tuple(sorted(always | outside)), host_bytes)
