"""On a GPU a fleet trains every member as plain eager torch on the same device: the checks of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from equivalence import (
    CLOSE,
    LOOSER,
    PLAIN,
    assert_equivalent,
    batches_of,
    check,
    check_dropout,
    drawn_masks,
    mask_fleet,
    members_of,
    train_alone,
    train_fused,
)
from odd_models import ODD, SERIES, Checkpointed, classify, odd
from short_workloads import SHORT

import trainmux as tm

DEVICE = "cuda"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {"num_members": 4, "num_steps": 10}) for name in PLAIN],
        ("convolutions_2d", {}),
        *[(name, {"data": "per_member"}) for name in ("transformer", "dlrm")],
        *[(name, {"way": "planned"}) for name in ("mlp", "cnn")],
        *[(name, {"way": "job"}) for name in ("mlp", "transformer")],
    ],
)
def test_a_model_trains_as_alone(name: str, options: dict[str, Any]) -> None:
    """Also on members' own batches, under a plan and as a job beside another."""
    check({**SHORT, **ODD}[name], device=DEVICE, **options)


def test_models_and_batches_may_stay_on_the_host() -> None:
    """Members are copied to the device and back: the host's own run is the reference."""
    workload = SMALL["cnn"]
    batches = batches_of(workload, 10)
    alone = [
        train_alone(member.model, member.optimizer, workload.loss, batches)
        for member in members_of(workload, range(3))
    ]
    fleet = tm.Fleet(
        members_of(workload, range(3)),
        workload.loss,
        batches[0],
        device=DEVICE,
        precision="fp64",
        lowering="aten",
    )
    fused = train_fused(fleet, batches)
    assert all(tensor.device.type == "cpu" for outcome in fused for tensor in outcome.tensors.values())
    assert_equivalent(fused, alone, looser=LOOSER["cnn"])


@pytest.mark.parametrize("name", ["cnn_with_dropout", "lstm_with_dropout", "transformer_with_dropout"])
def test_a_member_trains_the_same_at_any_width_in_any_slot_and_after_restore(
    name: str, tmp_path: Path
) -> None:
    check_dropout(SHORT[name], tmp_path / "checkpoint", device=DEVICE)


def test_the_host_and_the_device_draw_the_same_masks() -> None:
    seeds = {"a": 5, "b": -(2**63), "c": None}
    on_host, on_device = drawn_masks(mask_fleet(seeds)), drawn_masks(mask_fleet(seeds, DEVICE))
    for name in seeds:
        assert all(torch.equal(a, b) for a, b in zip(on_host[name], on_device[name], strict=True))


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_the_recomputation_of_a_checkpointed_block_draws_the_same_dropout(reentrant: bool) -> None:
    def train(reentrant: bool | None) -> Any:
        workload = odd("checkpointed", lambda: Checkpointed(reentrant, 0.3), classify, SERIES)
        batches = batches_of(workload, 5, device=DEVICE)
        members = members_of(workload, range(3), device=DEVICE)
        fleet = tm.Fleet(members, classify, batches[0], device=DEVICE, precision="fp64", lowering="aten")
        return train_fused(fleet, batches)

    assert_equivalent(train(reentrant), train(None), CLOSE)
