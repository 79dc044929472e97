"""A device that runs segments when they are enqueued and tells of their ends later, as a CUDA device does."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from colocation_cases import (
    Breaking,
    _fleet_of_one,
    assert_as_alone,
    assert_same_state,
    cycled,
    model_of,
    mse,
    smallest_budget,
    state_of,
    tiny_batches,
    tiny_fleet,
    tiny_job,
    tiny_model,
    tiny_optimizer,
    trained_alone,
)
from torch import nn

import trainmux as tm
from trainmux.colocate import _colocation
from trainmux.colocate._admitted import AdmittedJob
from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._fused_work import FusedWork
from trainmux.colocate._host_device import HostDevice
from trainmux.colocate._protocols import Ended
from trainmux.engine import Memory
from trainmux.errors import BudgetError

pytestmark = pytest.mark.usefixtures("built_once")

SHORT_LIVED = 21
"""Of fleets that other tests do not use again."""


class AheadDevice(HostDevice):
    """What a segment has to wait for was enqueued before it, so it may run at once."""

    def __init__(self, *, poisons: bool = False) -> None:
        super().__init__(poisons=poisons)
        self._ran: deque[Ended] = deque()
        self._last_end: dict[str, float] = {}

    def enqueue(self, ref: SegmentRef, after: tuple[SegmentRef, ...], work: Callable[[], None]) -> None:
        super().enqueue(ref, after, work)
        ended = super().next_ended()
        assert ended is not None
        started_at = self._last_end.get(ref.job, ended.started_at)  # the host takes no time
        self._last_end[ref.job] = ended.ended_at
        self._ran.append(ended._replace(started_at=started_at))

    @property
    def is_busy(self) -> bool:
        return bool(self._ran)

    def next_ended(self, until: float | None = None) -> Ended | None:
        if until is not None and (until == 0 or self.now() < until) and len(self._ran) % 3 == 1:
            return None  # nothing ends before; the caller is to ask again
        return self._ran.popleft() if self._ran else None


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _colocation, "make_device", lambda where, region_bytes, *, poisons: AheadDevice(poisons=poisons)
    )


def beside(job: tm.Job) -> tm.ColocationResult:
    """Run a job beside one that must not notice, in the smallest budget."""
    other = tiny_job("b", 1, steps=6)
    colocation = tm.colocate([job, other], "1GiB", tracking_bytes=0, poisons=True)
    colocation.set_budget(smallest_budget(colocation))
    result = colocation.run()
    assert_as_alone(result, other, 1, 6)
    return result


def test_a_loader_that_raises_ends_its_job_alone() -> None:
    error = OSError("the disk is gone")
    job = tiny_job("a", 0, steps=9, loader=Breaking(tiny_batches(0)[:2], error))
    result = beside(job)
    assert result["a"].error is error
    assert_as_alone(result, job, 0, 2)


def test_a_callback_that_raises_leaves_whole_steps() -> None:
    """The next iteration may be half on its way by then: it is ended, and the callback is not called."""
    seen: list[int] = []

    def refuse(event: tm.JobStep) -> None:
        seen.append(event.step)
        if event.step == 2:
            raise ValueError("enough")

    job = tiny_job("a", 0, steps=9, callbacks=[refuse])
    result = beside(job)
    assert str(result["a"].error) == "enough"
    assert seen == [1, 2]
    assert result["a"].num_steps in (2, 3)
    assert_as_alone(result, job, 0, result["a"].num_steps)


def refusing_settle(monkeypatch: pytest.MonkeyPatch, member: str, num_refusals: int) -> list[int]:
    """Have the job of a member refuse to move in so many times; fills with what it asked for each time."""
    settle, asked = FusedWork.settle, []

    def refuse(work: FusedWork, memory: Memory) -> None:
        settle(work, memory)
        if work.member_names == (member,):
            asked.append(work.need.local_bytes)
            if len(asked) <= num_refusals:
                raise BudgetError("too little")

    monkeypatch.setattr(FusedWork, "settle", refuse)
    return asked


def test_a_job_that_needs_more_than_it_knew_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refusing_settle(monkeypatch, "a", 2)
    jobs = [tiny_job("a", 0, steps=4), tiny_job("b", 1, steps=6)]
    result = tm.colocate(jobs, "2GiB", tracking_bytes=0, poisons=True).run()
    assert [later - earlier for earlier, later in itertools.pairwise(asked)] == [128 << 20, 256 << 20]
    assert result["a"].local_bytes == asked[-1]
    assert result.peak_bytes >= sum(job.local_bytes for job in result.jobs.values())
    assert_as_alone(result, jobs[0], 0, 4)
    assert_as_alone(result, jobs[1], 1, 6)


def test_a_job_that_needs_more_than_the_budget_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refusing_settle(monkeypatch, "a", 100)
    jobs = [tiny_job("a", 0, steps=4), tiny_job("b", 1, steps=6)]
    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, poisons=True)
    result = colocation.run()
    assert len(asked) == 4  # 128, 384 and 896 MiB more than at first; 1920 are refused
    assert result.failed == ("a",)
    error = result["a"].error
    assert isinstance(error, BudgetError)
    assert error.smallest_bytes is not None
    for found, expected in zip(model_of(jobs[0]).parameters(), tiny_model(0).parameters(), strict=True):
        assert torch.equal(found, expected)
    assert_as_alone(result, jobs[1], 1, 6)


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


def test_what_has_left_is_not_held_on_to() -> None:
    fleets: list[weakref.ref[tm.Fleet]] = []

    def come(event: tm.JobStep) -> None:
        if event.step == 1:
            guest = tm.Job(
                "guest", fleet=tiny_fleet(3, "guest", SHORT_LIVED), loader=tiny_batches(3), steps=1
            )
            fleets.append(weakref.ref(guest.fleet))  # type: ignore[arg-type]
            event.colocation.add(guest)

    colocation = tm.colocate([tiny_job("a", 0, steps=4, callbacks=[come])], "1GiB")
    result = colocation.run()
    assert result["guest"].num_steps == 1
    _fleet_of_one.cache_clear()  # which keeps fleets for the tests
    gc.collect()
    assert fleets[0]() is None


# ---- batches ahead -------------------------------------------------------------------------------------


class Counting:
    """A loader that counts the batches that were taken."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self.num_taken = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.num_taken += 1
            yield batch


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that took a batch ahead, each time that one did."""
    look_ahead, found = AdmittedJob.look_ahead, []

    def noting(admitted: AdmittedJob) -> None:
        found.append(admitted.name)
        look_ahead(admitted)

    monkeypatch.setattr(AdmittedJob, "look_ahead", noting)
    return found


def test_a_job_has_its_batch_before_it_may_begin(looks: list[str]) -> None:
    """Where it waits for memory; it takes no more batches than it has steps."""
    loader = Counting(tiny_batches(0))
    job = tiny_job("a", 0, steps=6, loader=loader)
    assert_as_alone(beside(job), job, 0, 6)
    assert looks.count("a") >= 3
    assert looks.count("b") >= 3
    assert loader.num_taken == 6


@pytest.mark.parametrize("is_for_all", [False, True])
def test_no_batch_is_taken_ahead_of_callbacks(looks: list[str], is_for_all: bool) -> None:
    """They may change what comes next."""
    events: list[str] = []

    def note(event: tm.JobStep) -> None:
        events.append(event.job)

    jobs = [tiny_job("a", 0, steps=4, callbacks=[] if is_for_all else [note]), tiny_job("b", 1, steps=4)]
    given = {"callbacks": [note]} if is_for_all else {}
    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, **given)
    colocation.set_budget(smallest_budget(colocation))
    colocation.run()
    assert events.count("a") == 4
    assert "a" not in looks
    assert ("b" in looks) is not is_for_all


def after_looking_ahead(
    monkeypatch: pytest.MonkeyPatch, fleet: tm.Fleet, act: Callable[[], None]
) -> list[int]:
    """Have ``act`` called once when job "a" has taken a batch ahead, as other threads and callbacks of other
    jobs may; fills with the steps that the job had done by then.
    """
    look_ahead: Callable[[AdmittedJob], None] = AdmittedJob.look_ahead
    first, found = fleet.num_steps, []

    def acting(admitted: AdmittedJob) -> None:
        look_ahead(admitted)
        if admitted.name == "a" and not found and fleet.num_steps >= first + 2:
            found.append(fleet.num_steps - first)
            act()

    monkeypatch.setattr(AdmittedJob, "look_ahead", acting)
    return found


def test_a_job_that_goes_with_a_batch_ahead_is_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = tiny_fleet(0, "a", 0)
    jobs = [tiny_job("a", 0, steps=1000, fleet=fleet), tiny_job("b", 1, steps=6)]
    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, poisons=True)
    colocation.set_budget(smallest_budget(colocation))
    gone_at = after_looking_ahead(monkeypatch, fleet, lambda: colocation.remove("a"))
    result = colocation.run()
    num_steps = result["a"].num_steps
    assert gone_at == [num_steps]
    assert_as_alone(result, jobs[0], 0, num_steps)
    assert_as_alone(result, jobs[1], 1, 6)
    further = list(cycled(tiny_batches(0), num_steps + 3))[num_steps:]
    found = torch.stack([fleet.step(batch).clone() for batch in further])
    assert torch.equal(found, trained_alone(0, num_steps + 3)[0][num_steps:])


def fleet_of_three() -> tm.Fleet:
    models = [tiny_model(seed) for seed in range(3)]
    members = [
        tm.Member(model, tiny_optimizer(model), name=f"m{seed}", seed=seed)
        for seed, model in enumerate(models)
    ]
    return tm.Fleet(members, mse, tiny_batches(0)[0], deterministic=True)


def set_learning_rate(fleet: tm.Fleet) -> None:
    for group in fleet.members[1].optimizer.param_groups:
        group["lr"] = 0.5


def replace_member(fleet: tm.Fleet) -> None:
    model = tiny_model(9)
    fleet.replace(
        "m1", tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), name="new")
    )


@pytest.mark.parametrize(
    "change",
    [lambda fleet: fleet.drop("m1"), set_learning_rate, replace_member],
    ids=["drop", "learning rate", "replace"],
)
def test_members_that_change_while_a_batch_is_ahead(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[tm.Fleet], None]
) -> None:
    """The iteration begins with them as they are then."""
    fleet, alone = fleet_of_three(), fleet_of_three()
    job = tm.Job("a", fleet=fleet, loader=tiny_batches(0), steps=8)
    changed_at = after_looking_ahead(monkeypatch, fleet, lambda: change(fleet))
    result = beside(job)["a"]
    assert result.error is None
    rows = []
    for step, batch in enumerate(cycled(tiny_batches(0), 8)):
        if [step] == changed_at:
            change(alone)
        rows.append(dict(zip(alone.names, alone.step(batch).tolist(), strict=True)))
    expected = torch.tensor([[row.get(name, torch.nan) for name in result.members] for row in rows])
    assert torch.equal(result.losses.isnan(), expected.isnan())
    assert torch.equal(result.losses.nan_to_num(), expected.nan_to_num())
    assert_same_state(state_of(fleet), state_of(alone), "changed")
