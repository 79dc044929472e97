"""Histories and early stopping, without a fleet."""

from __future__ import annotations

import copy
import json
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from trainmux.errors import ConfigError
from trainmux.fleet import EarlyStopping, EpochRecord, History


def history_of(**losses: list[float]) -> History:
    history = History()
    for name, values in losses.items():
        for index, loss in enumerate(values):
            history.append(name, EpochRecord(index + 1, 10 * (index + 1), loss, {"val_acc": 1 - loss}))
    return history


def test_record_is_frozen_and_travels() -> None:
    source = {"a": 1.0}
    record = EpochRecord(1, 2, 0.5, source, "stopped")
    source["a"] = 2.0
    assert record.metrics["a"] == 1.0
    with pytest.raises(TypeError):
        record.metrics["a"] = 3.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        record.loss = 1.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(record)) == record
    assert copy.deepcopy(record) == record
    assert record.values() == {"loss": 0.5, "a": 1.0}


def test_best() -> None:
    history = history_of(a=[0.1, 0.5], b=[0.4, 0.3], c=[0.9, math.nan])
    assert history.best() == "b"
    assert history.best("loss", at="any") == "a"
    assert history.best("val_acc", "max") == "b"
    assert history.best("val_acc", "max", at="any") == "a"
    assert history.best("loss", "max") == "a"


@pytest.mark.parametrize(
    "arguments",
    [{"metric": "nothing"}, {"mode": "most"}, {"at": "first"}, {"metric": "val_loss", "mode": "max"}],
)
def test_best_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        history_of(a=[0.1]).best(**arguments)
    with pytest.raises(ConfigError):
        History().best()


def test_mapping_and_copies() -> None:
    history = history_of(a=[0.1, 0.2], b=[0.3])
    assert list(history) == ["a", "b"]
    assert len(history["a"]) == 2
    history["a"].clear()
    assert len(history["a"]) == 2
    with pytest.raises(KeyError):
        history["c"]


def test_rows_are_by_epoch() -> None:
    rows = history_of(a=[0.1, 0.2], b=[0.3, 0.4]).to_rows()
    assert [(row["epoch"], row["member"]) for row in rows] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert [row["loss"] for row in rows] == [0.1, 0.3, 0.2, 0.4]
    assert list(rows[0]) == ["epoch", "step", "member", "loss", "val_acc", "stopped"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"patience": 0},
        {"patience": True},
        {"patience": 1.5},
        {"patience": 1, "mode": "up"},
        {"patience": 1, "min_delta": -1},
        {"patience": 1, "min_delta": math.nan},
        {"patience": 1, "min_delta": math.inf},
    ],
)
def test_early_stopping_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EarlyStopping("loss", **arguments)


class Stage:
    """Just enough of a FitState for on_epoch_end."""

    def __init__(self) -> None:
        self.history = History()
        self.active = ("m",)
        self.epoch = 0
        self.fleet = SimpleNamespace(_origins={"m": self})
        self.stops: list[int] = []

    def stop_member(self, name: str) -> None:
        self.stops.append(self.epoch)
        self.active = ()


def first_stop(callback: EarlyStopping, values: list[float]) -> int | None:
    stage = Stage()
    for value in values:
        stage.epoch += 1
        stage.history.append("m", EpochRecord(stage.epoch, stage.epoch, value, {}))
        callback.on_epoch_end(stage)  # type: ignore[arg-type]
        if stage.stops:
            return stage.stops[0]
    return None


@pytest.mark.parametrize(
    ("arguments", "values", "epoch"),
    [
        ({"patience": 2}, [3, 2, 1, 0], None),
        ({"patience": 2}, [3, 4, 5, 0], 3),
        ({"patience": 2}, [3, 4, 2, 3, 3], 5),
        ({"patience": 1, "mode": "max"}, [3, 4, 4], 3),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.6], 2),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 1.8], None),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2}, [1, math.nan, 0.5, 0.6, math.nan], 5),
    ],
)
def test_early_stopping(arguments: dict[str, Any], values: list[float], epoch: int | None) -> None:
    assert first_stop(EarlyStopping("loss", **arguments), values) == epoch


def test_early_stopping_state() -> None:
    first = EarlyStopping("loss", patience=3)
    assert first_stop(first, [1, 2, 2]) is None
    second = EarlyStopping("loss", patience=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first_stop(second, [1.5]) == 1
