"""Studies: samplers, pruners and storages are Optuna's own, and every trial ends as the study says."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import trainmux as tm

optuna = pytest.importorskip("optuna")

from optuna.storages import JournalStorage, RDBStorage  # noqa: E402
from optuna.storages.journal import JournalFileBackend  # noqa: E402
from tests.integrations.study_cases import Do, losses_alone, make_member, member, settings, terminate  # noqa: E402

STATES = optuna.trial.TrialState


@pytest.fixture(params=["memory", "journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return a_storage(request.param, tmp_path)


def a_storage(kind: str, path: Path) -> Any:
    if kind == "journal":
        return JournalStorage(JournalFileBackend(str(path / "journal.log")))
    return None if kind == "memory" else f"sqlite:///{path}/study.db"


def states(study: Any) -> Counter[str]:
    return Counter(trial.state.name for trial in study.trials)


def a_study(storage: Any = None, **more: Any) -> Any:
    more = {"sampler": optuna.samplers.TPESampler(seed=0), "pruner": optuna.pruners.NopPruner(), **more}
    return optuna.create_study(storage=storage, study_name="a", load_if_exists=True, **more)


class FirstEpochs(tm.SearchCallback):
    """Notes the first epoch that each trial trains in a search."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}

    def on_trial_epoch(self, trial: tm.Trial, record: tm.EpochRecord) -> None:
        self.found.setdefault(trial.number, record.epoch)


def test_trials_end_with_the_values_that_they_have_alone(storage: Any) -> None:
    study = a_study(storage)
    results = tm.optuna.optimize(study, make_member, n_trials=6, **settings())
    assert states(study) == {"COMPLETE": 6}
    for trial in study.trials:
        expected = losses_alone(trial.params["lr"], 4)
        assert trial.value == pytest.approx(expected[-1], rel=1e-4)
        assert list(trial.intermediate_values) == [0, 1, 2, 3]  # pruners count from 0
        assert list(trial.intermediate_values.values()) == pytest.approx(expected, rel=1e-4)
    assert results.best.number == study.best_trial.number
    assert results.best.params == study.best_params


@pytest.mark.parametrize(
    "pruner",
    [
        optuna.pruners.MedianPruner(n_startup_trials=2),
        optuna.pruners.SuccessiveHalvingPruner(),
        optuna.pruners.HyperbandPruner(max_resource=4),
    ],
    ids=lambda pruner: type(pruner).__name__,
)
def test_pruned_trials_leave_their_slots_to_the_next(pruner: Any) -> None:
    study = a_study(pruner=pruner)
    results = tm.optuna.optimize(study, make_member, n_trials=12, **settings())
    assert states(study).keys() == {"COMPLETE", "PRUNED"}
    assert len(study.trials) == len(results) == 12
    for trial, other in zip(study.trials, results, strict=True):
        assert str(other.state) == trial.state.name.lower()
        assert len(trial.intermediate_values) == other.epoch
        assert trial.value == pytest.approx(other.records[-1].loss)


def test_a_trial_fails_alone_and_says_why() -> None:
    def make(trial: Any) -> tm.Member:
        if trial.number == 1:
            raise RuntimeError("no such data")
        if trial.number == 2:
            raise optuna.TrialPruned
        return member(math.inf if trial.number == 3 else 0.01)

    study = a_study()
    with pytest.warns(tm.TrainmuxWarning, match="trial-"):
        results = tm.optuna.optimize(study, make, n_trials=6, **settings())
    assert [trial.state.name for trial in study.trials] == [
        "COMPLETE", "FAIL", "PRUNED", "FAIL", "COMPLETE", "COMPLETE",
    ]  # fmt: skip
    assert "RuntimeError: no such data" in study.trials[1].user_attrs["trainmux_error"]
    assert study.trials[3].user_attrs["trainmux_error"] == results[3].error


def test_what_is_not_caught_ends_the_search_and_puts_trials_back() -> None:
    def make(trial: Any) -> tm.Member:
        if trial.number == 5:
            raise KeyError("broken")
        return make_member(trial)

    study = a_study()
    with pytest.raises(KeyError, match="broken"), pytest.warns(tm.TrainmuxWarning):
        tm.optuna.optimize(study, make, n_trials=20, catch=ValueError, **settings(max_epochs=30))
    assert study.trials[5].state is STATES.FAIL
    assert "RUNNING" not in states(study)


def test_the_study_is_asked_before_anything_trains() -> None:
    study, two = a_study(), optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(tm.ConfigError, match="like the study's directions, got 'max'"):
        tm.optuna.optimize(study, make_member, mode="max", **settings())
    with pytest.raises(tm.ConfigError, match="one mode for each metric"):
        tm.optuna.optimize(two, make_member, **settings())
    for wrong in ({"slots": 0}, {"n_trials": 0}, {"heartbeat": 0}, {"callbacks": [tm.EarlyStopping]}):
        with pytest.raises(tm.ConfigError, match=next(iter(wrong))):
            tm.optuna.optimize(study, make_member, **settings(**wrong))
    assert study.trials == two.trials == []
    with pytest.raises(tm.ConfigError, match="expected metric= to be one of"):
        tm.optuna.optimize(study, make_member, metric="accuracy", **settings(n_trials=2))
    assert set(states(study)) == {"WAITING"}


def test_another_search_space_is_refused_and_nothing_is_lost(storage: Any) -> None:
    study = a_study(storage)
    tm.optuna.optimize(study, make_member, n_trials=2, **settings())
    study.enqueue_trial({"lr": 1e-3})

    def other(trial: Any) -> tm.Member:
        return member(trial.suggest_categorical("lr", [0.1, 0.2]))

    with pytest.raises(tm.ConfigError, match="another search space"):
        tm.optuna.optimize(study, other, n_trials=2, **settings())
    assert [trial.state.name for trial in study.trials][:3] == ["COMPLETE", "COMPLETE", "WAITING"]
    tm.optuna.optimize(study, make_member, n_trials=1, **settings())
    assert study.trials[2].params == {"lr": 1e-3}
    assert study.trials[2].state is STATES.COMPLETE


def test_several_directions_have_several_values_and_no_pruning() -> None:
    def with_norm(model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        value = ((model(inputs) - targets) ** 2).mean()
        return value, {"size": model.weight.square().sum()}

    study = optuna.create_study(
        directions=["minimize", "maximize"], pruner=optuna.pruners.MedianPruner(n_startup_trials=0)
    )
    results = tm.optuna.optimize(
        study, make_member, metric=["loss", "size"], n_trials=4, **settings(loss=with_norm)
    )
    assert states(study) == {"COMPLETE": 4}
    assert [tuple(trial.values) for trial in study.trials] == [trial.values for trial in results]
    assert {trial.number for trial in study.best_trials} == {trial.number for trial in results.pareto_front()}


def test_callbacks_of_both_kinds_are_called_and_may_stop_the_study(storage: Any) -> None:
    heard: list[int] = []
    begun: list[int] = []

    class Listener(tm.SearchCallback):
        def on_trial_start(self, trial: tm.Trial) -> None:
            begun.append(trial.number)

    def stop(study: Any, trial: Any) -> None:
        assert trial.state is STATES.COMPLETE
        heard.append(trial.number)
        if len(heard) == 3:
            study.stop()

    study = a_study(storage)
    results = tm.optuna.optimize(study, make_member, callbacks=[Listener(), stop], **settings())
    assert sorted(heard) == sorted(begun) == [trial.number for trial in results]
    assert 3 <= len(results) <= 3 + 4 + 4  # some have slots by then, some are asked for
    assert states(study)["RUNNING"] == 0


def test_what_a_search_leaves_unfinished_waits_for_the_next(storage: Any, tmp_path: Path) -> None:
    study = a_study(storage)
    how = settings(max_epochs=40, checkpoint=tmp_path / "trials", checkpoint_every=100)
    results = tm.optuna.optimize(
        study, make_member, total_trials=6, sigterm=True, callbacks=[Do(2, 10, terminate)], **how
    )
    assert {str(trial.state) for trial in results} == {"waiting"}
    assert set(states(study)) == {"WAITING"}
    left = {trial.number: trial.epoch for trial in results}
    assert left[2] >= 10

    begun = FirstEpochs()
    tm.optuna.optimize(study, make_member, total_trials=6, callbacks=[begun], **how)
    assert states(study) == {"COMPLETE": 6}
    for trial in study.trials:
        assert begun.found[trial.number] == left.get(trial.number, 0) + 1  # saved at the end
        assert trial.value == pytest.approx(losses_alone(trial.params["lr"], 40)[-1], rel=1e-3, abs=1e-9)
        assert trial.last_step == 39
        if isinstance(study._storage, optuna.storages.InMemoryStorage):  # others would slow the steps down
            assert list(trial.intermediate_values) == list(range(40))


def test_names_may_repeat() -> None:
    def make(trial: Any) -> tm.Member:
        lr = trial.suggest_categorical("lr", [0.01])
        made = member(lr)
        made.name = f"lr={lr}"
        return made

    results = tm.optuna.optimize(a_study(), make, n_trials=3, **settings())
    assert [trial.name for trial in results] == ["lr=0.01", "lr=0.01 (1)", "lr=0.01 (2)"]


# ---- workers ------------------------------------------------------------------------------------------


def killed_worker(storage: str, path: Path, *, epoch: int) -> None:
    """Run a worker in a process that is killed when trial 1 has trained some epochs."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.integrations import test_optuna as t
study = t.a_study({storage})
t.tm.optuna.optimize(study, t.make_member, total_trials=6, heartbeat=0.2, callbacks=[
    t.Do(1, {epoch}, lambda: os.kill(os.getpid(), signal.SIGKILL))
], **t.settings(max_epochs=8, checkpoint={str(path / "trials")!r}, checkpoint_every=2))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ), timeout=120)
    assert done.returncode == -9


@pytest.mark.parametrize("kind", ["journal", "sqlite", "heartbeat"])
def test_trials_of_a_killed_worker_are_retried_from_their_checkpoints(kind: str, tmp_path: Path) -> None:
    made = {
        "journal": f"t.a_storage('journal', t.Path({str(tmp_path)!r}))",
        "sqlite": f"t.a_storage('sqlite', t.Path({str(tmp_path)!r}))",
        "heartbeat": f"t.RDBStorage('sqlite:///{tmp_path}/study.db', heartbeat_interval=1)",
    }[kind]
    killed_worker(made, tmp_path, epoch=5)
    storage: Any = a_storage("journal" if kind == "journal" else "sqlite", tmp_path)
    if kind == "heartbeat":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            retry = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=2)
            storage = RDBStorage(storage, heartbeat_interval=1, heartbeat_stale_trial_callback=retry)
    study = a_study(storage)
    left = [trial.number for trial in study.trials if trial.state is STATES.RUNNING]
    assert {0, 1, 2, 3} <= set(left)

    begun = FirstEpochs()
    how = settings(max_epochs=8, checkpoint=tmp_path / "trials", checkpoint_every=2)
    tm.optuna.optimize(study, make_member, total_trials=6, heartbeat=0.2, callbacks=[begun], **how)
    assert states(study) == {"COMPLETE": 6, "FAIL": len(left)}
    for number in left:
        assert study.trials[number].state is STATES.FAIL
        (retry,) = [trial for trial in study.trials if trial.system_attrs.get("failed_trial") == number]
        assert retry.system_attrs["retry_history"] == [number]
        assert retry.params == study.trials[number].params
        if number < 4:
            assert begun.found[retry.number] >= 5  # killed after epoch 5, saved every 2
        assert retry.value == pytest.approx(losses_alone(retry.params["lr"], 8)[-1], rel=1e-3, abs=1e-9)


def test_a_name_is_refused_while_another_worker_has_it(tmp_path: Path) -> None:
    storage = a_storage("journal", tmp_path)
    study = a_study(storage)

    def second() -> None:
        other = a_study(a_storage("journal", tmp_path))
        with pytest.raises(tm.ConfigError, match="a second 'anna'"):
            tm.optuna.optimize(other, make_member, worker="anna", n_trials=1, **settings())

    named = {"worker": "anna", "heartbeat": 0.2, "n_trials": 4}
    tm.optuna.optimize(study, make_member, callbacks=[Do(0, 1, second)], **named, **settings())
    assert states(study) == {"COMPLETE": 4}
    tm.optuna.optimize(study, make_member, **named, **settings())  # free again
    assert states(study) == {"COMPLETE": 8}


def test_training_goes_on_while_the_storage_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = JournalFileBackend(str(tmp_path / "journal.log"))
    out = Outage(backend, monkeypatch)
    study = a_study(JournalStorage(backend))
    epochs_s: list[float] = []

    class Clock(tm.Callback):
        def on_epoch_end(self, state: Any) -> None:
            time.sleep(0.05)
            epochs_s.append(time.monotonic())

    begin = Do(0, 3, lambda: out.begin(2.0))
    tm.optuna.optimize(study, make_member, n_trials=4, callbacks=[begin, Clock()], **settings(max_epochs=60))
    assert states(study) == {"COMPLETE": 4}
    assert out.refused > 1
    assert sum(out.began_s < time_s < out.began_s + 2.0 for time_s in epochs_s) > 10


def test_a_storage_that_stays_away_ends_the_search_with_its_trials_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = JournalFileBackend(str(tmp_path / "journal.log"))
    out = Outage(backend, monkeypatch)
    study = a_study(JournalStorage(backend))

    class Slow(tm.Callback):
        def on_epoch_end(self, state: Any) -> None:
            time.sleep(0.05)

    how = settings(max_epochs=60, checkpoint=tmp_path / "trials", checkpoint_every=1000)
    begin = Do(0, 3, lambda: out.begin(math.inf))
    with pytest.raises(tm.SearchError, match="the disk is away"):
        tm.optuna.optimize(
            study, make_member, total_trials=4, storage_timeout=1.0, callbacks=[begin, Slow()], **how
        )
    out.end()
    study = a_study(a_storage("journal", tmp_path))
    results = tm.optuna.optimize(study, make_member, total_trials=4, heartbeat=0.2, **how)
    assert states(study) == {"COMPLETE": 4, "FAIL": 4}
    assert all(trial.records[-1].epoch == 60 and trial.resumes for trial in results)
    assert all((tmp_path / "trials" / f"trial-{n:05d}").exists() for n in range(4))


class Outage:
    """A journal whose reads and writes fail for some seconds."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began_s = self._end_s = -math.inf
        self.refused = 0
        for name in ("read_logs", "append_logs"):
            monkeypatch.setattr(backend, name, self._around(getattr(backend, name)))

    def begin(self, seconds: float) -> None:
        self.began_s = time.monotonic()
        self._end_s = self.began_s + seconds

    def end(self) -> None:
        self._end_s = -math.inf

    def _around(self, call: Any) -> Any:
        def made(*args: Any) -> Any:
            if time.monotonic() < self._end_s:
                self.refused += 1
                raise OSError("the disk is away")
            return call(*args)

        return made
