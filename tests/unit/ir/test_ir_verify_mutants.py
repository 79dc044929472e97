"""Right programs pass; broken ones are found out, each for its own reason."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_handmade import HANDMADE, Case
from ir_random import random_edit, random_program, random_step
from mutants import ALWAYS_WRONG, WRONG_UNLESS_REDUNDANT, Mutant, Mutator, dropped_waits
from tests.symbolic_machine import fault

from trainmux.ir import Multiplexing, Violation, ViolationKind, find_violations

# What the verifier refuses although a program, placed so, may come to no harm: bytes that are never given
# back, bytes shared with a tensor that is not read again, and tenancies that then say something else.
STRICTER = {
    ViolationKind.LEAK,
    ViolationKind.OVERLAP,
    ViolationKind.BOUNDARY,
    ViolationKind.PLACEMENT,
}

case_ids = {"ids": lambda value: value.__name__}


def violations(case: Case, mutant: Mutant) -> tuple[Violation, ...]:
    own = mutant.program.slab_bytes
    budget = own if mutant.budget_bytes is None else mutant.budget_bytes
    return find_violations(mutant.program, case.profiles, budget_bytes=budget)


def random_case(seed: int, max_layers: int) -> tuple[Random, Case]:
    random = Random(seed)
    profiles = tuple(random_step(random, random.randint(1, max_layers)) for _ in range(random.randint(1, 3)))
    program = random_program(random, profiles, random.choice(list(Multiplexing)))
    return random, Case(program, profiles)


@pytest.mark.parametrize("make", HANDMADE, **case_ids)
def test_programs_by_hand_are_right(make: Callable[[], Case]) -> None:
    case = make()
    assert find_violations(case.program, case.profiles, budget_bytes=case.program.slab_bytes) == ()
    assert fault(case.program, case.profiles) == ""


@pytest.mark.parametrize("mutator", ALWAYS_WRONG, **case_ids)
@pytest.mark.parametrize("make", HANDMADE, **case_ids)
def test_every_mutant_is_found(make: Callable[[], Case], mutator: Mutator) -> None:
    case = make()
    for mutant in mutator(case.program, case.profiles):
        found = violations(case, mutant)
        assert mutant.kinds & {each.kind for each in found}, (mutant.name, [str(each) for each in found])


@pytest.mark.parametrize("mutator", [*ALWAYS_WRONG, *WRONG_UNLESS_REDUNDANT], **case_ids)
def test_every_mutator_applies_somewhere(mutator: Mutator) -> None:
    cases = [make() for make in HANDMADE]
    assert any(list(mutator(case.program, case.profiles)) for case in cases)


@pytest.mark.parametrize("mutator", WRONG_UNLESS_REDUNDANT, **case_ids)
@pytest.mark.parametrize("make", HANDMADE, **case_ids)
def test_what_is_dropped_is_missed_unless_it_was_redundant(
    make: Callable[[], Case], mutator: Mutator
) -> None:
    """Redundant is what no race and no value tells: the machine that tries every pair finds nothing."""
    case = make()
    for mutant in mutator(case.program, case.profiles):
        found = violations(case, mutant)
        trouble = fault(mutant.program, case.profiles)
        assert bool(found) == bool(trouble), (mutant.name, trouble, [str(each) for each in found])
        if found:
            assert mutant.kinds & {each.kind for each in found}, (mutant.name, [str(each) for each in found])


def test_which_waits_by_hand_are_redundant() -> None:
    """Of all waits these five: nobody had the bytes before in this part, nothing wrote the tensor in this
    part, or the next wait of the same lane implies it."""
    survivors = [
        mutant.name
        for make in HANDMADE
        for case in [make()]
        for mutant in dropped_waits(case.program, case.profiles)
        if not violations(case, mutant)
    ]
    assert [name.partition(" ")[0] for name in survivors] == [
        "body[9]",  # fresh bytes
        "body[34]",  # [35] waits for compute, which waited for the offload
        "body[3]",  # a parameter, unchanged since the part began
        "body[15]",  # [16] again
        "body[19]",  # the two prefetches are on one lane: waiting for the second is enough
    ]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_programs_are_right(seed: int) -> None:
    _, case = random_case(seed, max_layers=4)
    found = find_violations(case.program, case.profiles, budget_bytes=case.program.slab_bytes)
    assert [str(each) for each in found] == []
    assert fault(case.program, case.profiles) == ""


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutants_of_random_programs_are_found(seed: int) -> None:
    _, case = random_case(seed, max_layers=2)
    for mutator in ALWAYS_WRONG:
        for mutant in mutator(case.program, case.profiles):
            found = violations(case, mutant)
            assert mutant.kinds & {each.kind for each in found}, (mutator.__name__, mutant.name)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_accepted_is_right_and_what_is_refused_is_wrong(seed: int) -> None:
    """Random edits: the verifier and the machine that tries everything agree on each."""
    random, case = random_case(seed, max_layers=3)
    for _ in range(4):
        edited = random_edit(random, case.program)
        found = find_violations(edited, case.profiles, budget_bytes=edited.slab_bytes)
        trouble = fault(edited, case.profiles)
        if trouble:
            assert found, trouble
        else:
            assert not found or found[0].kind in STRICTER, [str(each) for each in found]
