"""Faults on the device: memory that runs out in measuring, placing and capturing, and Ctrl-C at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interrupted import train_interrupted
from settled import settle
from small_fleets import assert_same, states
from wide_jobs import MIB, normed_batch, normed_fleet

import trainmux as tm
from trainmux.engine import PlannedEngine
from trainmux.errors import BudgetError, TrainmuxWarning
from trainmux.ir import Part


@pytest.fixture(autouse=True, scope="module")
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield


def fleet_of(num_members: int = 2) -> tm.Fleet:
    return normed_fleet(batch(0), num_members, depth=2, lowering="aten", deterministic=True)


def batch(number: int) -> torch.Tensor:
    return normed_batch(8192, number, features=512)


def train(planned: tm.Fleet, plain: tm.Fleet, *numbers: int) -> None:
    for number in numbers:
        losses = [fleet.step(batch(number)) for fleet in (planned, plain)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
    # But for rounding: fused to another width, matrix products add in another order.
    torch.testing.assert_close(states(planned), states(plain), rtol=1e-3, atol=1e-4)


def assert_refused(fleet: tm.Fleet, words: str) -> None:
    """A step is, and changes no bit."""
    before = states(fleet)
    assert words in refusal_of(lambda: fleet.step(batch(0)))
    assert_same(states(fleet), before)


@contextmanager
def no_more_memory(spare_bytes: int = 0) -> Iterator[None]:
    """This process gets no memory beyond what it has, and some to spare; others are not disturbed."""
    settle()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def refusal_of(work: Any) -> str:
    """What is said where memory runs out; empty where it does not. Nothing else is left of the error."""
    try:
        work()
    except BudgetError as error:
        return str(error)
    return ""


def after_enqueuing(patch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Each part of a step is followed by this work."""
    enqueue = PlannedEngine._enqueue

    def and_work(self: PlannedEngine, part: Part, lanes: Any = None) -> None:
        enqueue(self, part, lanes)
        work()

    patch.setattr(PlannedEngine, "_enqueue", and_work)


def test_memory_that_runs_out_while_a_step_is_measured() -> None:
    planned, plain = fleet_of(), fleet_of()
    with no_more_memory(8 * MIB):
        assert "to measure a step" in refusal_of(lambda: planned.plan(policy="none"))
        settle()
        held = torch.cuda.memory_allocated()
        assert "to measure a step" in refusal_of(lambda: planned.plan(policy="none"))
        settle()
        assert torch.cuda.memory_allocated() <= held
    planned.plan(policy="none")
    train(planned, plain, 0, 1)


def test_memory_that_runs_out_for_the_slab() -> None:
    planned, plain = fleet_of(), fleet_of()
    planned.plan(policy="none")
    with no_more_memory(8 * MIB):
        assert_refused(planned, "for the plan's tensors")
    planned.plan(policy="mutwo")
    train(planned, plain, 0, 1, 2)


def test_memory_that_runs_out_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, plain = fleet_of(), fleet_of()
    planned.plan(policy="mutwo")

    def take_too_much() -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")

    with monkeypatch.context() as patched:
        after_enqueuing(patched, take_too_much)
        for _ in range(2):
            assert_refused(planned, "outside its slab")
    train(planned, plain, 0, 1)
    planned.plan(policy="none")
    train(planned, plain, 2)


def test_what_cannot_be_captured_runs_instruction_by_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, plain = fleet_of(), fleet_of()
    planned.plan(policy="mutwo")
    # Not permitted in a capture:
    after_enqueuing(monkeypatch, lambda: torch.cuda.current_stream().synchronize())
    with pytest.warns(TrainmuxWarning, match="instruction by instruction"):
        train(planned, plain, 0, 1, 2)
    monkeypatch.undo()
    planned.plan(policy="none")
    train(planned, plain, 3)


def test_a_fleet_without_its_plan_gives_its_memory_back() -> None:
    fleet = fleet_of()
    fleet.step(batch(0))
    settle()
    before = torch.cuda.memory_allocated()
    fleet.plan(policy="mutwo")
    fleet.step(batch(1))
    fleet.use(None)
    fleet.step(batch(2))
    settle()
    assert torch.cuda.memory_allocated() <= before + 16 * MIB


def test_a_left_plans_slab_is_the_devices_again() -> None:
    """Not torch's: the fleet's state would take a part of it, and the rest could be given to nobody."""
    fleet = fleet_of(6)
    settle()
    before = torch.cuda.memory_reserved()
    fleet.plan(policy="none")
    fleet.step(batch(0))
    under_plan = torch.cuda.memory_reserved()
    fleet.use(None)
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert unused <= 64 * MIB  # segments are whole
    assert under_plan >= before + 256 * MIB


def test_interrupts_at_any_time_change_nothing() -> None:
    planned, in_peace = fleet_of(), fleet_of()
    for fleet in (planned, in_peace):
        fleet.plan(policy="mutwo")
    batches = [batch(number) for number in range(4)]
    planned.step(batches[0])  # what is made once is made in peace
    num_steps = 40
    assert train_interrupted(planned, lambda number: batches[number % 4], num_steps) > 3
    for number in range(num_steps):
        in_peace.step(batches[number % 4])
    assert planned.num_steps == num_steps
    assert_same(states(planned), states(in_peace))


def test_variants_of_a_step_share_the_memory_beside_the_slab() -> None:
    """Each with memory of its own would hold one activation more, and workspaces for another stream."""
    fleet = fleet_of()
    fleet.plan(policy="none")
    fleet.step(batch(0))
    settle()
    before = torch.cuda.memory_reserved()
    for size in (4096, 2048):
        fleet.step(batch(0)[:size])
    fleet.evaluate([batch(1)])
    fleet.step(batch(2))
    settle()
    assert torch.cuda.memory_reserved() - before <= 8192 * 512 * 4
