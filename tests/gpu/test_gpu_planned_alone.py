"""Memory over hundreds of steps in which everything happens."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from small_fleets import batch_of, make_fleet, make_member
from wide_jobs import MIB, used_bytes

pytestmark = pytest.mark.alone

NUM_STEPS = 500
WARM = 200
POLICIES = ("mutwo", "none", "swap_only", "auto")


def pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


@pytest.mark.timeout(280)
def test_memory_stays_flat_whatever_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every kind of event comes before the counting begins, and again and again after that."""
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path))
    fleet = make_fleet("mlp", lowering="aten")
    batches = [batch_of("mlp", number) for number in range(4)]
    newcomer = 100
    on_device, pinned = [], []
    num_plans = num_evaluations = num_replaced = num_dropped = 0
    for step in range(NUM_STEPS):
        is_warm = step >= WARM
        if step % (150 if is_warm else 50) == 0:
            fleet.plan(policy=POLICIES[num_plans % len(POLICIES)])
            num_plans += 1
        fleet.step(batches[step % 4])
        if step % 20 == 19:
            fleet.replace(fleet.names[num_replaced % 4], make_member("mlp", newcomer))
            newcomer, num_replaced = newcomer + 1, num_replaced + 1
        if step % 200 == 69 or step == 169:
            fleet.drop(fleet.names[num_dropped % 4])
            fleet.step(batches[0])
            fleet.add(make_member("mlp", newcomer))
            newcomer, num_dropped = newcomer + 1, num_dropped + 1
        if step % 50 == 29:
            fleet.evaluate(batches[:2])
            num_evaluations += 1
        if is_warm and step % 20 == 0:
            if step % 100 == 0:
                gc.collect()
            torch.cuda.synchronize()
            on_device.append(used_bytes())
            pinned.append(pinned_bytes())
    assert torch.isfinite(fleet.step(batches[0])).all()
    assert (num_plans, num_evaluations, num_replaced, num_dropped) == (6, 10, 25, 4)
    assert max(on_device) - min(on_device) <= 16 * MIB
    assert max(pinned) - min(pinned) <= MIB, "plans differ in what they keep on the host, which is little"
