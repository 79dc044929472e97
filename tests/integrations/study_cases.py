"""Small members for studies: linear models of one batch."""

from __future__ import annotations

import os
import signal
from typing import Any

import optuna
import torch
from torch import nn

import trainmux as tm

optuna.logging.set_verbosity(optuna.logging.WARNING)

_GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(32, 4, generator=_GENERATOR)
TARGETS = INPUTS @ torch.randn(4, 1, generator=_GENERATOR)
LOADER = [(INPUTS[:16], TARGETS[:16]), (INPUTS[16:], TARGETS[16:])]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


def make_member(trial: optuna.Trial) -> tm.Member:
    torch.manual_seed(trial.number)
    return member(trial.suggest_float("lr", 1e-4, 0.3, log=True))


def member(lr: float) -> tm.Member:
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return tm.Member(model, torch.optim.SGD(model.parameters(), lr=lr))


def losses_alone(lr: float, epochs: int) -> list[float]:
    """The loss of each epoch of a member by itself, in plain torch."""
    one = member(lr)
    found = []
    for _ in range(epochs):
        total = 0.0
        for batch in LOADER:
            one.optimizer.zero_grad()
            value = loss(one.model, batch)
            value.backward()
            one.optimizer.step()
            total += value.item()
        found.append(total / len(LOADER))
    return found


def settings(**more: Any) -> dict[str, Any]:
    """Arguments of ``tm.optuna.optimize`` for these members."""
    return {"loss": loss, "loader": LOADER, "slots": 4, "max_epochs": 4, "device": "cpu", **more}


class Do(tm.SearchCallback):
    """Does something once a trial of a number has trained some epochs."""

    def __init__(self, number: int, epoch: int, what: Any) -> None:
        self._number, self._epoch, self._what = number, epoch, what

    def on_trial_epoch(self, trial: tm.Trial, record: tm.EpochRecord) -> None:
        if (trial.number, record.epoch) == (self._number, self._epoch):
            self._what()


def terminate() -> None:
    """Send this process SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
