"""A program for given sub-arrays: steps other than the planned one, in its memory.

A short last batch, a micro-batch without an update or an evaluation runs over the sub-arrays of the plan that
is in use and must fit where that plan fits. It is not worth a search: the first policy that finds room, from
the cheapest to the most able, is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainmux.errors import BudgetError
from trainmux.ir import Multiplexing, Profile, Program, verify
from trainmux.planning._arrangement import Arrangement
from trainmux.planning._candidates import Candidates
from trainmux.planning._fewer_waits import fewer_waits
from trainmux.planning.policies import policy_named
from trainmux.sizes import exact_bytes

_POLICIES = ("none", "recompute_only", "capuchin", "auto")


def fit_program(
    profiles: Sequence[Profile], available_bytes: int, host_bytes: int, *, plainly: bool = False
) -> Program:
    """The sub-arrays' steps in turns, within ``available_bytes`` of slab, proved.

    ``plainly``: with nothing swapped and nothing recomputed. ``BudgetError``: nothing was found that fits.
    """
    names = tuple((str(number),) * profile.width for number, profile in enumerate(profiles))
    arrangement = Arrangement(names, tuple(profiles), Multiplexing.TURNS)
    least = math.inf
    for name in ("none",) if plainly else _POLICIES:
        candidates = Candidates(arrangement, policy_named(name), host_bytes)
        found = candidates.best(available_bytes, math.inf)
        if found is None and name == "auto":
            found = candidates.smallest()
        if found is not None:
            least = min(least, found.slab_bytes)
            if found.slab_bytes <= available_bytes:
                program = replace(found.program, body=fewer_waits(found.program.body, profiles))
                verify(program, profiles, budget_bytes=available_bytes, host_bytes=host_bytes)
                return program
    more = f"; {exact_bytes(int(least))} would do" if least < math.inf else ""
    raise BudgetError(
        f"expected another step to fit into {exact_bytes(available_bytes)}, but it does not"
        f"{more}; plan for a larger budget, or drop batches of other shapes"
    )
