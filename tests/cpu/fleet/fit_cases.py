"""Fleets of single numbers that move towards the mean of each batch: losses can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainmux import Callback, Fleet, History, Member
from trainmux.fleet import FitState

BATCHES = [torch.tensor([value], dtype=torch.float64) for value in (1.0, 2.0, 3.0)]
SLOW_AND_FAST = {"slow": 0.01, "fast": 0.1}
HUGE = 1e200
"""A learning rate whose first update makes the next loss infinite."""


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))


def distance(model: Any, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    gap = model.weight - batch.mean()
    return gap.square(), {"accuracy": (gap.abs() < 0.5).double(), "step": gap}


def points(lrs: Mapping[str, float] = SLOW_AND_FAST, *, own: Sequence[str] = ()) -> Fleet:
    """A fleet of members that go the share ``lr`` of the way to each batch's mean; ``own`` have their own."""
    members = []
    for name, lr in lrs.items():
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr / 2)
        members.append(Member(model, optimizer, name, example_batch=BATCHES[0] if name in own else None))
    return Fleet(members, distance, BATCHES[0])


def weights(fleet: Fleet) -> list[float]:
    return [member.model.weight.item() for member in fleet.members]


def run(fleet: Fleet, loader: Any = BATCHES, **options: Any) -> History:
    """Fit without a display."""
    return fleet.fit(loader, progress=False, **options)


class At(Callback):
    """Calls a function once, after a given step."""

    def __init__(self, step: int, act: Callable[[FitState], object]) -> None:
        self._step, self._act = step, act

    def on_step_end(self, state: FitState) -> None:
        if state.step == self._step:
            self._act(state)


class Spy(Callback):
    """Keeps the hooks that were called, with epoch and step, and the losses of all steps."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.losses: list[list[float]] = []

    def on_fit_start(self, state: FitState) -> None:
        self.calls.append(("start", state.epoch, state.step))

    def on_step_end(self, state: FitState) -> None:
        assert state.losses is not None
        self.losses.append(state.losses.tolist())
        self.calls.append(("step", state.epoch, state.step))

    def on_epoch_end(self, state: FitState) -> None:
        self.calls.append(("epoch", state.epoch, state.step))

    def on_fit_end(self, state: FitState) -> None:
        self.calls.append(("end", state.epoch, state.step))

    def seen(self, position: int = 0) -> list[float]:
        """Means of the batches that a member without a learning rate was given."""
        return [row[position] ** 0.5 for row in self.losses]


def failing_at(step: int, error: BaseException) -> At:
    def fail(state: FitState) -> None:
        raise error

    return At(step, fail)


def first_column(rows: list[tuple[Tensor, ...]]) -> Tensor:
    """Collate the rows of a ``TensorDataset`` of one tensor."""
    return torch.stack([row[0] for row in rows])
