"""A fit that goes on from a checkpoint is the uninterrupted one, and so is its log."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_cases import BATCHES, At, Spy, failing_at, first_column, points, run, weights
from fleet_cases import EXAMPLE, SCHEDULERS, adam, assert_same_states, mlp, mse, scheduled, states_of, vectors
from torch.utils.data import DataLoader, TensorDataset

from trainmux import Callback, CSVLog, EarlyStopping, Fleet, Member
from trainmux.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("built_once")


def shuffled(generator: torch.Generator | None = None) -> DataLoader[Any]:
    dataset = TensorDataset(torch.arange(12.0, dtype=torch.float64))
    return DataLoader(dataset, 3, shuffle=True, generator=generator, collate_fn=first_column)


@pytest.mark.parametrize(
    ("first", "whole", "own_generator"),
    [
        ({"epochs": 2}, {"epochs": 5}, True),
        ({"steps": 6}, {"steps": 15}, True),
        ({"steps": 8}, {"steps": 15}, False),
        ({"steps": 4, "validate_every": 2}, {"steps": 15, "validate_every": 2}, False),
    ],
)
def test_batches_are_those_of_the_whole_run(
    tmp_path: Path, first: dict[str, int], whole: dict[str, int], own_generator: bool
) -> None:
    """Of shuffled loaders, of members' own loaders, and where a run ends within a pass."""
    # With steps= alone, the end of the first run closes an epoch that the whole run does not have; a shuffled
    # validation there would draw random numbers that the whole run does not draw.
    same_epochs = "steps" not in whole or "validate_every" in whole

    def train(seed: int, options: dict[str, int], **more: Any) -> tuple[Fleet, Spy, Any]:
        def generator(number: int) -> torch.Generator | None:
            return torch.Generator().manual_seed(number) if own_generator else None

        torch.manual_seed(seed)
        spy = Spy()
        fleet = points({"still": 0.0, "fast": 0.1, "third": 0.0}, own=("fast", "third"))
        loaders = {"fast": [batch.expand(3) for batch in BATCHES[:2]], "third": shuffled(generator(4))}
        validation = shuffled() if same_epochs else None
        history = run(
            fleet,
            shuffled(generator(3)),
            member_loaders=loaders,
            validation=validation,
            callbacks=[spy],
            **options,
            **more,
        )
        return fleet, spy, history

    straight, seen, expected = train(0, whole)
    _, before, _ = train(0, first, checkpoint=tmp_path)
    resumed, after, history = train(99, whole, checkpoint=tmp_path)
    assert before.losses + after.losses == seen.losses
    assert weights(resumed) == weights(straight)
    assert history["third"][-1].step == expected["third"][-1].step
    if same_epochs:
        assert history == expected


def resumable(i: int) -> Member:
    return scheduled(adam(mlp(i, dropout=0.4), f"m{i}", 0.02 * i), SCHEDULERS["cosine"])


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_members_are_those_of_the_whole_run(tmp_path: Path, how: str) -> None:
    """Dropout, schedules, a member already stopped and one that early stopping has begun to count."""

    def train(seed: int, *callbacks: Callback, epochs: int = 3, **options: Any) -> tuple[Fleet, Any]:
        torch.manual_seed(seed)
        fleet = Fleet([resumable(i) for i in range(2)], mse, EXAMPLE)
        dataset = TensorDataset(*vectors(5, size=15))
        history = fleet.fit(
            DataLoader(dataset, batch_size=5, shuffle=True),
            epochs=epochs,
            validation=[vectors(5, size=15)],
            callbacks=[EarlyStopping("val_loss", patience=1), *callbacks],
            progress=False,
            **options,
        )
        return fleet, history

    straight, expected = train(0)
    if how == "killed":  # within an epoch
        with pytest.raises(SystemExit):
            train(0, failing_at(8, SystemExit()), checkpoint=tmp_path)
    else:
        train(0, epochs=2, checkpoint=tmp_path)
    resumed, history = train(99, checkpoint=tmp_path)
    assert history == expected
    assert resumed.stopped() == straight.stopped()
    assert_same_states(states_of(resumed), states_of(straight))
    for one, other in zip(resumed.members, straight.members, strict=True):
        assert one.scheduler.state_dict() == other.scheduler.state_dict()


def test_ways_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        run(points(), epochs=1, checkpoint=tmp_path, resume="must")
    first = run(points(), epochs=1, checkpoint=tmp_path, resume="auto")
    for epochs, resume, num_steps in ((2, True, 3), (1, False, 3), (1, "must", 0), (2, "auto", 3)):
        spy = Spy()
        history = run(points(), epochs=epochs, checkpoint=tmp_path, resume=resume, callbacks=[spy])
        assert len(history["fast"]) == epochs
        assert len(spy.losses) == num_steps
        if not num_steps:  # a complete run returns at once
            assert spy.calls == [("start", 1, 3), ("end", 1, 3)]
            assert history == first


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "of another unit": lambda path: run(points(), steps=3, checkpoint=path),
    "without a fit": lambda path: points().save(path),
    "damaged": lambda path: (path / "checkpoint.json").write_text("{"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_checkpoints_that_cannot_be_gone_on_with(tmp_path: Path, kind: str) -> None:
    """They are refused, not overwritten."""
    UNUSABLE[kind](tmp_path)
    before = (tmp_path / "checkpoint.json").read_bytes()
    with pytest.raises(CheckpointError):
        run(points(), epochs=1, checkpoint=tmp_path)
    assert (tmp_path / "checkpoint.json").read_bytes() == before


def test_a_checkpoint_that_cannot_be_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To take it for missing would start over on top of it."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError

    fleet = points()
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(CheckpointError):
        run(fleet, epochs=1, checkpoint=tmp_path)
    assert fleet.num_steps == 0


# ---- the log -------------------------------------------------------------------------------------------


LRS = {"a": 0.1, 'b, "quoted"\nname': 0.2}


def log(path: Path, *callbacks: Callback, **options: Any) -> Any:
    return run(points(LRS), BATCHES[:2], callbacks=[CSVLog(path), *callbacks], **options)


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_rows_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.csv"
    stop = At(2, lambda state: state.stop_member("a"))
    history = log(path, stop, epochs=2, validation=BATCHES)
    rows = rows_of(path)
    assert list(rows[0])[:4] == ["epoch", "step", "member", "loss"]
    assert {"grad_norm", "accuracy", "val_loss"} < set(rows[0])
    assert [(row["epoch"], row["member"]) for row in rows] == [
        *(("1", name) for name in LRS),
        ("2", [*LRS][1]),
    ]
    for row, expected in zip(rows, history.to_rows(), strict=True):
        assert float(row["loss"]) == expected["loss"]
        assert float(row["val_loss"]) == expected["val_loss"]
        assert int(row["step"]) == expected["step"]


def test_a_resumed_log_is_that_of_the_whole_run(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.csv", tmp_path / "run.csv"
    log(whole, epochs=4)
    with pytest.raises(RuntimeError):
        log(path, failing_at(5, RuntimeError()), epochs=4, checkpoint=tmp_path / "c")
    with open(path, "a", encoding="utf-8") as file:
        file.write("3,6,a,0.123\n3,6,b")  # logged, then killed before the checkpoint, in the middle of a row
    for _ in range(2):
        log(path, epochs=4, checkpoint=tmp_path / "c")
        assert path.read_bytes() == whole.read_bytes()
        path.unlink()


def test_new_metrics_widen_the_header(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    log(path, epochs=1, checkpoint=tmp_path / "c")
    log(path, epochs=2, checkpoint=tmp_path / "c", validation=BATCHES)
    assert [row["val_loss"] == "" for row in rows_of(path)] == [True, True, False, False]


def test_files_that_are_there_already(tmp_path: Path) -> None:
    """An older log is kept under another name; what is no log is not overwritten by a resumed fit."""
    path, foreign = tmp_path / "run.csv", tmp_path / "thesis.csv"
    log(path, epochs=1)
    first = path.read_text()
    log(path, epochs=2)
    log(path, epochs=1, checkpoint=tmp_path / "c")
    assert (tmp_path / "run.csv.1").read_text() == first
    assert [len(rows_of(tmp_path / name)) for name in ("run.csv.2", "run.csv")] == [4, 2]
    assert not list(tmp_path.glob("*.tmp"))
    foreign.write_text("my,precious,data\n")
    with pytest.raises(ConfigError):
        log(foreign, epochs=2, checkpoint=tmp_path / "c")
    assert foreign.read_text() == "my,precious,data\n"
