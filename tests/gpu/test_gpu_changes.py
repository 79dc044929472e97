"""Captured steps are whole, draw as evaluations ask, and follow, refuse or take over changes of members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_fleets import assert_same, states
from torch import Tensor, nn

import trainmux as tm
from trainmux.engine import CudaGraphEngine
from trainmux.errors import BudgetError, MemberChangedError

FP64 = torch.float64


class Net(nn.Module):
    """Has a view of its own weights and a number that decides what it computes.

    With ``noise`` it draws, in evaluation too; with ``shifts`` it makes a tensor on torch's default device.
    """

    def __init__(self, width: int, dtype: torch.dtype, noise: bool = False, shifts: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, width, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.last = nn.Linear(width, 3, dtype=dtype)
        self.last.bias.register_hook(lambda gradient: gradient * 0.5)
        self.kept = self.last.weight.data
        self.scale, self.noise, self.shifts = 1.0, noise, shifts

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)).tanh()) * self.scale + self.kept.sum()
        if self.noise:
            y = y + torch.randn_like(y)
        return y + torch.ones(3) if self.shifts else y


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def batch(number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 8, dtype=dtype, generator=generator, device="cpu")
    return inputs, torch.randn(8, 3, dtype=dtype, generator=generator, device="cpu")


def models_of(dtype: torch.dtype = torch.float32, **options: bool) -> list[Net]:
    """In two groups."""
    models = []
    for seed, width in enumerate((16, 16, 24)):
        torch.manual_seed(seed)
        models.append(Net(width, dtype, **options))
    return models


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fleet_of(models: list[Net], dtype: torch.dtype = torch.float32, engine: str = "cuda_graphs") -> tm.Fleet:
    members = [
        tm.Member(model, optimizer_of(model), name=f"m{number}", seed=number)
        for number, model in enumerate(models)
    ]
    options: dict[str, Any] = {"device": "cuda", "deterministic": True, "lowering": "aten", "engine": engine}
    precision = "fp64" if dtype is FP64 else "fp32"
    return tm.Fleet(members, loss_fn, batch(0, dtype), precision=precision, **options)


# ---- changes ---------------------------------------------------------------------------------------------


class Both:
    """Members on the GPU, and the same in plain torch on the host."""

    def __init__(self) -> None:
        self.models, self.plain = models_of(FP64), models_of(FP64)
        self.optimizers = [optimizer_of(model) for model in self.plain]
        self.fleet = fleet_of(self.models, FP64)

    def step(self, *numbers: int) -> None:
        for number in numbers:
            found = self.fleet.step(batch(number, FP64)).tolist()
            for model, optimizer, loss in zip(self.plain, self.optimizers, found, strict=True):
                optimizer.zero_grad()
                expected = loss_fn(model, batch(number, FP64))
                expected.backward()
                optimizer.step()
                assert loss == pytest.approx(expected.item(), rel=1e-9)

    def assert_same(self) -> None:
        expected = [value for model in self.plain for value in model.state_dict().values()]
        torch.testing.assert_close(states(self.fleet), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_change_is_noticed_and_taken_over_by_captured_steps(is_planned: bool) -> None:
    both = Both()
    if is_planned:
        both.fleet.plan(budget="2GiB", policy="none")
    both.step(0, 1, 2)
    both.models[0].scale = 0.5
    with pytest.raises(MemberChangedError, match=r"model\.scale"):
        both.fleet.step(batch(3, FP64))
    both.fleet.refresh("m0")
    both.plain[0].scale = 0.5
    both.step(3, 4, 5)
    both.fleet.sync()
    for model in (both.models[1], both.plain[1]):
        with torch.no_grad():
            model.first.weight.mul_(0.5)
    with pytest.raises(MemberChangedError, match=r"first\.weight"):
        both.fleet.step(batch(6, FP64))
    both.fleet.refresh()
    both.step(6, 7)
    both.assert_same()


# ---- whole steps, draws, surroundings ----------------------------------------------------------------------


def test_all_groups_are_captured_before_any_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second group's capture finds no memory: the first has not changed, and both go on later."""
    fleet, other = fleet_of(models_of()), fleet_of(models_of())
    before = states(fleet)
    captures = 0
    capture = CudaGraphEngine._capture

    def failing(*arguments: Any) -> Any:
        nonlocal captures
        captures += 1
        if captures == 2:
            raise torch.OutOfMemoryError("no more")
        return capture(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(CudaGraphEngine, "_capture", failing)
        with pytest.raises(BudgetError):
            fleet.step(batch(0))
    assert captures == 2
    assert_same(states(fleet), before)
    for number in range(3):
        assert torch.equal(fleet.step(batch(number)), other.step(batch(number)))
    assert_same(states(fleet), states(other))


def test_an_evaluation_draws_by_its_batches() -> None:
    """Captured as by the reference engine, whenever it is made; and under a plan."""
    graphs, reference = fleet_of(models_of(noise=True)), fleet_of(models_of(noise=True), engine="reference")
    loader = [batch(number) for number in range(3)]
    assert graphs.evaluate(loader) == reference.evaluate(loader)
    for is_planned in (False, True):
        if is_planned:
            graphs.plan(budget="2GiB", policy="none")
        graphs.step(batch(0))
        reference.step(batch(0))
        found = graphs.evaluate(loader)
        assert graphs.evaluate(loader) == found
        assert is_planned or found == reference.evaluate(loader)
        one, two = (graphs.evaluate([batch(0)] * count) for count in (1, 2))
        assert all(abs(one[name]["loss"] - two[name]["loss"]) > 1e-6 for name in one)


def test_code_that_makes_tensors_on_the_default_device_trains_on_it() -> None:
    with torch.device("cuda"):
        inside = fleet_of(models_of(shifts=True))
        losses = [inside.step(batch(number)) for number in range(2)]
    assert all(value.isfinite().all() for value in losses)
    inside.step(batch(2))  # outside of it, and on a batch of another size: traced anew
    inside.step(tuple(leaf[:3] for leaf in batch(3)))


@pytest.mark.parametrize("name", ["autocast", "inference mode"])
def test_a_captured_fleet_is_the_same_inside(name: str) -> None:
    surroundings = torch.autocast("cuda", torch.bfloat16) if name == "autocast" else torch.inference_mode()
    outside, inside = fleet_of(models_of(noise=True)), fleet_of(models_of(noise=True))
    losses = [outside.step(batch(number)) for number in range(3)]
    with surroundings:
        got = [inside.step(batch(number)) for number in range(3)]
    assert_same(got, losses)
    assert_same(states(inside), states(outside))
