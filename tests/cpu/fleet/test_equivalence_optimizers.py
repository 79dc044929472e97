"""Every optimizer does in a fleet what it does alone: fp64, other settings in each member and group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from equivalence import LOOSER, batches_of, check_fp64, models_of
from torch import nn

pytestmark = pytest.mark.usefixtures("traced_once")

NUM_MEMBERS = 4
NUM_STEPS = 20


@dataclass(frozen=True)
class Rule:
    """An optimizer class, the settings it has in all members, and those of the member with a number."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    common: dict[str, Any]
    settings: Callable[[int], dict[str, Any]]

    def over(self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]], number: int) -> Any:
        return self.make(parameters, **self.common, **self.settings(number))


RULES = (
    Rule("sgd", torch.optim.SGD, {}, lambda n: {"lr": 0.01 * (n + 1), "weight_decay": 0.01 * n}),
    Rule(
        "sgd-momentum",
        torch.optim.SGD,
        {},
        lambda n: {"lr": 0.01 * (n + 1), "momentum": 0.5 + 0.1 * n, "dampening": 0.1 * n},
    ),
    Rule(
        "sgd-nesterov",
        torch.optim.SGD,
        {"nesterov": True},
        lambda n: {"lr": 0.01 * (n + 1), "momentum": 0.6 + 0.1 * n, "weight_decay": 0.01 * n},
    ),
    Rule(
        "adam-amsgrad",
        torch.optim.Adam,
        {"amsgrad": True},
        lambda n: {"lr": 2e-3 * (n + 1), "betas": (0.5 + 0.1 * n, 0.9 + 0.02 * n), "weight_decay": 0.01 * n},
    ),
    Rule(
        "adamw-amsgrad",
        torch.optim.AdamW,
        {"amsgrad": True},
        lambda n: {"lr": 2e-3 * (n + 1), "eps": 10.0 ** (-8 + n), "weight_decay": 0.1 * n},
    ),
    Rule(
        "rmsprop",
        torch.optim.RMSprop,
        {},
        lambda n: {"lr": 1e-3 * (n + 1), "alpha": 0.8 + 0.05 * n, "eps": 1e-7, "weight_decay": 0.01 * n},
    ),
    Rule(
        "rmsprop-centered-momentum",
        torch.optim.RMSprop,
        {"centered": True},
        lambda n: {"lr": 1e-3 * (n + 1), "alpha": 0.8 + 0.05 * n, "eps": 1e-4, "momentum": 0.5 + 0.1 * n},
    ),
    Rule(
        "adagrad",
        torch.optim.Adagrad,
        {},
        lambda n: {"lr": 0.01 * (n + 1), "lr_decay": 0.01 * n, "initial_accumulator_value": 0.1 * n},
    ),
    Rule(
        "adadelta",
        torch.optim.Adadelta,
        {},
        lambda n: {"lr": 0.5 + 0.5 * n, "rho": 0.8 + 0.05 * n, "eps": 1e-6, "weight_decay": 0.01 * n},
    ),
)


def every_rule(*with_cnn: str) -> pytest.MarkDecorator:
    """Every rule over an MLP; over a CNN by default those named, as a rule knows no kinds of layers."""
    cases = [pytest.param("mlp", rule, id=f"mlp-{rule.name}") for rule in RULES]
    for rule in RULES:
        marks = [] if rule.name in with_cnn else [pytest.mark.extensive]
        cases.append(pytest.param("cnn", rule, id=f"cnn-{rule.name}", marks=marks))
    return pytest.mark.parametrize(("name", "rule"), cases)


@every_rule("sgd-nesterov", "adamw-amsgrad", "rmsprop")
def test_optimizer_equals_its_own_in_plain_torch(name: str, rule: Rule) -> None:
    workload = SMALL[name]
    check_fp64(
        models_of(workload, NUM_MEMBERS),
        workload.loss,
        batches_of(workload, NUM_STEPS),
        optimizer=lambda model, number: rule.over(model.parameters(), number),
        looser=LOOSER.get(name),
    )


@every_rule("sgd-momentum", "adam-amsgrad", "adagrad")
def test_two_parameter_groups_keep_their_own_settings(name: str, rule: Rule) -> None:
    workload = SMALL[name]

    def make(model: nn.Module, number: int) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        own = {**rule.settings((number + 1) % NUM_MEMBERS), "weight_decay": 0.0}
        # Adagrad fills its state when it is made, from the defaults: a group has no value of its own.
        own.pop("initial_accumulator_value", None)
        return rule.over([{"params": matrices}, {"params": vectors, **own}], number)

    check_fp64(
        models_of(workload, NUM_MEMBERS),
        workload.loss,
        batches_of(workload, NUM_STEPS),
        optimizer=make,
        looser=LOOSER.get(name),
    )


def test_a_member_that_trained_alone_before_continues_in_a_fleet() -> None:
    """Optimizer state and step count go in with the member: bias correction does not start again."""
    workload = SMALL["mlp"]
    batches = batches_of(workload, 30)

    def make(model: nn.Module, number: int) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
        for batch in batches[: 3 * number]:  # a history of another length for each member
            optimizer.zero_grad()
            workload.loss(model, batch).backward()
            optimizer.step()
        return optimizer

    check_fp64(models_of(workload, NUM_MEMBERS), workload.loss, batches[10:], optimizer=make)
