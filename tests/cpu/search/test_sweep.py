"""`tm.sweep`: each trial trains as it would by itself, fails alone, and frees its slot for the next one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import mse, train_alone
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")

FLOAT = torch.float64


def data(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 3, generator=generator, dtype=FLOAT)
    return inputs, inputs.sum(1, keepdim=True).tanh()


LOADER = [data(seed, 8) for seed in range(3)]
VALIDATION = [data(9, 8)]


def net(seed: int, hidden: int = 4, dropout: float = 0.25) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        return nn.Sequential(*layers).to(FLOAT)


def make(number: int, dropout: float = 0.0, hidden: int = 4, **options: Any) -> tm.Candidate:
    model = net(number, hidden, dropout)
    rate = 0.01 * (number + 1)
    member = tm.Member(model, torch.optim.Adam(model.parameters(), lr=rate), name=f"m{number}")
    return tm.Candidate(member, {"lr": rate}, **options)


def alone(number: int, batches: Sequence[Any], hidden: int = 4) -> nn.Module:
    """The same member in plain torch, without dropout."""
    member = make(number, hidden=hidden).member
    train_alone(member, batches)
    return member.model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run(members: Any, **options: Any) -> tm.Results:
    defaults = {"loss": mse, "loader": LOADER, "validation": VALIDATION, "slots": 3, "max_epochs": 2}
    return tm.sweep(members, **{**defaults, **options})


def states(results: tm.Results) -> list[str]:
    return [str(trial.state) for trial in results]


class Notes(tm.SearchCallback):
    """What a search tells its listeners, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_trial_start(self, trial: tm.Trial) -> None:
        self.lines.append(f"start {trial.name}")

    def on_trial_epoch(self, trial: tm.Trial, record: tm.EpochRecord) -> None:
        self.lines.append(f"{trial.name} epoch {record.epoch}")

    def on_trial_end(self, trial: tm.Trial) -> None:
        self.lines.append(f"{trial.name} {trial.state}")

    def on_search_end(self, results: tm.Results) -> None:
        self.lines.append(f"end of {len(results)}")


class Each(tm.Callback):
    """Calls a function at the end of every epoch."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self.call = call

    def on_epoch_end(self, state: Any) -> None:
        self.call(state)


# ---- training --------------------------------------------------------------------------------------


def test_every_trial_trains_as_it_would_by_itself() -> None:
    """Whichever slot it gets and however many epochs it has; values are those of its own last epoch."""
    epochs = [2, 1, 3, 2, 1, 2, 3]
    results = run([make(i, epochs=count) for i, count in enumerate(epochs)])
    assert states(results) == ["complete"] * 7
    for number, (trial, count) in enumerate(zip(results, epochs, strict=True)):
        expected = alone(number, LOADER * count)
        torch.testing.assert_close(weights(trial.member.model), weights(expected), rtol=1e-10, atol=1e-12)
        assert [record.epoch for record in trial.records] == list(range(1, count + 1))
        assert trial.records[-1].step == count * len(LOADER)
        assert trial.value == pytest.approx(mse(expected, VALIDATION[0]).item(), rel=1e-9)
    row = results.to_rows()[0]
    assert (row["number"], row["name"], row["state"], row["epochs"]) == (0, "m0", "complete", 2)
    assert (row["params_lr"], row["loss"]) == (0.01, results[0].value)
    best = min(results, key=lambda trial: trial.value)
    assert results.best is best
    assert results.ranked()[-1] is max(results, key=lambda trial: trial.value)


def test_slots_leave_no_trace() -> None:
    """With dropout, a trial in a slot that had others before is bitwise as in a fleet from the start."""
    results = run([make(i, dropout=0.1 * (i + 1)) for i in range(5)], slots=2, deterministic=True)
    members = [make(i, dropout=0.1 * (i + 1)).member for i in range(5)]
    fleet = tm.Fleet(members, mse, LOADER[0], deterministic=True)
    fleet.fit(LOADER, epochs=2, progress=False)
    for trial, member in zip(results, members, strict=True):
        assert torch.equal(weights(trial.member.model), weights(member.model))


def test_listeners_hear_of_everything_in_order() -> None:
    notes = Notes()
    run([make(i) for i in range(3)], slots=2, max_epochs=1, callbacks=[notes])
    first = ["start m0", "start m1", "m0 epoch 1", "m1 epoch 1", "m0 complete", "m1 complete"]
    assert notes.lines == [*first, "start m2", "m2 epoch 1", "m2 complete", "end of 3"]


def test_members_are_built_when_their_turn_comes() -> None:
    """Not all at once: a slot's worth ahead."""
    built = 0
    seen: list[int] = []

    def build(number: int) -> tm.Candidate:
        nonlocal built
        built += 1
        return make(number)

    listener = Each(lambda state: seen.append(built))
    run((build(i) for i in range(20)), slots=2, max_epochs=1, callbacks=[listener])
    assert seen[0] <= 5
    assert built == 20


def test_early_stopping_frees_a_slot() -> None:
    stopping = tm.EarlyStopping("val_loss", patience=1, min_delta=1e9)
    results = run([make(i) for i in range(5)], max_epochs=9, callbacks=[stopping])
    assert states(results) == ["complete"] * 5
    assert {trial.epoch for trial in results} == {2}


def test_trials_may_have_batches_of_their_own_alone_too() -> None:
    """Where there are no others, epochs are counted in steps."""
    own = [data(20, 8), data(21, 8)]
    results = run([make(0), make(1, loader=own), make(2, loader=own)], slots=2, max_epochs=1)
    for number, batches in ((0, LOADER), (1, [*own, own[0]])):
        expected = weights(alone(number, batches))
        torch.testing.assert_close(weights(results[number].member.model), expected, rtol=1e-10, atol=1e-12)
    members = [make(i, loader=[data(30 + i, 8)]) for i in range(3)]
    results = run(members, loader=None, steps_per_epoch=4, slots=2)
    assert [trial.records[-1].step for trial in results] == [8] * 3


def test_structures_share_a_bounded_number_of_groups() -> None:
    """Others wait until a group has ended; none is left out."""
    num_groups: list[int] = []
    listener = Each(lambda state: num_groups.append(len(state.fleet.groups)))
    members = [make(i, hidden=3 + i % 4) for i in range(8)]
    results = run(members, slots=4, max_groups=2, max_epochs=1, callbacks=[listener])
    assert states(results) == ["complete"] * 8
    assert max(num_groups) == 2
    for number, trial in enumerate(results):
        expected = weights(alone(number, LOADER, 3 + number % 4))
        torch.testing.assert_close(weights(trial.member.model), expected, rtol=1e-10, atol=1e-12)


class Asked:
    """Three trials, each of which depends on what the one before it came to."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def ask(self) -> tm.Member | None:
        return make(len(self.told)).member if len(self.told) < 3 else None

    def tell(self, trial: tm.Trial) -> None:
        self.told.append(trial.value)


def test_an_object_with_ask_and_tell() -> None:
    asked = Asked()
    results = run(asked, slots=1, max_epochs=1)
    assert asked.told == [trial.value for trial in results]
    assert len(asked.told) == 3


# ---- failures --------------------------------------------------------------------------------------


def test_trials_fail_alone() -> None:
    """One that cannot be built, cannot be traced, or becomes infinite; the others are as without it."""

    def unbuildable() -> tm.Member:
        raise RuntimeError("no such model")

    def untraceable() -> tm.Candidate:
        candidate = make(7)
        candidate.member.loss = lambda model, batch: mse(model, batch) * float(model(batch[0]).sum())
        return candidate

    def diverging() -> tm.Candidate:
        candidate = make(8)
        candidate.member.optimizer.param_groups[0]["lr"] = 1e200
        return candidate

    given = [partial(make, 0), unbuildable, untraceable, diverging, partial(make, 1), partial(make, 2)]
    with pytest.warns(tm.TrainmuxWarning, match="failed"):
        results = run(given)
    assert states(results) == ["complete", "failed", "failed", "failed", "complete", "complete"]
    reasons = ("no such model", "TraceError", "not finite")
    for trial, reason in zip(results[1:4], reasons, strict=True):
        assert reason in (trial.error or "")
    for number, trial in ((0, results[0]), (1, results[4]), (2, results[5])):
        expected = weights(alone(number, LOADER * 2))
        torch.testing.assert_close(weights(trial.member.model), expected, rtol=1e-10, atol=1e-12)


def test_a_search_none_of_whose_trials_can_be_trained_is_refused() -> None:
    def unbuildable() -> tm.Member:
        raise RuntimeError("no such model")

    with pytest.warns(tm.TrainmuxWarning), pytest.raises(tm.SearchError, match="no such model"):
        run([unbuildable] * 50)


def test_out_of_memory_fails_the_newest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step = tm.Fleet.step

    def short_of_memory(fleet: tm.Fleet, *args: Any) -> Tensor:
        if "m3" in fleet.names:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(fleet, *args)

    monkeypatch.setattr(tm.Fleet, "step", short_of_memory)
    members = [make(i, epochs=count) for i, count in enumerate((1, 2, 2, 1, 1))]
    with pytest.warns(tm.TrainmuxWarning, match="out of memory"):
        results = run(members, slots=2)
    assert states(results) == ["complete"] * 3 + ["failed", "complete"]


def test_a_budget_says_how_many_slots_there_are() -> None:
    """All that it holds; trained within it, to the same weights."""
    num_running: list[int] = []

    def peak(count: int) -> int:
        members = [make(i, hidden=512).member for i in range(count)]
        return tm.Fleet(members, mse, LOADER[0]).plan(policy="none").peak_bytes

    budget = (peak(3) + peak(4)) // 2
    note = Each(lambda state: num_running.append(len(state.fleet.names)))
    members = [make(i, hidden=512) for i in range(7)]
    results = run(members, slots=None, budget=budget, callbacks=[note])
    assert max(num_running) == 3
    assert states(results) == ["complete"] * 7
    expected = weights(alone(6, LOADER * 2, 512))
    torch.testing.assert_close(weights(results[6].member.model), expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(tm.BudgetError) as refused:
        run([make(0)], slots=None, budget=100)
    assert refused.value.smallest_bytes


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"slots": 0}, "slots"),
        ({"slots": None}, "budget"),
        ({"metric": "accuracy"}, "accuracy"),
        ({"mode": "best"}, "mode"),
        ({"metric": ("loss", "grad_norm")}, "one mode for each"),
        ({"loader": None}, "steps_per_epoch"),
        ({"loader": iter(LOADER)}, "iterator"),
        ({"callbacks": [print]}, "callbacks"),
        ({"timeout": 0}, "timeout"),
        ({"keep": 1, "metric": ("loss", "grad_norm"), "mode": ("min", "min")}, "keep"),
        ({"devise": "cpu"}, "devise"),
        ({"resume": "must"}, "resume"),
        ({"progress": "fancy"}, "progress"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises((tm.ConfigError, tm.CheckpointError), match=what):
        run([make(0)], **wrong)


def test_wrong_members_are_refused() -> None:
    with pytest.raises(tm.ConfigError, match="list"):
        run(3)
    with pytest.raises(tm.ConfigError, match="second 'm0'"):
        run([make(0), make(0)])
    with pytest.warns(tm.TrainmuxWarning), pytest.raises(tm.SearchError, match="Sequential"):
        run([net(0)])


# ---- ending and going on ---------------------------------------------------------------------------


def test_a_killed_search_goes_on_where_it_was(tmp_path: Path) -> None:
    """Finished trials are not trained again, the others from their last epoch on, to the same bits."""
    notes = Notes()

    def interrupt(state: Any) -> None:
        if state.epoch == 3:
            raise KeyboardInterrupt

    def members() -> Iterator[Callable[[], tm.Candidate]]:
        return (partial(make, i, 0.25, epochs=2 + i % 2) for i in range(5))

    options = {"slots": 2, "deterministic": True}
    with pytest.raises(KeyboardInterrupt):
        run(members(), checkpoint=tmp_path / "a", callbacks=[Each(interrupt)], **options)
    results = run(members(), checkpoint=tmp_path / "a", callbacks=[notes], **options)
    whole = run(members(), **options)
    assert states(results) == ["complete"] * 5
    assert "start m0" not in notes.lines
    assert "m1 epoch 1" not in notes.lines
    for trial, expected in zip(results, whole, strict=True):
        assert trial.value == expected.value
        assert [r.epoch for r in trial.records] == [r.epoch for r in expected.records]
        if trial.member is not None:
            assert torch.equal(weights(trial.member.model), weights(expected.member.model))
    assert {path.name for path in (tmp_path / "a").iterdir()} >= {"best", "trial-00004"}
    with pytest.raises(tm.ConfigError, match="search space has changed"):
        run([partial(make, i + 1) for i in range(5)], checkpoint=tmp_path / "a", **options)


def test_a_search_can_be_told_to_end() -> None:
    """By a callback that ends the fit, or after a time: no more trials are begun."""
    results = run([make(i) for i in range(9)], slots=2, max_epochs=5, callbacks=[Each(lambda s: s.end_fit())])
    assert states(results)[:2] == ["waiting"] * 2
    assert [trial.epoch for trial in results[:2]] == [1, 1]
    slow = Each(lambda state: time.sleep(0.05))
    results = run([make(i) for i in range(200)], slots=2, max_epochs=1, timeout=0.3, callbacks=[slow])
    assert 2 <= len([state for state in states(results) if state == "complete"]) < 50


def test_only_the_best_members_are_kept() -> None:
    results = run([make(i) for i in range(5)], slots=2, keep=2)
    kept = [trial for trial in results if trial.member is not None]
    assert sorted(trial.number for trial in kept) == sorted(trial.number for trial in results.ranked()[:2])


def test_several_metrics() -> None:
    results = run([make(i) for i in range(4)], metric=("loss", "grad_norm"), mode=("min", "max"))
    front = results.pareto_front()
    assert front
    for trial in results:
        beaten = any(a.values[0] < trial.values[0] and a.values[1] > trial.values[1] for a in results)
        assert (trial in front) != beaten
    with pytest.raises(tm.ConfigError, match="pareto_front"):
        _ = results.best


def test_a_report_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    results = tm.Results([tm.Trial(0, "a", {}, 1)], ("loss",), ("min",))
    with pytest.raises(tm.ConfigError, match=r"pip install 'trainmux\[search\]'"):
        results.report(tmp_path / "page.html")


def test_members_that_come_later_are_looked_at_while_others_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that builds them, so that a slot is refilled without a pause."""
    seen: list[tuple[str | None, bool]] = []
    prepare = tm.Fleet.prepare

    def noted(fleet: tm.Fleet, member: tm.Member) -> None:
        seen.append((member.name, threading.current_thread() is threading.main_thread()))
        prepare(fleet, member)

    monkeypatch.setattr(tm.Fleet, "prepare", noted)
    members = (partial(make, number, 0.1 + 0.05 * number) for number in range(6))
    results = tm.sweep(members, loss=mse, loader=LOADER, slots=2, max_epochs=2, deterministic=True)
    assert seen == [(f"m{number}", False) for number in range(2, 6)]
    assert all(trial.state is tm.TrialState.COMPLETE for trial in results)
