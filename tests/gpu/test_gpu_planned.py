"""Planned programs, on three streams and as CUDA graphs: bitwise what sub-arrays compute without a plan."""

from __future__ import annotations

import functools
import gc
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planned import Case, State, differences, train_plain, train_planned
from torch import nn

import trainmux as tm
from trainmux.engine import PlannedEngine, _planned_engine
from trainmux.engine._lanes import StreamLanes
from trainmux.errors import BudgetError
from trainmux.fleet._planned_groups import PlannedGroups, PlannedSteps
from trainmux.ir import Lane, Multiplexing, Offload, Part, Program, Recompute

DEVICE = "cuda"
NUM_STEPS = 20
NUM_SEEDS = 100
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


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    settle()


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def reserved_bytes() -> int:
    """What torch holds on the device for good: without workspaces, which libraries keep for every stream."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    settle()
    return torch.cuda.memory_reserved()


@functools.cache
def case_of(name: str, widths: tuple[int, ...], kernels: str) -> Case:
    lowering = "inductor" if kernels == "compiled" else "aten"
    return Case(name, widths, kernels, device=DEVICE, lowering=lowering, engine="reference")


@functools.cache
def expected_of(name: str, widths: tuple[int, ...], kernels: str, num_steps: int) -> list[State]:
    return train_plain(case_of(name, widths, kernels), num_steps)


@functools.cache
def program_of(name: str, way: str, kernels: str) -> Program:
    """What the way's policy makes of its share, or of the next larger one that it can keep to."""
    widths, policy, multiplexing, share = WAYS[way]
    candidates = case_of(name, widths, kernels).candidates(policy, multiplexing)
    smallest = candidates.smallest() if share == 0 else None
    if smallest is not None:
        return smallest.program
    saved = candidates.plain().slab_bytes - candidates.least_bytes
    for step in range(20):
        limit = candidates.least_bytes + int(min(1.0, share + step * 0.05) * saved)
        found = candidates.best(limit, math.inf)
        if found is not None:
            return found.program
    raise AssertionError("expected a limit that the policy can keep to")


def planned_of(case: Case, program: Program, *, captured: bool, **options: Any) -> PlannedGroups:
    own = PlannedSteps(case.steps, case.graphs, program)
    config = replace(case.fleet._config, engine="cuda_graphs" if captured else "reference")
    return PlannedGroups(None, case.groups(), "own", own, config, **options)  # type: ignore[arg-type]


def num_copies(program: Program) -> int:
    parts = (program.prologue, program.body, program.epilogue)
    return sum(isinstance(i, Offload) for part in parts for i in part.instructions)


# ---- the same bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True], ids=["streams", "captured"])
@pytest.mark.parametrize("kernels", ["aten", "compiled"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_changes_no_bit(name: str, way: str, kernels: str, captured: bool) -> None:
    widths = WAYS[way][0]
    case = case_of(name, widths, kernels)
    planned = planned_of(case, program_of(name, way, kernels), captured=captured)
    found = train_planned(case, planned, NUM_STEPS)
    assert differences(found, expected_of(name, widths, kernels, NUM_STEPS)) == []


@pytest.mark.parametrize(
    ("way", "kind", "names"),
    [
        ("swap_only", Offload, ("cnn_with_dropout", "transformer_with_dropout", "lstm_with_dropout")),
        ("recompute_only", Recompute, ("transformer_with_dropout", "lstm_with_dropout")),
        ("auto", Offload, NAMES),
    ],
)
def test_there_is_something_to_test(way: str, kind: type, names: tuple[str, ...]) -> None:
    """Else the test above would compare plans that decide nothing."""
    for name in names:
        assert any(isinstance(i, kind) for i in program_of(name, way, "aten").body.instructions), name


@pytest.mark.parametrize("captured", [False, True], ids=["streams", "captured"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES)
def test_freed_bytes_are_not_read(name: str, way: str, captured: bool) -> None:
    widths = WAYS[way][0]
    case = case_of(name, widths, "aten")
    planned = planned_of(case, program_of(name, way, "aten"), captured=captured, poisons=True)
    found = train_planned(case, planned, NUM_STEPS)
    assert differences(found, expected_of(name, widths, "aten", NUM_STEPS)) == []


# ---- any timing -----------------------------------------------------------------------------------------


class SleepyLanes(StreamLanes):
    """Lanes that fall asleep at random, before and after what is enqueued on them."""

    seed = 0
    share = 0.25
    max_cycles = 200_000

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._random = random.Random(self.seed)

    def _doze(self, lane: Lane) -> None:
        if self._random.random() < self.share:
            with torch.cuda.stream(self._streams[lane]):
                torch.cuda._sleep(self._random.randrange(1, self.max_cycles))

    @contextmanager
    def on(self, lane: Lane, position: int) -> Iterator[None]:
        self._doze(lane)
        with super().on(lane, position):
            yield

    def issued(self, lane: Lane, position: int) -> None:
        self._doze(lane)
        super().issued(lane, position)
        self._doze(lane)


@pytest.mark.parametrize("way", ["swap_only", "auto"])
def test_no_timing_of_the_lanes_changes_a_bit(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, num_steps = "transformer_with_dropout", 3
    widths = WAYS[way][0]
    case, program = case_of(name, widths, "aten"), program_of(name, way, "aten")
    assert num_copies(program) > 0, "expected copies, which are what can come too late"
    monkeypatch.setattr(_planned_engine, "StreamLanes", SleepyLanes)
    wrong = {}
    for seed in range(NUM_SEEDS):
        monkeypatch.setattr(SleepyLanes, "seed", seed)
        planned = planned_of(case, program, captured=False, poisons=bool(seed % 2))
        found = train_planned(case, planned, num_steps)
        different = differences(found, expected_of(name, widths, "aten", num_steps))
        if different:
            wrong[seed] = different
    assert wrong == {}


class HastyLanes(SleepyLanes):
    """Copies begin late, and nobody waits for them."""

    @contextmanager
    def on(self, lane: Lane, position: int) -> Iterator[None]:
        with torch.cuda.stream(self._streams[lane]):
            torch.cuda._sleep(20_000_000)  # some ten milliseconds: the host is far ahead by then
        with StreamLanes.on(self, lane, position):
            yield

    def wait(self, lane: Lane, position: int) -> None:
        return


def test_without_waits_the_bits_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    name, way, num_steps = "transformer_with_dropout", "swap_only", 3
    widths = WAYS[way][0]
    case = case_of(name, widths, "aten")
    monkeypatch.setattr(_planned_engine, "StreamLanes", HastyLanes)
    planned = planned_of(case, program_of(name, way, "aten"), captured=False, poisons=True)
    found = train_planned(case, planned, num_steps)
    assert differences(found, expected_of(name, widths, "aten", num_steps)) != []


# ---- memory ---------------------------------------------------------------------------------------------


def fail_in_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a part has been enqueued in a capture, more is asked for than any device has."""
    enqueue = PlannedEngine._enqueue

    def and_fail(self: PlannedEngine, part: Part) -> None:
        enqueue(self, part)
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)

    monkeypatch.setattr(PlannedEngine, "_enqueue", and_fail)


def refusal_of(case: Case, planned: PlannedGroups) -> str:
    """What a step says that cannot be captured; empty if it can. Nothing else is left of the error."""
    try:
        train_planned(case, planned, 1)
    except BudgetError as error:
        return str(error)
    return ""


def test_too_little_memory_in_a_capture_is_refused_and_leaves_the_plan_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, way = "transformer_with_dropout", "auto"
    widths = WAYS[way][0]
    case = case_of(name, widths, "aten")
    planned = planned_of(case, program_of(name, way, "aten"), captured=True)
    with monkeypatch.context() as patched:
        fail_in_capture(patched)
        assert "plan for a smaller budget" in refusal_of(case, planned)
    found = train_planned(case, planned, NUM_STEPS)
    assert differences(found, expected_of(name, widths, "aten", NUM_STEPS)) == []


def test_a_refused_capture_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    name, way = "transformer_with_dropout", "swap_only"
    case, program = case_of(name, WAYS[way][0], "aten"), program_of(name, way, "aten")
    seen = []
    fail_in_capture(monkeypatch)
    for _ in range(4):
        assert refusal_of(case, planned_of(case, program, captured=True))
        seen.append(reserved_bytes())
    assert max(seen[1:]) <= seen[0]


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
        assert torch.cuda.memory_reserved() - before <= plan.peak_bytes
