"""Faults in a planned fleet: too little memory anywhere and Ctrl-C at any time leave it whole and usable."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import train_interrupted
from planned_fleets import batch, fleet_of, same, train

from trainmux.engine import _planned
from trainmux.errors import BudgetError
from trainmux.fleet import _plan_keeper, _planned_runner, _planning

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.fixture(autouse=True, scope="module")
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")


def no_slab(*size: Any, **options: Any) -> bool:
    return (
        bool(size) and isinstance(size[0], int) and size[0] > 20_000 and options.get("dtype") is torch.uint8
    )


def no_host_memory(*_: Any, **options: Any) -> bool:
    return "pin_memory" in options


@pytest.mark.parametrize(("is_refused", "was_planned"), [(no_slab, True), (no_host_memory, False)])
def test_a_plan_that_finds_no_memory_is_refused_and_nothing_is_lost(
    is_refused: Callable[..., bool], was_planned: bool
) -> None:
    planned, plain = fleet_of(), fleet_of()
    if was_planned:
        planned.plan(policy="mutwo")
    train(planned, plain, steps=[0])
    planned.plan(policy="none")
    zeros = torch.zeros

    def refusing(*size: Any, **options: Any) -> torch.Tensor:
        if is_refused(*size, **options):
            raise (
                torch.OutOfMemoryError("no memory") if was_planned else RuntimeError("can't allocate memory")
            )
        return zeros(*size, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "zeros", refusing)
        with pytest.raises(BudgetError):
            planned.step(batch(2))
    assert same(planned, plain)
    if was_planned:
        planned.plan(policy="mutwo")
    else:
        planned.use(None)
    train(planned, plain, steps=[2])
    assert same(planned, plain)


def test_no_memory_while_a_step_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned, plain = fleet_of(), fleet_of()
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(_planning, "measure_profile", out_of_memory)
        with pytest.raises(BudgetError) as caught:
            planned.plan(policy="none")
        assert caught.value.__context__ is None, "expected nothing that holds on to the step's tensors"
    train(planned, plain, steps=[0])
    planned.plan(policy="none")
    train(planned, plain, steps=[1])
    assert same(planned, plain)


def test_no_memory_in_the_middle_of_a_step() -> None:
    """What runs node by node may fail at any of them: before its update a sub-array is as it was."""
    planned, plain = fleet_of(), fleet_of()
    planned.plan(policy="none")
    train(planned, plain, steps=range(2))
    run_into = _planned.run_into
    for num_nodes in (1, 12, 30):
        calls = iter(range(num_nodes))

        def counted(
            *arguments: Any, calls: Iterator[int] = calls, last: int = num_nodes - 1, **options: Any
        ) -> Any:
            return out_of_memory() if next(calls, None) == last else run_into(*arguments, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_planned, "run_into", counted)
            with pytest.raises(BudgetError) as caught:
                planned.step(batch(2))
            assert caught.value.__context__ is None
        assert planned.num_steps == plain.num_steps
        assert same(planned, plain)
    train(planned, plain, steps=[2])
    assert same(planned, plain)


# ---- Ctrl-C ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "name"), [(_plan_keeper, "PlannedRunner"), (_planned_runner.PlannedRunner, "release")]
)
def test_an_interrupt_while_a_plan_is_put_into_use_leaves_the_step_not_begun(place: Any, name: str) -> None:
    planned, plain = fleet_of(), fleet_of()
    plans = [planned.plan(policy=policy) for policy in ("mutwo", "none")]
    planned.use(plans[0])
    if name == "release":
        train(planned, plain, steps=[9])
        planned.use(plans[1])
    work = getattr(place, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return work(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            planned.step(batch(1))
    assert planned.num_steps == plain.num_steps
    assert same(planned, plain)
    train(planned, plain, steps=[5])
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
