"""Draft to program: a place for every byte, and no wait that is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainmux.ir import ALIGNMENT, ByteClass, Profile, Program, Schedule
from trainmux.planning._draft import Draft, draft
from trainmux.planning._facts import remembered
from trainmux.planning._fewer_waits import fewer_waits
from trainmux.planning._place import place_parts

_STATE = frozenset({ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE, ByteClass.BUFFER})
"""Tensors that outlive every program: they lie at the bottom of the slab, those of other classes above."""


def rewrite(profiles: Sequence[Profile], schedule: Schedule) -> Program:
    """The program of a schedule; ``profiles`` has one profile per sub-array.

    Refused with `PlanError`, naming the tensor and why: nodes or tensors that do not exist, an order that
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
    (prologue, body, epilogue), slab_bytes = place_parts(
        made.parts(),
        ALIGNMENT,
        lambda key: profiles[key[0]].tensors[key[1]].byte_class in _STATE,
        enough_bytes=enough_bytes,
    )
    return Program(prologue, body, epilogue, made.resident, slab_bytes, made.host_bytes)
