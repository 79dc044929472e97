"""Checkpoints: a restored fleet trains on bit for bit, damage is found, a failed save leaves the old one."""

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
from equivalence import same_bits
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    ONE_OF_EACH,
    OPTIMIZERS,
    SCHEDULERS,
    adam,
    adam_member,
    assert_same,
    assert_same_fleets,
    dropout_member,
    mlp,
    mse,
    projected,
    scheduled,
    states_of,
    train,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.record_files import edit
from torch import Tensor, nn
from torch.optim import lr_scheduler

from trainmux import Fleet, Member
from trainmux.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("built_once")


Make = Callable[[int, bool], Member]


def nothing(fleet: Fleet) -> None:
    pass


def with_constants(*constants: float) -> Make:
    return lambda i, elsewhere: adam(projected(i, constants[i + 2 * elsewhere]), f"m{i}")


def optimized(kind: str) -> Make:
    """With a learning rate of its own in the process that restores."""

    def make(i: int, elsewhere: bool) -> Member:
        model = mlp(i + 7 * elsewhere)
        member = Member(model, OPTIMIZERS[kind](model, i), f"m{i}")
        for group in member.optimizer.param_groups:
            group["lr"] *= 3.0 if elsewhere else 1.0
        return member

    return make


def with_schedule(i: int, elsewhere: bool) -> Member:
    schedules = [*SCHEDULERS.values(), lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)]
    return scheduled(adam_member(i), schedules[i])


def poisoned(i: int, elsewhere: bool) -> Member:
    member = dropout_member(i)
    if i == 2 and not elsewhere:
        nn.init.constant_(member.model[4].weight, math.inf)
    return member


def two_epochs(fleet: Fleet) -> None:
    for value in (1.0, 2.0):
        fleet.end_epoch({name: {"loss": value} for name in fleet.names})


ROWS: dict[str, tuple[Make, int, dict[str, Any], Callable[[Fleet], object]]] = {
    # By name: what makes members (there, and where they are restored), how many, settings, and what happens.
    **{kind: (optimized(kind), 2, {}, nothing) for kind in ONE_OF_EACH},
    "schedules": (with_schedule, len(SCHEDULERS) + 1, {}, two_epochs),
    "amid accumulation": (lambda i, elsewhere: adam_member(i), 2, {"accumulate": 3}, nothing),
    "stopped and frozen members": (poisoned, 3, {}, lambda fleet: fleet.stop("m1")),
    # Another process draws other constants: without the saved ones the weights are worth nothing.
    "shared constants": (with_constants(2.0, 2.0, 5.0, 5.0), 2, {}, nothing),
    "constants no longer shared": (with_constants(2.0, 2.0, 5.0, 6.0), 2, {}, nothing),
    "constants shared now": (with_constants(2.0, 3.0, 5.0, 5.0), 2, {}, nothing),
}


SELDOM = set(ONE_OF_EACH) - {"adam-amsgrad", "rmsprop-centered", "param-groups"}
"""Optimizers that add no kind of state."""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_member_that_was_saved_while_it_waited_trains_from_the_next_batch_on(
    accumulate: int, tmp_path: Path
) -> None:
    fleet = Fleet([adam_member(0)], mse, EXAMPLE, accumulate=2)
    fleet.step(BATCHES[0])
    fleet.add(adam_member(1))  # waits for the next update
    fleet.save_member("m1", tmp_path / "m1")
    other, plain = (Fleet([adam_member(1)], mse, EXAMPLE, accumulate=accumulate) for _ in range(2))
    other.load_member("m1", tmp_path / "m1")
    for each in (other, plain):
        train(each, BATCHES[:2])
    assert_same_fleets(other, plain)


def test_a_stopped_member_that_is_loaded_between_two_updates_stays_stopped(tmp_path: Path) -> None:
    fleet = Fleet([adam_member(0), adam_member(1)], mse, EXAMPLE, accumulate=2)
    fleet.stop("m1")
    fleet.save_member("m1", tmp_path / "m1")
    before = states_of(fleet)["m1"]
    fleet.step(BATCHES[0])
    fleet.load_member("m1", tmp_path / "m1")
    train(fleet, BATCHES[1:4])
    assert fleet.stopped() == {"m1": "stopped"}
    assert_same(states_of(fleet)["m1"], before)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.extensive] if row in SELDOM else []) for row in ROWS]
)
def test_a_restored_fleet_goes_on_bit_for_bit(row: str, tmp_path: Path) -> None:
    """As the one that was saved, which goes on as one that was not; and as often as it is restored."""
    make, num, options, happens = ROWS[row]
    saved, control = (Fleet([make(i, False) for i in range(num)], mse, EXAMPLE, **options) for _ in range(2))
    for fleet in (saved, control):
        train(fleet, BATCHES[:4])
        happens(fleet)
    saved.save(tmp_path, {"note": [1, 2.5, "three"]})
    restored = Fleet([make(i, True) for i in range(num)], mse, EXAMPLE, **options)
    assert restored.restore(tmp_path) == {"note": [1, 2.5, "three"]}
    assert restored.num_steps == 4
    assert restored.stopped() == saved.stopped()
    assert (row == "stopped and frozen members") == bool(saved.stopped())
    expected = [control.step(batch) for batch in BATCHES[4:8]]
    for fleet, is_again in ((saved, False), (restored, False), (saved, True)):
        if is_again:  # which starts a member again that was stopped since
            fleet.stop("m0")
            fleet.restore(tmp_path)
        assert all(map(same_bits, [fleet.step(batch) for batch in BATCHES[4:8]], expected))
        assert_same_fleets(fleet, control)
        assert_same(fleet.metrics, control.metrics)


# ---- values --------------------------------------------------------------------------------------------

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


def test_tensors_and_special_values_round_trip(saves: Saves, tmp_path: Path) -> None:
    """Every dtype and layout comes back by value, from a plain safetensors file, in memory of its own."""
    document = {
        "tensors": TENSORS,
        "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324],
        "numpy": [np.float32(0.5), np.int64(3), np.bool_(True), np.str_("x")],
        "others": [torch.bfloat16, torch.int64, "\ud800"],
    }
    whole = round_trip(saves.fleet, tmp_path / "a" / "b", document)
    assert repr(whole["floats"]) == repr(document["floats"])
    assert repr(whole["numpy"]) == repr([0.5, 3, True, "x"])
    assert whole["others"] == document["others"]
    found = whole["tensors"]
    (file,) = (tmp_path / "a" / "b").glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert len(opened.keys()) > len(TENSORS)
    file.write_bytes(b"\0" * file.stat().st_size)
    for got, expected in zip(found, TENSORS, strict=True):
        assert same_bits(got, expected.resolve_conj())
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


SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(deadline=None, max_examples=15, suppress_health_check=SLOW)
@given(document=st.dictionaries(st.text(), values))
def test_documents_round_trip(saves: Saves, tmp_path: Path, document: dict[str, Any]) -> None:
    assert repr(round_trip(saves.fleet, tmp_path, document)) == repr(document)  # types and order included


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


@pytest.mark.parametrize(
    "error", [Killed(), OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr
)
def test_a_save_that_fails_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    saves: Saves, tmp_path: Path, failing: Callable[..., list[str]], error: BaseException
) -> None:
    raised = CheckpointError if isinstance(error, OSError) else type(error)
    saves.write(tmp_path)
    calls = failing(1, None)
    old = saves.write(tmp_path)
    is_committed = []
    for when in range(1, len(calls) + 1):
        failing(when, error, forever=isinstance(error, Killed))
        try:
            saves.write(tmp_path)
        except raised:
            failing(0, None)
            found = saves.read(tmp_path)
            assert found in (old, old + 1)
            is_committed.append(found == old + 1)
            # Once committed the old tensors stay until the next save; before, no new ones do.
            assert isinstance(error, Killed) or len(list(tmp_path.iterdir())) == 2 + is_committed[-1]
        failing(0, None)
        old = saves.write(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    assert is_committed == sorted(is_committed)
    assert set(is_committed) == {False, True}


def test_a_first_save_that_fails_leaves_nothing_and_other_failures_do_no_harm(
    saves: Saves, tmp_path: Path, failing: Callable[..., list[str]]
) -> None:
    """A folder that cannot be flushed, and old tensors that stay."""
    failing(2, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(CheckpointError):
        saves.write(tmp_path)
    assert not list(tmp_path.iterdir())
    failing(0, None)
    saves.write(tmp_path)
    for when, number in ((3, errno.EINVAL), (7, errno.EPERM)):
        failing(when, OSError(number, "no"))
        assert saves.write(tmp_path) == saves.read(tmp_path)


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
