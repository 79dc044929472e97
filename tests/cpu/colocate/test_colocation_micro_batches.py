"""Micro-batches of one job side by side: bit for bit the job that runs them one after the other, alone."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from colocation_cases import (
    SMALL_CUTS,
    Breaking,
    assert_as_alone,
    assert_same_state,
    batches_of,
    cycled,
    enqueued_jobs,
    is_interleaved,
    model_job,
    mse,
    small_fleet,
    state_of,
    tiny_batches,
    tiny_job,
    tiny_model,
    tiny_optimizer,
)
from torch import Tensor, nn

import trainmux as tm
from trainmux.colocate import _health
from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._fused_work import FusedWork
from trainmux.colocate._layout import smallest_budget as smallest_demand
from trainmux.errors import BatchError, ConfigError

pytestmark = pytest.mark.usefixtures("built_once")

SECOND_LANE = " (lane 2)"


def demands_of(colocation: tm.Colocation) -> list[Any]:
    return [demand for admitted in colocation._jobs.values() for demand in admitted.demands]


def set_tightness(colocation: tm.Colocation, tightness: float) -> None:
    """1 is the smallest workable budget, 0 that with which no lane waits for memory."""
    demands = demands_of(colocation)
    most = sum(demand.local_bytes + demand.peak_bytes for demand in demands)
    colocation.set_budget(round(tightness * smallest_demand(demands) + (1 - tightness) * most))


def lanes_at_once(order: Sequence[SegmentRef], job: str) -> bool:
    return is_interleaved([ref for ref in order if ref.job.startswith(job)])


# ---- a small model with dropout -------------------------------------------------------------------------


def test_two_at_once_are_as_one_after_the_other(tmp_path: Path) -> None:
    """Dropout, two members, every budget, alone and beside another job; one fleet, to trace it once."""
    name, steps = "transformer_with_dropout", 7
    fleet = small_fleet(name, 2, accumulate=3)
    fleet.save(tmp_path / "begin")
    batches = batches_of(name)
    expected = torch.stack([fleet.step(batch).clone() for batch in cycled(batches, steps)])
    state = state_of(fleet)
    following = torch.stack([fleet.step(batch).clone() for batch in batches])  # with what was accumulated
    for tightness, others in ((0.0, 0), (0.5, 0), (1.0, 0), (1.0, 1), (0.5, 2)):
        fleet.restore(tmp_path / "begin")
        beside = [tiny_job(f"other {number}", number, steps=5) for number in range(others)]
        lanes = tm.Job("sweep", fleet=fleet, loader=batches, steps=steps, concurrent_micro_batches=2)
        colocation = tm.colocate([lanes, *beside], "4GiB", tracking_bytes=SMALL_CUTS, poisons=True)
        set_tightness(colocation, tightness)
        order = enqueued_jobs(colocation)
        result = colocation.run()
        what = f"{tightness} beside {others}"
        assert result.failed == (), what
        assert result.used_bytes <= result.peak_bytes <= result.budget_bytes
        assert torch.equal(result["sweep"].losses, expected), what
        assert_same_state(state_of(fleet), state, what)
        assert fleet.num_steps == steps
        assert torch.equal(torch.stack([fleet.step(batch).clone() for batch in batches]), following), what
        for number, job in enumerate(beside):
            assert_as_alone(result, job, number, 5)
        assert tightness == 1.0 or lanes_at_once(order, "sweep"), what
        if tightness == 1.0:  # what one lane has, the other has not
            assert result.used_bytes == result.budget_bytes
    jobs = {ref.job for ref in order}
    assert jobs == {"sweep", "sweep" + SECOND_LANE, "other 0", "other 1"}


# ---- tiny fleets ----------------------------------------------------------------------------------------


@functools.cache
def _traced_once(accumulate: int, num_members: int) -> tuple[tm.Fleet, Path]:
    fleet = new_sweep(accumulate, num_members)
    path = Path(_FILES.name) / f"{accumulate} {num_members}"
    fleet.save(path)
    return fleet, path


_FILES = tempfile.TemporaryDirectory()


def tiny_sweep(accumulate: int, num_members: int = 2) -> tm.Fleet:
    """The fleet of these numbers, as it was at its beginning."""
    fleet, path = _traced_once(accumulate, num_members)
    fleet.restore(path)
    return fleet


def new_sweep(accumulate: int, num_members: int, learning_rates: Sequence[float] = ()) -> tm.Fleet:
    members = []
    for seed in range(num_members):
        model = tiny_model(seed)
        optimizer = tiny_optimizer(model)
        if learning_rates:
            optimizer.param_groups[0]["lr"] = learning_rates[seed]
        members.append(tm.Member(model, optimizer, name=f"m{seed}", seed=seed))
    return tm.Fleet(members, mse, tiny_batches(0)[0], deterministic=True, accumulate=accumulate)


@dataclass(frozen=True)
class Trained:
    """A fleet after micro-batches, and after ``following`` ones that are run one by one in any case."""

    losses: Tensor
    metrics: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    following: list[Any]
    after: tuple[Tensor, dict[str, Tensor]]


def trained_alone(fleet: tm.Fleet, batches: Iterable[Any], following: Iterable[Any] = ()) -> Trained:
    """Micro-batch after micro-batch, with nothing beside it."""
    losses, metrics = [], []
    for batch in batches:
        losses.append(fleet.step(batch).clone())
        metrics.append({key: value.clone() for key, value in fleet.metrics.items()})
    state = state_of(fleet)
    following = list(following)
    return Trained(torch.stack(losses), metrics, state, following, follow(fleet, following))


def follow(fleet: tm.Fleet, batches: Iterable[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """What is accumulated shows in the next update."""
    losses = [fleet.step(batch).clone() for batch in batches]
    return torch.stack(losses) if losses else torch.zeros(0), state_of(fleet)


def assert_same(fleet: tm.Fleet, result: tm.JobResult, expected: Trained, what: str = "sweep") -> None:
    assert result.num_steps == len(expected.losses), what
    assert torch.equal(result.losses.nan_to_num(7.0), expected.losses.nan_to_num(7.0)), what
    assert_same_state(state_of(fleet), expected.state, what)
    losses, state = follow(fleet, expected.following)
    assert torch.equal(losses, expected.after[0]), what
    assert_same_state(state, expected.after[1], f"{what}, after")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a busy machine is, jobs and lanes are not time-sliced."""
    monkeypatch.setattr(_health, "_STALLS_TO_FALL_BACK", 1 << 20)
    monkeypatch.setattr(_health, "_LEAST_GAIN", 1e-9)


def in_lanes(fleet: tm.Fleet, loader: Any, tightness: float = 0.0, **options: Any) -> tm.JobResult:
    """Run a fleet's micro-batches in two lanes beside a job that must not notice."""
    job = tm.Job("sweep", fleet=fleet, loader=loader, concurrent_micro_batches=2, **options)
    other = tiny_job("other", 1, steps=6)
    colocation = tm.colocate([job, other], "1GiB", tracking_bytes=0, poisons=True)
    set_tightness(colocation, tightness)
    result = colocation.run()
    assert result.used_bytes <= result.peak_bytes <= result.budget_bytes
    assert_as_alone(result, other, 1, 6)
    return result["sweep"]


@pytest.mark.parametrize("tightness", [0.0, 1.0])
@pytest.mark.parametrize(("accumulate", "num_before", "steps"), [(2, 0, 9), (4, 1, 10), (3, 2, 1), (3, 2, 8)])
def test_any_number_of_micro_batches(accumulate: int, num_before: int, steps: int, tightness: float) -> None:
    """Also with some accumulated before the job begins, and an update still to come when it ends."""
    batches = [*tiny_batches(0), *tiny_batches(1, num_batches=2)]
    fleet = tiny_sweep(accumulate)
    follow(fleet, cycled(batches, num_before))
    expected = trained_alone(fleet, cycled(batches, steps), batches)
    fleet = tiny_sweep(accumulate)
    follow(fleet, cycled(batches, num_before))
    result = in_lanes(fleet, batches, tightness, steps=steps)
    assert result.error is None
    assert_same(fleet, result, expected)


def test_a_loader_that_ends_between_updates() -> None:
    batches = [*tiny_batches(0), *tiny_batches(1, num_batches=3)]
    expected = trained_alone(tiny_sweep(4), batches, batches[:2])
    fleet = tiny_sweep(4)
    result = in_lanes(fleet, batches)
    assert result.error is None
    assert fleet.num_steps == 6
    assert_same(fleet, result, expected)


@pytest.mark.parametrize("tightness", [0.0, 1.0])
def test_short_batches(tightness: float) -> None:
    long, short = tiny_batches(0, num_batches=4), tiny_batches(1, num_batches=2, size=3)
    batches = [long[0], short[0], long[1], long[2], short[1], long[3]]
    expected = trained_alone(tiny_sweep(2), batches)
    fleet = tiny_sweep(2)
    result = in_lanes(fleet, batches, tightness, steps=6)
    assert result.error is None
    assert_same(fleet, result, expected)


def test_members_that_are_not_finite() -> None:
    """One diverges after an update, one batch ends all others in the midst of a step."""
    broken = (torch.full((8, 4), torch.inf), torch.zeros(8, 1))
    batches = [*tiny_batches(0, num_batches=5), broken, *tiny_batches(1, num_batches=4)]
    rates = (0.05, 1e30, 0.01)
    expected = trained_alone(new_sweep(4, 3, rates), batches)
    assert not expected.losses[:, 1].isfinite().all()
    seen: list[tuple[int, dict[str, Any]]] = []

    def see(event: tm.JobStep) -> None:
        seen.append((event.step, dict(event.metrics)))

    fleet = new_sweep(4, 3, rates)
    result = in_lanes(fleet, batches, steps=10, callbacks=[see])
    assert result.error is None
    assert_same(fleet, result, expected)
    assert [step for step, _ in seen] == list(range(1, 11))
    for (_, found), wanted in zip(seen, expected.metrics, strict=True):
        assert found.keys() == wanted.keys()
        for key in wanted:  # the norm is that of what has been added up so far
            assert torch.equal(found[key].double().nan_to_num(7.0), wanted[key].double().nan_to_num(7.0))


def test_several_groups(tmp_path: Path) -> None:
    members = []
    for seed, hidden in enumerate((4, 8, 8)):
        model = tiny_model(seed, hidden)
        members.append(tm.Member(model, tiny_optimizer(model), name=f"m{seed}", seed=seed))
    fleet = tm.Fleet(members, mse, tiny_batches(0)[0], deterministic=True, accumulate=3)
    fleet.save(tmp_path / "begin")
    batches = [*tiny_batches(0), *tiny_batches(1, num_batches=1, size=3)]
    expected = trained_alone(fleet, cycled(batches, 8), batches)
    for tightness in (0.0, 0.7):
        fleet.restore(tmp_path / "begin")
        result = in_lanes(fleet, batches, tightness, steps=8)
        assert result.error is None
        assert_same(fleet, result, expected)


@pytest.mark.parametrize("tightness", [0.0, 0.6, 1.0])
def test_two_jobs_in_lanes(tightness: float) -> None:
    sizes = {"a": 2, "b": 3}
    expected = {
        name: trained_alone(tiny_sweep(accumulate), cycled(tiny_batches(0), 7), tiny_batches(1))
        for name, accumulate in sizes.items()
    }
    fleets = {name: tiny_sweep(accumulate) for name, accumulate in sizes.items()}
    jobs = [
        tm.Job(name, fleet=fleet, loader=tiny_batches(0), steps=7, concurrent_micro_batches=2)
        for name, fleet in fleets.items()
    ]
    colocation = tm.colocate(jobs, "1GiB", tracking_bytes=0, poisons=True)
    set_tightness(colocation, tightness)
    result = colocation.run()
    assert result.failed == ()
    for name, fleet in fleets.items():
        assert_same(fleet, result[name], expected[name], name)


def test_a_model_with_a_schedule() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = tiny_model(0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, schedule = make()
    member = tm.Member(model, optimizer, name="m", scheduler=schedule, seed=0)
    alone = tm.Fleet([member], mse, tiny_batches(0)[0], deterministic=True, accumulate=2)
    expected = trained_alone(alone, cycled(tiny_batches(0), 8))
    other_model, optimizer, schedule = make()
    job = model_job(
        "m",
        steps=8,
        model=other_model,
        optimizer=optimizer,
        scheduler=schedule,
        seed=0,
        accumulate=2,
        concurrent_micro_batches=2,
    )
    result = tm.colocate([job], "1GiB", tracking_bytes=0, poisons=True).run()["m"]
    assert torch.equal(result.losses, expected.losses)
    for found, wanted in zip(other_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert schedule.last_epoch == 4


# ---- what goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_good", "tightness"), [(1, 0.0), (2, 1.0), (3, 0.0), (4, 0.0), (5, 1.0)])
def test_a_loader_that_raises(num_good: int, tightness: float) -> None:
    """The micro-batches before the one that there is no batch for end; there are no others."""
    batches = tiny_batches(0, num_batches=6)
    expected = trained_alone(tiny_sweep(4), batches[:num_good], batches[num_good:])
    fleet = tiny_sweep(4)
    result = in_lanes(fleet, Breaking(batches[:num_good], OSError("disk")), tightness, steps=9)
    assert str(result.error) == "disk"
    assert fleet.num_steps == num_good
    assert_same(fleet, result, expected)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_batch_that_is_too_large(number: int) -> None:
    batches = tiny_batches(0, num_batches=5)
    large = tiny_batches(1, num_batches=1, size=512)
    expected = trained_alone(tiny_sweep(3), batches[:number], batches[number:])
    fleet = tiny_sweep(3)
    result = in_lanes(fleet, [*batches[:number], *large, *batches[number:]], steps=6)
    assert isinstance(result.error, BatchError)
    assert_same(fleet, result, expected)


def test_an_earlier_micro_batch_that_fails_ends_the_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients were not added up, so those of the later one must not be either."""
    run = FusedWork.run
    begun: list[int] = []

    def fail(work: FusedWork, segment: int) -> None:
        if work.member_names == ("m0", "m1"):
            begun.extend([work._index] if segment == 0 else [])
            lane = work._job.lane("sweep", 0)
            assert lane is not None
            is_earlier = work._index == 0 and begun[-1] == 1 and work._job.num_open == 2
            if is_earlier and 0 < segment < lane.first_ordered:
                raise RuntimeError("kernel")
        run(work, segment)

    fleet = tiny_sweep(4)
    with monkeypatch.context() as patch:
        patch.setattr(FusedWork, "run", fail)
        result = in_lanes(fleet, tiny_batches(0), steps=40)
    assert str(result.error) == "kernel"
    assert len(begun) == fleet.num_steps + 2  # the one that failed, and the one after it
    state, after = state_of(fleet), follow(fleet, tiny_batches(1, num_batches=4))
    alone = tiny_sweep(4)
    expected = trained_alone(alone, cycled(tiny_batches(0), result.num_steps), tiny_batches(1, num_batches=4))
    assert torch.equal(result.losses, expected.losses)
    assert_same_state(state, expected.state, "sweep")
    assert torch.equal(after[0], expected.after[0])
    assert_same_state(after[1], expected.after[1], "after")


# ---- callbacks, removal ----------------------------------------------------------------------------------


def test_callbacks_come_after_the_update_and_may_change_members() -> None:
    def change(fleet: tm.Fleet, step: int) -> None:
        if step == 2:
            fleet.drop("m1")
        if step == 4:
            fleet.stop("m2")
            fleet.members[0].optimizer.param_groups[0]["lr"] = 0.5
        if step == 6:
            model = tiny_model(9)
            fleet.replace("m0", tm.Member(model, tiny_optimizer(model), name="new", seed=9))

    alone, shared = new_sweep(2, 3), new_sweep(2, 3)
    rows: list[dict[str, float]] = []
    for step, batch in enumerate(cycled(tiny_batches(0), 10), start=1):
        rows.append(dict(zip(alone.names, alone.step(batch).tolist(), strict=True)))
        change(alone, step)
    seen: list[tuple[int, int]] = []

    def direct(event: tm.JobStep) -> None:
        seen.append((event.step, shared.num_steps))
        change(shared, event.step)

    result = in_lanes(shared, tiny_batches(0), steps=10, callbacks=[direct])
    assert result.error is None
    assert seen == [(step, step + step % 2) for step in range(1, 11)]
    for found, row in zip(result.losses, rows, strict=True):
        wanted = torch.tensor([row.get(name, torch.nan) for name in result.members])
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert_same_state(state_of(shared), state_of(alone), "sweep")


def test_callbacks_hear_of_what_no_update_follows() -> None:
    seen: list[int] = []
    in_lanes(tiny_sweep(4), tiny_batches(0), steps=7, callbacks=[lambda event: seen.append(event.step)])
    assert seen == list(range(1, 8))


def test_a_callback_that_raises_ends_the_job_after_an_update() -> None:
    def refuse(event: tm.JobStep) -> None:
        if event.step == 5:
            raise ValueError("enough")

    expected = trained_alone(tiny_sweep(4), cycled(tiny_batches(0), 8), tiny_batches(1))
    fleet = tiny_sweep(4)
    result = in_lanes(fleet, tiny_batches(0), steps=20, callbacks=[refuse])
    assert str(result.error) == "enough"
    assert_same(fleet, result, expected)


def test_a_job_that_is_removed_has_whole_micro_batches() -> None:
    def remove(event: tm.JobStep) -> None:
        if event.step == 3:
            event.colocation.remove("sweep")

    fleet = tiny_sweep(4)
    job = tm.Job("sweep", fleet=fleet, loader=tiny_batches(0), steps=10**6, concurrent_micro_batches=2)
    other = tiny_job("other", 1, steps=9, callbacks=[remove])
    result = tm.colocate([job, other], "1GiB", tracking_bytes=0, poisons=True).run()
    assert result.failed == ()
    assert_as_alone(result, other, 1, 9)
    steps = result["sweep"].num_steps
    assert 0 < steps < 1000
    removed_at = state_of(fleet)
    following, after = follow(fleet, tiny_batches(1))
    expected = trained_alone(tiny_sweep(4), cycled(tiny_batches(0), steps), tiny_batches(1))
    assert torch.equal(result["sweep"].losses, expected.losses)
    assert_same_state(removed_at, expected.state, "sweep")
    assert torch.equal(following, expected.after[0])
    assert_same_state(after, expected.after[1], "after")


def test_budgets_and_jobs_that_change_meanwhile() -> None:
    budgets: list[int] = []

    def change(event: tm.JobStep) -> None:
        if event.step in (2, 4):
            event.colocation.set_budget(budgets[event.step == 4])
        if event.step == 6:
            event.colocation.add(tiny_job("late", 2, steps=3))

    expected = trained_alone(tiny_sweep(4), cycled(tiny_batches(0), 22), tiny_batches(1))
    fleet = tiny_sweep(4)
    job = tm.Job("sweep", fleet=fleet, loader=tiny_batches(0), steps=22, concurrent_micro_batches=2)
    other = tiny_job("other", 1, steps=9, callbacks=[change])
    colocation = tm.colocate([job, other], "1GiB", tracking_bytes=0, poisons=True)
    budgets += [smallest_demand(demands_of(colocation)), 1 << 28]
    result = colocation.run()
    assert result.failed == ()
    assert_as_alone(result, other, 1, 9)
    assert result["late"].num_steps == 3
    assert_same(fleet, result["sweep"], expected)


# ---- what is refused -------------------------------------------------------------------------------------


def test_settings_that_make_no_sense_are_refused() -> None:
    make = functools.partial(model_job, "m")
    with pytest.raises(ConfigError, match="must not be above accumulate, but got accumulate=1"):
        make(concurrent_micro_batches=2)
    for wrong in (0, 3, True, 2.0, "2"):
        with pytest.raises(ConfigError, match="concurrent_micro_batches must be 1 or 2"):
            make(accumulate=4, concurrent_micro_batches=wrong)
    for wrong in (0, -1, True, 1.5, None):
        with pytest.raises(ConfigError, match="accumulate must be a whole number"):
            make(accumulate=wrong)
    with pytest.raises(ConfigError, match="accumulate is for a model, but got 2 and a fleet"):
        tm.Job("m", fleet=tiny_sweep(2), loader=[], accumulate=2)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_buffers_that_every_micro_batch_changes_are_refused() -> None:
    model = _Normed()
    job = functools.partial(
        model_job, "m", model=model, optimizer=tiny_optimizer(model), accumulate=2, steps=2
    )
    with pytest.raises(ConfigError, match=r"change no buffers.*running_mean.*eval"):
        tm.colocate([job(concurrent_micro_batches=2)], "1GiB")
    tm.colocate([job()], "1GiB").run()
    model.layers[1].eval()
    assert tm.colocate([job(concurrent_micro_batches=2)], "1GiB").run()["m"].error is None


def test_a_model_that_cannot_be_traced_does_not_accumulate() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mse(model, batch)
        return value if value.item() > -1 else -value

    with pytest.raises(ConfigError, match=r"cannot be traced.*must have accumulate=1, but got 2"):
        tm.colocate([model_job("m", loss=loss, accumulate=2, concurrent_micro_batches=2)], "1GiB")


def test_a_name_that_a_lane_has_is_refused() -> None:
    job = tm.Job("a", fleet=tiny_sweep(2), loader=tiny_batches(0), steps=4, concurrent_micro_batches=2)
    with pytest.raises(ConfigError, match="jobs must have different names"):
        tm.colocate([job, tiny_job("a" + SECOND_LANE, 1)], "1GiB")
