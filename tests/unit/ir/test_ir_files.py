"""Record files: exact both ways, strict reading, whole files only."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_record_is_read_back_as_it_was(tmp_path: Path, data: st.DataObject) -> None:
    st.register_type_strategy(str, st.text(st.characters(), max_size=5))  # half surrogate pairs too
    record = data.draw(st.from_type(Box))
    save(tmp_path / "box.json", record)
    assert repr(load(tmp_path / "box.json", Box)) == repr(record)  # tells -0.0 from 0.0 and 1 from 1.0


def test_the_text_is_strict_json_in_any_layout(file: Path) -> None:
    content = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(load(str(file), Box)) == repr(a_box())
    file.write_text(json.dumps(content, indent=7, sort_keys=True))
    assert repr(load(file, Box)) == repr(a_box())


def test_a_file_of_another_kind_or_version_or_one_that_was_edited_is_refused(file: Path) -> None:
    assert refusal(file, Profile).endswith("; profile again")
    text = file.read_text()
    file.write_text(text.replace('"budget_bytes":', '"budget_bytes":1'))
    refusal(file)
    for version in (2, 4, True, None, "3"):
        file.write_text(json.dumps({**json.loads(text), "version": version}))
        refusal(file)


SOMETHING_ELSE = (
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
)


def test_truncated_and_damaged_files_and_something_else_are_refused(file: Path) -> None:
    text = file.read_bytes()
    places = range(0, len(text), 61)
    damaged = [text[:at] + (b"1" if text[at : at + 1] != b"1" else b"2") + text[at + 1 :] for at in places]
    for wrong in (*SOMETHING_ELSE, *(text[:at] for at in places), *damaged):
        file.write_bytes(wrong)
        assert refusal(file).endswith("; pack it again"), wrong[:99]


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


def test_what_cannot_be_read_or_written_is_typed_and_leaves_the_old_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No such file" in refusal(tmp_path / "missing.json")
    assert "Is a directory" in refusal(tmp_path)
    write_file(tmp_path / "a" / "b" / "page.html", "größe")  # a missing folder is made
    assert (tmp_path / "a" / "b" / "page.html").read_text(encoding="utf-8") == "größe"
    for path in (file / "below.json", tmp_path, "no\0file"):
        with pytest.raises(CheckpointError):
            save(path, a_box())
    before = file.read_bytes()
    with pytest.raises(CheckpointError):
        save(file, replace(a_box(), note=3))  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        save(file, {})  # of no format

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

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
