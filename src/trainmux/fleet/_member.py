"""A member: a user's ordinary model and optimizer, and what is particular to it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainmux.errors import MemberError
from trainmux.tracing import LossFunction

_INTERVALS = ("step", "epoch")


@dataclass(eq=False)
class Member:
    """One model to train, with its own optimizer, schedule, seed and clipping.

    ``seed`` decides the member's random draws (dropout and the like) and nothing else; without one it is
    taken from the name, so that members differ. ``scheduler`` is any ``torch.optim.lr_scheduler`` object
    over this optimizer, stepped after every update or, with ``scheduler_interval="epoch"``, by ``fit`` at
    the end of an epoch; ``ReduceLROnPlateau`` is always stepped by epoch, on ``scheduler_monitor``.
    ``clip_norm`` limits the norm of all its gradients together, then ``clip_value`` each of their entries.
    ``loss`` and ``example_batch`` override the fleet's for this member.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    name: str | None = None
    scheduler: Any = None
    seed: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    loss: LossFunction | None = None
    example_batch: Any = None
    scheduler_interval: str = "step"
    scheduler_monitor: str = "loss"
    num_draws: int = field(default=0, init=False)  # batches seen in fleets, which number the random draws

    def __post_init__(self) -> None:
        label = f"member {self.name!r}" if self.name is not None else "member"
        if not isinstance(self.model, nn.Module):
            raise MemberError(
                f"{label}: expected model to be a torch.nn.Module, got {type(self.model).__name__}"
            )
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise MemberError(
                f"{label}: expected optimizer to be a torch.optim.Optimizer instance, got "
                f"{type(self.optimizer).__name__}; build one over model.parameters()"
            )
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise MemberError(f"{label}: expected name to be a non-empty string, got {self.name!r}")
        is_seed = _is_number(self.seed) and isinstance(self.seed, int) and -(2**63) <= self.seed < 2**63
        if self.seed is not None and not is_seed:
            raise MemberError(f"{label}: expected seed to be an integer of 64 bits, got {self.seed!r}")
        for setting in ("clip_norm", "clip_value"):
            value = getattr(self, setting)
            if value is not None and not (_is_number(value) and value > 0 and not math.isnan(value)):
                raise MemberError(
                    f"{label}: expected {setting} to be a positive number or None, got {value!r}"
                )
        if self.scheduler_interval not in _INTERVALS:
            raise MemberError(
                f"{label}: expected scheduler_interval to be one of {_INTERVALS}, got "
                f"{self.scheduler_interval!r}"
            )
        owner = getattr(self.scheduler, "optimizer", self.optimizer)
        if self.scheduler is not None and (
            owner is not self.optimizer or not hasattr(self.scheduler, "step")
        ):
            raise MemberError(
                f"{label}: expected scheduler to be a torch.optim.lr_scheduler object over this member's "
                f"optimizer, got {type(self.scheduler).__name__}; build it from the same optimizer"
            )
        if self.loss is not None and not callable(self.loss):
            raise MemberError(f"{label}: expected loss to be callable, got {type(self.loss).__name__}")

    @property
    def random_key(self) -> int:
        """The 64-bit key of this member's random draws."""
        if self.seed is not None:
            return self.seed
        digest = hashlib.sha256((self.name or "").encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    @property
    def steps_by_epoch(self) -> bool:
        """Whether the schedule advances at the end of an epoch instead of after every update."""
        plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        return plateau or self.scheduler_interval == "epoch"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
