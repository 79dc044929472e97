"""Planned programs compute, bit by bit, what their sub-arrays compute without a plan."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from planned import Case, differences, expected_of, small_case, tightest, train_plain, train_planned
from short_workloads import SHORT

from trainmux.fleet import _build
from trainmux.ir import Multiplexing, Offload, Recompute
from trainmux.runtime import _storage, stacked_strides

NUM_STEPS = 2
TURNS, RING = Multiplexing.TURNS, Multiplexing.RING


@pytest.mark.usefixtures("built_once")
@pytest.mark.parametrize(
    ("name", "widths", "policy", "multiplexing", "share"),
    [
        ("mlp", (2, 1), "none", TURNS, 1.0),
        ("transformer_with_dropout", (2,), "swap_only", TURNS, 0.6),
        ("transformer_with_dropout", (2,), "recompute_only", TURNS, 0.6),
        ("mlp", (1, 1, 1), "mutwo", RING, 1.0),
        pytest.param("residual", (1, 1), "auto", RING, 0.3, marks=pytest.mark.extensive),
        pytest.param("lstm_with_dropout", (1, 1), "mutwo", RING, 1.0, marks=pytest.mark.extensive),
    ],
)
def test_a_planned_program_computes_the_same_bits(
    name: str, widths: tuple[int, ...], policy: str, multiplexing: Multiplexing, share: float
) -> None:
    case = small_case(name, widths, workload=SHORT[name])
    found = tightest(case.candidates(policy, multiplexing), share)
    instructions = found.program.body.instructions
    if share < 1:
        assert any(isinstance(i, Offload | Recompute) for i in instructions), "expected something to test"
    planned = case.planned(found.program, poisons=True)
    expected = expected_of(name, widths, NUM_STEPS, workload=SHORT[name])
    assert differences(train_planned(case, planned, NUM_STEPS), expected) == []


@pytest.mark.usefixtures("built_once")
@pytest.mark.parametrize(
    ("name", "widths", "num_branches", "policy", "multiplexing", "share"),
    [
        ("mlp", (2, 2), 2, "none", TURNS, 1.0),
        ("mlp", (3, 2), 3, "none", TURNS, 1.0),
        ("cnn_with_dropout", (2, 1), 2, "auto", RING, 0.3),
        pytest.param("residual", (3,), 3, "auto", TURNS, 0.3, marks=pytest.mark.extensive),
    ],
)
def test_members_side_by_side_compute_the_bits_of_members_alone(
    name: str,
    widths: tuple[int, ...],
    num_branches: int,
    policy: str,
    multiplexing: Multiplexing,
    share: float,
) -> None:
    case = Case(name, widths, num_branches=num_branches, workload=SHORT[name])
    found = tightest(case.candidates(policy, multiplexing), share)
    if share < 1:
        instructions = found.program.body.instructions
        assert any(isinstance(i, Offload | Recompute) for i in instructions), "expected something to test"
    trained = train_planned(case, case.planned(found.program, poisons=True), NUM_STEPS)
    assert differences(trained, train_plain(case, NUM_STEPS)) == []


def test_losses_of_regions_come_with_their_own_step() -> None:
    name = "mlp"
    case = small_case(name, (1, 1), "lowered", SHORT[name])
    found = case.candidates("mutwo", RING).plain()
    trained = train_planned(case, case.planned(found.program, poisons=True), NUM_STEPS)
    assert differences(trained, expected_of(name, (1, 1), NUM_STEPS, "lowered", SHORT[name])) == []


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
    found = train_planned(case, case.planned(case.candidates("none", TURNS).plain().program), NUM_STEPS)
    assert differences(found, train_plain(case, NUM_STEPS)) == []
