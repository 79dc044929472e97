"""Trials of an Optuna study."""

from __future__ import annotations

import copy
import itertools
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, create_trial

from trainmux.errors import ConfigError, first_line, named_line
from trainmux.fleet import EpochRecord, Member
from trainmux.search._glance import Glance, seen_by_pruners
from trainmux.search._pace import Pace
from trainmux.search._patience import Patience, is_out_of_reach
from trainmux.search._search import metric_of
from trainmux.search._source import LATER, Later, Verdict, build_trial
from trainmux.search._trial import Candidate, Trial, TrialState
from trainmux.search._workers import ERROR, MARK, Worker, retried_number, retry_history

_CATCH_UP = 4
"""Epochs of a trial that are reported at once, when training is faster than reports."""
_LONGEST_ERROR = 1000
_TOO_MANY = "another worker was faster: total_trials is reached"

StudyCallback = Callable[[optuna.Study, FrozenTrial], None]
MakeMember = Callable[[optuna.Trial], Member | Candidate]


class StudySource:
    """Asks a study for trials, and tells it what became of them.

    A trial that is given back waits in the study for the next who asks, with what it has reported.
    """

    asks_ahead = True

    def __init__(
        self,
        study: optuna.Study,
        make_member: MakeMember,
        *,
        metric: str,
        max_epochs: int,
        n_trials: int | None,
        total_trials: int | None,
        report_every: int,
        callbacks: Sequence[StudyCallback],
        catch: tuple[type[BaseException], ...],
        patience_s: float,
        worker: str | None,
        heartbeat: float,
        reports_all: bool,
    ) -> None:
        self.on_stop: Callable[[], None] = lambda: None
        """Called when ``study.stop()`` was."""
        self._study = study
        self._storage = study._storage
        self._in_memory = isinstance(self._storage, optuna.storages.InMemoryStorage)
        self._make_member = make_member
        self._metric = metric
        self._max_epochs = max_epochs
        self._n_trials, self._total_trials = n_trials, total_trials
        self._report_every = report_every
        self._callbacks, self._catch = callbacks, catch
        self._patiently = Patience(patience_s)
        self._worker = Worker(study, worker, heartbeat, self._trial_ids)
        self._begun = 0
        self._asking_id: int | None = None
        self._num_left: int | None = None  # configurations that the study was missing when last asked
        self._mine: dict[int, optuna.Trial] = {}
        self._reported: dict[int, set[int]] = {}
        self._names: set[str] = set()
        self._prunes = len(study.directions) == 1 and not isinstance(study.pruner, optuna.pruners.NopPruner)
        self._glance = Glance(self._storage)
        self._seen_by_pruners = seen_by_pruners(study, self._glance)
        self._is_paced = not (reports_all or self._in_memory)
        self._pace = Pace()

    def open(self) -> None:
        """Begin to work on the study."""
        self._study._stop_flag = False
        self._worker.start(self._patiently)

    def close(self) -> None:
        """Leave the study, with no trial of this search running."""
        for number in list(self._mine):
            self._put_back(number)
        self._patiently(self._worker.stop)

    def is_resumed(self) -> bool:
        # Another worker may make the first trials of a study at this moment.
        return not self._in_memory or bool(self._study.get_trials(deepcopy=False))

    def num_trials(self) -> int | None:
        left = self._num_left
        if self._n_trials is not None and (left is None or self._n_trials - self._begun < left):
            return self._n_trials
        return None if left is None else self._begun + left

    # ---- asking ------------------------------------------------------------------------------------

    def ask(self) -> Trial | Later | None:
        self._study._thread_local.in_optimize_loop = True  # study.stop() works in here
        while not self._study._stop_flag and (self._n_trials is None or self._begun < self._n_trials):
            self._require_alive()
            frozen = self._pop_waiting()
            if frozen is None and not self._may_create():
                others = self._worker.has_others(self._study.get_trials(deepcopy=False))
                return LATER if others else None
            try:
                trial = self._begin(frozen)
            except UpdateFinishedTrialError:
                continue  # taken over by another worker meanwhile
            if trial is not None:
                self._begun += 1
                if frozen is None and self._num_left is not None:
                    self._num_left -= 1
                return trial
        return None

    def _pop_waiting(self) -> FrozenTrial | None:
        """Take the first trial that waits in the study, if there is one."""
        self._study._thread_local.cached_all_trials = None  # samplers are to see all that is known now
        trials = self._patiently(self._study.get_trials, deepcopy=False)
        for frozen in trials:
            if frozen.state is not optuna.trial.TrialState.WAITING:
                continue
            trial_id = frozen._trial_id
            try:
                running, mark = optuna.trial.TrialState.RUNNING, (trial_id, MARK, self._worker.mark)
                if MARK not in frozen.user_attrs:  # without one it would run for ever if we were killed now
                    self._patiently(self._storage.set_trial_user_attr, *mark)
                if not self._patiently(self._storage.set_trial_state_values, trial_id, running):
                    continue
                self._patiently(self._storage.set_trial_user_attr, *mark)
                if _is_second_retry(frozen, trials):
                    self._fail(trial_id, "another retry of the same trial came first")
                    continue
            except UpdateFinishedTrialError:
                continue
            return frozen
        return None

    def _may_create(self) -> bool:
        """Whether the study is to have one more configuration."""
        if self._total_trials is None:
            return True
        self._num_left = max(self._total_trials - self._num_configurations(math.inf), 0)
        return self._num_left > 0

    def _is_one_too_many(self, trial_id: int) -> bool:
        """Whether other workers made the last configurations between a look at the study and this trial."""
        if self._total_trials is None:
            return False
        number = self._patiently(self._storage.get_trial, trial_id).number
        return number >= self._total_trials and self._num_configurations(number) >= self._total_trials

    def _num_configurations(self, end: float) -> int:
        """Configurations in the study, among the trials with numbers below ``end``."""
        trials = self._patiently(self._study.get_trials, deepcopy=False)
        return sum(
            retried_number(trial) is None and trial.user_attrs.get(ERROR) != _TOO_MANY
            for trial in trials
            if trial.number < end
        )

    def _begin(self, frozen: FrozenTrial | None) -> Trial | None:
        """Build the member of a trial that waited, or of a new one; ``None`` where it is another's by now."""
        study, storage, patiently = self._study, self._storage, self._patiently
        if frozen is None:
            # Not study.ask(): a trial without a mark would run for ever if we were killed now.
            running = create_trial(
                state=optuna.trial.TrialState.RUNNING, user_attrs={MARK: self._worker.mark}
            )
            trial_id = patiently(storage.create_new_trial, study._study_id, template_trial=running)
            if self._is_one_too_many(trial_id):
                self._fail(trial_id, _TOO_MANY)
                return None
        else:
            trial_id = frozen._trial_id
        self._asking_id = trial_id  # ours, however long the sampler takes
        asked = patiently(optuna.Trial, study, trial_id)
        number = asked.number
        self._mine[number] = asked
        self._asking_id = None
        self._reported[number] = set() if frozen is None else set(frozen.intermediate_values)
        patiently(self._worker.begin, trial_id)

        trial = patiently(self._build, asked)
        trial.resumes = () if frozen is None else tuple(reversed(retry_history(frozen)))
        if isinstance(trial.cause, UpdateFinishedTrialError):
            self._forget(number)
            return None
        if isinstance(trial.cause, optuna.TrialPruned):
            trial.state, trial.error, trial.cause = TrialState.PRUNED, None, None
        elif trial.cause is not None and _is_of_another_space(trial.cause):
            if frozen is None:
                self._fail(trial_id, named_line(trial.cause))
            else:
                self._put_back(number)
            self._forget(number)
            raise ConfigError(
                f"expected make_member to ask for the parameters that study {study.study_name!r} has, got "
                f"another search space: {first_line(trial.cause)} Give the study another name"
            ) from trial.cause
        return trial

    def _build(self, asked: optuna.Trial) -> Trial:
        trial = build_trial(lambda: self._make_member(asked), asked.number, self._max_epochs)
        if trial.cause is not None and is_out_of_reach(trial.cause):
            raise trial.cause
        trial.params = trial.params or asked.params
        if trial.member is not None:
            if trial.name in self._names:
                trial.name = trial.member.name = f"{trial.name} ({trial.number})"
            self._names.add(trial.name)
        return trial

    # ---- hearing -----------------------------------------------------------------------------------

    def report(self, trial: Trial, record: EpochRecord) -> Verdict:
        self._require_alive()
        if trial.number not in self._mine:
            return Verdict.LOST
        if trial.records[-1] is not record or record.epoch % self._report_every:
            return Verdict.GO_ON  # reports are slower than training: the next call speaks for this one
        if self._is_paced and not self._pace.is_due(trial.number, self._mine):
            return Verdict.GO_ON
        begin_s = time.thread_time()
        try:
            self._patiently(self._report_all, trial)
            if self._prunes and self._patiently(self._should_prune, trial.number):
                return Verdict.PRUNE
        except UpdateFinishedTrialError:
            self._forget(trial.number)
            return Verdict.LOST
        finally:
            self._pace.spent(trial.number, time.thread_time() - begin_s)
        return Verdict.GO_ON

    def _should_prune(self, number: int) -> bool:
        asked = self._mine[number]
        if not self._in_memory:
            asked.study = self._seen_by_pruners
            self._glance.begin(number)
        return bool(asked.should_prune())

    def tell(self, trial: Trial) -> None:
        if trial.number not in self._mine:
            return
        asked = self._mine[trial.number]
        state, values = _STATES[trial.state], None
        try:
            if trial.state is TrialState.FAILED:
                self._fail(asked._trial_id, str(trial.error))
            else:
                self._patiently(self._report_all, trial)
                values = list(trial.values or ()) if trial.state is TrialState.COMPLETE else None
                self._patiently(self._study.tell, asked, values, state=state, skip_if_finished=True)
        except UpdateFinishedTrialError:
            self._forget(trial.number)
            return
        self._forget(trial.number)
        frozen = self._patiently(self._storage.get_trial, asked._trial_id)
        for callback in self._callbacks:
            self._patiently(callback, self._study, copy.deepcopy(frozen))
        if self._study._stop_flag:
            self.on_stop()
        if trial.cause is not None and not isinstance(trial.cause, self._catch):
            raise trial.cause

    def give_back(self, trial: Trial) -> None:
        if trial.number in self._mine:
            self._put_back(trial.number)

    def is_stuck(self) -> bool:
        return self._patiently.is_slow

    def _report_all(self, trial: Trial) -> None:
        """Report the epochs that have not been reported; where that takes long, the latest few."""
        if len(self._study.directions) > 1:
            return
        asked, reported = self._mine[trial.number], self._reported[trial.number]
        missing = [
            record
            for record in trial.records
            if record.epoch - 1 not in reported and record.epoch % self._report_every == 0
        ]
        wants_all = not self._is_paced or (trial.resumes and not reported)
        for record in missing if wants_all else missing[-_CATCH_UP:]:
            asked.report(metric_of(record, self._metric), record.epoch - 1)  # pruners count from 0
            reported.add(record.epoch - 1)

    def _fail(self, trial_id: int, error: str) -> None:
        # The error first: a failed trial without one is tried again.
        self._patiently(self._storage.set_trial_user_attr, trial_id, ERROR, error[:_LONGEST_ERROR])
        self._patiently(self._storage.set_trial_state_values, trial_id, optuna.trial.TrialState.FAIL)

    def _put_back(self, number: int) -> None:
        """Have a trial wait in the study again."""
        waiting = optuna.trial.TrialState.WAITING
        with suppress(UpdateFinishedTrialError):  # where another worker has taken it over
            self._patiently(self._storage.set_trial_state_values, self._mine[number]._trial_id, waiting)
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._mine.pop(number, None)
        self._reported.pop(number, None)
        self._pace.forget(number)

    def _trial_ids(self) -> list[int]:
        asking = [] if self._asking_id is None else [self._asking_id]
        return asking + [trial._trial_id for trial in list(self._mine.values())]

    def _require_alive(self) -> None:
        if self._worker.error is not None:
            raise self._worker.error


_STATES = {
    TrialState.COMPLETE: optuna.trial.TrialState.COMPLETE,
    TrialState.PRUNED: optuna.trial.TrialState.PRUNED,
    TrialState.FAILED: optuna.trial.TrialState.FAIL,
}


def _is_second_retry(frozen: FrozenTrial, trials: Sequence[FrozenTrial]) -> bool:
    """Whether a trial, or one that it is a retry of, was queued although there was a retry before."""
    first: dict[int, int] = {}
    for trial in trials:
        retried = retried_number(trial)
        if retried is not None:
            first[retried] = min(trial.number, first.get(retried, trial.number))
    path = [*retry_history(frozen), frozen.number]
    return any(first.get(one, other) < other for one, other in itertools.pairwise(path))


def _is_of_another_space(error: BaseException) -> bool:
    """Whether Optuna refused a parameter because the study has it with another range or kind."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "check_distribution_compatibility" for frame in frames)
