"""Swapping, recomputing, multiplexing and capturing, each on and off: the same bits after every step.

Compared are losses of every step, parameters, buffers, optimizer state and gradients (the first moment of the
members' optimizer is the gradient itself) with those of the same sub-arrays without a plan.
"""

from __future__ import annotations

import pytest
from decided_plans import num_decisions
from planned import differences, train_planned
from planned_on_gpu import NAMES, NUM_STEPS, WAYS, case_of, expected_of, planned_of, program_of

from trainmux.ir import Offload, Prefetch, Recompute

STREAMS, CAPTURED = False, True
SWITCHES = {
    # By name: swapped, recomputed, captured. Every pair of values of two switches occurs.
    "resident-captured": (False, False, CAPTURED),
    "recomputed-streams": (False, True, STREAMS),
    "swapped-streams": (True, False, STREAMS),
    "swapped-recomputed-captured": (True, True, CAPTURED),
}


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_no_switch_changes_a_bit(name: str, way: str, switches: str) -> None:
    swaps, recomputes, captured = SWITCHES[switches]
    program = program_of(name, way, swaps=swaps, recomputes=recomputes)
    counts = num_decisions(program)
    assert (counts[Offload] > 0, counts[Prefetch] > 0, counts[Recompute] > 0) == (swaps, swaps, recomputes)
    case = case_of(name, way)
    found = train_planned(case, planned_of(case, program, captured=captured), NUM_STEPS)
    assert differences(found, expected_of(name, way)) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_with_all_state_on_the_host_and_freed_bytes_poisoned_nothing_changes(name: str, way: str) -> None:
    """Parameters and optimizer state are away whenever they are not used; what is given back becomes NaN."""
    program = program_of(name, way, swaps=True, recomputes=True, with_static=True)
    plain = program_of(name, way, swaps=True, recomputes=True)
    assert num_decisions(program)[Prefetch] > num_decisions(plain)[Prefetch]
    case = case_of(name, way)
    captured = list(WAYS).index(way) % 2 == 0
    found = train_planned(case, planned_of(case, program, captured=captured, poisons=True), NUM_STEPS)
    assert differences(found, expected_of(name, way)) == []
