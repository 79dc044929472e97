"""Fleets of small workloads on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from short_workloads import SHORT, member_of
from torch import Tensor

import trainmux as tm


def make_member(name: str, seed: int) -> tm.Member:
    """Its learning rate is another one with every step."""
    # A large eps: gradients that are zero but for rounding must not become whole steps.
    member = member_of(SHORT[name], seed, lr=1e-3 * (seed % 10 + 1), eps=1e-3)
    member.scheduler = torch.optim.lr_scheduler.LambdaLR(
        member.optimizer, lambda step: 1.0 / (1.0 + 0.3 * step * (seed % 10 + 1))
    )
    return member


def batch_of(name: str, number: int) -> Any:
    return SHORT[name].batch(number, torch.float32)


def make_fleet(name: str, num_members: int = 4, **options: Any) -> tm.Fleet:
    members = [make_member(name, seed) for seed in range(num_members)]
    return tm.Fleet(members, SHORT[name].loss, batch_of(name, 0), device="cuda", **options)


def states(fleet: tm.Fleet) -> list[Tensor]:
    """Copies of all members' parameters and buffers."""
    fleet.sync()
    return [value.clone() for member in fleet.members for value in member.model.state_dict().values()]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit, on whatever device."""
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left.cpu(), right.cpu())
