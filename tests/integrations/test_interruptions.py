"""Searches of studies that end before they are done: nothing is lost, and the next call goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainmux as tm

optuna = pytest.importorskip("optuna")

from optuna.storages import JournalStorage  # noqa: E402
from optuna.storages.journal import JournalFileBackend  # noqa: E402
from tests.integrations.study_cases import LOADER, make_member, settings, terminate  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from trainmux.cli._app import app  # noqa: E402
from trainmux.search._workers import retry  # noqa: E402

ROOT = Path(__file__).parents[2]


def a_study(path: Path) -> Any:
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(path / "journal.log"))),
        study_name="a",
        load_if_exists=True,
        pruner=optuna.pruners.NopPruner(),
    )


def states(study: Any) -> Counter[str]:
    return Counter(trial.state.name for trial in study.trials)


class Epochs(tm.SearchCallback):
    """Counts the epochs that a search trains, by trial."""

    def __init__(self) -> None:
        self.found: Counter[int] = Counter()

    def on_trial_epoch(self, trial: tm.Trial, record: tm.EpochRecord) -> None:
        self.found[trial.number] += 1


class EndsEarly:
    """A loader that has nothing left after some passes."""

    def __init__(self, passes: int) -> None:
        self._left = passes

    def __iter__(self) -> Iterator[Any]:
        self._left -= 1
        return iter(LOADER if self._left >= 0 else [])


class CtrlC(tm.Callback):
    """Ctrl-C in the middle of an epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_step_end(self, state: Any) -> None:
        if state.epoch == self._epoch:
            signal.raise_signal(signal.SIGINT)


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Have the disk be full after some files were written."""
    num_written, real = 0, os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal num_written
        if "/trials/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            num_written += 1
            if num_written > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("what", ["loader", "ctrl-c", "disk"])
def test_what_was_saved_goes_on_after(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = a_study(tmp_path)
    how = settings(max_epochs=8, checkpoint=tmp_path / "trials", checkpoint_every=2, slots=2)
    with monkeypatch.context() as patch:
        if what == "loader":
            error, more = pytest.raises(tm.BatchError, match="none in pass"), {"loader": EndsEarly(6)}
        elif what == "ctrl-c":
            error, more = pytest.raises(KeyboardInterrupt), {"callbacks": [CtrlC(6)]}
        else:
            error, more = pytest.raises(tm.CheckpointError, match="No space left"), {}
            full_disk(patch, after=20)
        with error:
            tm.optuna.optimize(study, make_member, total_trials=2, **{**how, **more})
    assert states(study) == {"WAITING": 2}

    epochs = Epochs()
    results = tm.optuna.optimize(study, make_member, total_trials=2, callbacks=[epochs], **how)
    assert states(study) == {"COMPLETE": 2}
    assert all(trial.epoch == 8 for trial in results)
    assert all(0 < count <= 4 for count in epochs.found.values()), "saved after epoch 4 at least"


def test_sigterm_at_the_start_trains_nothing_and_keeps_the_trials(tmp_path: Path) -> None:
    def make(trial: Any) -> tm.Member:
        if trial.number == 1:
            terminate()
        return make_member(trial)

    study, epochs = a_study(tmp_path), Epochs()
    how = settings(sigterm=True, callbacks=[epochs])
    results = tm.optuna.optimize(study, make, total_trials=4, **how)
    assert not epochs.found
    assert {str(trial.state) for trial in results} <= {"waiting"}
    assert set(states(study)) == {"WAITING"}
    tm.optuna.optimize(study, make_member, total_trials=4, **how)
    assert states(study) == {"COMPLETE": 4}


def test_a_trial_whose_own_loader_is_empty_fails_alone(tmp_path: Path) -> None:
    def make(trial: Any) -> tm.Candidate:
        return tm.Candidate(make_member(trial), loader=[] if trial.number == 1 else LOADER)

    study = a_study(tmp_path)
    with pytest.warns(tm.TrainmuxWarning, match="gave no batches"):
        tm.optuna.optimize(study, make, n_trials=3, **settings())
    assert states(study) == {"COMPLETE": 2, "FAIL": 1}
    assert "gave no batches" in study.trials[1].user_attrs["trainmux_error"]


def test_an_enqueued_trial_is_not_left_running_by_a_worker_killed_while_it_takes_it(tmp_path: Path) -> None:
    code = f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from tests.integrations import test_interruptions as t
        study = t.a_study(Path({str(tmp_path)!r}))
        study.enqueue_trial({{"lr": 0.01}})
        take = study._storage.set_trial_state_values
        def killed(trial_id, state, values=None):
            take(trial_id, state, values)
            os.kill(os.getpid(), signal.SIGKILL)
        study._storage.set_trial_state_values = killed
        t.tm.optuna.optimize(study, t.make_member, total_trials=2, heartbeat=0.2, **t.settings())
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=120)
    assert done.returncode == -9
    study = a_study(tmp_path)
    assert states(study) == {"RUNNING": 1}
    tm.optuna.optimize(study, make_member, total_trials=2, heartbeat=0.2, **settings())
    assert states(study) == {"FAIL": 1, "COMPLETE": 2}
    (retry,) = [trial for trial in study.trials if trial.system_attrs.get("retry_history") == [0]]
    assert retry.params == {"lr": 0.01}


def test_of_two_retries_of_a_trial_one_counts_even_if_the_other_is_killed(tmp_path: Path) -> None:
    """Killed before it was found to be the second, it is itself retried."""
    study = a_study(tmp_path)
    running, failed = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.FAIL
    study.add_trial(
        optuna.trial.create_trial(
            state=failed,
            params={"lr": 0.01},
            distributions={"lr": optuna.distributions.FloatDistribution(1e-4, 0.3, log=True)},
            user_attrs={"trainmux_worker": "gone:0"},
        )
    )
    retry(study, study.trials[0])
    retry(study, study.trials[0])
    for state in (running, failed):
        study._storage.set_trial_state_values(study.trials[2]._trial_id, state)
    tm.optuna.optimize(study, make_member, total_trials=1, heartbeat=0.2, **settings())
    assert states(study) == {"COMPLETE": 1, "FAIL": 3}
    assert study.trials[1].state is optuna.trial.TrialState.COMPLETE


# ---- journals at relative paths -----------------------------------------------------------------------


def test_a_journal_whose_lock_nobody_could_break_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for path, is_warned in (("runs/journal.log", True), ("journal.log", False)):
        study = optuna.create_study(storage=JournalStorage(JournalFileBackend(path)))
        if is_warned:
            with pytest.warns(tm.TrainmuxWarning, match="at an absolute path, got 'runs/journal.log'"):
                tm.optuna.optimize(study, make_member, n_trials=1, **settings())
        else:
            tm.optuna.optimize(study, make_member, n_trials=1, **settings())


def test_the_command_line_takes_journals_at_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(
        "from tests.integrations.study_cases import make_member, settings\n"
        "search = {'make_member': make_member, **settings()}\n"
    )
    storage = ["--storage", "journal:runs/journal.log"]
    done = CliRunner().invoke(app, ["sweep", "a.py:search", *storage, "--study", "a", "--trials", "2"])
    assert done.exit_code == 0, done.output
    assert states(a_study(tmp_path / "runs")) == {"COMPLETE": 2}
