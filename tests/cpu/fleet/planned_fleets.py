"""Fleets of small MLPs for tests of plans, and comparisons of what they have trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.workloads import SMALL
from fleet_cases import assert_same, states_of

import trainmux as tm

WORKLOAD = SMALL["mlp"]


def member(number: int, **options: Any) -> tm.Member:
    model = WORKLOAD.build(number).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (number + 1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return tm.Member(model, optimizer, name=f"m{number}", seed=number, scheduler=schedule, **options)


def with_momentum(number: int) -> tm.Member:
    """A member of another group."""
    model = WORKLOAD.build(number).train()
    return tm.Member(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), name=f"m{number}", seed=number
    )


def fleet_of(num_members: int = 2, *, clips: bool = False, **options: Any) -> tm.Fleet:
    limits: list[Any] = [{"clip_norm": 0.1}, {"clip_value": 0.01}] if clips else [{}, {}]
    members = [member(number, **limits[min(number, 1)]) for number in range(num_members)]
    return tm.Fleet(members, WORKLOAD.loss, batch(0), deterministic=True, **options)


def batch(number: int, size: int | None = None) -> Any:
    whole = WORKLOAD.batch(number, torch.float32)
    return whole if size is None else torch.utils._pytree.tree_map(lambda tensor: tensor[:size], whole)


def same(a: tm.Fleet, b: tm.Fleet) -> bool:
    for one, other in zip(states_of(a).values(), states_of(b).values(), strict=True):
        assert_same(one, other)
    return True


def train(*fleets: tm.Fleet, steps: Sequence[int]) -> None:
    """Both are given the same batches, and have the same losses."""
    for number in steps:
        losses = [fleet.step(batch(number)).nan_to_num() for fleet in fleets]
        assert torch.equal(*losses)
