"""Programs whose decisions are made by hand: all that can be swapped or recomputed is, or nothing.

Policies decide on as little as a budget asks for. Of models as small as those of the tests that is next to
nothing; here it is as much as there is.
"""

from __future__ import annotations

from planned import Case

from trainmux.ir import Multiplexing, Offload, Prefetch, Program, Recompute, verify
from trainmux.planning import rewrite
from trainmux.planning._policy import Task, plain_order
from trainmux.planning.policies._body import FixedBody
from trainmux.planning.policies._gaps import Choice, Gap, find_gaps
from trainmux.planning.policies._layout import demand, lay_out

_NO_LIMIT = 1 << 50


def decided(
    case: Case, multiplexing: Multiplexing, *, swaps: bool, recomputes: bool, with_static: bool = False
) -> Program:
    """All feature maps decided on, and with ``with_static`` parameters and optimizer state swapped as well.

    With both ``swaps`` and ``recomputes`` every other feature map that can be recomputed is.
    """
    task = Task(case.profiles, multiplexing, _NO_LIMIT, _NO_LIMIT, 0.0)
    body = FixedBody(task, plain_order(task.profiles, multiplexing))
    gaps = find_gaps(body.all_facts, with_static=with_static)
    choices = [_choice(gap, number, swaps, recomputes) for number, gap in enumerate(gaps)]
    needs = demand(body, gaps, choices)
    assert needs is not None, "expected recomputations that are possible"
    layout = lay_out(body, gaps, needs, needs.peak_bytes)
    assert layout is not None, "expected copies to fit into what is needed in any case"
    program = rewrite(case.profiles, layout.schedule("decided by hand"))
    verify(program, case.profiles, budget_bytes=program.slab_bytes, host_bytes=program.host_bytes)
    return program


def _choice(gap: Gap, number: int, swaps: bool, recomputes: bool) -> Choice:
    if recomputes and gap.can_recompute and not (swaps and number % 2):
        # Made once for all that need it; every fourth one for itself alone, from whatever is left.
        return Choice.RECOMPUTE_EARLY if number % 4 else Choice.RECOMPUTE
    return Choice.SWAP if swaps else Choice.KEEP


def num_decisions(program: Program) -> dict[type, int]:
    """Offloads, prefetches and recomputations in one pass through the body."""
    kinds = (Offload, Prefetch, Recompute)
    return {kind: sum(isinstance(i, kind) for i in program.body.instructions) for kind in kinds}
