"""Files of a checkpoint: values come back, damage is found, a failed save leaves the old one in place."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet_cases import BATCHES, EXAMPLE, adam_member, assert_same, mse, states_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.record_files import edit
from torch import Tensor

from trainmux import Fleet
from trainmux.errors import CheckpointError

NAME = "ünïcode/名"
BASE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


class Saves:
    """A fleet of one that saves numbered states, and knows what each held."""

    def __init__(self) -> None:
        self.fleet = Fleet([adam_member(0, NAME)], mse, EXAMPLE)
        self._states: dict[int, dict[str, Tensor]] = {}

    def write(self, path: Path) -> int:
        """Train one step and save; returns the number of the checkpoint."""
        number = len(self._states) + 1
        self.fleet.step(BATCHES[number % len(BATCHES)])
        self._states[number] = states_of(self.fleet)[NAME]
        self.fleet.save(path, {"number": number, "inside": torch.tensor([number])})
        return number

    def read(self, path: Path) -> int:
        """Restore and compare with what was saved under that number."""
        extra = self.fleet.restore(path)
        assert extra["inside"].tolist() == [extra["number"]]
        assert_same(states_of(self.fleet)[NAME], self._states[extra["number"]])
        return extra["number"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def saves() -> Saves:
    return Saves()


def round_trip(fleet: Fleet, path: Path, extra: dict[str, Any]) -> Any:
    fleet.save(path, extra)
    return fleet.restore(path)


# ---- values --------------------------------------------------------------------------------------------


TENSORS = [
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.linspace(0, 1, 5, dtype=torch.float64),
    torch.tensor([True, False, True]),
    torch.tensor(3, dtype=torch.int8),
    torch.empty(0, 4, dtype=torch.float16),
    BASE.transpose(0, 2),
    BASE[:, 1],
    torch.tensor([1.0]).expand(3, 4),
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.tensor([1 + 2j, 3], dtype=torch.complex128).conj(),
    torch.tensor([0.5, 1.0, 2.0]).to(torch.float8_e4m3fn),
    torch.tensor([1, 65535], dtype=torch.uint16),
    torch.tensor([math.nan, math.inf]),
    torch.nn.Parameter(torch.ones(2)),
]


def as_bytes(tensor: Tensor) -> list[int]:
    found = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return found.tolist()  # type: ignore[no-any-return]


def test_tensors_round_trip(saves: Saves, tmp_path: Path) -> None:
    """Every dtype and layout comes back by value, from a plain safetensors file, in memory of its own."""
    found = round_trip(saves.fleet, tmp_path / "a" / "b", {"tensors": TENSORS})["tensors"]
    (file,) = (tmp_path / "a" / "b").glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert len(opened.keys()) > len(TENSORS)
    file.write_bytes(b"\0" * file.stat().st_size)
    for got, expected in zip(found, TENSORS, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert as_bytes(got) == as_bytes(expected)
        assert got.is_contiguous()
        assert not got.requires_grad


keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
hashables = st.recursive(keys, lambda inner: st.tuples(inner, inner), max_leaves=4)
values = st.recursive(
    keys,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(hashables, inner)
        | st.dictionaries(st.sampled_from(["$tuple", "$dict", "a", ""]), inner)
        | st.lists(inner).map(lambda items: deque(items, maxlen=len(items) + 1))
        | st.dictionaries(hashables, st.integers()).map(Counter)
        | st.lists(st.tuples(hashables, inner)).map(OrderedDict)
    ),
    max_leaves=12,
)


def same_types(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return all(same_types(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(same_types(a, b) for a, b in zip(left, right, strict=True))
    return True


SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(deadline=None, max_examples=15, suppress_health_check=SLOW)
@given(document=st.dictionaries(st.text(), values))
def test_documents_round_trip(saves: Saves, tmp_path: Path, document: dict[str, Any]) -> None:
    found = round_trip(saves.fleet, tmp_path, document)
    assert found == document
    assert same_types(found, document)


def test_special_values_round_trip(saves: Saves, tmp_path: Path) -> None:
    document = {
        "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324],
        "numpy": [np.float32(0.5), np.int64(3), np.bool_(True), np.str_("x")],
        "dtypes": [torch.bfloat16, torch.int64],
        "surrogate": "\ud800",
    }
    found = round_trip(saves.fleet, tmp_path, document)
    assert repr(found["floats"]) == repr(document["floats"])
    assert found["numpy"] == [0.5, 3, True, "x"]
    assert [type(value) for value in found["numpy"]] == [float, int, bool, str]
    assert (found["dtypes"], found["surrogate"]) == (document["dtypes"], "\ud800")


class Color(IntEnum):
    RED = 1


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"members": [0, {"scheduler": {"fn": lambda: 0}}]}, "members[1].scheduler.fn"),
        ({"x": {3: b"bytes"}}, "x[3]"),
        ({"x": (1, defaultdict(int))}, "x[1]"),
        ({"x": Color.RED}, "x"),
        ({"x": {1, 2}}, "x"),
        ({"x": np.zeros(2)}, "x"),
        ({"x": np.longdouble(1)}, "x"),
        ({"x": {torch.zeros(1): 1}}, "x"),
        ({"x": {frozenset(): 1}}, "x"),
        ({"x": 1 << 20000}, "x"),
        ({"x": complex(1, 2)}, "x"),
        ({"x": CYCLE}, "x"),
        ({"x": torch.ones(2, 2).to_sparse()}, ""),
        ({"x": torch.ones(2, device="meta")}, ""),
    ],
)
def test_what_cannot_be_saved_is_refused_by_path(
    saves: Saves, tmp_path: Path, value: dict[str, Any], path: str
) -> None:
    number = saves.write(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        saves.fleet.save(tmp_path, value)
    assert path in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    assert saves.read(tmp_path) == number


# ---- damage --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(saves: Saves, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("intact")
    saves.write(folder)
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_flipped_bits_and_cut_ends_are_found(
    saves: Saves, intact: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    """The damaged file is named, and the fleet stays as it was."""
    name = data.draw(st.sampled_from(sorted(intact)))
    position = data.draw(st.integers(0, 8 * len(intact[name]) - 1))
    damaged = bytearray(intact[name])
    if data.draw(st.booleans()):
        damaged[position // 8] ^= 1 << position % 8
    else:
        del damaged[position // 8 :]
    for other, raw in intact.items():
        (tmp_path / other).write_bytes(damaged if other == name else raw)
    before = states_of(saves.fleet)[NAME]
    with pytest.raises(CheckpointError) as caught:
        saves.fleet.restore(tmp_path)
    assert name in str(caught.value)
    assert_same(states_of(saves.fleet)[NAME], before)


def test_missing_and_foreign_files(saves: Saves, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.json"

    def refused() -> None:
        with pytest.raises(CheckpointError):
            saves.fleet.restore(tmp_path)

    refused()
    saves.write(tmp_path)
    text = file.read_text()
    for content in ('{"something": "else"}', "[" * 100_000, json.dumps({**json.loads(text), "version": 1})):
        file.write_text(content)
        refused()
    file.write_text(text)
    next(tmp_path.glob("*.safetensors")).unlink()
    refused()


@pytest.mark.parametrize(
    ("steps", "value"),
    [
        (["tensors_file"], "../../etc/passwd"),
        (["tensors_file"], 3),
        (["raw_tensors"], []),
        (["raw_tensors"], {"w": ["nn", [1]]}),
        (["raw_tensors"], {"other": ["float64", [1]]}),
        (["document"], {"$tuple": []}),
        (["document"], 1),
        (["document", "kind"], "a cake"),
        *(
            (["document", "extra", "number"], value)
            for value in (
                {"$tensor": "missing"},
                {"$eval": "1"},
                {"$dtype": "nn"},
                {"$dtype": 3},
                {"$float": "1e5"},
                {"$tuple": 3},
                {"$tuple": [], "b": 1},
                {"$deque": [1]},
                {"$dict": [[[], 1]]},
                {"$counter": 4},
            )
        ),
    ],
)
def test_forged_json_is_refused(saves: Saves, tmp_path: Path, steps: list[str], value: object) -> None:
    saves.write(tmp_path)
    edit(tmp_path / "checkpoint.json", steps, value)
    with pytest.raises(CheckpointError):
        saves.fleet.restore(tmp_path)


def test_a_reader_follows_a_writer(saves: Saves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors vanish between the reader's two looks because a newer checkpoint was committed."""
    saves.write(tmp_path)
    original, newer = json.loads, []

    def overtaken(*args: Any, **options: Any) -> Any:
        if not newer:
            newer.append(0)
            newer[0] = saves.write(tmp_path)
        return original(*args, **options)

    monkeypatch.setattr(json, "loads", overtaken)
    assert saves.read(tmp_path) == newer[0]


# ---- failures while writing ----------------------------------------------------------------------------


CALLS = ["fsync", "replace", "fsync", "fsync", "replace", "fsync", "unlink"]
"""Calls of one save: the tensors, their folder, the JSON file, its folder; then the old tensors go."""

COMMIT = 5
"""The call that puts the new JSON file in the place of the old one."""


class Killed(BaseException):
    """The process ends here: nothing after it may run, clean-up neither."""


@pytest.fixture
def failing() -> Iterator[Callable[..., list[str]]]:
    """Let the ``when``-th call that changes the disk fail; with ``forever`` all later ones, too."""
    with pytest.MonkeyPatch.context() as patch:

        def arm(when: int, error: BaseException | None, forever: bool = False) -> list[str]:
            calls: list[str] = []

            def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any, **kwargs: Any) -> Any:
                    calls.append(name)
                    if error is not None and (len(calls) == when or (forever and len(calls) > when)):
                        raise error
                    return original(*args, **kwargs)

                return call

            patch.undo()
            if when:
                for name in ("replace", "fsync", "unlink"):
                    patch.setattr(os, name, wrapped(name, getattr(os, name)))
            return calls

        yield arm


def test_a_kill_at_every_call(saves: Saves, tmp_path: Path, failing: Callable[..., list[str]]) -> None:
    old = saves.write(tmp_path)
    calls = failing(1, None)
    old = saves.write(tmp_path)
    assert calls == CALLS
    for when in range(1, len(CALLS) + 1):
        failing(when, Killed(), forever=True)
        with pytest.raises(Killed):
            saves.write(tmp_path)
        failing(0, None)
        assert saves.read(tmp_path) == (old + 1 if when > COMMIT else old)
        old = saves.write(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_error_at_every_call(
    saves: Saves, tmp_path: Path, failing: Callable[..., list[str]], error: BaseException
) -> None:
    raised = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    old = saves.write(tmp_path)
    for when in range(1, len(CALLS)):
        failing(when, error)
        with pytest.raises(raised):
            saves.write(tmp_path)
        failing(0, None)
        is_committed = when > COMMIT
        assert saves.read(tmp_path) == (old + 1 if is_committed else old)
        # Once committed the old tensors stay until the next save; before, nothing of the new ones does.
        assert len(list(tmp_path.iterdir())) == (3 if is_committed else 2)
        old = saves.write(tmp_path)


def test_failures_without_harm(
    saves: Saves, tmp_path: Path, failing: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be flushed, old tensors that stay, an interrupt right after the commit."""
    saves.write(tmp_path)
    for when, number in ((3, errno.EINVAL), (len(CALLS), errno.EPERM)):
        failing(when, OSError(number, "no"))
        assert saves.write(tmp_path) == saves.read(tmp_path)
    failing(0, None)
    original = os.replace

    def replace_then_interrupt(source: Any, target: Any) -> None:
        original(source, target)
        if str(target).endswith("checkpoint.json"):
            raise KeyboardInterrupt

    last = saves.read(tmp_path)
    monkeypatch.setattr(os, "replace", replace_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        saves.write(tmp_path)
    assert saves.read(tmp_path) == last + 1


def test_a_first_save_that_fails_leaves_nothing(
    saves: Saves, tmp_path: Path, failing: Callable[..., list[str]]
) -> None:
    failing(2, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(CheckpointError):
        saves.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_files_of_others_stay(saves: Saves, tmp_path: Path) -> None:
    token = "0123456789abcdef"
    ours = {
        f"tensors-{token}.safetensors",
        f".tensors-{token}.safetensors.{token}.tmp",
        f".checkpoint.json.{token}.tmp",
    }
    foreign = {"notes.txt", "tensors-mine.safetensors", "model.safetensors"}
    for name in ours | foreign:
        (tmp_path / name).write_text("x")
    saves.write(tmp_path)
    names = {entry.name for entry in tmp_path.iterdir()}
    assert foreign < names
    assert not ours & names
    for path in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "below"):
        with pytest.raises(CheckpointError):
            saves.write(path)
