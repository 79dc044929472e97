"""Faults in a planned fleet: too little memory anywhere and Ctrl-C at any time leave it whole and usable."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import train_interrupted
from planned_fleets import batch, fleet_of

import trainmux as tm
from trainmux.engine import _planned
from trainmux.errors import BudgetError, TrainmuxError
from trainmux.fleet import _plan_keeper, _planned_runner, _planning

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.fixture(autouse=True, scope="module")
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield


def state(fleet: tm.Fleet) -> list[torch.Tensor]:
    fleet.sync()
    found = []
    for member in fleet.members:
        found += [tensor.clone() for tensor in member.model.state_dict().values()]
        found += [value.clone() for slot in member.optimizer.state.values() for value in slot.values()]
    return found


def same(a: tm.Fleet, b: tm.Fleet) -> bool:
    return all(torch.equal(x, y) for x, y in zip(state(a), state(b), strict=True))


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")


def after(num_calls: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """``work`` as it is until it has been called so often; then there is no memory, once."""
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return out_of_memory() if calls == num_calls else work(*arguments, **options)

    return counted


# ---- too little memory ----------------------------------------------------------------------------------


def no_slab(patched: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    patched.setattr(
        _planned_runner.torch,
        "zeros",
        lambda *size, **options: (
            out_of_memory()
            if size and isinstance(size[0], int) and size[0] > 20_000 and options.get("dtype") is torch.uint8
            else zeros(*size, **options)
        ),
    )


def no_host_memory(patched: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def refuse(*size: Any, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")
        return zeros(*size, **options)

    patched.setattr(torch, "zeros", refuse)


@pytest.mark.parametrize(
    ("fault", "words", "was_planned"),
    [
        (no_slab, "on the device for the plan's tensors", True),
        (no_host_memory, "of host memory for what the plan", False),
    ],
)
def test_a_plan_that_finds_no_memory_is_refused_and_nothing_is_lost(
    fault: Callable[[pytest.MonkeyPatch], None], words: str, was_planned: bool
) -> None:
    planned, plain = fleet_of(), fleet_of()
    if was_planned:
        planned.plan(policy="mutwo")
    assert torch.equal(planned.step(batch(0)), plain.step(batch(0)))
    planned.plan(policy="none")
    with pytest.MonkeyPatch.context() as patched:
        fault(patched)
        with pytest.raises(BudgetError, match=words):
            planned.step(batch(2))
    assert same(planned, plain)
    if was_planned:
        planned.plan(policy="mutwo")
    else:
        planned.use(None)
    assert torch.equal(planned.step(batch(2)), plain.step(batch(2)))
    assert same(planned, plain)


def test_no_memory_while_a_step_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned, plain = fleet_of(), fleet_of()
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(_planning, "measure_profile", out_of_memory)
        with pytest.raises(BudgetError, match="to measure a step of") as caught:
            planned.plan(policy="none")
        assert caught.value.__context__ is None, "expected nothing that holds on to the step's tensors"
    assert torch.equal(planned.step(batch(0)), plain.step(batch(0)))
    planned.plan(policy="none")
    assert torch.equal(planned.step(batch(1)), plain.step(batch(1)))
    assert same(planned, plain)


def test_no_memory_in_the_middle_of_a_step() -> None:
    """What runs node by node may fail at any of them: before its update a sub-array is as it was."""
    planned, plain = fleet_of(), fleet_of()
    planned.plan(policy="none")
    for number in range(2):
        assert torch.equal(planned.step(batch(number)), plain.step(batch(number)))
    for num_nodes in (1, 12, 30):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_planned, "run_into", after(num_nodes, _planned.run_into))
            with pytest.raises(BudgetError, match="beside its slab") as caught:
                planned.step(batch(2))
            assert caught.value.__context__ is None
        assert planned.num_steps == plain.num_steps
        assert same(planned, plain)
    assert torch.equal(planned.step(batch(2)), plain.step(batch(2)))
    assert same(planned, plain)


# ---- other refusals -------------------------------------------------------------------------------------


def test_a_watched_step_that_is_refused_leaves_the_next_one_unwatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fleet_of()
    fleet.plan(policy="none")
    fleet.step(batch(0))
    with pytest.raises(TrainmuxError):
        fleet.watch({"not": "a batch"})
    active = fleet._plans._active
    assert active is not None
    assert active._watching is None
    seen: list[Any] = []
    run = _planned.PlannedProgram.run
    monkeypatch.setattr(
        _planned.PlannedProgram,
        "run",
        lambda self, part, before=None, lanes=None: seen.append(lanes) or run(self, part, before, lanes),
    )
    fleet.step(batch(1))
    assert seen == [None]
    assert fleet.watch(batch(2)).source == "measured"


# ---- Ctrl-C ---------------------------------------------------------------------------------------------


def interrupting(work: Callable[..., Any]) -> Callable[..., Any]:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return work(*arguments, **options)

    return interrupted


INTERRUPTED = (
    (_plan_keeper, "PlannedRunner"),
    (_planned_runner.PlannedRunner, "release"),
)


def test_an_interrupt_while_a_plan_is_put_into_use_leaves_the_step_not_begun() -> None:
    planned, plain = fleet_of(), fleet_of()
    plans = [planned.plan(policy=policy) for policy in ("mutwo", "none")]
    for number, (place, name) in enumerate(INTERRUPTED):
        planned.use(plans[number % 2])
        if name == "release":
            planned.step(batch(9))
            plain.step(batch(9))
            planned.use(plans[1])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(place, name, interrupting(getattr(place, name)))
            with pytest.raises(KeyboardInterrupt):
                planned.step(batch(number))
        assert planned.num_steps == plain.num_steps
        assert same(planned, plain), name
        assert torch.equal(planned.step(batch(5)), plain.step(batch(5))), name
    assert same(planned, plain)


def test_interrupts_at_any_time_change_nothing() -> None:
    planned, plain = fleet_of(), fleet_of()
    planned.plan(policy="mutwo")
    planned.step(batch(0))  # what is made once is made in peace
    num_steps = 40
    assert train_interrupted(planned, batch, num_steps) > 3
    for number in range(num_steps):
        plain.step(batch(number))
    assert planned.num_steps == num_steps
    assert same(planned, plain)
