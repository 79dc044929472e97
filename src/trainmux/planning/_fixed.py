"""A program for given sub-arrays: steps other than the planned one, in its memory.

A short last batch, a micro-batch without an update or an evaluation runs over the sub-arrays of the plan that
is in use and must fit where that plan fits. It is not worth a search: the first policy that finds room, from
the cheapest to the most able, is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainmux.errors import BudgetError
from trainmux.ir import Multiplexing, Profile, Program, verify
from trainmux.planning._body import Infeasible
from trainmux.planning._fewer_waits import fewer_waits
from trainmux.planning._placed import (
    Arrangement,
    PlacedSchedule,
    ScheduleSearch,
    place_plainly,
    place_schedule,
)
from trainmux.planning.policies._known import policy_named
from trainmux.planning.policies.auto import Auto
from trainmux.sizes import exact_bytes

_POLICIES = ("recompute_only", "capuchin", "auto")


def fit_program(
    profiles: Sequence[Profile], available_bytes: int, host_bytes: int, *, plainly: bool = False
) -> Program:
    """The sub-arrays' steps in turns, within ``available_bytes`` of slab, proved.

    ``plainly``: with nothing swapped and nothing recomputed. ``BudgetError``: nothing was found that fits.
    """
    names = tuple((str(number),) * profile.width for number, profile in enumerate(profiles))
    arrangement = Arrangement(names, tuple(profiles), Multiplexing.TURNS)
    least = math.inf
    for found in _in_order(arrangement, available_bytes, host_bytes, plainly):
        least = min(least, found.slab_bytes)
        if found.slab_bytes <= available_bytes:
            program = replace(found.program, body=fewer_waits(found.program.body, profiles))
            verify(program, profiles, budget_bytes=available_bytes, host_bytes=host_bytes)
            return program
    raise BudgetError(
        f"expected another step to fit into {exact_bytes(available_bytes)}, but it needs "
        f"{exact_bytes(int(least))}; plan for a larger budget, or drop batches of other shapes"
    )


def _in_order(
    arrangement: Arrangement, available_bytes: int, host_bytes: int, plainly: bool
) -> Iterator[PlacedSchedule]:
    yield place_plainly(arrangement)
    if plainly:
        return
    for name in _POLICIES:
        policy = policy_named(name).policy
        found = ScheduleSearch(arrangement, policy, available_bytes, host_bytes).first()
        if found is not None:
            yield found
    try:
        task = arrangement.task(available_bytes, host_bytes)
        yield place_schedule(arrangement, Auto().smallest(task))
    except Infeasible:
        return
