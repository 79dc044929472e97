"""A job that fails ends alone; what cannot work is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from colocation_cases import (
    Breaking,
    assert_as_alone,
    model_job,
    mse,
    smallest_budget,
    tiny_batches,
    tiny_fleet,
    tiny_job,
    tiny_model,
    tiny_optimizer,
)
from torch import nn

import trainmux as tm
from trainmux.errors import BatchError, BudgetError, ConfigError

pytestmark = pytest.mark.usefixtures("built_once")

PLANNED, GROWN = 8, 9
"""Fleets that other tests do not use again."""


def run_beside(failing: tm.Job) -> tm.ColocationResult:
    """Run a job beside two that must not notice."""
    others = [tiny_job("b", 1, steps=6), tiny_job("c", 2, steps=4)]
    colocation = tm.colocate([failing, *others], "1GiB", tracking_bytes=0, poisons=True)
    result = colocation.run()
    assert result.failed == (failing.name,)
    assert_as_alone(result, others[0], 1, 6)
    assert_as_alone(result, others[1], 2, 4)
    return result


def test_a_loader_that_raises_ends_its_job_alone() -> None:
    error = OSError("the disk is gone")
    job = tiny_job("a", 0, steps=9, loader=Breaking(tiny_batches(0)[:2], error))
    result = run_beside(job)
    assert result["a"].error is error
    assert_as_alone(result, job, 0, 2)


def test_a_loader_that_raises_at_once_ends_its_job_before_it_begins() -> None:
    error = OSError("no disk")
    result = run_beside(tiny_job("a", 0, loader=Breaking([], error)))
    assert result["a"].error is error
    assert result["a"].num_steps == 0


def test_a_loader_that_can_be_walked_only_once_ends_its_job_early() -> None:
    job = tiny_job("a", 0, steps=9, loader=iter(tiny_batches(0)))
    result = run_beside(job)
    assert isinstance(result["a"].error, BatchError)
    assert "only once" in str(result["a"].error)
    assert_as_alone(result, job, 0, 3)


def test_a_batch_that_does_not_fit_ends_its_job() -> None:
    other_type = [(tiny_batches(0)[0][0].double(), tiny_batches(0)[0][1])]
    result = run_beside(tiny_job("a", 0, steps=9, loader=tiny_batches(0)[:1] + other_type))
    assert isinstance(result["a"].error, BatchError)
    assert result["a"].num_steps == 1


def test_a_batch_larger_than_the_first_is_refused() -> None:
    larger = tiny_batches(0, num_batches=1, size=64)
    result = run_beside(tiny_job("a", 0, steps=9, loader=tiny_batches(0)[:1] + larger))
    assert isinstance(result["a"].error, BatchError)
    assert "largest batch come first" in str(result["a"].error)
    assert result["a"].num_steps == 1


def test_a_callback_that_raises_ends_its_job_alone() -> None:
    def refuse(event: tm.JobStep) -> None:
        if event.step == 2:
            raise ValueError("enough")

    job = tiny_job("a", 0, steps=9, callbacks=[refuse])
    result = run_beside(job)
    assert str(result["a"].error) == "enough"
    assert result["a"].num_steps >= 2
    assert_as_alone(result, job, 0, result["a"].num_steps)


def test_a_loss_that_raises_ends_its_job_alone() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("in the loss")

    result = run_beside(model_job("a", 0, loss=loss))
    assert isinstance(result["a"].error, ZeroDivisionError)


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
    assert tm.colocate(jobs, least).run().failed == ()


def test_a_job_that_does_not_fit_beside_the_others_is_not_added() -> None:
    colocation = tm.colocate([tiny_job("a", 0, steps=2)], "1GiB")
    colocation.set_budget(smallest_budget(colocation))
    with pytest.raises(BudgetError):
        colocation.add(tiny_job("b", 1))
    result = colocation.run()
    assert tuple(result.jobs) == ("a",)
    assert result["a"].num_steps == 2


def test_jobs_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one job"):
        tm.colocate([], "1GiB")
    with pytest.raises(ConfigError, match="'a' twice"):
        tm.colocate([tiny_job("a", 0), tiny_job("a", 1)], "1GiB")
    with pytest.raises(ConfigError, match=r"trainmux\.Job"):
        tm.colocate(["a"], "1GiB")  # type: ignore[list-item]
    fleet = tiny_fleet(0, "m", 0)
    with pytest.raises(ConfigError, match="one and the same"):
        tm.colocate([tm.Job(name, fleet=fleet, loader=tiny_batches(0)) for name in ("a", "b")], "1GiB")
    with pytest.raises(ConfigError, match="never added"):
        tm.colocate([tiny_job("a", 0)], "1GiB").remove("b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be"),
        ({"steps": True}, "steps must be"),
        ({"share": 0.0}, "share must be above 0"),
        ({"loader": None}, "must have a loader"),
        ({"loss": None}, "got no loss"),
        ({"callbacks": [1]}, "callbacks must be callable"),
        ({"fleet": object(), "model": None, "optimizer": None, "loss": None}, "must have a trainmux.Fleet"),
        ({"fleet": object()}, "leave one out"),
    ],
)
def test_settings_that_are_no_use_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_job("a", 0, **options)


def test_names_and_loaders_that_are_no_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="non-empty string"):
        model_job("", 0)
    with pytest.raises(BatchError, match="gave no batches"):
        tm.colocate([tiny_job("a", 0, loader=[])], "1GiB")


def test_fleets_that_are_cut_or_planned_are_refused() -> None:
    members = []
    for number in range(2):
        model = tiny_model(number)
        members.append(tm.Member(model, tiny_optimizer(model), name=f"m{number}"))
    fleet = tm.Fleet(members, mse, tiny_batches(0)[0], width=1)
    with pytest.raises(ConfigError, match="leave out the fleet's width"):
        tm.colocate([tm.Job("a", fleet=fleet, loader=tiny_batches(0))], "1GiB")
    planned = tiny_fleet(0, "m", PLANNED)
    planned.plan("1GiB", policy="none")
    job = tm.Job("a", fleet=planned, loader=tiny_batches(0), steps=1)
    with pytest.raises(ConfigError, match=r"fleet\.use\(None\)"):
        tm.colocate([job], "1GiB")
    planned.use(None)
    assert tm.colocate([job], "1GiB").run()["a"].num_steps == 1


def test_a_fleet_that_grew_meanwhile_ends_its_job() -> None:
    fleet = tiny_fleet(0, "m", GROWN)

    def grow(event: tm.JobStep) -> None:
        model = tiny_model(5)
        if event.step == 1:
            fleet.add(tm.Member(model, tiny_optimizer(model), name="newcomer"))

    result = run_beside(tm.Job("a", fleet=fleet, loader=tiny_batches(0), steps=5, callbacks=[grow]))
    assert isinstance(result["a"].error, ConfigError)
    assert "slots" in str(result["a"].error)


def test_jobs_on_several_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="one device"):
        tm.colocate([tiny_job("a", 0), model_job("b", 1, device="cuda:1")], "1GiB")
    colocation = tm.colocate([tiny_job("a", 0)], "1GiB")
    with pytest.raises(ConfigError, match="one device"):
        colocation.add(model_job("b", 1, device="cuda:1"))
    with pytest.raises(ConfigError, match="must be 'cpu' or"):
        colocation.add(model_job("b", 1, device="abacus"))
