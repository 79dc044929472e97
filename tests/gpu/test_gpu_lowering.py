"""Compiled regions on CUDA: as exact as ATen's kernels, deterministic where asked, captured once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from equivalence import MAX_ERROR_RATIO, full_precision
from small_fleets import assert_same, batch_of, make_fleet, make_member, states
from torch import Tensor

from trainmux.engine import CudaGraphEngine
from trainmux.lowering import compiler_missing

NUM_STEPS = 3
FLOOR = 1e-6
"""What rounding alone does in fp32; below it, ATen is exact by accident."""


@pytest.fixture(autouse=True)
def needs_a_compiler() -> None:
    if missing := compiler_missing(torch.device("cuda", 0)):
        pytest.skip(missing)


def trained(name: str, **options: Any) -> list[Tensor]:
    """Losses and weights of a fleet after a few steps."""
    fleet = make_fleet(name, **options)
    losses = [fleet.step(batch_of(name, 100 + step)).cpu() for step in range(NUM_STEPS)]
    return losses + [value.cpu() for value in states(fleet) if value.is_floating_point()]


def error(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Root mean square over all tensors, each as a share of its own size."""
    shares = [
        ((a.double() - b.double()).square().mean() / b.double().square().mean().clamp(min=1e-30)).item()
        for a, b in zip(got, exact, strict=True)
    ]
    return (sum(shares) / len(shares)) ** 0.5


@pytest.mark.parametrize(
    ("name", "deterministic"), [("bottleneck", True), ("transformer_with_dropout", True), ("mlp", False)]
)
def test_compiled_kernels_are_as_exact_as_those_of_aten_and_repeat_where_deterministic(
    name: str, deterministic: bool
) -> None:
    with full_precision():
        exact = trained(name, lowering="aten", precision="fp64")
        of_aten = error(trained(name, lowering="aten"), exact)
        runs = [trained(name, lowering="inductor", deterministic=deterministic) for _ in range(2)]
    assert error(runs[0], exact) <= MAX_ERROR_RATIO * max(of_aten, FLOOR)
    if deterministic:
        assert_same(*runs)


@pytest.mark.parametrize(
    ("name", "lowering"), [("bottleneck", "aten"), ("transformer_with_dropout", "inductor")]
)
def test_branches_compute_what_one_after_another_does(name: str, lowering: str) -> None:
    options: dict[str, Any] = {"lowering": lowering, "deterministic": True, "width": 1}
    assert_same(*(trained(name, branches=branches, **options) for branches in (2, 1)))


@pytest.mark.parametrize(("width", "lowering"), [(None, "aten"), (1, "inductor")])
def test_a_replaced_member_keeps_the_captured_graph(
    width: int | None, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "transformer_with_dropout"
    captures: list[int] = []
    original = CudaGraphEngine._capture

    def capture(self: CudaGraphEngine, *args: Any, **kwargs: Any) -> Any:
        captures.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CudaGraphEngine, "_capture", capture)
    fleet = make_fleet(name, lowering=lowering, width=width, deterministic=True)
    batch = batch_of(name, 0)
    fleet.step(batch)
    assert len(captures) == 1
    fleet.replace("m1", make_member(name, 7))
    losses = fleet.step(batch)
    fleet.drop("m3")
    fleet.add(make_member(name, 8))
    fleet.step(batch)
    assert len(captures) == 1
    assert torch.isfinite(losses).all()


def test_training_begins_at_once_and_goes_on_compiled() -> None:
    with full_precision():
        fleet, other = make_fleet("mlp", lowering="auto"), make_fleet("mlp", lowering="aten")
        for step in range(4):
            batch = batch_of("mlp", step)
            if step == 2:
                fleet.wait_until_compiled()
            torch.testing.assert_close(fleet.step(batch), other.step(batch), rtol=1e-4, atol=1e-5)
