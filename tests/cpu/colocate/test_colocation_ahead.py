"""Jobs on a device that runs segments when they are enqueued and tells of their ends later."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from colocation_cases import (
    assert_as_alone,
    assert_members_as_alone,
    cycled,
    fleet_of_one,
    model_of,
    run_ahead,
    smallest_budget,
    tiny_batches,
    tiny_fleet,
    tiny_job,
    tiny_model,
    trained_alone,
    trio,
)
from torch import nn

import trainmux as tm
from trainmux.colocate._admitted import AdmittedJob
from trainmux.colocate._fused_work import FusedWork
from trainmux.engine import Memory
from trainmux.errors import BudgetError

pytestmark = pytest.mark.usefixtures("built_once")

SHORT_LIVED = 21
"""Of fleets that other tests do not use again."""


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ahead(monkeypatch)


def beside(job: tm.Job) -> tm.ColocationResult:
    """Run a job beside one that must not notice, in the smallest budget."""
    other = tiny_job("b", 1, steps=6)
    colocation = tm.colocate([job, other], "1GiB", tracking_bytes=0, poisons=True)
    colocation.set_budget(smallest_budget(colocation))
    result = colocation.run()
    assert_as_alone(result, other, 1, 6)
    return result


@pytest.mark.parametrize(("num_refusals", "budget"), [(2, "2GiB"), (100, "1GiB")])
def test_a_job_that_needs_more_than_it_knew_gets_it_if_the_budget_allows(
    monkeypatch: pytest.MonkeyPatch, num_refusals: int, budget: str
) -> None:
    settle, asked = FusedWork.settle, []

    def refuse(work: FusedWork, memory: Memory) -> None:
        settle(work, memory)
        if work.member_names == ("a",):
            asked.append(work.demand("a", steps=1, share=1.0).local_bytes)
            if len(asked) <= num_refusals:
                raise BudgetError("too little")

    monkeypatch.setattr(FusedWork, "settle", refuse)
    jobs = [tiny_job("a", 0, steps=4), tiny_job("b", 1, steps=6)]
    result = tm.colocate(jobs, budget, tracking_bytes=0, poisons=True).run()
    more = [(later - earlier) >> 20 for earlier, later in itertools.pairwise(asked)]
    assert_as_alone(result, jobs[1], 1, 6)
    if num_refusals == 2:
        assert more == [128, 256]
        assert result["a"].local_bytes == asked[-1]
        assert result.peak_bytes >= sum(job.local_bytes for job in result.jobs.values())
        assert_as_alone(result, jobs[0], 0, 4)
    else:
        assert more == [128, 256, 512]  # 1024 more are refused
        assert result.failed == ("a",)
        error = result["a"].error
        assert isinstance(error, BudgetError)
        assert error.smallest_bytes is not None
        for found, expected in zip(model_of(jobs[0]).parameters(), tiny_model(0).parameters(), strict=True):
            assert torch.equal(found, expected)


def test_an_error_holds_on_to_nothing() -> None:
    held: list[weakref.ref[nn.Module]] = []

    def refuse(event: tm.JobStep) -> None:
        batch = nn.Linear(1, 1)
        held.append(weakref.ref(batch))
        raise ValueError("enough")

    result = beside(tiny_job("a", 0, steps=2, callbacks=[refuse]))
    gc.collect()
    assert str(result["a"].error) == "enough"
    assert held[0]() is None


def test_a_job_that_has_left_is_not_held_on_to() -> None:
    fleets: list[weakref.ref[tm.Fleet]] = []

    def come(event: tm.JobStep) -> None:
        if event.step == 1:
            fleet = tiny_fleet(3, "guest", SHORT_LIVED)
            fleets.append(weakref.ref(fleet))
            event.colocation.add(tm.Job("guest", fleet=fleet, loader=tiny_batches(3), steps=1))

    colocation = tm.colocate([tiny_job("a", 0, steps=4, callbacks=[come])], "1GiB")
    result = colocation.run()
    assert result["guest"].num_steps == 1
    fleet_of_one.cache_clear()  # which keeps fleets for the tests
    gc.collect()
    assert fleets[0]() is None


# ---- batches ahead -------------------------------------------------------------------------------------


class Counting(list[Any]):
    """Batches of which those that were taken are counted."""

    num_taken = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.num_taken += 1
            yield batch


def when_looking_ahead(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Have ``act`` called with its name when a job has taken a batch ahead, as other threads may."""
    look_ahead: Callable[[AdmittedJob], None] = AdmittedJob.look_ahead

    def acting(admitted: AdmittedJob) -> None:
        look_ahead(admitted)
        act(admitted.name)

    monkeypatch.setattr(AdmittedJob, "look_ahead", acting)


def test_a_job_has_its_batch_before_it_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it waits for memory; it takes no more batches than it has steps."""
    looks: list[str] = []
    when_looking_ahead(monkeypatch, looks.append)
    loader = Counting(tiny_batches(0))
    job = tiny_job("a", 0, steps=6, loader=loader)
    assert_as_alone(beside(job), job, 0, 6)
    assert looks.count("a") >= 3
    assert looks.count("b") >= 3
    assert loader.num_taken == 6


@pytest.mark.parametrize("is_for_all", [False, True])
def test_no_batch_is_taken_ahead_of_callbacks(monkeypatch: pytest.MonkeyPatch, is_for_all: bool) -> None:
    """They may change what comes next."""
    looks: list[str] = []
    events: list[str] = []
    when_looking_ahead(monkeypatch, looks.append)
    note = [lambda event: events.append(event.job)]
    jobs = [tiny_job("a", 0, steps=4, callbacks=[] if is_for_all else note), tiny_job("b", 1, steps=4)]
    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, callbacks=note if is_for_all else ())
    colocation.set_budget(smallest_budget(colocation))
    colocation.run()
    assert events.count("a") == 4
    assert "a" not in looks
    assert ("b" in looks) is not is_for_all


def once_ahead(monkeypatch: pytest.MonkeyPatch, fleet: tm.Fleet, act: Callable[[], None]) -> list[int]:
    """Have ``act`` called once when job "a" has taken a batch ahead; fills with the steps it had done."""
    first, found = fleet.num_steps, []

    def acting(name: str) -> None:
        if name == "a" and not found and fleet.num_steps >= first + 2:
            found.append(fleet.num_steps - first)
            act()

    when_looking_ahead(monkeypatch, acting)
    return found


def test_a_job_that_goes_with_a_batch_ahead_is_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = tiny_fleet(0, "a", 0)
    jobs = [tiny_job("a", 0, steps=1000, fleet=fleet), tiny_job("b", 1, steps=6)]
    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, poisons=True)
    colocation.set_budget(smallest_budget(colocation))
    gone_at = once_ahead(monkeypatch, fleet, lambda: colocation.remove("a"))
    result = colocation.run()
    num_steps = result["a"].num_steps
    assert gone_at == [num_steps]
    assert_as_alone(result, jobs[0], 0, num_steps)
    assert_as_alone(result, jobs[1], 1, 6)
    further = list(cycled(tiny_batches(0), num_steps + 3))[num_steps:]
    found = torch.stack([fleet.step(batch).clone() for batch in further])
    assert torch.equal(found, trained_alone(0, num_steps + 3)[0][num_steps:])


def set_learning_rate(fleet: tm.Fleet) -> None:
    for group in fleet.members[1].optimizer.param_groups:
        group["lr"] = 0.5


def replace_member(fleet: tm.Fleet) -> None:
    model = tiny_model(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    fleet.replace("m1", tm.Member(model, optimizer, name="new"))


@pytest.mark.parametrize(
    "change",
    [lambda fleet: fleet.drop("m1"), lambda fleet: fleet.stop("m1"), set_learning_rate, replace_member],
    ids=["drop", "stop", "learning rate", "replace"],
)
def test_members_that_change_while_a_batch_is_ahead(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[tm.Fleet], None]
) -> None:
    """The iteration begins with them as they are then."""
    fleet = trio()
    changed_at = once_ahead(monkeypatch, fleet, lambda: change(fleet))
    job = tm.Job("a", fleet=fleet, loader=tiny_batches(0), steps=6)
    result = beside(job)["a"]

    def change_then(alone: tm.Fleet, step: int) -> None:
        if [step] == changed_at:
            change(alone)

    assert changed_at
    assert ("new" in result.members) is (change is replace_member)
    assert_members_as_alone(result, job, trio(), change_then)
