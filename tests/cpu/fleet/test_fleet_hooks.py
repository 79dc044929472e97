"""Hooks: those on gradients are part of the graph, those around the update are refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_cases import (
    EXAMPLE,
    assert_alone,
    assert_close,
    assert_same,
    mse,
    sgd_member,
    state_of,
    train_alone,
)
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import trainmux as tm
from trainmux.errors import MemberChangedError, OptimizerError, TrainmuxWarning

pytestmark = pytest.mark.usefixtures("built_once")


def made(i: int, install: Callable[[Any, Any], object]) -> tm.Member:
    member = sgd_member(i)
    install(member.model, member.optimizer)
    return member


# ---- honoured ------------------------------------------------------------------------------------------


def mask(model: Any, optimizer: Any) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * torch.eye(4, 3, dtype=gradient.dtype))


def clip(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def two_in_order(model: Any, optimizer: Any) -> None:
    model[2].bias.register_hook(lambda gradient: gradient + 1.0)
    model[2].bias.register_hook(lambda gradient: gradient * 0.5)


def by_the_weight_itself(model: Any, optimizer: Any) -> None:
    weight = model[2].weight
    weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())


def of_a_module(model: Any, optimizer: Any) -> None:
    model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)


def of_a_schedule(model: Any, optimizer: Any) -> None:
    """A schedule wraps the optimizer's step."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def removed(model: Any, optimizer: Any) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * 0).remove()


@pytest.mark.parametrize(
    "install", [mask, clip, two_in_order, by_the_weight_itself, of_a_module, of_a_schedule, removed]
)
def test_hooks_that_are_honoured(install: Callable[[Any, Any], None]) -> None:
    fleet = tm.Fleet([made(0, install), sgd_member(1)], mse, EXAMPLE)
    for _ in range(3):
        fleet.step(EXAMPLE)
    assert_alone(fleet, (made(0, install), [EXAMPLE] * 3), (sgd_member(1), [EXAMPLE] * 3))
    assert len(fleet.summary()) == (1 if install in (removed, of_a_schedule) else 2)


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
    member = made(0, install)
    before = state_of(member)
    with pytest.raises(OptimizerError):
        tm.Fleet([member], mse, EXAMPLE)
    assert_same(state_of(member), before)


def test_jobs_with_such_code_run_eagerly() -> None:
    """Each with its own hook, beside one that is traced."""
    members = [made(i, install) for i, install in enumerate(REFUSED)]
    jobs = [tm.Job(m.name or "", m.model, m.optimizer, mse, [EXAMPLE], steps=3) for m in members]
    other = sgd_member(4)
    jobs.append(tm.Job("other", other.model, other.optimizer, mse, [EXAMPLE], steps=3))
    with pytest.warns(TrainmuxWarning, match="cannot be traced and runs eagerly"):
        tm.colocate(jobs, budget="64MiB").run()
    for i, install in enumerate((*REFUSED, lambda model, optimizer: None)):
        alone = made(i, install)
        train_alone(alone, [EXAMPLE] * 3)
        assert_close(state_of([*members, other][i]), state_of(alone))


def test_hooks_that_come_later_or_from_elsewhere() -> None:
    member = sgd_member(0)
    fleet = tm.Fleet([member], mse, EXAMPLE)
    fleet.step(EXAMPLE)
    after_step(member.model, member.optimizer)
    with pytest.raises(MemberChangedError):
        fleet.step(EXAMPLE)
    handle = register_optimizer_step_post_hook(lambda *arguments: None)
    try:
        with pytest.raises(OptimizerError):
            tm.Fleet([sgd_member(1)], mse, EXAMPLE)
    finally:
        handle.remove()
