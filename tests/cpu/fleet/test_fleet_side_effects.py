"""Code with side effects: refused with the line, and everything it touched put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fleet_cases import EXAMPLE, TOLERANCE, assert_close, state_of, train_alone
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import TraceError, TrainmuxWarning

SCALE = torch.zeros(2, dtype=torch.float64)
NOTES: list[Any] = []
OWN_RANDOM = random.Random(3)
OWN_NUMPY = np.random.default_rng(3)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def member_of(model: nn.Module) -> tm.Member:
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), "a")


def fleet_of(model: nn.Module, loss: Callable[..., Any] = mse) -> tm.Fleet:
    return tm.Fleet([member_of(model)], loss, EXAMPLE)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def assert_trains(make: Callable[[], nn.Module], loss: Callable[..., Any] = mse, num_steps: int = 3) -> Any:
    """The model trains fused as it does alone; returns the fused one."""
    fused, plain = member_of(make()), member_of(make())
    fleet = tm.Fleet([fused], loss, EXAMPLE)
    found = [fleet.step(EXAMPLE).item() for _ in range(num_steps)]
    assert found == pytest.approx(train_alone(plain, [EXAMPLE] * num_steps, loss), rel=TOLERANCE)
    fleet.sync()
    assert_close(state_of(fused), state_of(plain))
    return fused.model


# ---- refused -------------------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()


class Counts(Body):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # changed: model.calls
        return self.layer(x) * min(1.0, self.calls / 5)


class CountsForLater(Body):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # changed: model.calls
        return self.layer(x) if self.calls < 1000 else self.layer(x) * 2


class RemembersState(Body):
    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + (0 if self.hidden is None else self.hidden)
        self.hidden = y.mean(0).detach()  # changed: model.hidden
        return y


class InitialisesFromData(Body):
    def __init__(self) -> None:
        super().__init__()
        self.initialised = False
        self.register_buffer("shift", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not self.initialised:
            self.shift = y.detach().mean(0)
            self.initialised = True  # changed: model.initialised
        return y - self.shift


class CachesAWeight(Body):
    """Keeps something computed from a parameter: stale after the first update."""

    cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = self.layer.weight.detach() * 2  # changed: model.cached
        return self.layer(x) + x @ self.cached.t()


@pytest.mark.parametrize("make", [Counts, CountsForLater, RemembersState, InitialisesFromData, CachesAWeight])
def test_python_state_of_a_model(make: Callable[[], nn.Module]) -> None:
    """What is changed, and the line that changes it, are named."""
    model = make()
    before = dict(vars(model))
    with pytest.raises(TraceError) as caught:
        fleet_of(model)
    file, line = str(caught.value.location).split(" in ")[0].rsplit(":", 1)
    source = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert source.split("# changed: ")[1] in str(caught.value)
    assert vars(model) == before
    train_alone(member_of(model), [EXAMPLE], mse)


def draws_from_python(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch) * random.random()


def draws_from_numpy(model: nn.Module, batch: Any) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return mse(model, (share * batch[0], batch[1]))


def draws_from_its_own(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch) * OWN_RANDOM.random()


def draws_from_its_own_numpy(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch) * float(OWN_NUMPY.random())


def grows_a_list(model: nn.Module, batch: Any) -> Tensor:
    value = mse(model, batch)
    NOTES.append(value.detach())
    return value


def changes_a_tensor(model: nn.Module, batch: Any) -> Tensor:
    SCALE.add_(1)
    return mse(model, batch) + SCALE.sum()


@pytest.mark.parametrize(
    "loss",
    [
        draws_from_python,
        draws_from_numpy,
        draws_from_its_own,
        draws_from_its_own_numpy,
        grows_a_list,
        changes_a_tensor,
    ],
)
def test_losses_that_change_something(loss: Callable[..., Any]) -> None:
    def states() -> str:
        generators = (random.getstate(), np.random.get_state(), OWN_RANDOM.getstate())
        return repr((generators, OWN_NUMPY.bit_generator.state, NOTES, SCALE))

    before = states()
    with pytest.raises(TraceError, match=loss.__name__):
        fleet_of(linear(), loss)
    assert states() == before


class Centre(nn.Module):
    """A criterion with a moving average, as in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(y - self.centre, target)
        self.centre = self.centre * 0.9 + 0.1 * y.detach().mean(0)
        return loss


class CentreInPlace(Centre):
    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(y - self.centre, target)
        self.centre.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return loss


@pytest.mark.parametrize("make", [Centre, CentreInPlace])
def test_a_criterion_that_changes_its_buffer(make: Callable[[], nn.Module]) -> None:
    """Refused beside the model; as a part of it, it trains."""
    criterion = make()
    with pytest.raises(TraceError):
        fleet_of(linear(), lambda model, batch: criterion(model(batch[0]), batch[1]))
    assert type(criterion.centre) is Tensor
    assert criterion.centre.tolist() == [0.0, 0.0]
    criterion(linear()(EXAMPLE[0]), EXAMPLE[1]).backward()

    def with_criterion() -> nn.Module:
        model = Body()
        model.criterion = make()
        return model

    assert_trains(with_criterion, lambda model, batch: model.criterion(model.layer(batch[0]), batch[1]))


# ---- not refused ---------------------------------------------------------------------------------------


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

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def train(self, mode: bool = True) -> nn.Module:
        if not mode:
            self.folded = self.layer.weight
        return super().train(mode)


def test_evaluation_has_no_side_effects_either() -> None:
    model = Prepares()
    found = fleet_of(model).evaluate([EXAMPLE])["a"]["loss"]
    assert (model.training, model.factor) == (True, 1.0)
    assert found == pytest.approx(mse(model.eval(), EXAMPLE).item(), rel=TOLERANCE)
    folds = Folds()
    fleet = fleet_of(folds)
    with pytest.raises(TraceError):
        fleet.evaluate([EXAMPLE])
    assert not hasattr(folds, "folded")
