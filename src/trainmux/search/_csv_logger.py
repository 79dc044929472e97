"""The log of a search as two CSV files: a row per trial, and a row per epoch."""

from __future__ import annotations

import csv
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainmux.errors import ConfigError
from trainmux.fleet import EpochRecord, csv_text, put_aside
from trainmux.ir import replace_file
from trainmux.search._logger import Logger, number_of, plain_params
from trainmux.search._trial import Trial, TrialState

Row = Mapping[str, Any]


class CSVLogger(Logger[None]):
    """Writes the files ``trials.csv`` and ``epochs.csv`` into ``folder``.

    One has a row per trial that has ended or was given back (then as ``waiting``), with the columns of
    ``Results.to_rows`` and all metrics of its last epoch; the other one a row per trial and epoch, with
    ``number, name, epoch, step, loss`` and the metrics. A resumed search goes on in them; any other one
    starts new files, and those that are there already are kept as ``<file>.1``, ``<file>.2``, … Workers of
    one study may share a folder.

    For the members of ``Fleet.fit`` there is `CSVLog`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._trials = _Table(Path(folder, "trials.csv"), "number name state epochs seconds error")
        self._epochs = _Table(Path(folder, "epochs.csv"), "number name epoch step loss")

    def on_search_start(self, is_resumed: bool) -> None:
        super().on_search_start(is_resumed)
        for table in (self._trials, self._epochs):
            table.begin(is_resumed)

    def _open(self, trial: Trial, number: int) -> None:
        if self._is_resumed:
            self._trials.remove(number)
            self._epochs.remove(number, lambda row: int(row["epoch"]) > trial.resumed_epoch)

    def _log(self, run: None, trial: Trial, record: EpochRecord) -> None:
        about = {"number": number_of(trial), "name": trial.name, "epoch": record.epoch, "step": record.step}
        self._epochs.append({**about, **record.values()})

    def _close(self, run: None, trial: Trial, state: TrialState) -> None:
        about = {
            "number": number_of(trial),
            "name": trial.name,
            "state": str(state),
            "epochs": trial.epoch,
            "seconds": trial.seconds,
            "error": trial.error,
        }
        values = trial.records[-1].values() if trial.records else {}
        params = {f"params_{name}": value for name, value in plain_params(trial.params).items()}
        self._trials.append({**about, **values, **params})


class _Table:
    """A CSV file to which several processes may append."""

    def __init__(self, path: Path, columns: str) -> None:
        self._path = path
        self._columns = columns.split()

    def begin(self, is_resumed: bool) -> None:
        """Go on with the file that is there, or put it aside; refuses one of another kind."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if not self._path.exists():
                return
            if is_resumed:
                found = self._header()
                if found and found[: len(self._columns)] != self._columns:
                    raise ConfigError(
                        f"expected {self._path} to start with {','.join(self._columns)}, got "
                        f"{','.join(found)[:60]!r}; name another folder"
                    )
                self._drop_half_row()
                return
            put_aside(self._path)

    def append(self, row: Row) -> None:
        """Add a row: all of it, or none where the disk is full."""
        with self._locked():
            header = self._header()
            columns = list(dict.fromkeys([*(header or self._columns), *row]))
            if columns != header:
                self._rewrite([*self._rows(), row], columns)
            else:
                self._add(csv_text([row], columns).encode())

    def remove(self, number: int, is_old: Callable[[Mapping[str, str]], bool] = lambda row: True) -> None:
        """Remove the rows of a trial, or those of them that are out of date."""
        with self._locked():
            if f"\n{number},".encode() not in (self._path.read_bytes() if self._path.exists() else b""):
                return
            rows = list(self._rows())
            kept = [row for row in rows if row["number"] != str(number) or not is_old(row)]
            if len(kept) < len(rows):
                self._rewrite(kept, self._header())

    def _add(self, data: bytes) -> None:
        with open(self._path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(data) < len(data):
                    raise OSError(f"the disk of {self._path} is full")
            except OSError:
                file.truncate(end)  # no half row
                raise

    def _rewrite(self, rows: Iterable[Row], columns: list[str]) -> None:
        header = {column: column for column in columns}
        data = csv_text([header, *rows], columns).encode()
        replace_file(self._path, lambda file: file.write(data))

    def _drop_half_row(self) -> None:
        """Drop what a killed process left unfinished."""
        data = self._path.read_bytes()
        os.truncate(self._path, data.rfind(b"\n") + 1)

    def _rows(self) -> Iterator[dict[str, str]]:
        if self._path.exists():
            with open(self._path, encoding="utf-8", newline="") as file:
                yield from csv.DictReader(file, restval="")

    def _header(self) -> list[str]:
        try:
            with open(self._path, encoding="utf-8", newline="") as file:
                return next(csv.reader(file), [])
        except FileNotFoundError:
            return []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
