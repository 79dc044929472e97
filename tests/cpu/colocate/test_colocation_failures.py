"""A job that fails ends alone; what cannot work is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from colocation_cases import (
    Breaking,
    assert_as_alone,
    model_job,
    model_of,
    mse,
    run_ahead,
    smallest_budget,
    tiny_batches,
    tiny_fleet,
    tiny_job,
    tiny_member,
    tiny_model,
)
from torch import nn

import trainmux as tm
from trainmux.errors import BatchError, BudgetError, ConfigError

pytestmark = pytest.mark.usefixtures("built_once")

PLANNED, GROWN = 8, 9
"""Fleets that other tests do not use again."""


def refusing(event: tm.JobStep) -> None:
    if event.step == 2:
        raise ValueError("enough")


def growing() -> tm.Job:
    fleet = tiny_fleet(0, "m", GROWN)

    def grow(event: tm.JobStep) -> None:
        if event.step == 1:
            fleet.add(tiny_member(5, "newcomer"))

    return tm.Job("a", fleet=fleet, loader=tiny_batches(0), steps=5, callbacks=[grow])


def dividing_by_zero(model: nn.Module, batch: Any) -> torch.Tensor:
    raise ZeroDivisionError("in the loss")


def loading(make_loader: Callable[[], Any]) -> Callable[[], tm.Job]:
    return lambda: tiny_job("a", 0, steps=9, loader=make_loader())


ALL = tiny_batches(0)
FIRST = ALL[0]
FAILING: dict[str, tuple[Callable[[], tm.Job], type[Exception], range]] = {
    "loader": (loading(lambda: Breaking(ALL[:2])), OSError, range(2, 3)),
    "loader at once": (loading(Breaking), OSError, range(1)),
    "loader of one pass": (loading(lambda: iter(ALL)), BatchError, range(3, 4)),
    "batch of another type": (
        loading(lambda: [FIRST, (FIRST[0].double(), FIRST[1])]),
        BatchError,
        range(1, 2),
    ),
    "larger batch": (loading(lambda: [FIRST, *tiny_batches(0, 1, size=64)]), BatchError, range(1, 2)),
    "callback": (lambda: tiny_job("a", 0, steps=9, callbacks=[refusing]), ValueError, range(2, 4)),
    "loss": (lambda: model_job("a", 0, loss=dividing_by_zero), ZeroDivisionError, range(1)),
    "new slots": (growing, ConfigError, range(1, 3)),
}


@pytest.mark.parametrize(
    ("case", "is_ahead"), [*((case, False) for case in FAILING), ("loader", True), ("callback", True)]
)
def test_a_job_that_fails_ends_alone_after_whole_steps(
    case: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_ahead:
        run_ahead(monkeypatch)
    make, error, steps = FAILING[case]
    failing, others = make(), [tiny_job("b", 1, steps=6), tiny_job("c", 2, steps=4)]
    colocation = tm.colocate([failing, *others], "1GiB", tracking_bytes=0, poisons=True)
    colocation.set_budget(smallest_budget(colocation))
    result = colocation.run()
    assert result.failed == ("a",)
    assert isinstance(result["a"].error, error)
    assert result["a"].num_steps in steps
    if case != "new slots" and result["a"].num_steps:
        assert_as_alone(result, failing, 0, result["a"].num_steps)
    assert_as_alone(result, others[0], 1, 6)
    assert_as_alone(result, others[1], 2, 4)


# ---- refused before anything runs ----------------------------------------------------------------------


def test_jobs_that_do_not_fit_are_refused_with_the_smallest_budget() -> None:
    jobs = [tiny_job("a", 0, steps=1), tiny_job("b", 1, steps=1)]
    roomy = tm.colocate(jobs, "1GiB")
    least = smallest_budget(roomy)
    for budget in (1, least // 2, least - 1):
        with pytest.raises(BudgetError) as refused:
            tm.colocate(jobs, budget)
        assert refused.value.smallest_bytes == least
    with pytest.raises(BudgetError) as refused:
        roomy.set_budget(least - 1)
    assert refused.value.smallest_bytes == least
    colocation = tm.colocate(jobs, least)
    with pytest.raises(BudgetError):
        colocation.add(tiny_job("c", 2))
    result = colocation.run()
    assert tuple(result.jobs) == ("a", "b")
    assert result.failed == ()


def test_jobs_that_cannot_be_co_located_are_refused() -> None:
    fleet, job = tiny_fleet(0, "m", 0), tiny_job("a", 1)
    narrow = tm.Fleet([tiny_member(0), tiny_member(1)], mse, FIRST, width=1)
    for jobs in (
        [],
        ["a"],
        [job, tiny_job("a", 2)],
        [tm.Job(name, fleet=fleet, loader=tiny_batches(0)) for name in ("a", "b")],
        [job, model_job("b", 2, device="cuda:1")],
        [tm.Job("a", fleet=narrow, loader=tiny_batches(0))],
    ):
        with pytest.raises(ConfigError):
            tm.colocate(jobs, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(BatchError):
        tm.colocate([tiny_job("a", 0, loader=[])], "1GiB")
    colocation = tm.colocate([job], "1GiB")
    with pytest.raises(ConfigError):
        colocation.remove("b")
    for device in ("cuda:1", "abacus"):
        with pytest.raises(ConfigError):
            colocation.add(model_job("b", 2, device=device))
    assert tuple(colocation.results().jobs) == ("a",)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": True},
        {"share": 0.0},
        {"loader": None},
        {"loss": None},
        {"callbacks": [1]},
        {"accumulate": 0},
        {"fleet": object(), "model": None, "optimizer": None, "loss": None},
        {"fleet": object()},
        {"name": ""},
    ],
)
def test_settings_that_are_no_use_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        model_job(**{"name": "a", **options})


def test_a_planned_fleet_is_refused_until_its_plan_is_left() -> None:
    planned = tiny_fleet(0, "m", PLANNED)
    planned.plan("1GiB", policy="none")
    job = tm.Job("a", fleet=planned, loader=tiny_batches(0), steps=1)
    with pytest.raises(ConfigError):
        tm.colocate([job], "1GiB")
    for found, expected in zip(model_of(job).parameters(), tiny_model(0).parameters(), strict=True):
        assert torch.equal(found, expected)
    planned.use(None)
    assert tm.colocate([job], "1GiB").run()["a"].num_steps == 1
