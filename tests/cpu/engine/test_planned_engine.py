"""Planned programs compute, bit by bit, what their sub-arrays compute without a plan; broken off, they leave
everything as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decided_plans import num_decisions
from planned import Case, case_of, differences, state_of, train_planned

from trainmux.engine import _planned
from trainmux.errors import BudgetError, TrainmuxWarning
from trainmux.fleet import _build
from trainmux.ir import Multiplexing, Offload, Prefetch, Recompute
from trainmux.runtime import _storage, stacked_strides

TURNS, RING = Multiplexing.TURNS, Multiplexing.RING
KEPT, SWAPPED, RECOMPUTED, BOTH = (False, False), (True, False), (False, True), (True, True)
NUM_STEPS = 3

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.mark.parametrize(
    ("name", "widths", "num_branches", "kernels", "multiplexing", "decisions"),
    [
        ("mlp", (2, 1), 1, "aten", TURNS, KEPT),
        ("mlp", (1, 1, 1), 1, "aten", RING, SWAPPED),
        ("mlp", (1, 1, 1), 1, "aten", RING, RECOMPUTED),
        ("mlp", (1, 1, 1), 1, "aten", TURNS, BOTH),
        ("mlp", (1, 1), 1, "lowered", RING, KEPT),
        ("mlp", (3, 2), 3, "aten", TURNS, BOTH),
        ("cnn_with_dropout", (2, 1), 2, "aten", RING, BOTH),
        ("transformer_with_dropout", (2,), 1, "aten", TURNS, BOTH),
        pytest.param("lstm_with_dropout", (1, 1), 1, "aten", RING, BOTH, marks=pytest.mark.extensive),
    ],
)
def test_a_planned_program_computes_the_same_bits(
    name: str,
    widths: tuple[int, ...],
    num_branches: int,
    kernels: str,
    multiplexing: Multiplexing,
    decisions: tuple[bool, bool],
) -> None:
    """Freed bytes become NaN. Where feature maps are swapped, so are parameters and optimizer state."""
    swaps, recomputes = decisions
    case = case_of(name, widths, kernels, num_branches)
    program = case.program(multiplexing, swaps=swaps, recomputes=recomputes, with_static=swaps)
    counts = num_decisions(program)
    assert (counts[Offload] > 0, counts[Prefetch] > 0, counts[Recompute] > 0) == (swaps, swaps, recomputes)
    trained = train_planned(case, case.planned(program, poisons=True), NUM_STEPS)
    assert differences(trained, case.expected(NUM_STEPS)) == []


def test_layouts_are_those_of_a_step_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters as they are stored on a CUDA device, channels innermost, and one channel only.

    Traced, the view of two members' filters has a stride by which torch takes them for channels last; run, it
    has not. A plan follows what is run: another layout would round differently from there on.
    """

    def as_on_cuda(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
        return stacked_strides(shape, dtype, torch.device("cuda"))

    for module in (_storage, _build):
        monkeypatch.setattr(module, "stacked_strides", as_on_cuda)
    case = Case("cnn_with_dropout", (2,))
    assert differences(train_planned(case, case.planned(case.program(TURNS)), 2), case.expected(2)) == []


def test_a_step_that_breaks_off_leaves_static_tensors_where_they_are_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them are swapped: in the middle of a step some are on the host that should not be, and more so.

    Nothing has been updated when the forward pass breaks off, so everything is as it was.
    """
    case = case_of("mlp", (2, 1))
    planned = case.planned(case.program(TURNS, swaps=True, recomputes=True, with_static=True), poisons=True)
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
            with pytest.raises(BudgetError) as caught:
                planned.step("own", [batch] * len(planned.groups))
        assert caught.value.__context__ is None, "expected nothing that holds on to the step's tensors"
        assert differences(state_of(planned.groups), before) == [], stop
    assert differences(train_planned(case, planned, NUM_STEPS), case.expected(NUM_STEPS)) == []


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
    case = case_of("mlp", (1, 1, 1))
    program = case.program(multiplexing, swaps=True, recomputes=True, with_static=True)
    planned = case.planned(program, poisons=True)
    planned._engines["own"][1]._room = GraphsOnTheHost(can_capture=can_capture)  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = train_planned(case, planned, NUM_STEPS)
    assert [each.category for each in told] == [TrainmuxWarning] * (not can_capture)
    assert differences(found, case.expected(NUM_STEPS)) == []
