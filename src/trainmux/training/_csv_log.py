"""A CSV file that follows the history: one row per member and epoch."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainmux.errors import ConfigError
from trainmux.ir import replace_file
from trainmux.training._callbacks import Callback, FitState
from trainmux.training._history import ROW_COLUMNS, History


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
            os.replace(self._path, self._free_name())

    def on_epoch_end(self, state: FitState) -> None:
        if self._columns != _columns(state.history):
            # The first epoch, or a metric that was not there before: the header changes.
            self._rewrite(state.history)
            return
        rows = [row for row in state.history.to_rows() if row["epoch"] == state.epoch]
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            # One write: a kill leaves all rows of the epoch, or a tail that a resume rewrites.
            file.write(_csv_text(rows, self._columns))
            file.flush()
            os.fsync(file.fileno())

    def _rewrite(self, history: History) -> None:
        self._columns = _columns(history)
        header = {column: column for column in self._columns}
        text = _csv_text([header, *history.to_rows()], self._columns)
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

    def _free_name(self) -> Path:
        number = 1
        while (candidate := self._path.with_name(f"{self._path.name}.{number}")).exists():
            number += 1
        return candidate


def _columns(history: History) -> list[str]:
    return [*ROW_COLUMNS, *history.metric_names()]


def _csv_text(rows: Iterable[Mapping[str, Any]], columns: list[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()
