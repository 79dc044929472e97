"""Lowered programs compute what they computed before; with real kernels too."""

from __future__ import annotations

import pytest
import torch
from lowering_tools import (
    CASES,
    TINY,
    assert_close,
    compile_afresh,
    example,
    fleet_of,
    leave_uncompiled,
    trained,
)

pytestmark = pytest.mark.usefixtures("traced_once")

BOUNDS = {"fp32": 1e-5, "fp64": 1e-10}
# ATen's kernel for the gradient of hardsigmoid has one sixth in single precision, even for fp64.
LOOSER = {"mobilenet": 1e-8}


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_cutting_a_program_changes_nothing(name: str, precision: str) -> None:
    case = example(name, precision)
    after, before = case.run(case.lowered.module), case.run(case.whole)
    # The operators are the same ones, only in another order; in bf16 a region rounds as often as before.
    assert_close(after, before, 1e-12 if precision == "fp64" else 1e-6)
    arguments = [after[f"argument {i}"] for i in range(len(case.arguments))]
    assert any(not torch.equal(a, b) for a, b in zip(arguments, case.arguments, strict=True))


@pytest.mark.parametrize("name", TINY)
def test_a_lowered_program_computes_what_the_one_on_aten_does(name: str) -> None:
    case = example(name, "fp64")
    assert_close(case.run(case.lowered.module), case.run(case.on_aten()), LOOSER.get(name, BOUNDS["fp64"]))


@pytest.mark.parametrize("name", ["mlp", "cnn_with_dropout", "transformer_with_dropout"])
def test_a_lowered_fleet_trains_like_one_on_aten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncompiled(monkeypatch)
    workload = TINY[name]
    expected = trained(workload, fleet_of(workload, "aten"))
    assert_close(trained(workload, fleet_of(workload, "inductor")), expected, BOUNDS["fp32"])


@pytest.mark.slow  # the first kernel of a machine takes twenty seconds, each other one or two
@pytest.mark.parametrize(
    "name",
    ["cnn_with_dropout", "dlrm", pytest.param("transformer_with_dropout", marks=pytest.mark.extensive)],
)
def test_a_compiled_fleet_trains_like_one_on_aten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout too: masks are drawn in compiled code, and a single other one would show."""
    compile_afresh(monkeypatch)
    workload = TINY[name]
    expected = trained(workload, fleet_of(workload, "aten"))
    assert_close(trained(workload, fleet_of(workload, "inductor")), expected, BOUNDS["fp32"])


@pytest.mark.slow
def test_a_compiled_evaluation_gives_what_one_on_aten_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with sums over bags: the forward pass alone is lowered by a way of its own."""
    compile_afresh(monkeypatch)
    workload = TINY["dlrm"]
    batches = [workload.batch(0, torch.float32)]
    expected = fleet_of(workload, "aten").evaluate(batches)
    got = fleet_of(workload, "inductor").evaluate(batches)
    assert got == {name: pytest.approx(metrics, rel=BOUNDS["fp32"]) for name, metrics in expected.items()}
