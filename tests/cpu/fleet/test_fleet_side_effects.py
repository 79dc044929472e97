"""Code with side effects that do no harm, and what evaluation does to models that prepare for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_cases import EXAMPLE, TOLERANCE, assert_trains_alone, coded, mlp, mse, sgd, train_alone
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import TraceError, TrainmuxWarning


def assert_trains(make: Callable[[], nn.Module], loss: Callable[..., Any] = mse, num_steps: int = 3) -> Any:
    """The model trains fused as it does alone; returns the fused one."""
    fleet = tm.Fleet([sgd(make())], loss, EXAMPLE)
    assert_trains_alone(fleet, lambda _: sgd(make()), [EXAMPLE] * num_steps, loss)
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
        tm.Fleet([sgd(mlp())], lambda model, batch: criterion(model(batch[0]), batch[1]), EXAMPLE)
    assert type(criterion.centre) is Tensor
    assert criterion.centre.tolist() == [0.0, 0.0]
    criterion(mlp()(EXAMPLE[0]), EXAMPLE[1]).backward()
    assert_trains(
        lambda: coded(lambda model, x: model.layer(x), criterion=Centre(in_place)),
        lambda model, batch: model.criterion(model(batch[0]), batch[1]),
    )


def caches_a_mask(model: Any, x: Tensor) -> Any:
    """Makes a constant at the first call and keeps it."""
    if model.mask is None:
        model.mask = torch.ones(2, dtype=x.dtype).cumsum(0)
    if len(x) not in model.by_size:
        model.by_size[len(x)] = torch.full((2,), float(len(x)), dtype=x.dtype)
    model.was_called = True
    return model.layer(x) * model.mask + model.by_size[len(x)]


def counts_in_a_buffer(model: Any, x: Tensor) -> Any:
    """The remedy for a model that counts its calls."""
    model.calls += 1
    return model.layer(x) * (model.calls / 5).clamp(max=1.0)


def stores_an_auxiliary_loss(model: Any, x: Tensor) -> Any:
    y = model.layer(x)
    model.penalty = y.square().mean()
    return y


def test_code_without_consequences_for_the_next_call() -> None:
    cached = assert_trains(lambda: coded(caches_a_mask, mask=None, by_size={}, was_called=False))
    assert (cached.mask, cached.by_size, cached.was_called) == (None, {}, False)
    calls = torch.zeros((), dtype=torch.float64)
    assert_trains(lambda: coded(counts_in_a_buffer, calls=calls.clone()), num_steps=7)
    with pytest.warns(TrainmuxWarning, match=r"model\.penalty"):
        stored = assert_trains(
            lambda: coded(stores_an_auxiliary_loss, penalty=0.0),
            lambda model, batch: mse(model, batch) + 0.1 * model.penalty,
        )
    assert stored.penalty == 0.0


class Prepares(nn.Module):
    """Gets ready for evaluation: with another factor, and where ``folds`` is set with other parameters."""

    def __init__(self, *, folds: bool) -> None:
        super().__init__()
        self.layer, self.folds, self.factor = mlp(), folds, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training else self.layer(x) * self.factor

    def train(self, mode: bool = True) -> Any:
        self.factor = 1.0 if mode else 2.0
        if self.folds and not mode:
            self.folded = self.layer[0].weight
        return super().train(mode)


def test_evaluation_has_no_side_effects_either() -> None:
    model = Prepares(folds=False)
    found = tm.Fleet([sgd(model)], mse, EXAMPLE).evaluate([EXAMPLE])["a"]["loss"]
    assert (model.training, model.factor) == (True, 1.0)
    assert found == pytest.approx(mse(model.eval(), EXAMPLE).item(), rel=TOLERANCE)
    folds = Prepares(folds=True)
    with pytest.raises(TraceError):
        tm.Fleet([sgd(folds)], mse, EXAMPLE).evaluate([EXAMPLE])
    assert not hasattr(folds, "folded")
    train_alone(sgd(folds), [EXAMPLE])
