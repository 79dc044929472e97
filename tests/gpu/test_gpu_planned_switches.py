"""Swapping, recomputing, multiplexing and capturing, each on and off: the same bits after every step.

Compared are losses of every step, parameters, buffers, optimizer state and gradients (the first moment of the
members' optimizer is the gradient itself) with those of the same sub-arrays without a plan.
"""

from __future__ import annotations

import pytest
from decided_plans import num_decisions
from planned import differences, train_planned
from planned_on_gpu import NUM_STEPS, WAYS, case_on_gpu

from trainmux.ir import Offload, Prefetch, Recompute

STREAMS, CAPTURED = False, True
SWITCHES = {
    # By name: swapped, recomputed, captured; and whether parameters and optimizer state are away too whenever
    # they are not used, and what is given back becomes NaN. Every pair of values of two switches occurs.
    "resident-captured": (False, False, CAPTURED, False),
    "recomputed-streams": (False, True, STREAMS, False),
    "swapped-streams": (True, False, STREAMS, False),
    "swapped-recomputed-captured": (True, True, CAPTURED, False),
    "all-away-streams": (True, True, STREAMS, True),
    "all-away-captured": (True, True, CAPTURED, True),
}
CASES = [
    ("mlp", "ring"),
    ("mlp", "beside"),
    ("cnn_with_dropout", "turns"),
    ("cnn_with_dropout", "pair"),
    ("transformer_with_dropout", "turns"),
    ("transformer_with_dropout", "ring"),
    ("transformer_with_dropout", "beside"),
    ("lstm_with_dropout", "pair"),
]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_no_switch_changes_a_bit(name: str, way: str, switches: str) -> None:
    swaps, recomputes, captured, all_away = SWITCHES[switches]
    case = case_on_gpu(name, way)
    program = case.program(WAYS[way][1], swaps=swaps, recomputes=recomputes, with_static=all_away)
    counts = num_decisions(program)
    assert (counts[Offload] > 0, counts[Prefetch] > 0, counts[Recompute] > 0) == (swaps, swaps, recomputes)
    if all_away:
        without = case.program(WAYS[way][1], swaps=swaps, recomputes=recomputes)
        assert counts[Prefetch] > num_decisions(without)[Prefetch]
    found = train_planned(case, case.planned(program, captured=captured, poisons=all_away), NUM_STEPS)
    assert differences(found, case.expected(NUM_STEPS)) == []
