"""Fleets of small MLPs for tests of plans, and what they have trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.workloads import SMALL

import trainmux as tm

WORKLOAD = SMALL["mlp"]


def member(number: int, **options: Any) -> tm.Member:
    model = WORKLOAD.build(number).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (number + 1))
    return tm.Member(model, optimizer, name=f"m{number}", seed=number, **options)


def fleet_of(
    num_members: int = 2, options_of: Callable[[int], Any] = lambda number: {}, **options: Any
) -> tm.Fleet:
    members = [member(number, **options_of(number)) for number in range(num_members)]
    return tm.Fleet(members, WORKLOAD.loss, batch(0), deterministic=True, **options)


def batch(number: int, size: int | None = None) -> Any:
    whole = WORKLOAD.batch(number, torch.float32)
    return whole if size is None else torch.utils._pytree.tree_map(lambda tensor: tensor[:size], whole)


def parameters(fleet: tm.Fleet) -> list[torch.Tensor]:
    fleet.sync()
    return [tensor.clone() for m in fleet.members for tensor in m.model.state_dict().values()]


def same(a: tm.Fleet, b: tm.Fleet) -> bool:
    pairs = zip(parameters(a), parameters(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)
