"""The common base of all loggers of a search."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainmux.errors import named_line, warn_user
from trainmux.fleet import EpochRecord
from trainmux.search._callbacks import SearchCallback
from trainmux.search._trial import Trial, TrialState

if TYPE_CHECKING:
    from trainmux.search._results import Results

Run = TypeVar("Run")

_MOST_NAMED = 10


class Logger(SearchCallback, Generic[Run]):
    """Writes down each trial of a search in a run of its own; subclasses say where.

    A trial that is retried under another number goes on in the run of the first, and no run has an epoch
    twice. What cannot be written warns once and is tried again with what comes next: no logger ends a search
    that has begun.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._written: dict[int, int] = {}  # the last epoch of each trial that was written
        self._ended: list[Trial] = []  # trials whose end has not been written
        self._has_warned = self._is_resumed = False

    @abstractmethod
    def _open(self, trial: Trial, number: int) -> Run:
        """Begin the run of a trial, or go on with it after ``trial.resumed_epoch``."""

    @abstractmethod
    def _log(self, run: Run, trial: Trial, record: EpochRecord) -> None:
        """Write an epoch down."""

    @abstractmethod
    def _close(self, run: Run, trial: Trial, state: TrialState) -> None:
        """Write down how a trial ended; ``WAITING`` where it may go on another time."""

    def on_search_start(self, is_resumed: bool) -> None:
        self._runs.clear()
        self._written.clear()
        self._ended.clear()
        self._has_warned, self._is_resumed = False, is_resumed

    def on_trial_start(self, trial: Trial) -> None:
        self._attempt(self._run, trial)

    def on_trial_epoch(self, trial: Trial, record: EpochRecord) -> None:
        self._attempt(self._write, trial, record.epoch)

    def on_trial_end(self, trial: Trial) -> None:
        self._ended.append(trial)
        self._end()

    def on_trial_given_back(self, trial: Trial) -> None:
        if number_of(trial) in self._runs:
            self.on_trial_end(trial)

    def on_search_end(self, results: Results) -> None:
        self._end()
        if self._ended:
            names = ", ".join(trial.name for trial in self._ended[:_MOST_NAMED])
            warn_user(f"{type(self).__name__} could not write {len(self._ended)} trials completely: {names}")

    def _run(self, trial: Trial) -> Run:
        number = number_of(trial)
        if number not in self._runs:
            self._written.setdefault(number, trial.resumed_epoch)
            self._runs[number] = self._open(trial, number)
        return self._runs[number]

    def _write(self, trial: Trial, epoch: int) -> None:
        """Write the epochs of a trial up to this one that are not written yet."""
        run, number = self._run(trial), number_of(trial)
        for record in trial.records[self._written[number] : epoch]:
            self._log(run, trial, record)
            self._written[number] = record.epoch

    def _end(self) -> None:
        """Write how trials ended, as many as can be."""
        for trial in list(self._ended):
            self._ended.remove(trial)
            if not self._attempt(self._end_run, trial):
                self._ended.append(trial)
                break

    def _end_run(self, trial: Trial) -> None:
        self._write(trial, trial.epoch)
        self._close(self._run(trial), trial, trial.state)
        del self._runs[number_of(trial)], self._written[number_of(trial)]

    def _attempt(self, write: Callable[..., object], *args: object) -> bool:
        try:
            write(*args)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    f"{type(self).__name__} could not write and tries again with what comes next: "
                    f"{named_line(error)}"
                )
            return False
        return True


def number_of(trial: Trial) -> int:
    """The number under which a trial was tried first."""
    return trial.resumes[-1] if trial.resumes else trial.number


def plain(value: Any) -> Any:
    """A parameter as what every tool takes: a number, a truth value or a text."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name, each as ``plain`` has it."""
    return {str(name): plain(value) for name, value in params.items()}
