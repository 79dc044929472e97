"""Measured times on disk: what is kept, what is passed over, and that nothing is lost between writers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from trainmux.fusion.strategies import TimesFile
from trainmux.fusion.strategies import _store as store

CPU = torch.device("cpu")


def file_in(folder: Path) -> TimesFile:
    return TimesFile(CPU, folder)


def test_what_is_added_is_read_again(tmp_path: Path) -> None:
    file_in(tmp_path).add({"a": {"grouped": 0.25, "bmm": None}})
    file_in(tmp_path).add({"b": {"bmm": 1.0}})
    assert file_in(tmp_path).read() == {"a": {"grouped": 0.25, "bmm": None}, "b": {"bmm": 1.0}}


def test_a_second_writer_keeps_what_the_first_has_written(tmp_path: Path) -> None:
    first, second = file_in(tmp_path), file_in(tmp_path)
    first.add({"a": {"x": 1.0}})
    second.add({"b": {"x": 2.0}})
    first.add({"c": {"x": 3.0}})
    assert sorted(second.read()) == ["a", "b", "c"]
    assert os.listdir(tmp_path) == [first.path.name]  # nothing half-written is left


def test_nothing_is_known_before_anything_was_measured(tmp_path: Path) -> None:
    assert file_in(tmp_path / "not there").read() == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"times": {}}',
        '{"times": 3}',
    ],
)
def test_a_broken_file_is_passed_over_and_written_anew(tmp_path: Path, content: str) -> None:
    file = file_in(tmp_path)
    file.path.write_text(content)
    assert file.read() == {}
    file.add({"a": {"x": 1.0}})
    assert file.read() == {"a": {"x": 1.0}}


@pytest.mark.parametrize("wrong", [0.0, -1.0, "fast", [1.0], True, {"x": 1.0}])
def test_a_file_with_times_that_are_none_is_passed_over(tmp_path: Path, wrong: object) -> None:
    file = file_in(tmp_path)
    file.add({"a": {"x": 1.0}})
    content = json.loads(file.path.read_text())
    content["times"]["a"]["x"] = wrong
    file.path.write_text(json.dumps(content))
    assert file.read() == {}


@pytest.mark.parametrize("key", ["device", "torch", "cudnn", "source"])
def test_a_stale_file_is_passed_over(tmp_path: Path, key: str) -> None:
    file = file_in(tmp_path)
    file.add({"a": {"x": 1.0}})
    content = json.loads(file.path.read_text())
    content[key] = "another"
    file.path.write_text(json.dumps(content))
    assert file.read() == {}
    file.add({"b": {"x": 2.0}})
    assert file.read() == {"b": {"x": 2.0}}


def test_there_is_one_file_for_each_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = file_in(tmp_path).path
    monkeypatch.setattr(torch, "__version__", "9.9.0+cu999")
    there = file_in(tmp_path).path
    assert here != there
    assert there.name == "cpu_9.9.0_cu999_None.json"


def test_a_folder_that_cannot_be_written_to_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    file = file_in(tmp_path / "a file" / "below it")
    file.add({"a": {"x": 1.0}})
    assert file.read() == {}


def test_the_folder_is_named_by_a_variable_or_lies_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINMUX_STRATEGY_DIR", str(tmp_path / "named"))
    assert store.default_folder() == tmp_path / "named"
    monkeypatch.delenv("TRAINMUX_STRATEGY_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.default_folder() == tmp_path / "trainmux" / "strategies"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.default_folder() == tmp_path / "home" / ".cache" / "trainmux" / "strategies"
