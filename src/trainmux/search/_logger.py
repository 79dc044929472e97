"""What all loggers of a search have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainmux.errors import first_line, warn_user
from trainmux.fleet import EpochRecord
from trainmux.search._callbacks import SearchCallback
from trainmux.search._trial import Trial, TrialState

if TYPE_CHECKING:
    from trainmux.search._results import Results

Run = TypeVar("Run")


class Logger(SearchCallback, Generic[Run]):
    """Writes down each trial of a search in a run of its own; subclasses say where.

    A trial that is retried under another number goes on in the run of the first, and no run has an epoch
    twice. What cannot be written warns once and is left out: no logger ends a search that has begun.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._num_lost = 0

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
        self._num_lost = 0

    def on_trial_start(self, trial: Trial) -> None:
        self._attempt(self._run, trial)

    def on_trial_epoch(self, trial: Trial, record: EpochRecord) -> None:
        self._attempt(lambda: self._log(self._run(trial), trial, record))

    def on_trial_end(self, trial: Trial) -> None:
        self._attempt(self._end, trial)

    def on_trial_given_back(self, trial: Trial) -> None:
        if number_of(trial) in self._runs:
            self._attempt(self._end, trial)

    def on_search_end(self, results: Results) -> None:
        if self._num_lost > 1:
            warn_user(f"{type(self).__name__}: {self._num_lost} entries in all could not be written")

    def _run(self, trial: Trial) -> Run:
        number = number_of(trial)
        if number not in self._runs:
            self._runs[number] = self._open(trial, number)
        return self._runs[number]

    def _end(self, trial: Trial) -> None:
        run = self._run(trial)
        del self._runs[number_of(trial)]
        self._close(run, trial, trial.state)

    def _attempt(self, write: Callable[..., object], *args: object) -> None:
        try:
            write(*args)
        except Exception as error:
            self._num_lost += 1
            if self._num_lost == 1:
                warn_user(
                    f"{type(self).__name__} could not write an entry and goes on without it: "
                    f"{type(error).__name__}: {first_line(error)}"
                )


def number_of(trial: Trial) -> int:
    """The number under which a trial was tried first."""
    return trial.resumes[-1] if trial.resumes else trial.number


def plain(value: Any) -> Any:
    """A parameter as what every tool takes: a number, a truth value or a text."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name, each as ``plain`` has it."""
    return {str(name): plain(value) for name, value in params.items()}
