"""Micro-batches of one job on two streams: bit for bit one after the other, within the budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from colocation_cases import (
    ONE_LAYER,
    assert_same_state,
    batches_of,
    cycled,
    pairs_beside,
    state_of,
)
from settled import settle
from test_gpu_colocate import BATCH_SIZE, REGION, used_bytes, wide_batches, wide_fleet
from torch import Tensor

import trainmux as tm
from trainmux.colocate._layout import smallest_budget as smallest_demand

MIB = 1 << 20
STEPS = 22


@pytest.fixture(autouse=True)
def _without_workspaces() -> Iterator[None]:
    settle(clears_workspaces=True)
    yield
    settle(clears_workspaces=True)


def mixed_batches() -> list[Tensor]:
    long, short = wide_batches(0), wide_batches(0, BATCH_SIZE // 2)
    return [long[0], long[1], short[0], long[2], long[1]]


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("is_tight", [True, False])
def test_two_at_once_are_as_one_after_the_other(lowering: str, is_tight: bool) -> None:
    """With short batches, beside another job, in poisoned memory."""
    alone = wide_fleet(0, accumulate=4, lowering=lowering)
    if lowering == "inductor":
        alone.wait_until_compiled()
    losses = torch.stack([alone.step(batch).cpu() for batch in cycled(mixed_batches(), STEPS)])
    state = state_of(alone)
    fleet = wide_fleet(0, accumulate=4, lowering=lowering)
    job = tm.Job("a", fleet=fleet, loader=mixed_batches(), steps=STEPS, concurrent_micro_batches=2)
    other = tm.Job("b", fleet=wide_fleet(1), loader=wide_batches(1), steps=6)
    colocation = tm.colocate([job, other], "20GiB", tracking_bytes=4 * MIB, region_bytes=REGION, poisons=True)
    demands = [demand for admitted in colocation._jobs.values() for demand in admitted.demands]
    most = sum(demand.local_bytes + demand.peak_bytes for demand in demands)
    colocation.set_budget(smallest_demand(demands) if is_tight else most)
    pairs = pairs_beside(colocation)
    before = used_bytes()
    seen: list[int] = []
    device: Any = colocation._device
    next_ended = device.next_ended

    def watched(until: float | None = None) -> Any:
        seen.append(used_bytes())
        return next_ended(until)

    device.next_ended = watched
    result = colocation.run()
    assert [repr(one.error) for one in result.jobs.values() if one.error] == []
    assert torch.equal(result["a"].losses, losses)
    assert_same_state(state_of(fleet), state, "a")
    assert max(seen) - before <= result.budget_bytes
    of_one_job = [pair for pair in pairs if all(ref.job.startswith("a") for ref in pair)]
    assert is_tight or of_one_job


def test_dropout_and_several_members() -> None:
    name = "transformer_with_dropout"

    def make() -> tm.Fleet:
        members = []
        for number in range(2):
            model = ONE_LAYER[name](number).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (number + 1))
            members.append(tm.Member(model, optimizer, name=f"m{number}", seed=number))
        return tm.Fleet(
            members,
            SMALL[name].loss,
            batches_of(name)[0],
            device="cuda",
            deterministic=True,
            lowering="aten",
            accumulate=3,
        )

    alone, fleet = make(), make()
    losses = torch.stack([alone.step(batch).cpu() for batch in cycled(batches_of(name), 200)])
    job = tm.Job("a", fleet=fleet, loader=batches_of(name), steps=200, concurrent_micro_batches=2)
    result = tm.colocate([job], "20GiB", region_bytes=REGION, poisons=True).run()["a"]
    assert result.error is None
    assert torch.equal(result.losses, losses)
    assert_same_state(state_of(fleet), state_of(alone), "a")
