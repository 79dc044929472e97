"""Every model trains in a fleet as it would alone: fp64, many steps of AdamW, six different members."""

from __future__ import annotations

import pytest
from benchmarks.workloads import SMALL, Workload
from equivalence import LOOSER, PLAIN, batches_of, check_fp64, models_of
from short_workloads import SHORT

pytestmark = pytest.mark.usefixtures("traced_once")

NUM_MEMBERS = 6
NUM_STEPS = 50
FEW_STEPS = 15

LONG = ("mlp", "cnn", "residual", "transformer", "dlrm")
"""One of each kind, and batch norm: differences that grow have all steps to show."""


def check(workload: Workload, num_steps: int) -> None:
    check_fp64(
        models_of(workload, NUM_MEMBERS),
        workload.loss,
        batches_of(workload, num_steps),
        looser=LOOSER.get(workload.name),
    )


@pytest.mark.parametrize(
    "name",
    [name if name in LONG else pytest.param(name, marks=pytest.mark.extensive) for name in PLAIN],
)
def test_fifty_steps_of_six_members_equal_training_one_by_one(name: str) -> None:
    check(SMALL[name], NUM_STEPS)


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in LONG])
def test_fifteen_steps_of_six_members_equal_training_one_by_one(name: str) -> None:
    check(SHORT[name], FEW_STEPS)


# Batch norm, a mask that differs between members, and ragged bags in a dataclass.
@pytest.mark.parametrize("name", ["cnn", "transformer", "dlrm"])
def test_members_with_batches_of_their_own_equal_training_one_by_one(name: str) -> None:
    workload = SMALL[name]
    check_fp64(
        models_of(workload, NUM_MEMBERS),
        workload.loss,
        [batches_of(workload, FEW_STEPS, seed=1000 * number) for number in range(NUM_MEMBERS)],
        data="per_member",
        looser=LOOSER.get(name),
    )


def test_one_member_alone_in_a_fleet_equals_training_without_one() -> None:
    workload = SMALL["residual"]
    check_fp64(models_of(workload, 1), workload.loss, batches_of(workload, 20))
