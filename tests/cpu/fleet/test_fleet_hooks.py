"""Hooks: those on gradients are part of the graph, those around the update are refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import trainmux as tm
from trainmux.errors import OptimizerError, TrainmuxWarning

BATCH = (torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64))


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make(seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        mse(model, BATCH).backward()
        optimizer.step()


def fleet_of(*pairs: tuple[nn.Module, torch.optim.Optimizer]) -> tm.Fleet:
    members = [tm.Member(model, optimizer, name=f"m{i}") for i, (model, optimizer) in enumerate(pairs)]
    return tm.Fleet(members, mse, BATCH, precision="fp64")


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# ---- honoured ------------------------------------------------------------------------------------------


def mask(model: Any) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * torch.eye(6, dtype=gradient.dtype))


def clip(model: Any) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def two_in_order(model: Any) -> None:
    model[2].bias.register_hook(lambda gradient: gradient + 1.0)
    model[2].bias.register_hook(lambda gradient: gradient * 0.5)


def by_the_weight_itself(model: Any) -> None:
    weight = model[2].weight
    weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())


def of_a_module(model: Any) -> None:
    model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)


@pytest.mark.parametrize("install", [mask, clip, two_in_order, by_the_weight_itself, of_a_module])
def test_hooks_on_gradients_are_in_the_graph(install: Callable[[Any], None]) -> None:
    plain, fused, other = make(), make(), make(1)
    install(plain[0])
    install(fused[0])
    fleet = fleet_of(fused, other)
    for _ in range(3):
        fleet.step(BATCH)
    fleet.sync()
    plain_steps(*plain)
    assert_same(fused[0], plain[0])
    expected = make(1)
    plain_steps(*expected)
    assert_same(other[0], expected[0])


def test_a_removed_hook_is_none() -> None:
    fused = make()
    fused[0][0].weight.register_hook(lambda gradient: gradient * 0).remove()
    fleet = fleet_of(fused, make(1))
    assert len(fleet.summary()) == 1


# ---- refused, and run eagerly beside other jobs --------------------------------------------------------


def after_accumulation(model: Any, optimizer: Any) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halve)


def after_step(model: Any, optimizer: Any) -> None:
    def clamp(optimizer: Any, arguments: Any, named: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.clamp_(-0.05, 0.05)

    optimizer.register_step_post_hook(clamp)


def before_step(model: Any, optimizer: Any) -> None:
    def signs(optimizer: Any, arguments: Any, named: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.sign_()

    optimizer.register_step_pre_hook(signs)


def patched_step(model: Any, optimizer: Any) -> None:
    def step(self: Any, closure: Any = None) -> None:
        torch.optim.SGD.step(self, closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.9)

    optimizer.step = types.MethodType(step, optimizer)


REFUSED = [after_accumulation, after_step, before_step, patched_step]


@pytest.mark.parametrize("install", REFUSED)
def test_code_around_the_update_is_refused(install: Callable[[Any, Any], None]) -> None:
    model, optimizer = make()
    install(model, optimizer)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(OptimizerError, match="runs no code of yours"):
        fleet_of((model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("install", REFUSED)
def test_a_job_with_such_code_runs_eagerly(install: Callable[[Any, Any], None]) -> None:
    plain, beside, other = make(), make(), make(1)
    install(*plain)
    install(*beside)
    jobs = [
        tm.Job("hooked", *beside, mse, [BATCH], steps=3),
        tm.Job("other", *other, mse, [BATCH], steps=3),
    ]
    with pytest.warns(TrainmuxWarning, match="job 'hooked' cannot be traced and runs eagerly"):
        tm.colocate(jobs, budget="64MiB").run()
    plain_steps(*plain)
    assert_same(beside[0], plain[0])


def test_hooks_for_all_optimizers_are_refused() -> None:
    handle = register_optimizer_step_post_hook(lambda *arguments: None)
    try:
        with pytest.raises(OptimizerError, match="step hooks"):
            fleet_of(make())
    finally:
        handle.remove()


def test_a_schedule_wraps_the_step_and_is_no_patch() -> None:
    model, optimizer = make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fleet = tm.Fleet([tm.Member(model, optimizer, scheduler=schedule)], mse, BATCH, precision="fp64")
    fleet.step(BATCH)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_hook_that_comes_later_is_noticed() -> None:
    model, optimizer = make()
    fleet = fleet_of((model, optimizer))
    fleet.step(BATCH)
    after_step(model, optimizer)
    with pytest.raises(tm.errors.MemberChangedError, match="step hooks"):
        fleet.step(BATCH)
