"""Fleets of small workloads on the GPU."""

from __future__ import annotations

from typing import Any

import torch
from short_workloads import SHORT

import trainmux as tm


def make_member(name: str, seed: int) -> tm.Member:
    model = SHORT[name].build(seed).train()
    # A large eps: gradients that are zero but for rounding must not become whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed % 10 + 1), eps=1e-3)
    return tm.Member(model, optimizer, name=f"m{seed}", seed=seed)


def batch_of(name: str, number: int) -> Any:
    return SHORT[name].batch(number, torch.float32)


def make_fleet(name: str, num_members: int = 4, **options: Any) -> tm.Fleet:
    members = [make_member(name, seed) for seed in range(num_members)]
    return tm.Fleet(members, SHORT[name].loss, batch_of(name, 0), device="cuda", **options)
