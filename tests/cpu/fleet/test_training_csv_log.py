"""The CSV log: one row per member and epoch, whatever happens in between."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fakes import FakeFleet

from trainmux.errors import ConfigError
from trainmux.fleet import CSVLog
from trainmux.fleet._fit import fit

LRS = {"a": 0.1, 'b, "quoted"\nname': 0.2}
BATCHES = [torch.tensor([1.0]), torch.tensor([2.0])]


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run(path: Path, fleet: FakeFleet | None = None, **options: Any) -> Any:
    return fit(fleet or FakeFleet(LRS), BATCHES, callbacks=[CSVLog(path)], progress=False, **options)


def test_rows_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.csv"
    history = run(path, epochs=2, validation=BATCHES)
    rows = rows_of(path)
    assert list(rows[0]) == ["epoch", "step", "member", "loss", "grad_norm", "accuracy", "val_loss"]
    assert [(row["epoch"], row["member"]) for row in rows] == [(str(e), name) for e in (1, 2) for name in LRS]
    for row, expected in zip(rows, history.to_rows(), strict=True):
        assert float(row["loss"]) == expected["loss"]
        assert float(row["val_loss"]) == expected["val_loss"]
        assert int(row["step"]) == expected["step"]


def test_resume_continues_without_duplicates(tmp_path: Path) -> None:
    whole = tmp_path / "whole.csv"
    run(whole, epochs=4)
    path = tmp_path / "run.csv"
    crashed = FakeFleet(LRS)
    crashed.fail_at[5] = RuntimeError()
    with pytest.raises(RuntimeError):
        run(path, crashed, epochs=4, checkpoint=tmp_path / "c")
    with open(path, "a") as file:
        file.write("3,6,a,0.123\n3,6,b")  # logged, then killed before the checkpoint, in the middle of a row
    run(path, epochs=4, checkpoint=tmp_path / "c")
    assert path.read_bytes() == whole.read_bytes()
    path.unlink()
    run(path, epochs=4, checkpoint=tmp_path / "c")
    assert path.read_bytes() == whole.read_bytes()


def test_new_metrics_widen_the_header(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    run(path, epochs=1, checkpoint=tmp_path / "c")
    run(path, epochs=2, checkpoint=tmp_path / "c", validation=BATCHES)
    rows = rows_of(path)
    assert [row["val_loss"] == "" for row in rows] == [True, True, False, False]


def test_fresh_fit_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    run(path, epochs=1)
    first = path.read_text()
    run(path, epochs=2)
    run(path, epochs=1)
    assert (tmp_path / "run.csv.1").read_text() == first
    assert len(rows_of(tmp_path / "run.csv.2")) == 4
    assert len(rows_of(path)) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_foreign_file_is_refused_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "thesis.csv"
    run(tmp_path / "run.csv", epochs=1, checkpoint=tmp_path / "c")
    path.write_text("my,precious,data\n")
    with pytest.raises(ConfigError, match="precious"):
        run(path, epochs=2, checkpoint=tmp_path / "c")
    assert path.read_text() == "my,precious,data\n"
