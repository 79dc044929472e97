"""`CSVLogger`: a row per trial and a row per epoch, each once, whatever happens to the search or the disk."""

from __future__ import annotations

import csv
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads.seeding import seeded
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")

GENERATOR = torch.Generator().manual_seed(0)
LOADER = [torch.randn(4, 2, generator=GENERATOR) for _ in range(2)]


def loss(model: nn.Module, batch: Tensor) -> Any:
    value = (model(batch) - 1).square().mean()
    return value, {"size": value.sqrt()}


def make(number: int, lr: float = 0.01, **params: Any) -> tm.Candidate:
    model = seeded(nn.Linear, in_features=2, out_features=1)(number)
    member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=lr), name=f"m{number}")
    return tm.Candidate(member, {"lr": lr, **params})


def unbuildable() -> tm.Candidate:
    raise RuntimeError("no such, model")


def run(members: Any, **options: Any) -> tm.Results:
    return tm.sweep(members, **{"loss": loss, "loader": LOADER, "slots": 2, "max_epochs": 3, **options})


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Interrupt(tm.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, state: Any) -> None:
        if state.epoch == self.epoch:
            raise KeyboardInterrupt


class Notes(tm.SearchCallback):
    """Notes trials that were given back, and what ended the search."""

    def __init__(self) -> None:
        self.given_back: list[str] = []
        self.errors: list[str] = []

    def on_trial_given_back(self, trial: tm.Trial) -> None:
        self.given_back.append(trial.name)

    def on_exception(self, error: BaseException) -> None:
        self.errors.append(type(error).__name__)


def test_every_trial_and_every_epoch_has_a_row(tmp_path: Path) -> None:
    members = [make(0), unbuildable, partial(make, 2, depth=3), partial(make, 3, 1e30)]
    with pytest.warns(tm.TrainmuxWarning, match="failed"):
        results = run(members, callbacks=[tm.loggers.CSVLogger(tmp_path / "log")])
    trials = rows(tmp_path / "log/trials.csv")
    assert {row["number"]: row["state"] for row in trials} == {
        "0": "complete", "1": "failed", "2": "complete", "3": "failed",
    }  # fmt: skip
    by_number = {int(row["number"]): row for row in trials}
    assert "no such, model" in by_number[1]["error"]
    assert (by_number[2]["params_depth"], by_number[0]["params_depth"]) == ("3", "")
    for trial in results:
        row = by_number[trial.number]
        assert row["name"] == trial.name
        assert int(row["epochs"]) == trial.epoch
        found = [row for row in rows(tmp_path / "log/epochs.csv") if row["number"] == str(trial.number)]
        assert [int(row["epoch"]) for row in found] == [record.epoch for record in trial.records]
        for one, record in zip(found, trial.records, strict=True):
            assert float(one["loss"]) == pytest.approx(record.loss, nan_ok=True)
            assert float(one["size"]) == pytest.approx(record.metrics["size"], nan_ok=True)


def test_a_resumed_search_writes_no_epoch_twice(tmp_path: Path) -> None:
    """Epochs since the last checkpoint are trained, and written, anew; trials that waited end properly."""

    def search(*more: Any) -> tm.Results:
        members: Iterator[Callable[[], tm.Candidate]] = (partial(make, number) for number in range(3))
        logger = tm.loggers.CSVLogger(tmp_path / "log")
        where = {"checkpoint": tmp_path / "search", "checkpoint_every": 2}
        return run(members, max_epochs=4, callbacks=[logger, *more], **where)

    notes = Notes()
    with pytest.raises(KeyboardInterrupt):
        search(Interrupt(3), notes)
    assert set(notes.given_back) >= {"m0", "m1"}
    assert notes.errors == ["KeyboardInterrupt"]
    assert [row["state"] for row in rows(tmp_path / "log/trials.csv")] == ["waiting"] * 2
    with open(tmp_path / "log/epochs.csv", "a") as file:
        file.write("0,m0,3,")  # a row that was being written when the process was killed
    results = search()
    epochs = [(row["name"], int(row["epoch"])) for row in rows(tmp_path / "log/epochs.csv")]
    assert sorted(epochs) == [(f"m{number}", epoch) for number in range(3) for epoch in (1, 2, 3, 4)]
    trials = rows(tmp_path / "log/trials.csv")
    assert sorted((row["name"], row["state"]) for row in trials) == [(f"m{i}", "complete") for i in range(3)]
    assert {row["name"]: float(row["loss"]) for row in trials} == {
        trial.name: pytest.approx(trial.records[-1].loss) for trial in results
    }


def test_another_search_keeps_the_files_of_the_first(tmp_path: Path) -> None:
    for number in (1, 2):
        run([make(number)], max_epochs=1, callbacks=[tm.loggers.CSVLogger(tmp_path)])
    assert [row["name"] for row in rows(tmp_path / "trials.csv")] == ["m2"]
    assert [row["name"] for row in rows(tmp_path / "trials.csv.1")] == ["m1"]
    assert [row["name"] for row in rows(tmp_path / "epochs.csv.1")] == ["m1"]


# ---- by its hooks ------------------------------------------------------------------------------------


def trial_of(number: int, **more: Any) -> tm.Trial:
    return tm.Trial(number, f"t{number}", {"lr": 0.1, **more}, 9)


def train(logger: tm.SearchCallback, trial: tm.Trial, **metrics: float) -> None:
    record = tm.EpochRecord(trial.epoch + 1, 2 * trial.epoch + 2, 0.5, metrics)
    trial.records.append(record)
    logger.on_trial_epoch(trial, record)


def test_a_full_disk_ends_no_search_and_what_it_held_up_is_written_later(tmp_path: Path) -> None:
    logger, trial = tm.loggers.CSVLogger(tmp_path), trial_of(0)
    logger.on_search_start(False)
    logger.on_trial_start(trial)
    train(logger, trial)
    path = tmp_path / "epochs.csv"
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 3, limits[1]))
    try:
        with pytest.warns(tm.TrainmuxWarning, match="could not write"):
            train(logger, trial)
        train(logger, trial)  # warned once
        logger.on_trial_end(trial)
        logger.on_trial_end(trial_of(1))
        assert path.read_bytes() == before  # no half row
        assert not (tmp_path / "trials.csv").exists()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.on_search_end(tm.Results([trial], ("loss",), ("min",)))
    assert [row["epoch"] for row in rows(path)] == ["1", "2", "3"]
    assert [row["number"] for row in rows(tmp_path / "trials.csv")] == ["1", "0"]


def test_what_could_never_be_written_is_said(tmp_path: Path) -> None:
    logger, trial = tm.loggers.CSVLogger(tmp_path / "log"), trial_of(0)
    logger.on_search_start(False)
    shutil.rmtree(tmp_path / "log")
    with pytest.warns(tm.TrainmuxWarning, match="could not write and tries again"):
        train(logger, trial)
    logger.on_trial_end(trial)
    with pytest.warns(tm.TrainmuxWarning, match="1 trials completely: t0"):
        logger.on_search_end(tm.Results([trial], ("loss",), ("min",)))


def test_workers_of_a_study_share_a_folder(tmp_path: Path) -> None:
    """Also where one knows columns that the other does not; a retry goes on in the rows of the first."""
    loggers = [tm.loggers.CSVLogger(tmp_path) for _ in range(2)]
    for logger in loggers:
        logger.on_search_start(True)
    one, other = trial_of(0), trial_of(1, depth=2)
    for trial, logger, metrics in ((one, loggers[0], {}), (other, loggers[1], {"size": 3.0})):
        logger.on_trial_start(trial)
        for _ in range(2):
            train(logger, trial, **metrics)
    loggers[0].on_trial_end(one)
    loggers[1].on_trial_end(other)
    # The first worker dies in the third epoch of its next trial, saved after the first; the other retries.
    lost, retried = trial_of(2), trial_of(3)
    for _ in range(3):
        train(loggers[0], lost)
    retried.resumes, retried.resumed_epoch, retried.records = (2,), 1, lost.records[:1]
    loggers[1].on_trial_start(retried)
    train(loggers[1], retried)
    loggers[1].on_trial_end(retried)
    epochs = rows(tmp_path / "epochs.csv")
    assert sorted((row["number"], row["epoch"], row["size"]) for row in epochs) == [
        *(("0", "1", ""), ("0", "2", ""), ("1", "1", "3.0"), ("1", "2", "3.0")),
        *(("2", "1", ""), ("2", "2", "")),
    ]
    assert [row["params_depth"] for row in rows(tmp_path / "trials.csv")] == ["", "2", ""]


def test_a_file_of_another_kind_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "trials.csv").write_text("a,b\n1,2\n")
    with pytest.raises(tm.ConfigError, match="another folder"):
        tm.loggers.CSVLogger(tmp_path).on_search_start(True)
    assert (tmp_path / "trials.csv").read_text() == "a,b\n1,2\n"
