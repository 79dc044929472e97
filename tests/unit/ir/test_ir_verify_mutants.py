"""Right programs pass; broken ones are found out, each for its own reason, and in little time."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_programs import HANDMADE, Case
from ir_random import random_case, random_edit
from mutants import ALWAYS_WRONG, WRONG_UNLESS_REDUNDANT, Mutator
from tests.symbolic_machine import fault

from trainmux.ir import ViolationKind, find_violations

STRICTER = {ViolationKind.LEAK, ViolationKind.OVERLAP, ViolationKind.BOUNDARY, ViolationKind.PLACEMENT}
"""Refused by the verifier although a program, placed so, may come to no harm: bytes that are never given
back, bytes shared with a tensor that is not read again, and tenancies that then say something else."""

SEEDS = st.integers(0, 2**32)


def assert_right(case: Case) -> None:
    found = find_violations(case.program, case.profiles, budget_bytes=case.program.slab_bytes)
    assert [str(each) for each in found] == []
    assert fault(case.program, case.profiles) == ""


def check_mutants(case: Case, mutator: Mutator) -> int:
    """Every mutant must be refused for its reason, but for one that only lost something redundant: no race
    and no value tells, and the machine that tries every pair of instructions finds nothing."""
    mutants = list(mutator(case.program, case.profiles))
    for mutant in mutants:
        budget = mutant.program.slab_bytes if mutant.budget_bytes is None else mutant.budget_bytes
        found = find_violations(mutant.program, case.profiles, budget_bytes=budget)
        told = (mutant.name, [str(each) for each in found])
        if mutator in WRONG_UNLESS_REDUNDANT:
            assert bool(found) == bool(fault(mutant.program, case.profiles)), told
        else:
            assert found, told
        assert not found or mutant.kinds & {each.kind for each in found}, told
    return len(mutants)


@pytest.mark.parametrize("make", HANDMADE)
def test_programs_by_hand_are_right(make: Callable[[], Case]) -> None:
    assert_right(make())


@pytest.mark.parametrize(
    "mutator", [*ALWAYS_WRONG, *WRONG_UNLESS_REDUNDANT], ids=lambda mutator: mutator.__name__
)
def test_every_mutant_is_found(mutator: Mutator) -> None:
    assert sum(check_mutants(make(), mutator) for make in HANDMADE) > 0


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS)
def test_random_programs_are_right(seed: int) -> None:
    assert_right(random_case(Random(seed), max_layers=4))


@settings(max_examples=3, deadline=None)
@given(seed=SEEDS)
def test_mutants_of_random_programs_are_found(seed: int) -> None:
    case = random_case(Random(seed), max_layers=2)
    for mutator in ALWAYS_WRONG:
        check_mutants(case, mutator)


@settings(max_examples=16, deadline=None)
@given(seed=SEEDS)
def test_what_is_accepted_is_right_and_what_is_refused_is_wrong(seed: int) -> None:
    """Random edits: the verifier and the machine that tries everything agree on each."""
    random = Random(seed)
    case = random_case(random, max_layers=3)
    for _ in range(8):
        edited = random_edit(random, case.program)
        found = find_violations(edited, case.profiles, budget_bytes=edited.slab_bytes)
        trouble = fault(edited, case.profiles)
        if trouble:
            assert found, trouble
        else:
            assert not found or found[0].kind in STRICTER, [str(each) for each in found]


def test_a_proof_takes_a_tenth_of_a_millisecond_per_instruction() -> None:
    case = random_case(Random(0), max_layers=100, num_decisions=2)
    start = time.process_time()
    assert find_violations(case.program, case.profiles, budget_bytes=case.program.slab_bytes) == ()
    parts = (case.program.prologue, case.program.body, case.program.epilogue)
    num_instructions = sum(len(part.instructions) for part in parts)
    assert num_instructions > 500
    assert time.process_time() - start < 1e-4 * num_instructions
