"""Device memory: predicted before a step is captured, shared by every batch shape, and flat afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from settled import settle
from wide_jobs import MIB, normed_batch, normed_fleet, normed_member, used_bytes

import trainmux as tm
from trainmux.errors import BudgetError
from trainmux.ir import MemoryUse


def batch(size: int, seed: int = 0) -> torch.Tensor:
    return normed_batch(size, seed).cuda()


def memory_of(fleet: tm.Fleet) -> MemoryUse:
    memory = fleet.summary()[0].memory
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    "options",
    [
        {"lowering": "aten"},
        {"lowering": "inductor", "precision": "bf16"},
        {"lowering": "aten", "width": 1, "branches": 2},
    ],
    ids=["aten", "inductor", "branches"],
)
def test_what_is_reserved_was_predicted(options: dict[str, Any]) -> None:
    fleet = normed_fleet(batch(4096), **options)
    fleet.step(batch(4096))
    memory = memory_of(fleet)
    assert memory.predicted_bytes is not None
    assert memory.reserved_bytes == pytest.approx(memory.predicted_bytes, rel=0.01)
    assert torch.cuda.memory_reserved() == pytest.approx(memory.predicted_bytes, rel=0.03)
    for seed in range(3):
        fleet.step(batch(4096, seed))
    assert torch.cuda.memory_reserved() == pytest.approx(memory.predicted_bytes, rel=0.03)
    assert "predicted" in fleet.explain()


def test_another_batch_shape_uses_the_same_memory() -> None:
    fleet = normed_fleet(batch(4096), lowering="aten")
    fleet.step(batch(4096))
    reserved = torch.cuda.memory_reserved()
    for size in (2048, 1000, 4000):
        fleet.step(batch(size))
    # The batches themselves, and the results, are new; what a step needs is not.
    assert torch.cuda.memory_reserved() - reserved <= 64 * MIB
    memory = memory_of(fleet)
    assert memory.predicted_bytes == pytest.approx(memory.reserved_bytes, rel=0.03)


@pytest.mark.alone
def test_a_step_larger_than_the_device_is_refused_in_words() -> None:
    fleet = normed_fleet(batch(64), 2, lowering="aten")
    fleet.step(batch(64))
    before = torch.cuda.memory_reserved()
    free, _ = torch.cuda.mem_get_info()
    blocker = torch.empty(free - 512 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(BudgetError, match="more memory than the device has"):
        fleet.step(batch(65536))
    del blocker
    settle()
    assert torch.cuda.memory_reserved() <= before + 600 * MIB
    assert torch.isfinite(fleet.step(batch(64))).all()


def test_a_user_who_records_allocations_is_left_alone() -> None:
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        fleet = normed_fleet(batch(512), 2, lowering="aten")
        fleet.step(batch(512))
        assert memory_of(fleet).predicted_bytes is None
        assert torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)


@pytest.mark.alone
def test_memory_stays_flat_over_steps_and_replacements() -> None:
    fleet = normed_fleet(batch(1024), lowering="aten")
    batches = [batch(1024, seed) for seed in range(4)]
    seen = []
    for step in range(200):
        fleet.step(batches[step % 4])
        if step % 20 == 19:
            fleet.replace(fleet.names[step // 20 % 4], normed_member(100 + step))
        if step >= 50 and step % 10 == 0:
            torch.cuda.synchronize()
            seen.append(used_bytes())
    assert max(seen) - min(seen) <= 16 * MIB
