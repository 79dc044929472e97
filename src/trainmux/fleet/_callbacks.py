"""Hooks into the fit loop: their base class, early stopping, and a log file."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainmux.errors import ConfigError
from trainmux.fleet._config import whole_number
from trainmux.fleet._history import ROW_COLUMNS, History, Mode, check_mode
from trainmux.ir import replace_file

if TYPE_CHECKING:
    from trainmux.fleet._fleet import Fleet


@dataclass(frozen=True)
class FitState:
    """The fit at the moment of a hook.

    ``epoch`` is the current one, from 1; in ``on_fit_start`` and ``on_fit_end`` the number of finished ones,
    so 0 at a fresh start and more after a resume. ``step`` counts finished steps. ``losses`` is what the last
    step returned, in the order of ``fleet.names``, still on the device: to read it on the host at every step
    costs a wait at every step. ``history`` includes the current epoch in ``on_epoch_end``. ``stopped`` is as
    last seen, which is exact in ``on_epoch_end`` and may lag behind in ``on_step_end``.

    ``stop_member(name)`` ends one member's training; prefer it to ``fleet.stop``, since it also keeps later
    losses out of the member's mean. ``end_fit()`` ends the fit after this step or epoch.
    """

    fleet: Fleet
    epoch: int
    step: int
    num_epochs: int | None
    num_steps: int | None
    losses: torch.Tensor | None
    history: History
    stopped: Mapping[str, str]
    stop_member: Callable[[str], None]
    end_fit: Callable[[], None]

    @property
    def active(self) -> tuple[str, ...]:
        """The members that were not stopped when last seen."""
        return tuple(name for name in self.fleet.names if name not in self.stopped)


class Callback:
    """Base of all callbacks: every hook does nothing. An exception in a hook ends the fit, after a sync."""

    def on_fit_start(self, state: FitState) -> None:
        """Once, after a checkpoint was restored and before the first step."""

    def on_step_end(self, state: FitState) -> None:
        """After every step has been handed to the device."""

    def on_epoch_end(self, state: FitState) -> None:
        """After an epoch was validated and recorded, before its checkpoint is saved."""

    def on_fit_end(self, state: FitState) -> None:
        """Once, when training has ended as it should; not after an exception."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to keep in a checkpoint, as plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned in the run that is resumed."""


class Departures:
    """Notices members that left, and names whose member began anew: by ``replace`` or ``copy_member``."""

    def __init__(self) -> None:
        self._origins: dict[str, object] = {}

    def since_last(self, fleet: Fleet) -> list[str]:
        """Names whose member of the last call is gone."""
        before, self._origins = self._origins, fleet._origins
        return [name for name, origin in before.items() if self._origins.get(name) is not origin]


def callback_states(callbacks: Iterable[Callback]) -> list[dict[str, Any]]:
    """Collect type and state of all callbacks, in order, for a checkpoint."""
    return [{"type": type(callback).__qualname__, "state": callback.state_dict()} for callback in callbacks]


def load_callback_states(callbacks: Iterable[Callback], states: list[dict[str, Any]]) -> None:
    """Give each callback its state: the n-th of a type gets the n-th that was saved for the type.

    So a resumed run may have further callbacks; those without a saved state start fresh.
    """
    waiting = list(states)
    for callback in callbacks:
        for index, saved in enumerate(waiting):
            if saved["type"] == type(callback).__qualname__:
                callback.load_state_dict(saved["state"])
                del waiting[index]
                break


class EarlyStopping(Callback):
    """Stops a member after ``patience`` epochs in a row in which ``monitor`` did not improve.

    ``monitor`` is ``"loss"`` (the training loss), a training metric, or ``"val_<name>"`` of a validation
    metric. An improvement is a change by more than ``min_delta`` in the direction of ``mode``; NaN never is
    one. Refuses a patience below 1, a negative ``min_delta``, and, at the first epoch, an unknown monitor.
    """

    def __init__(self, monitor: str, patience: int, mode: Mode = "min", min_delta: float = 0.0) -> None:
        check_mode(mode)
        if not min_delta >= 0 or math.isinf(min_delta):
            raise ConfigError(f"min_delta must be a finite number not below 0, but got {min_delta!r}")
        self.monitor = monitor
        self.patience = whole_number("patience", patience)
        self.mode = mode
        self.min_delta = min_delta
        self._best: dict[str, float] = {}
        self._num_bad: dict[str, int] = {}
        self._departures = Departures()

    def on_epoch_end(self, state: FitState) -> None:
        for name in self._departures.since_last(state.fleet):
            self._best.pop(name, None)
            self._num_bad.pop(name, None)
        for name in state.active:
            record = state.history[name][-1] if name in state.history else None
            if record is None or record.epoch != state.epoch:
                continue  # joined after the epoch was recorded
            values = record.values()
            if self.monitor not in values:
                raise ConfigError(
                    f"EarlyStopping cannot monitor {self.monitor!r}: member {name!r} has {sorted(values)}. "
                    "Name one of these (validation metrics have 'val_' before their name)"
                )
            if self._improves(name, values[self.monitor]):
                self._best[name] = values[self.monitor]
                self._num_bad[name] = 0
            else:
                self._num_bad[name] = self._num_bad.get(name, 0) + 1
                if self._num_bad[name] >= self.patience:
                    state.stop_member(name)

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self._best), "num_bad": dict(self._num_bad)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = dict(state["best"])
        self._num_bad = dict(state["num_bad"])
        self._departures = Departures()

    def _improves(self, name: str, value: float) -> bool:
        best = self._best.get(name, math.inf if self.mode == "min" else -math.inf)
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta  # False for NaN, which also inf - inf is


class CSVLog(Callback):
    """Writes ``epoch, step, member, loss`` and the metrics to the file ``path`` after every epoch.

    A fresh fit starts a new file; one that is there already is kept as ``<path>.1``, ``<path>.2``, …
    A resumed fit rewrites the file from its history, so that no epoch is there twice and no half row of a
    killed run remains. Refuses to do that to a file that is not such a log.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._columns: list[str] = []

    def on_fit_start(self, state: FitState) -> None:
        self._columns = []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if state.epoch > 0:
            self._check_is_log()
            self._rewrite(state.history)
        elif self._path.exists():
            put_aside(self._path)

    def on_epoch_end(self, state: FitState) -> None:
        if self._columns != _columns(state.history):
            # The first epoch, or a metric that was not there before: the header changes.
            self._rewrite(state.history)
            return
        rows = [row for row in state.history.to_rows() if row["epoch"] == state.epoch]
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            # One write: a kill leaves all rows of the epoch, or a tail that a resume rewrites.
            file.write(csv_text(rows, self._columns))
            file.flush()
            os.fsync(file.fileno())

    def _rewrite(self, history: History) -> None:
        self._columns = _columns(history)
        header = {column: column for column in self._columns}
        text = csv_text([header, *history.to_rows()], self._columns)
        replace_file(self._path, lambda file: file.write(text.encode()))

    def _check_is_log(self) -> None:
        try:
            with open(self._path, encoding="utf-8", errors="replace", newline="") as file:
                first = file.readline().strip()
        except FileNotFoundError:
            return
        if first and first.split(",")[: len(ROW_COLUMNS)] != list(ROW_COLUMNS):
            raise ConfigError(
                f"{self._path} is not a log of this kind: expected it to start with {','.join(ROW_COLUMNS)}, "
                f"got {first[:60]!r}. Name another file"
            )


def _columns(history: History) -> list[str]:
    return [*ROW_COLUMNS, *history.metric_names()]


def put_aside(path: Path) -> None:
    """Rename a file to ``<path>.1``, or the first number that is free."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.replace(path, aside)


def csv_text(rows: Iterable[Mapping[str, Any]], columns: list[str]) -> str:
    """Write rows as lines of a CSV file; what has no column is left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()
