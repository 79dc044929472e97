"""Fleets over compiled kernels train as those over ATen's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.workloads import Workload
from lowering_tools import MIXED, assert_close, fleet_of, trained
from short_workloads import SHORT
from torch import Tensor, nn

import trainmux as tm
import trainmux.fleet._build as build_module
from trainmux.engine._sub_arrays import SubArrays
from trainmux.lowering import KernelCache

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 1e-5
"""Of fp32."""


LARGER = [SHORT[name] for name in ("cnn_with_dropout", "dlrm", "transformer_with_dropout")]


@pytest.mark.slow  # the first kernel of a machine takes twenty seconds, each other one or two
@pytest.mark.parametrize(
    "workload",
    [MIXED, *(pytest.param(each, marks=pytest.mark.extensive) for each in LARGER)],
    ids=lambda workload: workload.name,
)
def test_a_compiled_fleet_trains_and_evaluates_like_one_on_aten(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout: masks are drawn in compiled code, and a single other one would show. With pools, whose
    gradients go to the same places. With sums over bags: the forward pass alone is lowered by a way of its
    own."""
    kernels = KernelCache()  # of no other test
    monkeypatch.setattr(build_module, "_kernels", lambda deterministic: kernels)
    compiled, on_aten = fleet_of(workload, "inductor"), fleet_of(workload, "aten")
    assert_close(trained(workload, compiled), trained(workload, on_aten), BOUND)
    batches = [workload.batch(0, torch.float32)]
    expected = on_aten.evaluate(batches)
    assert compiled.evaluate(batches) == {
        member: pytest.approx(metrics, rel=10 * BOUND) for member, metrics in expected.items()
    }


# ---- what a step is given --------------------------------------------------------------------------------

OFFSETS = torch.linspace(-1, 1, 6)
INPUTS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class Shifted(nn.Module):
    """Adds a constant that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = self.linear(x + OFFSETS)
        return shifted


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), torch.zeros(()))


def shifted_fleet(lowering: str, example: Tensor = INPUTS, **options: Any) -> tm.Fleet:
    members = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Shifted()
        members.append(tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name=str(seed)))
    return tm.Fleet(members, squares, example, lowering=lowering, **options)


def losses(fleet: tm.Fleet, batch: Tensor) -> Tensor:
    return torch.stack([fleet.step(batch).clone() for _ in range(3)])


@pytest.mark.slow
def test_constants_and_batches_in_another_layout() -> None:
    """Compiled regions are made for contiguous batches."""
    strided = INPUTS.t().contiguous().t()
    assert not strided.is_contiguous()
    expected = losses(shifted_fleet("aten"), INPUTS)
    for lowering, example, batch in (
        ("aten", INPUTS, strided),
        ("inductor", INPUTS, strided),
        ("inductor", strided, INPUTS),
    ):
        torch.testing.assert_close(losses(shifted_fleet(lowering, example), batch), expected)


def test_parts_of_a_batch_that_begin_anywhere_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six numbers a member: the second member's begin at no multiple of 16 bytes."""
    begins: list[int] = []
    original = SubArrays._slice

    def watch(self: SubArrays, arguments: Any, index: int) -> Any:
        taken = original(self, arguments, index)
        begins.extend(taken[position].data_ptr() % 16 for position in self._fed)
        return taken

    monkeypatch.setattr(SubArrays, "_slice", watch)
    odd = torch.randn(2, 1, 6)
    assert odd[1].data_ptr() % 16 != 0
    shifted_fleet("aten", example=odd, data="per_member", width=1).step(odd)
    assert set(begins) == {0}
