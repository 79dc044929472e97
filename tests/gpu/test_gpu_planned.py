"""The policies' own plans over compiled kernels: bitwise what sub-arrays compute without a plan.

Every decision by itself, over ATen's kernels, is in `test_gpu_planned_switches`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from held_memory import look_at_memory
from planned import Case, State, differences, tightest, train_plain, train_planned
from planned_on_gpu import planned_of
from settled import settle
from wide_jobs import MIB, cuda, normed_batch, normed_fleet

from trainmux.errors import BudgetError
from trainmux.ir import Multiplexing, Offload, Program, Recompute

NUM_STEPS = 8
TURNS, RING = Multiplexing.TURNS, Multiplexing.RING
NAMES = ("cnn_with_dropout", "transformer_with_dropout")
WAYS = {
    # By name: sub-arrays, policy, how they are multiplexed, the share that is left of what could be saved at
    # most. Of models as small as these, mutwo saves nothing; its ring runs all the same.
    "swap_only": ((2,), "swap_only", TURNS, 0.6),
    "recompute_only": ((2,), "recompute_only", TURNS, 0.6),
    "mutwo": ((1, 1), "mutwo", RING, 0.5),
    "auto": ((1, 1), "auto", RING, 0.0),
}
DECIDES = {
    # Else plans would be compared that decide nothing, as some do of models as small as these.
    ("swap_only", "transformer_with_dropout"): Offload,
    ("recompute_only", "transformer_with_dropout"): Recompute,
    ("auto", "cnn_with_dropout"): Offload,
    ("auto", "transformer_with_dropout"): Offload,
}


@functools.cache
def case_of(name: str, widths: tuple[int, ...]) -> Case:
    return Case(name, widths, "compiled", device="cuda", lowering="inductor", engine="reference")


@functools.cache
def expected_of(name: str, widths: tuple[int, ...]) -> list[State]:
    return train_plain(case_of(name, widths), NUM_STEPS)


@functools.cache
def program_of(name: str, way: str) -> Program:
    """What the way's policy makes of its share, or of the next larger one that it can keep to."""
    widths, policy, multiplexing, share = WAYS[way]
    candidates = case_of(name, widths).candidates(policy, multiplexing)
    smallest = candidates.smallest() if share == 0 else None
    return (smallest if smallest is not None else tightest(candidates, share)).program


@pytest.mark.parametrize("captured", [False, True], ids=["streams", "captured"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_changes_no_bit(name: str, way: str, captured: bool) -> None:
    widths = WAYS[way][0]
    case, program = case_of(name, widths), program_of(name, way)
    kind = DECIDES.get((way, name))
    assert kind is None or any(isinstance(i, kind) for i in program.body.instructions)
    planned = planned_of(case, program, captured=captured)
    assert differences(train_planned(case, planned, NUM_STEPS), expected_of(name, widths)) == []


@pytest.mark.parametrize("policy", ["auto", "mutwo", "swap_only", "recompute_only"])
def test_no_more_is_reserved_than_was_planned(
    policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path))
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
    for budget in (smallest, (smallest + largest) // 2, largest):
        plan = fleet.plan(budget, policy)
        assert plan.peak_bytes <= budget
        for _ in range(3):
            losses = fleet.step(batch)
        assert torch.isfinite(losses).all()
        del losses
        held = torch.cuda.memory_reserved() - before
        assert held <= plan.peak_bytes, f"{held} bytes\n{look_at_memory(cuda()).table()}"
