"""What a lowered step is given: constants of the model, batches in any layout, parts of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lowering_tools import leave_uncompiled
from torch import Tensor, nn

import trainmux as tm

OFFSETS = torch.linspace(-1, 1, 6)
INPUTS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class Shifted(nn.Module):
    """Adds a tensor that is no buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = self.linear(x + OFFSETS)
        return shifted


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), torch.zeros(()))


def fleet_of(lowering: str, example: Tensor = INPUTS, **options: Any) -> tm.Fleet:
    members = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Shifted()
        members.append(tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name=str(seed)))
    return tm.Fleet(members, loss, example, lowering=lowering, **options)


def losses(fleet: tm.Fleet, batch: Tensor) -> Tensor:
    return torch.stack([fleet.step(batch).clone() for _ in range(3)])


def test_constants_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncompiled(monkeypatch)
    torch.testing.assert_close(losses(fleet_of("inductor"), INPUTS), losses(fleet_of("aten"), INPUTS))


@pytest.mark.slow
def test_a_batch_in_another_layout() -> None:
    """Compiled regions are made for contiguous batches."""
    strided = INPUTS.t().contiguous().t()
    assert not strided.is_contiguous()
    expected = losses(fleet_of("aten"), INPUTS)
    torch.testing.assert_close(losses(fleet_of("aten"), strided), expected)
    torch.testing.assert_close(losses(fleet_of("inductor"), strided), expected)
    torch.testing.assert_close(losses(fleet_of("inductor", example=strided), INPUTS), expected)


def test_parts_of_a_batch_that_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six numbers a member: the second member's begin at no multiple of 16 bytes."""
    from trainmux.engine._sub_arrays import SubArrays

    leave_uncompiled(monkeypatch)
    begins: list[int] = []
    original = SubArrays._slice

    def watch(self: SubArrays, arguments: Any, index: int) -> Any:
        taken = original(self, arguments, index)
        begins.extend(taken[position].data_ptr() % 16 for position in self._fed)
        return taken

    monkeypatch.setattr(SubArrays, "_slice", watch)
    rows = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    odd = rows[:, :1].contiguous()  # six numbers a member, 24 bytes
    assert odd[1].data_ptr() % 16 != 0
    fleet_of("aten", example=odd, data="per_member", width=1).step(odd)
    assert begins
    assert set(begins) == {0}
