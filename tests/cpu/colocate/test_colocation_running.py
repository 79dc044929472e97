"""Jobs that come and go, budgets that change, callbacks, threads, and an interrupt in the middle."""

from __future__ import annotations

import _thread
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from colocation_cases import (
    assert_as_alone,
    assert_same_state,
    cycled,
    model_job,
    model_of,
    mse,
    smallest_budget,
    state_of,
    tiny_batches,
    tiny_job,
    tiny_member,
    tiny_model,
    tiny_optimizer,
    trained_alone,
)
from equivalence import train_alone

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")


def promptness() -> tuple[float, int | None]:
    """Python's switch interval in seconds, and on Linux this thread's timer slack in nanoseconds."""
    slack = ctypes.CDLL(None).prctl(30, 0, 0, 0, 0) if sys.platform == "linux" else None
    return sys.getswitchinterval(), slack


def test_a_model_is_trained_in_its_own_objects() -> None:
    usual, seen = promptness(), []
    watch = [lambda event: seen.append(promptness())]
    job, other = model_job("a", 0, steps=4, callbacks=watch), tiny_job("b", 1, steps=None)
    result = tm.colocate([job, other], "1GiB").run()
    assert_as_alone(result, job, 0, 4)
    assert_as_alone(result, other, 1, 3)  # without steps there is one pass
    assert result["a"].members == ("a",)
    assert result["a"].steps_per_second == pytest.approx(4 / result["a"].seconds)
    assert result["a"].metrics["finite"].all()
    # Threads go on soon after another one has run, or after a sleep, while jobs run.
    assert promptness() == usual
    assert len(set(seen)) == 1
    assert seen[0][0] == pytest.approx(2e-4, abs=2e-6)
    assert seen[0][1] in (None, 1000)
    plain = tiny_model(0)
    train_alone(plain, tiny_optimizer(plain), mse, cycled(tiny_batches(0), 4))
    for found, expected in zip(model_of(job).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_jobs_arrive_and_leave_from_callbacks() -> None:
    seen: list[tuple[str, int]] = []
    late = tiny_job("late", 2, steps=3)

    def direct(event: tm.JobStep) -> None:
        seen.append((event.job, event.step))
        if event.step == 2:
            event.colocation.add(late)
        if event.step == 4:
            event.colocation.remove("endless")

    jobs = [tiny_job("a", 0, steps=8, callbacks=[direct]), tiny_job("endless", 1, steps=10**6)]
    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, poisons=True)
    result = colocation.run()
    assert seen == [("a", step) for step in range(1, 9)]
    assert_as_alone(result, jobs[0], 0, 8)
    assert_as_alone(result, late, 2, 3)
    assert 0 < result["endless"].num_steps < 10**6
    assert_as_alone(result, jobs[1], 1, result["endless"].num_steps)
    assert {row.state for row in colocation.usage()} == {"done"}
    with pytest.raises(tm.errors.ConfigError, match="twice"):
        colocation.add(tiny_job("a"))


def test_another_thread_gets_its_turn() -> None:
    colocation = tm.colocate([tiny_job("endless", 0, steps=10**6)], "1GiB")
    answers: list[object] = []
    late = tiny_job("b", 1, steps=2)

    def direct() -> None:
        while not any(row.num_steps > 2 for row in colocation.usage()):
            time.sleep(0.001)
        colocation.add(late)
        try:
            colocation.set_budget(1)
        except tm.errors.BudgetError as error:
            answers.append(error.smallest_bytes)
        while colocation.results()["b"].num_steps < 2:
            time.sleep(0.001)
        colocation.remove("endless")

    thread = threading.Thread(target=direct)
    thread.start()
    result = colocation.run()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert answers == [smallest_budget(colocation)]
    assert_as_alone(result, late, 1, 2)


def fail() -> None:
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("stop", "error"), [(_thread.interrupt_main, KeyboardInterrupt), (fail, RuntimeError)]
)
def test_what_ends_a_run_leaves_every_member_between_two_steps(
    stop: Callable[[], None], error: type[BaseException]
) -> None:
    """An interrupt, or a callback for all jobs that raises."""
    jobs = [tiny_job("a", 0, steps=10**6), tiny_job("b", 1, steps=10**6)]

    def direct(event: tm.JobStep) -> None:
        if event.job == "a" and event.step == 3:
            stop()

    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, callbacks=[direct])
    with pytest.raises(error):
        colocation.run()
    result = colocation.results()
    for number, job in enumerate(jobs):
        steps = result[job.name].num_steps
        assert 3 <= steps < 10**6 if job.name == "a" else steps > 0
        assert_as_alone(result, job, number, steps)


def test_groups_take_turns_within_a_job(tmp_path: Path) -> None:
    """With micro-batches that do not update, and a batch that is shorter than the others."""
    members = [tiny_member(0, "m0")]
    model = tiny_model(1, hidden=8)
    members.append(tm.Member(model, tiny_optimizer(model), name="m1", seed=1))
    fleet = tm.Fleet(members, mse, tiny_batches(0)[0], deterministic=True, accumulate=2)
    fleet.save(tmp_path / "begin")
    batches = [*tiny_batches(0), *tiny_batches(1, num_batches=1, size=3)]
    expected = torch.stack([fleet.step(batch).clone() for batch in cycled(batches, 5)])
    state = state_of(fleet)
    after = fleet.step(batches[0]).clone()
    fleet.restore(tmp_path / "begin")
    other = tiny_job("b", 1, steps=5)
    jobs = [tm.Job("sweep", fleet=fleet, loader=batches, steps=5), other]
    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, poisons=True)
    colocation.set_budget(smallest_budget(colocation))
    result = colocation.run()
    assert result.failed == ()
    assert torch.equal(result["sweep"].losses, expected)
    assert result["sweep"].members == ("m0", "m1")
    assert_same_state(state_of(fleet), state, "sweep")
    assert fleet.num_steps == 5
    assert torch.equal(fleet.step(batches[0]), after)
    assert_as_alone(result, other, 1, 5)


def test_a_shuffled_loader_draws_as_it_would_alone() -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*tiny_batches(0), strict=True))
    data = torch.utils.data.TensorDataset(inputs, targets)

    def losses(*others: tm.Job) -> torch.Tensor:
        torch.manual_seed(7)
        loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        job = tiny_job("a", 0, steps=5, loader=loader)
        return tm.colocate([job, *others], "1GiB").run()["a"].losses

    alone = losses()
    others = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    assert torch.equal(losses(tiny_job("b", 1, steps=5, loader=others)), alone)
    assert not torch.equal(alone, trained_alone(0, 5)[0])
