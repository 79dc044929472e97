"""Programs in which as much is decided on as there is: all feature maps swapped or recomputed, or nothing.

Policies decide on as little as a budget asks for. Of models as small as those of the tests that is next to
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainmux.ir import Multiplexing, Offload, Prefetch, Profile, Program, Recompute, verify
from trainmux.planning import rewrite
from trainmux.planning._body import plain_body
from trainmux.planning._facts import Choice, find_gaps
from trainmux.planning._layout import demand, lay_out

_MOST_NODES = 12
"""Nodes that are run again for one feature map: those of late layers would take the whole forward pass."""


def decided(
    profiles: Sequence[Profile],
    multiplexing: Multiplexing,
    *,
    swaps: bool = False,
    recomputes: bool = False,
    with_static: bool = False,
) -> Program:
    """All feature maps decided on, and with ``with_static`` parameters and optimizer state swapped as well.

    With both ``swaps`` and ``recomputes`` every other feature map is swapped, others if they take long.
    Copies back come as late as they can, within as little memory as that takes.
    """
    body = plain_body(profiles, multiplexing)
    gaps = find_gaps(body.all_facts, with_static=with_static)
    choices = [Choice.KEEP] * len(gaps)
    for number, gap in enumerate(gaps):
        tried = [Choice.RECOMPUTE] if recomputes and gap.can_recompute and not (swaps and number % 2) else []
        for choice in [*tried, Choice.SWAP] if swaps else tried:
            choices[number] = choice
            needs = demand(body, gaps, choices)
            if needs is not None and all(len(each.derived.ranks) <= _MOST_NODES for each in needs.recomputes):
                break
            choices[number] = Choice.KEEP
    needs = demand(body, gaps, choices)
    assert needs is not None
    layout = lay_out(body, gaps, needs, needs.peak_bytes, late=True)
    program = rewrite(profiles, layout.schedule(""))
    verify(program, profiles, budget_bytes=program.slab_bytes, host_bytes=program.host_bytes)
    return program


def num_decisions(program: Program) -> dict[type, int]:
    """Offloads, prefetches and recomputations in one pass through the body."""
    kinds = (Offload, Prefetch, Recompute)
    return {kind: sum(isinstance(i, kind) for i in program.body.instructions) for kind in kinds}
