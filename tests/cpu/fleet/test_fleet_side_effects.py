"""Code with side effects that do no harm, and what evaluation does to models that prepare for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_cases import EXAMPLE, TOLERANCE, assert_trains_alone, mse, train_alone
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import TraceError, TrainmuxWarning


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def member_of(model: nn.Module) -> tm.Member:
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "a")


def assert_trains(make: Callable[[], nn.Module], loss: Callable[..., Any] = mse, num_steps: int = 3) -> Any:
    """The model trains fused as it does alone; returns the fused one."""
    fleet = tm.Fleet([member_of(make())], loss, EXAMPLE)
    assert_trains_alone(fleet, lambda _: member_of(make()), [EXAMPLE] * num_steps, loss)
    return fleet.members[0].model


class Centre(nn.Module):
    """A criterion with a moving average, as in self-distillation."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64))
        self.in_place = in_place

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(y - self.centre, target)
        if self.in_place:
            self.centre.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        else:
            self.centre = self.centre * 0.9 + 0.1 * y.detach().mean(0)
        return loss


@pytest.mark.parametrize("in_place", [False, True])
def test_a_criterion_that_changes_its_buffer(in_place: bool) -> None:
    """Refused beside the model; as a part of it, it trains."""
    criterion = Centre(in_place)
    with pytest.raises(TraceError):
        tm.Fleet([member_of(Body())], lambda model, batch: criterion(model(batch[0]), batch[1]), EXAMPLE)
    assert type(criterion.centre) is Tensor
    assert criterion.centre.tolist() == [0.0, 0.0]
    criterion(Body()(EXAMPLE[0]), EXAMPLE[1]).backward()

    def with_criterion() -> nn.Module:
        model = Body()
        model.criterion = Centre(in_place)
        return model

    assert_trains(with_criterion, lambda model, batch: model.criterion(model(batch[0]), batch[1]))


class CachesAMask(Body):
    """Makes a constant at the first call and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.by_size: dict[int, Tensor] = {}
        self.was_called = False

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(2, dtype=x.dtype).cumsum(0)
        if len(x) not in self.by_size:
            self.by_size[len(x)] = torch.full((2,), float(len(x)), dtype=x.dtype)
        self.was_called = True
        return self.layer(x) * self.mask + self.by_size[len(x)]


class CountsInABuffer(Body):
    """The remedy for a model that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (self.calls / 5).clamp(max=1.0)


class StoresAnAuxiliaryLoss(Body):
    penalty: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.penalty = y.square().mean()
        return y


def test_code_without_consequences_for_the_next_call() -> None:
    cached = assert_trains(CachesAMask)
    assert (cached.mask, cached.by_size, cached.was_called) == (None, {}, False)
    assert_trains(CountsInABuffer, num_steps=7)
    with pytest.warns(TrainmuxWarning, match=r"model\.penalty"):
        stored = assert_trains(StoresAnAuxiliaryLoss, lambda m, batch: mse(m, batch) + 0.1 * m.penalty)
    assert stored.penalty == 0.0


class Prepares(Body):
    """Gets ready for evaluation."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training else self.layer(x) * self.factor

    def train(self, mode: bool = True) -> nn.Module:
        self.factor = 1.0 if mode else 2.0
        return super().train(mode)


class Folds(Body):
    """Evaluates with other parameters."""

    def train(self, mode: bool = True) -> nn.Module:
        if not mode:
            self.folded = self.layer.weight
        return super().train(mode)


def test_evaluation_has_no_side_effects_either() -> None:
    model = Prepares()
    found = tm.Fleet([member_of(model)], mse, EXAMPLE).evaluate([EXAMPLE])["a"]["loss"]
    assert (model.training, model.factor) == (True, 1.0)
    assert found == pytest.approx(mse(model.eval(), EXAMPLE).item(), rel=TOLERANCE)
    folds = Folds()
    fleet = tm.Fleet([member_of(folds)], mse, EXAMPLE)
    with pytest.raises(TraceError):
        fleet.evaluate([EXAMPLE])
    assert not hasattr(folds, "folded")
    train_alone(member_of(folds), [EXAMPLE])
