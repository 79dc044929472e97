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
from torch import nn

import trainmux as tm
from trainmux.errors import BudgetError
from trainmux.ir import Multiplexing, Offload, Program, Recompute

DEVICE = "cuda"
NUM_STEPS = 20
TURNS, RING = Multiplexing.TURNS, Multiplexing.RING
NAMES = ("mlp", "cnn_with_dropout", "transformer_with_dropout", "lstm_with_dropout")
WAYS = {
    # By name: sub-arrays, policy, how they are multiplexed, the share that is left of what could be saved at
    # most. Of models as small as these, mutwo saves nothing; its ring runs all the same.
    "swap_only": ((2,), "swap_only", TURNS, 0.6),
    "recompute_only": ((2,), "recompute_only", TURNS, 0.6),
    "mutwo": ((1, 1), "mutwo", RING, 0.5),
    "auto": ((1, 1), "auto", RING, 0.0),
}
MIB = 1 << 20


def reserved_bytes() -> int:
    """What torch holds on the device for good: without workspaces, which libraries keep for every stream."""
    settle(clears_workspaces=True)
    return torch.cuda.memory_reserved()


@functools.cache
def case_of(name: str, widths: tuple[int, ...]) -> Case:
    return Case(name, widths, "compiled", device=DEVICE, lowering="inductor", engine="reference")


@functools.cache
def expected_of(name: str, widths: tuple[int, ...]) -> list[State]:
    return train_plain(case_of(name, widths), NUM_STEPS)


@functools.cache
def program_of(name: str, way: str) -> Program:
    """What the way's policy makes of its share, or of the next larger one that it can keep to."""
    widths, policy, multiplexing, share = WAYS[way]
    candidates = case_of(name, widths).candidates(policy, multiplexing)
    smallest = candidates.smallest() if share == 0 else None
    if smallest is not None:
        return smallest.program
    return tightest(candidates, share).program


# ---- the same bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True], ids=["streams", "captured"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_changes_no_bit(name: str, way: str, captured: bool) -> None:
    widths = WAYS[way][0]
    case = case_of(name, widths)
    planned = planned_of(case, program_of(name, way), captured=captured)
    assert differences(train_planned(case, planned, NUM_STEPS), expected_of(name, widths)) == []


@pytest.mark.parametrize(
    ("way", "kind", "names"),
    [
        ("swap_only", Offload, ("transformer_with_dropout", "lstm_with_dropout")),
        ("recompute_only", Recompute, ("transformer_with_dropout",)),
        ("auto", Offload, NAMES),
    ],
)
def test_there_is_something_to_test(way: str, kind: type, names: tuple[str, ...]) -> None:
    """Else the test above would compare plans that decide nothing, as some do of models as small as these."""
    for name in names:
        assert any(isinstance(i, kind) for i in program_of(name, way).body.instructions), name


# ---- memory ---------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough that segments of a megabyte or two do not matter."""

    def __init__(self, features: int = 1024, depth: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(features, features), nn.GELU(), nn.LayerNorm(features)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def wide_fleet(batch: torch.Tensor, num_members: int = 4) -> tm.Fleet:
    members = []
    for number in range(num_members):
        torch.manual_seed(number)
        model = Wide()
        members.append(tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-3), name=f"m{number}"))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(batch).square().mean()
        return value

    return tm.Fleet(members, loss, batch, device=DEVICE, lowering="aten")


@pytest.mark.parametrize("policy", ["auto", "mutwo", "swap_only", "recompute_only"])
def test_no_more_is_reserved_than_was_planned(
    policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path))
    before = reserved_bytes()
    batch = torch.randn(4096, 1024)
    fleet = wide_fleet(batch)
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
        assert held <= plan.peak_bytes, f"{held} bytes\n{look_at_memory(torch.device(DEVICE, 0)).table()}"
