"""Code with side effects: refused with the line, and everything it touched put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import TraceError, TrainmuxWarning

BATCH = (torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64))
SCALE = torch.zeros(3, dtype=torch.float64)
NOTES: list[Any] = []
OWN_RANDOM = random.Random(3)
OWN_NUMPY = np.random.default_rng(3)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def fleet_of(model: nn.Module, loss: Callable[..., Any] = mse) -> tm.Fleet:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tm.Fleet([tm.Member(model, optimizer, name="a")], loss=loss, example_batch=BATCH, precision="fp64")


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 3).double()


def train_plainly(model: nn.Module, loss: Callable[..., Any], num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        value = loss(model, BATCH)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


# ---- refused -------------------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()


class Counts(Body):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * min(1.0, self.calls / 5)


class CountsForLater(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls < 1000 else self.layer(x) * 2


class RemembersState(Body):
    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + (0 if self.hidden is None else self.hidden)
        self.hidden = y.mean(0).detach()
        return y


class RunningTotal(Body):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.total = self.total + y.detach().sum(0)
        return y


class InitialisesFromData(Body):
    def __init__(self) -> None:
        super().__init__()
        self.initialised = False
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not self.initialised:
            self.shift = y.detach().mean(0)
            self.initialised = True
        return y - self.shift


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (Counts, "model.calls"),
        (CountsForLater, "model.calls"),
        (RemembersState, "model.hidden"),
        (RunningTotal, "model.total"),
        (InitialisesFromData, "model.initialised"),
    ],
)
def test_python_state_of_a_model(make: Callable[[], nn.Module], path: str) -> None:
    model = make()
    before = dict(vars(model))
    with pytest.raises(
        TraceError, match=f"{path} is changed at .*test_fleet_side_effects.py:.* in forward"
    ) as info:
        fleet_of(model)
    assert "buffer" in str(info.value)
    assert vars(model) == before
    train_plainly(model, mse, 1)


def test_the_line_is_the_one_that_changes_it() -> None:
    with pytest.raises(TraceError) as info:
        fleet_of(Counts())
    file, line = str(info.value.location).split(" in ")[0].rsplit(":", 1)
    with open(file, encoding="utf-8") as source:
        assert source.readlines()[int(line) - 1].strip() == "self.calls += 1"


def draws_from_python(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch) * random.random()


def draws_from_numpy(model: nn.Module, batch: Any) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return mse(model, (share * batch[0], batch[1]))


def draws_from_its_own(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch) * OWN_RANDOM.random()


def draws_from_its_own_numpy(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch) * float(OWN_NUMPY.random())


@pytest.mark.parametrize(
    "loss", [draws_from_python, draws_from_numpy, draws_from_its_own, draws_from_its_own_numpy]
)
def test_random_numbers_that_are_not_torchs(loss: Callable[..., Any]) -> None:
    def states() -> list[str]:
        return [
            repr(state)
            for state in (
                random.getstate(),
                np.random.get_state(),
                OWN_RANDOM.getstate(),
                OWN_NUMPY.bit_generator.state,
            )
        ]

    before = states()
    with pytest.raises(TraceError, match=f"random generator at .* in {loss.__name__}; .*draw with torch"):
        fleet_of(linear(), loss)
    assert states() == before


def test_a_list_that_grows() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mse(model, batch)
        NOTES.append(value.detach())
        return value

    with pytest.raises(TraceError, match=r"loss\.NOTES is changed at .* in loss by every call"):
        fleet_of(linear(), loss)
    assert NOTES == []


class Centre(nn.Module):
    """A criterion with a moving average, as in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

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
def test_a_criterion_beside_the_model_that_changes_its_buffer(make: Callable[[], nn.Module]) -> None:
    criterion = make()
    with pytest.raises(TraceError, match="buffer of the model"):
        fleet_of(linear(), lambda model, batch: criterion(model(batch[0]), batch[1]))
    assert type(criterion.centre) is Tensor
    assert criterion.centre.tolist() == [0.0, 0.0, 0.0]
    criterion(linear()(BATCH[0]), BATCH[1]).backward()


@pytest.mark.parametrize("make", [Centre, CentreInPlace])
def test_the_same_criterion_inside_the_model_trains(make: Callable[[], Centre]) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return model.criterion(model.layer(batch[0]), batch[1])  # type: ignore[no-any-return]

    def with_criterion() -> nn.Module:
        model = Body()
        model.criterion = make()
        return model

    plain, fused = with_criterion(), with_criterion()
    expected = train_plainly(plain, loss, 4)
    fleet = fleet_of(fused, loss)
    found = [fleet.step(BATCH).item() for _ in range(4)]
    fleet.sync()
    assert found == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(fused.criterion.centre, plain.criterion.centre, rtol=1e-12, atol=1e-12)


def test_a_global_tensor_changed_in_place() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        SCALE.add_(1)
        return mse(model, batch) + SCALE.sum()

    with pytest.raises(TraceError, match=r"add_.* changes a tensor in place that is not part of the model"):
        fleet_of(linear(), loss)
    assert SCALE.tolist() == [0.0, 0.0, 0.0]


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
            self.mask = torch.ones(3, dtype=x.dtype).cumsum(0)
        if len(x) not in self.by_size:
            self.by_size[len(x)] = torch.full((3,), float(len(x)), dtype=x.dtype)
        self.was_called = True
        return self.layer(x) * self.mask + self.by_size[len(x)]


class CachesAWeight(Body):
    """Keeps something computed from a parameter: stale after the first update."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = self.layer.weight.detach() * 2
        return self.layer(x) + x @ self.cached.t()


class StoresAnAuxiliaryLoss(Body):
    def __init__(self) -> None:
        super().__init__()
        self.penalty: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.penalty = y.square().mean()
        return y


def test_caches_of_constants_train_and_stay_empty() -> None:
    plain, fused = CachesAMask(), CachesAMask()
    expected = train_plainly(plain, mse, 3)
    fleet = fleet_of(fused)
    assert [fleet.step(BATCH).item() for _ in range(3)] == pytest.approx(expected, rel=1e-12)
    assert (fused.mask, fused.by_size, fused.was_called) == (None, {}, False)


def test_a_cache_of_a_weight_is_refused() -> None:
    with pytest.raises(TraceError, match=r"model\.cached is changed .* next call computes something else"):
        fleet_of(CachesAWeight())


def test_a_stored_tensor_that_the_next_call_does_not_read_is_warned_of() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) + 0.1 * model.penalty

    plain, fused = StoresAnAuxiliaryLoss(), StoresAnAuxiliaryLoss()
    expected = train_plainly(plain, loss, 3)
    with pytest.warns(TrainmuxWarning, match=r"model\.penalty: set by every call"):
        fleet = fleet_of(fused, loss)
    assert [fleet.step(BATCH).item() for _ in range(3)] == pytest.approx(expected, rel=1e-12)
    assert fused.penalty == 0.0


class CountsInABuffer(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (self.calls / 5).clamp(max=1.0)


def test_the_remedy_works() -> None:
    plain, fused = CountsInABuffer(), CountsInABuffer()
    expected = train_plainly(plain, mse, 7)
    fleet = fleet_of(fused)
    assert [fleet.step(BATCH).item() for _ in range(7)] == pytest.approx(expected, rel=1e-12)


def test_evaluation_has_no_side_effects_either() -> None:
    class PreparesForEvaluation(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if self.training else self.layer(x) * self.factor

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.factor = 1.0 if mode else 2.0
            return self

    model = PreparesForEvaluation().train()
    fleet = fleet_of(model)
    found = fleet.evaluate([BATCH])["a"]["loss"]
    assert (model.training, model.factor) == (True, 1.0)
    assert found == pytest.approx(mse(model.eval(), BATCH).item(), rel=1e-12)


def test_a_model_that_evaluates_with_other_parameters_is_refused() -> None:
    class Folds(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def train(self, mode: bool = True) -> nn.Module:
            if not mode:
                self.folded = self.layer.weight
            return super().train(mode)

    model = Folds()
    fleet = fleet_of(model)
    with pytest.raises(TraceError, match=r"eval\(\) gives the model other parameters"):
        fleet.evaluate([BATCH])
    assert not hasattr(model, "folded")
