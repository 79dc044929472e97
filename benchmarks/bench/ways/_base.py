"""What every way of training is given, what it gives back, and the settings that all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

AUTOCAST_DTYPE = torch.bfloat16
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.999)
EPS = 1e-8


@dataclass(frozen=True)
class Setup:
    """Models to train and what with.

    ``models`` are in host memory, in fp32, one per member, each with its entry of ``learning_rates``.
    ``example`` is a batch on the device, like those that the steps will get. ``fleet`` is for the way
    ``trainmux`` alone.
    """

    models: Sequence[nn.Module]
    learning_rates: Sequence[float]
    loss: Callable[[nn.Module, Any], Tensor]
    example: Any
    device: torch.device
    fleet: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """``step(batch)`` trains ``num_members`` models once on a batch on the device and gives their losses.

    The losses may be overwritten by the next step. ``notes`` say what had to be done differently.
    """

    step: Callable[[Any], Tensor]
    num_members: int
    notes: tuple[str, ...] = ()


def learning_rates(num_members: int) -> list[float]:
    """One rate per member, all different, between the usual one and twice as much."""
    return [LEARNING_RATE * (1 + index / num_members) for index in range(num_members)]


def autocast(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPE)


def is_convolutional(model: nn.Module) -> bool:
    return any(parameter.dim() == 4 for parameter in model.parameters())


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device, ready to train, in the layout that suits it."""
    model = model.to(device).train()
    if is_convolutional(model):
        # torch's stubs know this argument only together with others.
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model
