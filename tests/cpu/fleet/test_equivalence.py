"""Every model trains in a fleet as it would alone: fp64, fifty steps of AdamW, six different members."""

from __future__ import annotations

import pytest
from equivalence import LOOSER, PLAIN, batches_of, check_fp64, models_of

from trainmux.workloads import SMALL

NUM_MEMBERS = 6
NUM_STEPS = 50


@pytest.mark.parametrize("name", PLAIN)
def test_fifty_steps_of_six_members_equal_training_one_by_one(name: str) -> None:
    workload = SMALL[name]
    check_fp64(
        models_of(workload, NUM_MEMBERS),
        workload.loss,
        batches_of(workload, NUM_STEPS),
        looser=LOOSER.get(name),
    )


# Batch norm, a mask that differs between members, and ragged bags in a dataclass.
@pytest.mark.parametrize("name", ["cnn", "transformer", "dlrm"])
def test_members_with_batches_of_their_own_equal_training_one_by_one(name: str) -> None:
    workload = SMALL[name]
    check_fp64(
        models_of(workload, NUM_MEMBERS),
        workload.loss,
        [batches_of(workload, NUM_STEPS, seed=1000 * number) for number in range(NUM_MEMBERS)],
        data="per_member",
        looser=LOOSER.get(name),
    )


def test_one_member_alone_in_a_fleet_equals_training_without_one() -> None:
    workload = SMALL["residual"]
    check_fp64(models_of(workload, 1), workload.loss, batches_of(workload, 20))
