"""Record files: exact both ways, strict reading, whole files only."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_programs import recompute_from_swapped, two_layers
from tests.record_files import edit

from trainmux.errors import CheckpointError, PlanError
from trainmux.ir import (
    Attempt,
    Multiplexing,
    PlanRecord,
    Profile,
    Program,
    Recomputation,
    Schedule,
    SubArray,
    Swap,
    file_format,
    load,
    save,
    write_file,
)
from trainmux.runtime import private_folder


@file_format("box", version=3, remedy="pack it again", error=CheckpointError)
@dataclass(frozen=True)
class Box:
    """Every type that records are made of."""

    plan: PlanRecord
    program: Program
    profiles: tuple[Profile, ...]
    sizes: dict[str, tuple[int, float]]
    note: str | None

    def __post_init__(self) -> None:
        if self.note == "forbidden":
            raise ValueError("must not be forbidden")


def a_plan(num_nodes: int = 9) -> PlanRecord:
    order = tuple((s, rank) for s in (0, 1) for rank in range(num_nodes))
    swaps = tuple(Swap(*node, node, node, node, "case 2a") for node in order[::4])
    again = tuple(Recomputation(*node, (1, 2), node) for node in order[::5])
    tried = Attempt("mutwo", (1, 1), Multiplexing.RING, 0.1 + 0.2, 10**12, 1e-300, 5e-324, "")
    lost = replace(tried, widths=(2,), step_seconds=float("inf"), lost_because="more than 20 GiB “budget”")
    members = (SubArray(("lr=0.1", "größe"), 0), SubArray(("lr=0.2",), 1))
    schedule = Schedule(Multiplexing.RING, order, swaps, again)
    seconds = (float("nan"), -0.0, float("-inf"), 0.9, 0)
    return PlanRecord(
        "mutwo", 20 << 30, 64, ("a1", "b2"), members, schedule, 19 << 30, 3, *seconds, (tried, lost)
    )


def a_box(num_nodes: int = 9) -> Box:
    return Box(a_plan(num_nodes), recompute_from_swapped().program, (two_layers(),), {"a": (1, 0.5)}, None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(tmp_path / "box.json", a_box())
    return tmp_path / "box.json"


def refusal(path: Path, kind: type[Any] = Box) -> str:
    with pytest.raises(CheckpointError if kind is Box else PlanError) as caught:
        load(path, kind)
    assert caught.value.__cause__ is None
    assert str(path) in str(caught.value)
    return str(caught.value)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    simple = {
        int: st.integers(-(2**70), 2**70),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(), max_size=5),  # half surrogate pairs too
        bool: st.booleans(),
        NoneType: st.none(),
    }
    if hint in simple:
        return simple[hint]
    if isinstance(hint, UnionType):
        return st.one_of(*map(values_of, get_args(hint)))
    if is_dataclass(hint):
        return st.builds(hint, **{name: values_of(kind) for name, kind in get_type_hints(hint).items()})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    items = get_args(hint)
    if hint.__origin__ is dict:
        return st.dictionaries(values_of(str), values_of(items[1]), max_size=2)
    if items[-1] is Ellipsis:
        return st.lists(values_of(items[0]), max_size=3).map(tuple)
    return st.tuples(*map(values_of, items))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(record=values_of(Box))
def test_any_record_is_read_back_as_it_was(tmp_path: Path, record: Box) -> None:
    save(tmp_path / "box.json", record)
    assert repr(load(tmp_path / "box.json", Box)) == repr(record)  # tells -0.0 from 0.0 and 1 from 1.0


def test_the_text_is_strict_json_in_any_layout(file: Path) -> None:
    content = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(load(str(file), Box)) == repr(a_box())
    file.write_text(json.dumps(content, indent=7, sort_keys=True))
    assert repr(load(file, Box)) == repr(a_box())


def test_truncated_and_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    save(file, two_layers())
    text = file.read_text()
    for at in range(0, len(text), 61):
        for damaged in (text[:at], text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :]):
            file.write_text(damaged)
            refusal(file, Profile)


def test_a_file_of_another_kind_or_version_or_one_that_was_edited_is_refused(file: Path) -> None:
    assert refusal(file, Profile).endswith("; profile again")
    text = file.read_text()
    file.write_text(text.replace('"budget_bytes":', '"budget_bytes":1'))
    refusal(file)
    for version in (2, 4, True, None, "3"):
        file.write_text(json.dumps({**json.loads(text), "version": version}))
        refusal(file)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"{}",
        b'{"trainmux": 3}',
        b'{"trainmux": "box", "version": 3}',
        b'{"trainmux": "box", "version": 3, "sha256": "", "box": {}}',
        b'{"trainmux": "box", "version": 3, "sha256": null, "box": NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"\xff\xfe\x00",
    ],
    ids=range(11),
)
def test_something_else_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "box.json").write_bytes(text)
    assert refusal(tmp_path / "box.json").endswith("; pack it again")


INSTRUCTION = ["program", "body", "instructions", 3]
SWAPS = ["plan", "schedule", "swaps"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["plan", "policy"], 3, "box.plan.policy must be str and is int 3"),
        (["plan", "budget_bytes"], 1.0, "box.plan.budget_bytes"),
        (["plan", "budget_bytes"], True, "box.plan.budget_bytes"),
        (["plan", "step_seconds"], "fast", "box.plan.step_seconds"),
        (["plan", "profiles", 1], 4, "box.plan.profiles[1]"),
        (["plan", "schedule"], [], "box.plan.schedule"),
        (["plan", "schedule"], {}, "box.plan.schedule lacks the field 'multiplexing'"),
        (["plan", "unknown"], 7, "box.plan has the unknown field 'unknown'"),
        (["plan", "schedule", "multiplexing"], ["ring"], "multiplexing must be one of turns, ring"),
        (["plan", "schedule", "order", 2], [0, 1, 2], "box.plan.schedule.order[2]"),
        ([*SWAPS, "rows", 1, 2], [0, "x"], "box.plan.schedule.swaps[1].offload_after"),
        ([*SWAPS, "rows", 0], {}, "box.plan.schedule.swaps[0]"),
        ([*SWAPS, "rows", 0], [1], "box.plan.schedule.swaps[0]"),
        ([*SWAPS, "columns"], ["a"], "box.plan.schedule.swaps"),
        (INSTRUCTION, ["Jump", 0], "instructions[3]"),
        (INSTRUCTION, [], "instructions[3]"),
        (INSTRUCTION, ["Compute", 0], "instructions[3]"),
        (INSTRUCTION, ["Wait", "sideways", 0], "instructions[3].lane"),
        (["sizes"], [], "box.sizes"),
        (["sizes", "a"], [1], "box.sizes['a']"),
        (["note"], 3, "box.note"),
        (["note"], "forbidden", "box must not be forbidden"),
    ],
)
def test_values_of_other_types_are_refused_even_with_a_checksum_that_fits(
    file: Path, path: list[str | int], value: Any, said: str
) -> None:
    edit(file, path, value)
    assert said in refusal(file)


def test_a_record_that_does_not_fit_is_not_written(file: Path) -> None:
    before = file.read_bytes()
    bad = replace(a_box(), plan=replace(a_plan(), policy=3))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        save(file, bad)
    with pytest.raises(PlanError):
        save(file, {})
    assert file.read_bytes() == before


def test_failures_of_the_file_system_are_typed_and_leave_the_old_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No such file" in refusal(tmp_path / "missing.json")
    assert "Is a directory" in refusal(tmp_path)
    write_file(tmp_path / "a" / "b" / "page.html", "größe")  # a missing folder is made
    assert (tmp_path / "a" / "b" / "page.html").read_text(encoding="utf-8") == "größe"
    for path in (file / "below.json", tmp_path, "no\0file"):
        with pytest.raises(CheckpointError):
            save(path, a_box())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save(file, replace(a_box(), note="new"))
        with pytest.raises(PlanError, match="No space left"):
            write_file(file, "text")
    assert file.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "box.json"]


@pytest.mark.skipif(os.name == "nt", reason="has no modes")
def test_a_private_folder_is_only_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "trainmux"
    for _ in range(2):
        assert private_folder(folder) == folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o755)  # read by others: closed again
    folder.chmod(0o775)  # others may have written
    with pytest.raises(PermissionError):
        private_folder(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").touch()
    for other in ("link", "file"):
        with pytest.raises(PermissionError):
            private_folder(tmp_path / other)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError):
        private_folder(folder)
