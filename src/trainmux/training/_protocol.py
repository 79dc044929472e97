"""What the fit loop needs of the thing it trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

Batch = Any
MetricFn = Callable[..., Any]

# The reason that ``Trainable.stopped`` gives for a member that was stopped on request. Any other reason
# means that training could not go on, and is reported as a warning.
STOPPED_ON_REQUEST = "stopped"


class Trainable(Protocol):
    """Several members, each with a name, that take their steps together."""

    @property
    def names(self) -> tuple[str, ...]:
        """The members; every per-member tensor is in this order."""
        ...

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Of the last step: the user's metrics, ``grad_norm``, ``finite``; one value per member each."""
        ...

    def step(self, batch: Batch, overrides: Mapping[str, Batch] | None = None) -> torch.Tensor:
        """One step of all members; ``overrides`` are other batches for some of them.

        Returns the losses without waiting for the device. The tensor may be reused by the next step.
        """
        ...

    def evaluate(
        self, loader: Iterable[Batch], metric_fn: MetricFn | None = None
    ) -> dict[str, dict[str, float]]:
        """Each member's metrics over ``loader``, by name."""
        ...

    def stop(self, name: str) -> None:
        """No more updates for this member; its weights stay."""
        ...

    def stopped(self) -> dict[str, str]:
        """Which members are stopped and why: ``"stopped"`` or, say, ``"not finite at step 12"``. Waits for
        the device."""
        ...

    def end_epoch(self, monitored: Mapping[str, Mapping[str, float]]) -> None:
        """Step the schedulers that count epochs. ``monitored`` has the epoch's ``loss`` and metrics of each
        member that was still training in it, and of no other."""
        ...

    def sync(self) -> None:
        """Finish what is in flight, so that the members' own objects hold their weights."""
        ...

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint with ``extra`` inside."""
        ...

    def restore(self, path: str | os.PathLike[str]) -> Mapping[str, Any]:
        """Go back to a checkpoint; returns the ``extra`` that was saved in it."""
        ...
