"""Fewer waits of the compute lane: each for all that has ended by then, not only for what is needed there.

A wait of a kernel for a copy costs even where the copy has long ended: in a CUDA graph about ten microseconds
on an H200, for an edge between two engines. Copies of one direction run one after another, so whoever waits
for one knows that all before it have ended. A wait for the latest copy that will have ended by then holds
compute up no longer than the one that is needed, and makes later waits needless. What has ended is taken from
the simulation, as predicted and with slower copies: if those come true, nothing is held up either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from trainmux.ir import Instruction, Lane, Part, Profile, Wait, lane_of
from trainmux.rewrite._known import COMPUTE, IN, LANES, OUT, Known
from trainmux.simulate import LaneTimes, lane_times

_STRAINS = (1.0, 1.25)
"""How many times as long as predicted copies may take without a wait that was moved holding up compute."""


def fewer_waits(part: Part, profiles: Sequence[Profile]) -> Part:
    """The same part, its bytes where they are, with as few waits of the compute lane as this gives."""
    if not any(isinstance(item, Wait) and item.lane is Lane.COMPUTE for item in part.instructions):
        return part
    times = [lane_times(part, profiles, strain) for strain in _STRAINS]
    kept = _kept(part.instructions, times)
    moved = {old: new for new, (old, _) in enumerate(kept)}
    length = len(part.instructions)
    moved |= {-1: -1, length: len(kept)}
    return Part(
        tuple(replace(item, on=moved[item.on]) if isinstance(item, Wait) else item for _, item in kept),
        tuple(replace(each, begin=moved[each.begin], end=moved[each.end]) for each in part.tenancies),
    )


def _kept(instructions: Sequence[Instruction], times: Sequence[LaneTimes]) -> list[tuple[int, Instruction]]:
    """The instructions that are left, each with the position that it had; waits name such positions."""
    known = Known()
    copies: dict[int, list[int]] = {OUT: [], IN: []}
    kept: list[tuple[int, Instruction]] = []
    for position, item in enumerate(instructions):
        lane = LANES.index(lane_of(item))
        if not isinstance(item, Wait):
            if lane in copies:
                copies[lane].append(position)
            kept.append((position, item))
        elif not known.has_ended(lane, item.on):
            on = item.on
            if lane == COMPUTE and known.lane_of(on) in copies:
                on = _latest_ended(copies[known.lane_of(on)], on, position, times)
            known.learn(lane, on)
            kept.append((position, Wait(item.lane, on)))
        known.append(lane)
    return kept


def _latest_ended(copies: Sequence[int], needed: int, position: int, times: Sequence[LaneTimes]) -> int:
    """The last copy of a lane that has ended when the one that is ``needed`` at ``position`` must have."""
    later = takewhile(lambda copy: copy > needed, reversed(copies))
    ended = (copy for copy in later if all(each.ends[copy] <= each.ends[position] for each in times))
    return next(ended, needed)
