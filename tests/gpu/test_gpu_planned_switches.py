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
    # By name: swapped, recomputed, captured. Every pair of values of two switches occurs.
    "resident-captured": (False, False, CAPTURED),
    "recomputed-streams": (False, True, STREAMS),
    "swapped-streams": (True, False, STREAMS),
    "swapped-recomputed-captured": (True, True, CAPTURED),
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
    swaps, recomputes, captured = SWITCHES[switches]
    case = case_on_gpu(name, way)
    program = case.program(WAYS[way][1], swaps=swaps, recomputes=recomputes)
    counts = num_decisions(program)
    assert (counts[Offload] > 0, counts[Prefetch] > 0, counts[Recompute] > 0) == (swaps, swaps, recomputes)
    found = train_planned(case, case.planned(program, captured=captured), NUM_STEPS)
    assert differences(found, case.expected(NUM_STEPS)) == []


@pytest.mark.parametrize(("name", "way"), CASES)
def test_with_all_state_on_the_host_and_freed_bytes_poisoned_nothing_changes(name: str, way: str) -> None:
    """Parameters and optimizer state are away whenever they are not used; what is given back becomes NaN."""
    case = case_on_gpu(name, way)
    plain = case.program(WAYS[way][1], swaps=True, recomputes=True)
    program = case.program(WAYS[way][1], swaps=True, recomputes=True, with_static=True)
    assert num_decisions(program)[Prefetch] > num_decisions(plain)[Prefetch]
    captured = CASES.index((name, way)) % 2 == 0
    found = train_planned(case, case.planned(program, captured=captured, poisons=True), NUM_STEPS)
    assert differences(found, case.expected(NUM_STEPS)) == []
