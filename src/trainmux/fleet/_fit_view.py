"""The rows and totals that displays show of a running fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from trainmux.fleet._progress import Row, left_text, memory_text, printable, rate_text, value_text

_MOST_KEPT = 64
"""Losses of a member's curve; of more, every other one is dropped."""


class Curves:
    """The course of each member's loss, thinned out as it grows longer."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._every = self._count = 0

    def add(self, losses: Mapping[str, float]) -> None:
        """Note the members' losses; those of others are forgotten."""
        self._count += 1
        if self._count <= self._every:
            return
        self._count = 0
        found = {name: [*self._values.get(name, ()), loss] for name, loss in losses.items()}
        if max(map(len, found.values()), default=0) > _MOST_KEPT:
            found = {name: values[1::2] for name, values in found.items()}
            self._every = 2 * self._every + 1
        self._values = found  # a new one: displays read the old one from their own thread

    def current(self) -> Mapping[str, Sequence[float]]:
        """Losses by member, oldest first."""
        return self._values


@dataclass(frozen=True)
class FitView:
    """The fit as last seen on the host. ``remaining_steps`` and ``steps_per_s`` are None where not known."""

    epoch: int
    num_epochs: int | None
    step: int
    num_steps: int | None
    losses: Mapping[str, float]
    curves: Mapping[str, Sequence[float]]
    stopped: Mapping[str, str]
    steps_per_s: float | None
    remaining_steps: int | None
    device: torch.device

    head: ClassVar[str] = "member"
    value_name: ClassVar[str] = "loss"

    def headline(self) -> str:
        """``epoch 2/5, step 120/500, 41.2 steps/s, 0:00:12 left``; what is not known is left out."""
        counts = (("epoch", self.epoch, self.num_epochs), ("step", self.step, self.num_steps))
        parts = [f"{what} {number}" + (f"/{total}" if total else "") for what, number, total in counts]
        if self.steps_per_s:
            parts.append(rate_text(self.steps_per_s, "steps/s"))
            if self.remaining_steps is not None:
                parts.append(left_text(self.remaining_steps / self.steps_per_s))
        return ", ".join(parts)

    def headlines(self) -> list[str]:
        memory = memory_text(self.device)
        return [self.headline() + (f", {memory}" if memory else "")]

    def share_done(self) -> float | None:
        if self.remaining_steps is None:
            return None
        return self.step / max(self.step + self.remaining_steps, 1)

    def ranked(self, max_rows: int) -> list[str]:
        """The members by loss, smallest first, NaN last; equal ones in their own order."""
        return sorted(self.losses, key=lambda name: (math.isnan(self.losses[name]), self.losses[name]))

    @cached_property
    def _best(self) -> str | None:
        return next((name for name in self.ranked(1) if name not in self.stopped), None)

    def row(self, key: str) -> Row:
        why, loss = self.stopped.get(key, ""), self.losses[key]
        look = "dim" if why else "best" if key == self._best else ""
        return Row(printable(key), loss, self.curves.get(key, ()), note=why, look=look)

    def line(self) -> str:
        """Everything in one line: the headline, the best and the worst loss, how many are stopped."""
        parts, ordered = [self.headline()], self.ranked(2)
        if ordered:
            ends = dict.fromkeys((ordered[0], ordered[-1]))
            losses = [f"{value_text(self.losses[name])} ({printable(name)})" for name in ends]
            parts.append("loss " + " to ".join(losses))
        num_stopped = sum(name in self.stopped for name in self.losses)
        if num_stopped:
            parts.append(f"{num_stopped} of {len(self.losses)} stopped")
        return ", ".join(parts)
