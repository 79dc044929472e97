"""Continuous batching of trials: a queue of members through the slots of one fleet."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from trainmux.errors import BudgetError, ConfigError, SearchError, TrainmuxError, named_line, warn_user
from trainmux.fleet import (
    STOPPED_ON_REQUEST,
    Callback,
    EpochRecord,
    FitState,
    Fleet,
    Mode,
    Room,
    check_mode,
    first_batch,
    open_display,
    progress_setting,
    whole_number,
)
from trainmux.search._callbacks import Listeners, SearchCallback
from trainmux.search._office import Office
from trainmux.search._results import Results, score
from trainmux.search._source import Source, Verdict
from trainmux.search._store import TrialStore
from trainmux.search._trial import Trial, TrialState
from trainmux.search._view import SearchView

_PATIENCE = 0.1
"""Share of an epoch's time for which pruning decisions are waited for."""
_LOST = "another worker has taken it over, because nothing was heard of this one for too long"
_FLEET_ARGUMENTS = {
    "device",
    "precision",
    "accumulate",
    "deterministic",
    "engine",
    "lowering",
    "width",
    "branches",
}
_SAMPLE = 4
"""Members that are planned together to learn what one of them takes of a budget."""
_MOST_SLOTS = 500
_IDLE_S = 0.5
"""Between two questions to a source that has nothing now, while nothing trains."""


@dataclass
class SearchOptions:
    """Options for training the trials of a search; ``fleet`` has further arguments of `Fleet`.

    Settings are checked: ``ConfigError`` says which one is wrong. No loader is iterated.
    """

    loss: Callable[..., Any] | None
    loader: Iterable[Any] | None
    metric: str | Sequence[str]
    mode: Mode | Sequence[Mode]
    slots: int | None
    budget: int | str | None = None
    steps_per_epoch: int | None = None
    validation: Iterable[Any] | None = None
    metric_fn: Callable[..., Any] | None = None
    example_batch: Any = None
    callbacks: Iterable[Callback | SearchCallback] = ()
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int = 1
    resume: str | bool = "auto"
    keep: int | None = None
    max_groups: int = 4
    timeout: float | None = None
    progress: str | bool = "auto"
    fleet: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for setting in ("slots", "steps_per_epoch", "checkpoint_every", "keep", "max_groups"):
            if getattr(self, setting) is not None:
                setattr(self, setting, whole_number(setting, getattr(self, setting)))
        if self.slots is None and self.budget is None:
            raise ConfigError("expected slots=, or a budget= that says how many there are, got neither")
        if len(self.metrics) != len(self.modes) or not self.metrics:
            raise ConfigError(
                f"expected one mode for each metric, got metric={self.metric!r} and mode={self.mode!r}"
            )
        for mode in self.modes:
            check_mode(mode)
        self.callbacks = tuple(self.callbacks)
        for item in self.callbacks:
            if not isinstance(item, (Callback, SearchCallback)):
                raise ConfigError(f"expected callbacks derived from Callback or SearchCallback, got {item!r}")
        if self.loader is None and self.steps_per_epoch is None:
            raise ConfigError(
                "expected loader= or, where every trial has its own, steps_per_epoch=; got neither"
            )
        for setting in ("loader", "validation"):
            if isinstance(getattr(self, setting), Iterator):
                raise ConfigError(
                    f"{setting}= is iterated again and again, but got the iterator "
                    f"{type(getattr(self, setting)).__name__}, which runs out. Give a DataLoader or a list"
                )
        if self.keep is not None and len(self.metrics) > 1:
            raise ConfigError("keep= needs one metric, got several: which members are best is not defined")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be a number of seconds above 0, but got {self.timeout!r}")
        self.progress = progress_setting(self.progress)
        check_fleet_arguments(self.fleet)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics by name."""
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The direction of each metric."""
        return (self.mode,) if isinstance(self.mode, str) else tuple(self.mode)


def check_fleet_arguments(given: Iterable[str], refused: Iterable[str] = ()) -> None:
    """Refuse what is no argument of `Fleet` that can be chosen here."""
    allowed = _FLEET_ARGUMENTS - set(refused)
    unknown = sorted(set(given) - allowed)
    if unknown:
        raise ConfigError(
            f"expected arguments of a search or of Fleet, got {unknown[0]!r}; those of Fleet are "
            f"{', '.join(sorted(allowed))}"
        )


class Search:
    """One run of a search: asks a source for trials and trains them in the slots of a fleet.

    An epoch is a pass over the loader, or ``steps_per_epoch`` steps, for all trials at once. The slots of
    trials that are finished by its end are refilled before the next one.
    """

    def __init__(self, source: Source, options: SearchOptions) -> None:
        self.options = options
        self.trials: list[Trial] = []
        """All that have been asked for, in this order."""
        self.running: dict[str, Trial] = {}
        self._source = source
        self._office = Office(source)
        self._listeners = Listeners([item for item in options.callbacks if isinstance(item, SearchCallback)])
        self._store = TrialStore(options.checkpoint, options.resume)
        self._fleet: Fleet | None = None
        self._slots: int = options.slots or _SAMPLE  # until it is known how many the budget holds
        self._names: set[str] = set()
        self._waiting: list[Trial] = []  # built, but no group has room for them yet
        self._newest: list[Trial] = []  # that have not done an epoch yet
        self._verdicts: dict[str, list[Future[Verdict]]] = {}  # that nobody has looked at yet
        self._answer_s = 0.0  # that the source took for the verdicts of an epoch, last time
        self._begun_s: dict[str, float] = {}
        self._loaders: dict[str, Iterable[Any]] = {}
        self._kept: list[Trial] = []  # that still have their members, best first
        self._must_end = threading.Event()
        self._no_more = threading.Event()
        self._step = 0
        self._start_s = self._epoch_start_s = time.monotonic()

    def end(self) -> None:
        """Have the search end after this epoch, with unfinished trials given back; from any thread."""
        self._must_end.set()

    def begin_no_more(self) -> None:
        """Have the search end when the trials that have slots are finished; from any thread."""
        self._no_more.set()

    def run(self) -> Results:
        """Train until there are no more trials."""
        with open_display(str(self.options.progress)) as display, self._listeners, self._office:
            if display.wants_updates:
                display.follow(self._view())
            self._listeners.tell("on_search_start", self._source.is_resumed() or self._store.is_resumed)
            self._listeners.wait()
            try:
                self._refill()
                # Asked to end by now: nothing has been trained that an epoch should complete.
                has_begun = not self._must_end.is_set()
                while has_begun and self.running and self._fit_ran_out_of_memory():
                    self._refill()
            finally:
                self._give_back()
            results = Results(self.trials, self.options.metrics, self.options.modes)
            self._listeners.tell("on_search_end", results)
        return results

    def _view(self) -> SearchView:
        options = self.options
        return SearchView(
            self.trials,
            options.metrics,
            options.modes,
            lambda: self._slots,
            self._source.num_trials,
            torch.device(options.fleet.get("device", "cpu")),
            options.timeout,
        )

    # ---- epochs ------------------------------------------------------------------------------------

    def _fit_ran_out_of_memory(self) -> bool:
        """Train until the search ends, or until there is no memory for the trials that came last."""
        options = self.options
        every = options.steps_per_epoch
        others = [item for item in options.callbacks if isinstance(item, Callback)]
        assert self._fleet is not None
        self._step, self._epoch_start_s = 0, time.monotonic()
        try:
            self._fleet.fit(
                options.loader if options.loader is not None else _NoBatches(),
                epochs=None if every else sys.maxsize,
                steps=sys.maxsize if every else None,
                validate_every=every,
                validation=options.validation,
                metric_fn=options.metric_fn if options.validation is not None else None,
                callbacks=[*others, _AtEpochEnd(self._end_epoch)],
                member_loaders=self._loaders,
                progress=False,
            )
        except torch.OutOfMemoryError as error:
            if not self._newest:
                raise
            self._finish(self._newest.pop(), TrialState.FAILED, named_line(error))
            return True
        return False

    def _end_epoch(self, state: FitState) -> None:
        """Record the epoch of each trial, end those that are done, refill their slots."""
        self._newest = []
        num_steps, self._step = state.step - self._step, state.step
        if self._must_wait():
            self._office.wait(self._unread(), even_if_stuck=True)
        for name, trial in list(self.running.items()):
            if self._was_ended(trial):
                continue
            self._record(trial, state.history[name][-1], num_steps)
        for name, trial in list(self.running.items()):
            reason = state.stopped.get(name)
            if reason is not None and reason != STOPPED_ON_REQUEST:
                self._finish(trial, TrialState.FAILED, reason)
            elif reason is not None or trial.epoch >= trial.max_epochs:
                is_number = not any(map(math.isnan, trial.values or ()))
                how = (TrialState.COMPLETE, None) if is_number else (TrialState.FAILED, "its value is NaN")
                self._finish(trial, *how)
        self._prune()
        every = self.options.checkpoint_every
        must_end = self._must_end.is_set()
        self._save([trial for trial in self.running.values() if must_end or trial.epoch % every == 0])
        try:
            self._office.check()
            self._listeners.check()
            if not must_end:
                self._refill()
        except Exception:
            self._save(self.running.values())
            raise
        if must_end:
            state.end_fit()
        self._epoch_start_s = time.monotonic()

    def _record(self, trial: Trial, last: EpochRecord, num_steps: int) -> None:
        """Note a trial's epoch and report it."""
        steps = num_steps + (trial.records[-1].step if trial.records else 0)
        record = EpochRecord(trial.epoch + 1, steps, last.loss, last.metrics)
        trial.values = tuple(metric_of(record, metric) for metric in self.options.metrics)
        trial.records.append(record)
        told = self._office.do(self._source.report, trial, record)
        self._verdicts.setdefault(trial.name, []).append(told)
        self._listeners.tell("on_trial_epoch", trial, record)

    def _prune(self) -> None:
        """End the trials that are to be pruned, as far as that is known soon; the others train on."""
        asked_s = time.monotonic()
        patience_s = _PATIENCE * (asked_s - self._epoch_start_s)

        def note(told: Future[None]) -> None:
            self._answer_s = time.monotonic() - asked_s

        self._office.do(lambda: None).add_done_callback(note)
        if self._must_wait():
            self._office.wait(self._unread(), even_if_stuck=True)
        elif self._answer_s <= patience_s:  # otherwise to wait would most likely be in vain
            self._office.wait(self._unread(), False, patience_s)
        for trial in list(self.running.values()):
            self._was_ended(trial)

    def _must_wait(self) -> bool:
        """Whether results depend on when answers of the source come."""
        return bool(self.options.fleet.get("deterministic"))

    def _unread(self) -> list[Future[Verdict]]:
        return [told for some in self._verdicts.values() for told in some]

    def _was_ended(self, trial: Trial) -> bool:
        """End a trial if that is what the source has said by now."""
        told = self._verdicts.get(trial.name, [])
        known = [future for future in told if future.done()]
        self._verdicts[trial.name] = [future for future in told if future not in known]
        # What a call raised is raised by `Office.check`.
        verdicts = {future.result() for future in known if future.exception() is None}
        if Verdict.LOST in verdicts:
            self._finish(trial, TrialState.FAILED, _LOST, is_ours=False)
        elif Verdict.PRUNE in verdicts:
            self._finish(trial, TrialState.PRUNED)
        return trial.state.is_finished

    # ---- slots -------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Give free slots to trials: first to those that wait, then to those that come next."""
        while not self._is_late():
            # As many may wait as there are slots, so that some are like the members of a group with room.
            num_free = self._slots - max(len(self.running), len(self._waiting))
            must_wait = not self.running or self._must_wait()
            # An epoch with free slots costs as much as to wait for so long with all of them.
            epoch_s = time.monotonic() - self._epoch_start_s
            patience_s = math.inf if must_wait else epoch_s * num_free / self._slots
            taken = self._office.take(num_free, must_wait, patience_s)
            waiting, self._waiting = self._waiting, []
            waiting += [trial for trial in taken if self._admit(trial)]
            if self._must_end.is_set():  # while they were built; to trace them may take long
                self._waiting = waiting
                break
            self._begin(waiting)
            if not taken:
                if self.running or self._office.is_exhausted:
                    break
                time.sleep(_IDLE_S)
        failed = [trial for trial in self.trials if trial.state is TrialState.FAILED]
        if self._fleet is None and failed and not self._names:
            raise SearchError(
                f"expected trials that can be trained, got {len(failed)} in a row that cannot; the "
                f"first of them: {failed[0].error}"
            ) from failed[0].cause
        if self._source.asks_ahead and not self._is_late():
            ending = sum(trial.epoch + 1 >= trial.max_epochs for trial in self.running.values())
            self._office.want(max(ending, math.ceil(self._slots / 4)))

    def _is_late(self) -> bool:
        """Whether no more trials are begun."""
        timeout = self.options.timeout
        is_over = timeout is not None and time.monotonic() - self._start_s >= timeout
        return is_over or self._must_end.is_set() or self._no_more.is_set()

    def _admit(self, trial: Trial) -> bool:
        """Note a trial that was asked for; true where it is to be trained."""
        self.trials.append(trial)
        if trial.state.is_finished:
            self._tell(trial)
            if self._fleet is None and len(self.trials) >= max(self._slots, 3) and not self._names:
                self._must_end.set()
            return False
        if trial.name in self._names:
            raise ConfigError(
                f"expected trials with names of their own, got a second {trial.name!r}; leave the name "
                "out, or make one of the parameters"
            )
        self._names.add(trial.name)
        if self._store.was_finished(trial):
            trial.member, trial.resumed_epoch = None, trial.epoch
            self._office.do(self._source.tell, trial)
            return False
        if trial.loader is not None and trial.member is not None and trial.member.example_batch is None:
            try:
                trial.member.example_batch = first_batch(trial.loader, f"the loader of trial {trial.name!r}")
            except TrainmuxError as error:
                self._fail(trial, error)
                return False
        return True

    def _begin(self, trials: list[Trial]) -> None:
        """Give trials slots; those whose group has no room wait."""
        if self._fleet is None:
            trials = self._begin_fleet(trials)
        for trial in trials:
            assert self._fleet is not None
            assert trial.member is not None
            if len(self.running) == self._slots:
                self._waiting.append(trial)
                continue
            try:
                is_full = len(self._fleet.groups) >= self.options.max_groups
                if is_full and self._fleet.room_for(trial.member) is Room.NEW_GROUP:
                    self._waiting.append(trial)
                    continue
                self._fleet.add(trial.member)
            except (TrainmuxError, torch.OutOfMemoryError) as error:
                self._fail(trial, error)
                continue
            self._enter(trial)

    def _begin_fleet(self, trials: list[Trial]) -> list[Trial]:
        """Make the fleet of the first trials; returns those that are left, of further groups."""
        options = self.options
        example = options.example_batch
        if example is None and options.loader is not None and trials:
            example = first_batch(options.loader)

        def fleet_of(some: Sequence[Trial]) -> Fleet:
            members = [trial.member for trial in some if trial.member is not None]
            return Fleet(members, options.loss, example, **options.fleet)

        if not trials:
            return []
        try:
            if options.slots is None and options.budget is not None:
                self._slots = _most_slots(fleet_of(trials[:1]), fleet_of(trials), options.budget)
                more = self._office.take(max(0, self._slots - len(trials)))
                trials += [trial for trial in more if self._admit(trial)]
                trials, self._waiting = trials[: self._slots], trials[self._slots :]
            self._fleet = fleet_of(trials)
        except (TrainmuxError, torch.OutOfMemoryError):
            good = []
            for trial in trials:
                try:
                    fleet_of([trial])
                    good.append(trial)
                except (TrainmuxError, torch.OutOfMemoryError) as error:
                    self._fail(trial, error)
            if len(good) == len(trials):  # nobody is to blame alone
                raise
            if not good:
                return []
            self._fleet, trials = fleet_of(good), good
        inside = {name for names in self._fleet.groups[: options.max_groups] for name in names}
        self._hold_back([trial for trial in trials if trial.name not in inside])
        self._plan([trial for trial in trials if trial.name in inside])
        for trial in trials:
            if trial not in self._waiting:
                self._enter(trial)
        self._office.prepare = self._prepare
        return []

    def _prepare(self, trial: Trial) -> None:
        """Have a trial's member checked, traced and copied while others train."""
        assert self._fleet is not None
        has_batch = trial.loader is None or (trial.member and trial.member.example_batch is not None)
        if trial.member is not None and has_batch and not trial.state.is_finished:
            self._fleet.prepare(trial.member)

    def _hold_back(self, trials: Sequence[Trial]) -> None:
        """Have trials that are in the fleet wait, untrained."""
        assert self._fleet is not None
        for trial in trials:
            self._fleet.drop(trial.name)
            self._waiting.append(trial)

    def _plan(self, trials: Sequence[Trial]) -> None:
        """Have the fleet train within the budget, if there is one; of as many trials as it holds."""
        assert self._fleet is not None
        options = self.options
        while options.budget is not None:
            try:
                self._fleet.plan(options.budget)
                return
            except BudgetError:
                if options.slots is not None or len(trials) == 1:
                    raise
                self._slots = len(trials) - math.ceil(len(trials) / 20)
                self._hold_back(trials[self._slots :])
                trials = trials[: self._slots]

    def _enter(self, trial: Trial) -> None:
        """Have a trial that has just got a slot start, or go on from where it was saved."""
        assert self._fleet is not None
        if trial.loader is not None:
            self._loaders[trial.name] = trial.loader
        self._store.resume(trial, self._fleet)
        trial.resumed_epoch = trial.epoch
        trial.state = TrialState.RUNNING
        self.running[trial.name] = trial
        self._newest.append(trial)
        self._begun_s[trial.name] = time.monotonic() - trial.seconds
        self._listeners.tell("on_trial_start", trial)

    def _finish(
        self, trial: Trial, state: TrialState, error: str | None = None, is_ours: bool = True
    ) -> None:
        """Take a trial out of its slot, its weights in its member where the search keeps them."""
        assert self._fleet is not None
        del self.running[trial.name]
        self._verdicts.pop(trial.name, None)
        self._loaders.pop(trial.name, None)
        trial.state, trial.error = state, error
        trial.seconds = time.monotonic() - self._begun_s.pop(trial.name)
        if self._is_best(trial):
            self._store.save_best(trial, self._fleet)
        self._fleet.drop(trial.name, write_back=self._keeps(trial))
        self._tell(trial, is_ours)

    def _is_best(self, trial: Trial) -> bool:
        if trial.state is not TrialState.COMPLETE or len(self.options.modes) > 1:
            return False
        mode = self.options.modes
        done = (other for other in self.trials if other.state is TrialState.COMPLETE and other is not trial)
        return score(trial, mode) < min((score(other, mode) for other in done), default=math.inf)

    def _keeps(self, trial: Trial) -> bool:
        """Whether a finished trial's member is kept; lets go of one that is not among the best any more."""
        if self.options.keep is None:
            return True
        self._kept.append(trial)
        self._kept.sort(key=self._rank)
        for other in self._kept[self.options.keep :]:
            other.member = None
        del self._kept[self.options.keep :]
        return trial in self._kept

    def _rank(self, trial: Trial) -> tuple[bool, float]:
        return trial.state is not TrialState.COMPLETE, score(trial, self.options.modes)

    def _fail(self, trial: Trial, error: BaseException) -> None:
        """End a trial that cannot be trained."""
        trial.fail(named_line(error))
        trial.cause, trial.member = error, None
        self._tell(trial)

    def _tell(self, trial: Trial, is_ours: bool = True) -> None:
        """Tell everybody that a trial is finished; only those who look on where it is not ours any more."""
        if trial.state is TrialState.FAILED:
            warn_user(f"trial {trial.name!r} failed: {trial.error}")
        if is_ours:
            self._office.do(self._store.finish, trial)
            self._office.do(self._source.tell, trial)
        self._listeners.tell("on_trial_end", trial)

    def _save(self, trials: Iterable[Trial]) -> None:
        assert self._fleet is not None
        for trial in trials:
            trial.seconds = time.monotonic() - self._begun_s[trial.name]
            self._store.save(trial, self._fleet)

    def _give_back(self) -> None:
        """Let the source know which trials the search leaves unfinished."""
        unfinished = [*self.running.values(), *self._waiting, *self._office.give_back()]
        for trial in unfinished:
            if trial.state.is_finished:  # could not be built
                self.trials.append(trial)
                self._tell(trial)
            else:
                trial.state = TrialState.WAITING
                self._office.do(self._source.give_back, trial)
                self._listeners.tell("on_trial_given_back", trial)


def _most_slots(one: Fleet, several: Fleet, budget: int | str) -> int:
    """The number of members that train within a budget with nothing offloaded or recomputed.

    What a member takes is the difference between fleets of one and of several.
    ``BudgetError`` where not even ``one`` does, whatever is done.
    """
    alone = one.plan(budget, "none")
    num_more = len(several.names) - 1
    if not num_more:
        return 1
    each = (several.plan(None, "none").peak_bytes - alone.peak_bytes) / num_more
    return min(1 + int((alone.budget_bytes - alone.peak_bytes) / max(each, 1)), _MOST_SLOTS)


class _AtEpochEnd(Callback):
    """Calls a function at the end of every epoch."""

    def __init__(self, call: Callable[[FitState], None]) -> None:
        self._call = call

    def on_epoch_end(self, state: FitState) -> None:
        self._call(state)


class _NoBatches:
    """A loader for a fleet whose members all have loaders of their own."""

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None


def metric_of(record: EpochRecord, metric: str) -> float:
    """A metric's value: of the validation, or else of the training."""
    values = record.values()
    for name in (f"val_{metric}", metric):
        if name in values:
            return values[name]
    raise ConfigError(f"expected metric= to be one of {sorted(values)}, got {metric!r}; name one of these")
