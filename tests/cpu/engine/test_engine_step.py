"""A step program over tensors that share memory in the trace, and over constants.

Members that stop or are not finite, and those beside them, are tested with fleets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainmux as tm


def batch(seed: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class SharesGradient(nn.Module):
    """Two parameters with one and the same gradient, a third with a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(3, 3).double()) for _ in range(2))
        self.flat = nn.Parameter(torch.randn(9).double())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.a + self.b + self.flat.view(3, 3))).square().mean()


class WithConstant(nn.Module):
    """Constants that are no buffers, used forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.table = torch.arange(1.0, 4.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        constant = torch.tensor([1.0, 2.0], dtype=torch.float64).sum()
        return (x * self.weight * self.table).sin().square().mean() + constant


class Returned(nn.Module):
    """A gradient, a metric and a buffer that are one and the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total = x.sum(0)
        self.seen.copy_(total)
        return (self.weight * total).sum(), {"total": total}


def fleet_of(make: Callable[[], nn.Module], **options: Any) -> tm.Fleet:
    members = []
    for number in range(2):
        torch.manual_seed(number)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (number + 1), weight_decay=0.1)
        members.append(tm.Member(model, optimizer, name=f"m{number}", **options))
    return tm.Fleet(members, lambda model, x: model(x), batch(0), lowering="aten")


@pytest.mark.parametrize(
    ("make", "clip"), [(SharesGradient, None), (SharesGradient, 0.05), (WithConstant, None), (Returned, 0.05)]
)
def test_models_train_like_torch(make: Callable[[], nn.Module], clip: float | None) -> None:
    fleet = fleet_of(make, clip_norm=clip)
    plain = [copy.deepcopy((member.model, member.optimizer)) for member in fleet.members]
    for step in range(3):
        losses = fleet.step(batch(step))
        for number, (model, optimizer) in enumerate(plain):
            optimizer.zero_grad()
            result = model(batch(step))
            loss, metrics = result if isinstance(result, tuple) else (result, {})
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clone()  # torch may give two parameters one gradient
            nn.utils.clip_grad_norm_(model.parameters(), torch.inf if clip is None else clip)
            optimizer.step()
            torch.testing.assert_close(losses[number], loss.detach(), rtol=1e-12, atol=1e-12)
            for name, value in metrics.items():
                torch.testing.assert_close(fleet.metrics[name][number], value)
    fleet.sync()
    for member, (model, _) in zip(fleet.members, plain, strict=True):
        got, expected = (dict(each.state_dict()) for each in (member.model, model))
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
