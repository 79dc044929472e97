"""Workers of one study: signs of life, and trials of workers that give none.

A worker counts up a user attribute of the study, and marks the trials that it asks for. Who sees a mark
without a living worker behind it fails the trial, and queues a retry that knows what it retries, as Optuna's
``RetryHeartbeatStaleTrialCallback`` does. Nobody compares clocks, and any storage will do. Where the storage
has heartbeats, they are recorded too, so that Optuna's own workers see ours and the other way round.

A worker may be killed between any two calls; so a failed trial of ours that has neither an error nor a retry
is given one by whoever sees it, and of two retries of one trial the second is void.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from trainmux.errors import ConfigError, warn_user
from trainmux.search._patience import Patience, is_out_of_reach

MARK = "trainmux_worker"
"""User attribute of a trial: the worker that has it, or had it last."""
ERROR = "trainmux_error"
"""User attribute of a trial that failed by itself: why."""
_RECORD = "trainmux_worker:"
"""User attribute of a study, with a worker's name: its sign of life."""
_DEAD_AFTER = 3
"""Looks, one interval apart, between which a living worker has given a sign of life."""


class Worker:
    """This process among those that work on a study: its sign of life, and a look at the others'."""

    def __init__(
        self,
        study: optuna.Study,
        name: str | None,
        interval_s: float,
        trial_ids: Callable[[], Iterable[int]],
    ) -> None:
        self.error: Exception | None = None
        """Why this worker must not go on."""
        self._study = study
        self._storage: BaseStorage = study._storage
        self._token = uuid.uuid4().hex[:8]
        self._is_named = name is not None
        self._name = name or f"{socket.gethostname()}-{os.getpid()}-{self._token}"
        self._trial_ids = trial_ids
        self._beats = 0
        self._seen: dict[tuple[int, str, int | None], int] = {}
        self._given_up: set[int] = set()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_heartbeats = _interval_of(self._storage) is not None
        self._interval_s = float(_interval_of(self._storage) or interval_s)

    @property
    def mark(self) -> str:
        """Marks a trial as this worker's."""
        return f"{self._name}:{self._token}"

    def start(self, patience: Patience) -> None:
        """Give the first sign of life, and go on from a thread; refuses a name that a living worker has."""
        if isinstance(self._storage, optuna.storages.InMemoryStorage):
            return  # nobody else can see it
        _warn_of_lock(self._storage)
        if self._is_named:
            patience(self._require_name_of_its_own)
        patience(self._beat)
        self._thread = threading.Thread(target=self._run, name="trainmux-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take leave: no trial is this worker's any more."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        if self.error is None:
            self._study.set_user_attr(_RECORD + self._name, None)

    def begin(self, trial_id: int) -> None:
        """Give a new trial's first sign of life."""
        if self._has_heartbeats:
            self._storage.record_heartbeat(trial_id)

    def has_others(self, trials: Iterable[FrozenTrial]) -> bool:
        """Whether trials may come back from other workers."""
        if self._thread is None:
            return False
        trials = list(trials)
        mine = set(self._trial_ids())
        is_running = any(
            trial.state is TrialState.RUNNING and trial._trial_id not in mine and MARK in trial.user_attrs
            for trial in trials
        )
        return is_running or bool(self._without_retry(trials))

    # ---- on the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while self.error is None:
            try:
                self._look()
                if self._over.wait(self._interval_s):
                    return
                self._beat()
            except Exception as error:
                if not is_out_of_reach(error):
                    self.error = error
                elif self._over.wait(min(1.0, self._interval_s)):
                    return

    def _beat(self) -> None:
        record = self._study.user_attrs.get(_RECORD + self._name)
        if self._beats and record is not None and record["token"] != self._token:
            self.error = self._name_is_taken()
            return
        self._beats += 1
        beat = {"token": self._token, "beats": self._beats, "seconds": self._interval_s}
        self._study.set_user_attr(_RECORD + self._name, beat)
        if self._has_heartbeats:
            for trial_id in list(self._trial_ids()):
                self._storage.record_heartbeat(trial_id)

    def _look(self) -> None:
        """Fail trials of workers that seem dead, and queue what has to be tried again."""
        beats = {
            f"{name.removeprefix(_RECORD)}:{record['token']}": record["beats"]
            for name, record in self._study.user_attrs.items()
            if name.startswith(_RECORD) and record is not None
        }
        mine = set(self._trial_ids())
        seen = {}
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            mark = trial.user_attrs.get(MARK)
            if mark is None:
                continue
            if trial._trial_id in mine:
                if (
                    mark != self.mark
                ):  # of one who marked it at the same time, but was not the first to run it
                    with suppress(optuna.exceptions.UpdateFinishedTrialError):
                        self._storage.set_trial_user_attr(trial._trial_id, MARK, self.mark)
                continue
            key = (trial.number, mark, None if mark == self.mark else beats.get(mark))
            seen[key] = self._seen.get(key, 0) + 1
            if seen[key] >= _DEAD_AFTER:
                with suppress(optuna.exceptions.UpdateFinishedTrialError):  # somebody was faster
                    self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        self._seen = seen
        if self._has_heartbeats:
            fail_stale_trials = optuna.storages.fail_stale_trials
            getattr(fail_stale_trials, "__wrapped__", fail_stale_trials)(self._study)
        self._retry()

    def _retry(self) -> None:
        """Queue what failed without an error of its own and has not been queued yet."""
        callback = None
        if self._has_heartbeats:
            callback = self._storage.get_heartbeat_stale_trial_callback()
        for trial in self._without_retry(self._study.get_trials(deepcopy=False)):
            (callback or retry)(self._study, self._storage.get_trial(trial._trial_id))
            self._given_up.add(trial.number)  # if it was not queued now, then it should not be

    def _without_retry(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        trials = list(trials)
        retried = {retried_number(trial) for trial in trials} | self._given_up
        return [
            trial
            for trial in trials
            if trial.state is TrialState.FAIL
            and MARK in trial.user_attrs
            and ERROR not in trial.user_attrs
            and trial.number not in retried
        ]

    def _require_name_of_its_own(self) -> None:
        """Watch who had the name before for a sign of life."""
        before = self._study.user_attrs.get(_RECORD + self._name)
        if before is None:
            return
        end_s = time.monotonic() + 2 * before["seconds"]
        while time.monotonic() < end_s:
            time.sleep(min(0.5, before["seconds"] / 4))
            now = self._study.user_attrs.get(_RECORD + self._name)
            if now is None:
                return
            if now != before:
                raise self._name_is_taken()

    def _name_is_taken(self) -> ConfigError:
        return ConfigError(
            f"expected workers of study {self._study.study_name!r} with names of their own, got a second "
            f"{self._name!r}; leave worker= out, or give each another name"
        )


def retry(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue a trial again, as a new one that knows which it retries."""
    history = [*retry_history(trial), trial.number]
    study.add_trial(
        create_trial(
            state=TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs=trial.user_attrs,
            system_attrs={**trial.system_attrs, "failed_trial": history[0], "retry_history": history},
        )
    )


def retry_history(trial: FrozenTrial) -> list[int]:
    """The numbers under which a trial was tried before, latest last."""
    return list(trial.system_attrs.get("retry_history", []))


def retried_number(trial: FrozenTrial) -> int | None:
    """The number of the trial that this one is a retry of."""
    history = retry_history(trial)
    return history[-1] if history else None


def _warn_of_lock(storage: Any) -> None:
    """Warn where Optuna would not find out that a journal's lock is old, as a killed worker leaves it."""
    lock = getattr(getattr(storage, "_backend", None), "_lock", None)
    if isinstance(lock, optuna.storages.journal.JournalFileSymlinkLock):
        path = lock._lock_target_file
        if not os.path.exists(os.path.join(os.path.dirname(lock._lock_file), path)):
            warn_user(
                f"expected the journal at an absolute path, got {path!r}: if a worker is killed while it "
                "writes, its lock stays, and all others wait for ever. Give JournalFileBackend "
                "os.path.abspath(...)"
            )


def _interval_of(storage: Any) -> int | None:
    """Seconds between heartbeats, where a storage has them."""
    get_interval = getattr(storage, "get_heartbeat_interval", None)
    return None if get_interval is None else get_interval()
