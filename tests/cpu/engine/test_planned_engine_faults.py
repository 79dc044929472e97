"""Programs decided by hand, run whole and broken off, and with one wait too few."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decided_plans import decided, num_decisions
from planned import differences, expected_of, small_case, state_of, train_planned
from planted_races import RACES, planted

from trainmux.engine import _planned
from trainmux.errors import BudgetError, TrainmuxWarning
from trainmux.ir import Multiplexing, Offload, Prefetch, Recompute, ViolationKind, find_violations

TURNS, RING = Multiplexing.TURNS, Multiplexing.RING


@pytest.mark.parametrize(
    ("swaps", "recomputes", "multiplexing"),
    [(False, False, TURNS), (True, False, RING), (False, True, RING), (True, True, TURNS)],
)
def test_no_switch_changes_a_bit(swaps: bool, recomputes: bool, multiplexing: Multiplexing) -> None:
    case = small_case("mlp", (1, 1, 1))
    program = decided(case, multiplexing, swaps=swaps, recomputes=recomputes, with_static=swaps)
    counts = num_decisions(program)
    assert (counts[Offload] > 0, counts[Prefetch] > 0, counts[Recompute] > 0) == (swaps, swaps, recomputes)
    found = train_planned(case, case.planned(program, poisons=True), 3)
    assert differences(found, expected_of("mlp", (1, 1, 1), 3)) == []


def test_a_step_that_breaks_off_leaves_static_tensors_where_they_are_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them are swapped: in the middle of a step some are on the host that should not be, and more so.

    Nothing has been updated when the forward pass breaks off, so everything is as it was.
    """
    case = small_case("mlp", (2, 1))
    program = decided(case, TURNS, swaps=True, recomputes=True, with_static=True)
    planned = case.planned(program, poisons=True)
    batch = case.batch(0)
    before = [
        {name: value for name, value in state.items() if not name.startswith("last")}
        for state in state_of(planned.groups)
    ]
    run_into = _planned.run_into
    for stop in range(1, 22, 7):
        calls = 0

        def counted(*arguments: object, stop: int = stop) -> list[torch.Tensor]:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise torch.OutOfMemoryError("no more")
            return run_into(*arguments)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(_planned, "run_into", counted)
            for group in planned.groups:
                group.variant()
            with pytest.raises(BudgetError, match="beside its slab"):
                planned.step("own", [batch] * len(planned.groups))
        assert differences(state_of(planned.groups), before) == [], stop
    found = train_planned(case, planned, 3)
    assert differences(found, expected_of("mlp", (2, 1), 3)) == []


@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("multiplexing", [TURNS, RING])
def test_the_verifier_finds_planted_races(multiplexing: Multiplexing, race: str) -> None:
    case = small_case("mlp", (1, 1, 1))
    program = decided(case, multiplexing, swaps=True, recomputes=True, with_static=True)
    found = [
        {violation.kind for violation in find_violations(each, case.profiles, budget_bytes=1 << 40)}
        for each in planted(program, race)
    ]
    assert found, "expected waits to take away"
    assert all(ViolationKind.MISSING_WAIT in kinds for kinds in found)


class GraphsOnTheHost:
    """A room whose graphs are functions: replaying one runs it. It rehearses as the real one does."""

    def __init__(self, *, can_capture: bool) -> None:
        self.can_capture = can_capture

    def capture_all(self, rehearse: Callable[[], None], run: Sequence[Callable[[], None]]) -> list[Any]:
        for _ in range(2):
            rehearse()
        if not self.can_capture:  # as with an operator that waits for the device
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return [SimpleNamespace(replay=each) for each in run]


@pytest.mark.parametrize(("multiplexing", "can_capture"), [(TURNS, True), (RING, True), (RING, False)])
def test_rehearsing_leaves_no_trace(multiplexing: Multiplexing, can_capture: bool) -> None:
    """Static tensors are swapped, so each part begins with them elsewhere than the others do.

    What cannot be captured runs all the same, with one warning.
    """
    case = small_case("mlp", (1, 1, 1))
    program = decided(case, multiplexing, swaps=True, recomputes=True, with_static=True)
    planned = case.planned(program, poisons=True)
    planned._engines["own"][1]._room = GraphsOnTheHost(can_capture=can_capture)  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = train_planned(case, planned, 3)
    assert [each.category for each in told] == [TrainmuxWarning] * (not can_capture)
    assert differences(found, expected_of("mlp", (1, 1, 1), 3)) == []
