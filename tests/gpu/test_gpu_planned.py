"""The policies' own plans over compiled kernels: bitwise what sub-arrays compute without a plan.

Every decision by itself, over ATen's kernels, is in `test_gpu_planned_switches`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planned import Case, case_of, differences, train_planned
from settled import settle
from wide_jobs import MIB, normed_batch, normed_fleet

from trainmux.errors import BudgetError
from trainmux.ir import Multiplexing, Offload, Program, Recompute
from trainmux.planning import Infeasible, Task, policy_named, rewrite

NUM_STEPS = 4
TURNS, RING = Multiplexing.TURNS, Multiplexing.RING
WAYS = {
    # By policy: model, sub-arrays, how they are multiplexed, and what is decided; of models as small as
    # these mutwo saves nothing, its ring runs all the same.
    "swap_only": ("transformer_with_dropout", (2,), TURNS, Offload),
    "recompute_only": ("transformer_with_dropout", (2,), TURNS, Recompute),
    "mutwo": ("cnn_with_dropout", (1, 1), RING, None),
    "auto": ("cnn_with_dropout", (1, 1), RING, Offload | Recompute),
}


def case_by(policy: str) -> Case:
    name, widths, _, _ = WAYS[policy]
    return case_of(name, widths, "compiled", device="cuda", lowering="inductor", engine="reference")


@functools.cache
def program_by(policy: str) -> Program:
    """What a policy makes of the smallest limit that it can keep to."""
    profiles, multiplexing, limit = case_by(policy).profiles, WAYS[policy][2], 0
    while True:
        try:
            task = Task(profiles, multiplexing, limit, host_bytes=1 << 34)
            return rewrite(profiles, next(policy_named(policy).policy.schedules(task)))
        except Infeasible as reason:
            limit += reason.excess_bytes


@pytest.mark.parametrize("captured", [False, True], ids=["streams", "captured"])
@pytest.mark.parametrize("policy", list(WAYS))
def test_a_plan_changes_no_bit(policy: str, captured: bool) -> None:
    case, program, kind = case_by(policy), program_by(policy), WAYS[policy][3]
    assert kind is None or any(isinstance(i, kind) for i in program.body.instructions)
    planned = case.planned(program, captured=captured)
    assert differences(train_planned(case, planned, NUM_STEPS), case.expected(NUM_STEPS)) == []


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was measured for one policy is known to the next."""
    return tmp_path_factory.mktemp("profiles")


def seen_from_outside(pid: int) -> int:
    """Bytes that the driver's tool shows for a process."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(",") for line in listed.splitlines()]
    found = [int(used) * MIB for number, used in rows if int(number) == pid]
    if not found:
        pytest.skip("the driver does not know this process by its number")
    return found[0]


@functools.cache
def context_bytes() -> int:
    """Bytes that the driver's tool shows for a process in which torch has done nothing but begin."""
    code = "import torch; torch.cuda.init(); torch.cuda.synchronize(); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        return seen_from_outside(child.pid)


@pytest.mark.parametrize("policy", ["auto", "mutwo", "swap_only", "recompute_only"])
def test_no_more_is_held_than_was_planned(
    policy: str, monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    """By torch's own account, and as another process sees it."""
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(profiles))
    settle(clears_workspaces=True)  # which libraries keep for every stream
    before = torch.cuda.memory_reserved()
    batch = normed_batch(4096)
    fleet = normed_fleet(batch, lowering="aten")
    largest = fleet.plan(policy=policy).peak_bytes
    with pytest.raises(BudgetError) as refused:
        fleet.plan(64 * MIB, policy)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    del refused
    for budget in (smallest, largest):
        plan = fleet.plan(budget, policy)
        assert plan.peak_bytes <= budget
        for _ in range(3):
            losses = fleet.step(batch)
        assert torch.isfinite(losses).all()
        del losses
        held = torch.cuda.memory_reserved() - before
        assert held <= plan.peak_bytes
        assert seen_from_outside(os.getpid()) - context_bytes() - before <= budget
