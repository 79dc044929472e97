"""Profiles, plans and programs as JSON: exact both ways, whole files, refusals with reasons."""

from __future__ import annotations

import json
import os
import time
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_handmade import pair_with_swapped_state, recompute_from_swapped
from ir_programs import two_layers

from trainmux.errors import PlanError
from trainmux.ir import (
    Attempt,
    Multiplexing,
    Plan,
    Profile,
    Program,
    Recomputation,
    Schedule,
    SubArray,
    Swap,
    from_json,
    load,
    save,
    to_json,
)
from trainmux.ir._json import _checksum

Record = Profile | Plan | Program


def a_plan(num_nodes: int = 9) -> Plan:
    order = tuple((s, rank) for s in (0, 1) for rank in range(num_nodes))
    swaps = tuple(
        Swap(s, rank, (s, rank), (s, rank + 1), (s, rank + 2), "case 2a")
        for s in (0, 1)
        for rank in range(0, num_nodes, 4)
    )
    again = tuple(Recomputation(1, rank, (rank, rank + 1), (1, rank + 3)) for rank in range(0, num_nodes, 5))
    tried = Attempt("mutwo", (1, 1), Multiplexing.RING, 0.1 + 0.2, 10**12, 1e-300, 5e-324, "")
    lost = replace(tried, widths=(2,), step_seconds=float("inf"), lost_because="more than 20 GiB “budget”")
    return Plan(
        policy="mutwo",
        budget_bytes=20 << 30,
        fixed_bytes=64 << 20,
        profiles=("a1", "b2"),
        partition=(SubArray(("lr=0.1", "größe"), 0), SubArray(("lr=0.2",), 1)),
        schedule=Schedule(Multiplexing.RING, order, swaps, again),
        peak_bytes=19 << 30,
        host_bytes=3 << 30,
        step_seconds=1 / 3,
        stall_seconds=-0.0,
        recompute_seconds=2.5e-7,
        swap_overlap=0.9,
        recompute_share=0,
        attempts=(tried, lost),
    )


def all_records() -> list[Record]:
    return [two_layers(), a_plan(), pair_with_swapped_state().program, recompute_from_swapped().program]


records = pytest.mark.parametrize("record", all_records(), ids=lambda record: type(record).__name__)


@records
def test_what_is_written_is_read_back(record: Record) -> None:
    text = to_json(record)
    again = from_json(text, type(record))
    assert again == record
    assert repr(again) == repr(record)  # tells -0.0 from 0.0 and 1 from 1.0
    assert to_json(again) == text
    assert from_json(text.encode(), type(record)) == record


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that records are made of."""
    simple = {
        int: st.integers(-(2**70), 2**70),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(), max_size=5),  # half surrogate pairs too
        bool: st.booleans(),
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
    if items[-1] is Ellipsis:
        return st.lists(values_of(items[0]), max_size=3).map(tuple)
    return st.tuples(*map(values_of, items))


@pytest.mark.parametrize("kind", [Profile, Plan, Program])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_record_is_read_back_as_it_was(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(values_of(kind))
    again = from_json(to_json(record), kind)
    assert again == record
    assert repr(again) == repr(record)


def test_infinite_and_undefined_numbers_come_back() -> None:
    strange = replace(a_plan(), step_seconds=float("nan"), stall_seconds=float("-inf"))
    text = to_json(strange)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(from_json(text, Plan)) == repr(strange)


def test_what_was_written_before_a_field_was_there_has_its_default() -> None:
    profile = replace(two_layers(), slowdown_by_copies=1.0)
    document = json.loads(to_json(profile))
    for name in ("slowdown_by_copies", "seconds_beside", "num_branches", "meeting_seconds"):
        del document["profile"][name]
    document["sha256"] = _checksum("profile", document["profile"])
    assert from_json(json.dumps(document), Profile) == profile
    del document["profile"]["width"]
    document["sha256"] = _checksum("profile", document["profile"])
    with pytest.raises(PlanError, match="an object with the keys"):
        from_json(json.dumps(document), Profile)


def test_a_table_from_before_a_column_was_there_has_its_default() -> None:
    plan = a_plan()
    document = json.loads(to_json(plan))
    attempts = document["plan"]["attempts"]
    assert attempts["columns"].pop() == "num_branches"
    attempts["rows"] = [row[:-1] for row in attempts["rows"]]
    document["sha256"] = _checksum("plan", document["plan"])
    assert from_json(json.dumps(document), Plan) == plan
    attempts["columns"].pop()  # lost_because, which has no default
    document["sha256"] = _checksum("plan", document["plan"])
    with pytest.raises(PlanError, match="a table with the columns"):
        from_json(json.dumps(document), Plan)


def test_the_text_is_readable_and_compact() -> None:
    lines = to_json(two_layers()).splitlines()
    assert lines[0].startswith('{"trainmux": "profile", "version": 1, "sha256": "')
    rows = [line.strip() for line in lines if line.strip().startswith('["')]
    assert rows[-1] == '["up_w1", "update", [13], [], [1, 3], 0.001, 8, true]]},'
    assert lines[-1].strip() == '"meeting_seconds": 0.0}}'
    program = to_json(recompute_from_swapped().program)
    assert '\n   ["Wait", "compute", 0],\n' in program
    assert '\n   ["Recompute", 0, 0, [5]],\n' in program
    assert max(map(len, to_json(a_plan(num_nodes=500)).splitlines())) <= 112


# Refusals


def refusal(text: str | bytes, kind: type[Any] = Plan) -> str:
    with pytest.raises(PlanError) as caught:
        from_json(text, kind)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_a_document_of_another_kind_is_refused() -> None:
    for record in all_records():
        for kind in {Profile, Plan, Program} - {type(record)}:
            text = refusal(to_json(record), kind)
            assert f"expected a {kind.__name__.lower()} in the text" in text
            assert f"got a '{type(record).__name__.lower()}' document" in text
            assert "; " in text


@records
def test_a_truncated_document_is_refused(record: Record) -> None:
    text = to_json(record)
    for length in [*range(40), *range(40, len(text) - 1, 97), len(text) - 2]:
        refusal(text[:length], type(record))


def test_a_document_with_one_character_changed_is_refused() -> None:
    text = to_json(replace(two_layers(), fingerprint="abc"))
    for at in range(0, len(text), 7):
        changed = text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :]
        if text[at] not in " \n":
            refusal(changed, Profile)


def test_an_edited_document_is_refused_by_its_checksum() -> None:
    text = to_json(a_plan())
    assert "its checksum does not fit" in refusal(text.replace('"budget_bytes": ', '"budget_bytes": 1'))
    document = json.loads(text)
    document["plan"]["schedule"]["order"].reverse()
    assert "its checksum does not fit" in refusal(json.dumps(document))


def test_laid_out_otherwise_it_is_the_same_document() -> None:
    document = json.loads(to_json(a_plan()))
    assert from_json(json.dumps(document, indent=7, sort_keys=True), Plan) == a_plan()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"trainmux": 3}',
        '{"trainmux": "plan"}',
        '{"trainmux": "plan", "version": 1}',
        '{"trainmux": "plan", "version": 1, "sha256": "", "plan": {}}',
        '{"trainmux": "plan", "version": 1, "sha256": null, "plan": NaN}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        b"\xff\xfe\x00",
        b"\x80",
        to_json(a_plan()) + "x",
    ],
    ids=range(15),
)
def test_what_is_no_plan_is_refused(text: str | bytes) -> None:
    message = refusal(text)
    assert message.startswith("expected a plan in the text, but got ")
    assert message.endswith("; plan again and save it anew")


def test_another_format_version_is_refused() -> None:
    document = json.loads(to_json(a_plan()))
    document["version"] = 2
    assert "got format version 2, and this trainmux reads 1" in refusal(json.dumps(document))
    document["version"] = True
    refusal(json.dumps(document))


def sealed(kind: str, content: Any) -> str:
    """A document whose checksum fits whatever it holds."""
    return json.dumps({"trainmux": kind, "version": 1, "sha256": _checksum(kind, content), kind: content})


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["policy"], 3, "plan.policy must be str and is int 3"),
        (["budget_bytes"], 1.0, "plan.budget_bytes must be int and is float 1.0"),
        (["budget_bytes"], True, "plan.budget_bytes must be int and is bool True"),
        (["step_seconds"], "fast", "plan.step_seconds must be float and is str 'fast'"),
        (["step_seconds"], None, "plan.step_seconds must be float"),
        (["profiles"], "a1", "plan.profiles must be a list and is str 'a1'"),
        (["profiles", 1], 4, "plan.profiles[1] must be str and is int 4"),
        (["schedule"], [], "plan.schedule must be an object with the keys multiplexing, order"),
        (["schedule", "multiplexing"], "ringlike", "plan.schedule.multiplexing must be one of turns, ring"),
        (["schedule", "multiplexing"], ["ring"], "plan.schedule.multiplexing must be one of turns, ring"),
        (["schedule", "order", 2], [0, 1, 2], "plan.schedule.order[2] must be a list of 2"),
        (["schedule", "order", 2], "ab", "plan.schedule.order[2] must be a list of 2"),
        (["schedule", "swaps", "rows", 1, 2], [0, "x"], "plan.schedule.swaps[1].offload_after"),
        (["schedule", "swaps", "rows", 0], {}, "plan.schedule.swaps[0] must be a list"),
        (["schedule", "swaps", "rows", 0], [1], "plan.schedule.swaps[0] must be 6 values of a Swap"),
        (["schedule", "swaps", "columns"], ["a"], "plan.schedule.swaps must be a table with the columns"),
        (["partition"], 7, "plan.partition must be a table with the columns members, profile"),
        (["unknown"], 7, "plan must be an object with the keys policy"),
    ],
)
def test_values_of_other_types_are_refused_even_with_a_checksum_that_fits(
    path: list[str | int], value: Any, said: str
) -> None:
    content = json.loads(to_json(a_plan()))["plan"]
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert said in refusal(sealed("plan", content))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (["Jump", 0, 0], "must be a list that begins with one of Compute, Recompute"),
        ([], "must be a list that begins with one of"),
        ([["Compute"], 0, 0], "must be a list that begins with one of"),
        (["Compute", 0], "must be 2 values of a Compute"),
        (["Wait", "sideways", 0], "instructions[3].lane must be one of compute, device to host"),
        ("Free", "must be a list"),
    ],
)
def test_unknown_instructions_are_refused(row: Any, said: str) -> None:
    content = json.loads(to_json(recompute_from_swapped().program))["program"]
    content["body"]["instructions"][3] = row
    message = refusal(sealed("program", content), Program)
    assert "program.body.instructions[3]" in message
    assert said in message


def test_a_field_of_another_type_is_not_written() -> None:
    bad = replace(a_plan(), profiles=["a1", "b2"])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"plan\.profiles must be a tuple and is list"):
        to_json(bad)
    with pytest.raises(PlanError, match=r"plan\.peak_bytes must be int and is float"):
        to_json(replace(a_plan(), peak_bytes=1.5))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="expected one of Profile, Plan, Program, but got dict"):
        to_json({})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="expected one of Profile, Plan, Program, but got int"):
        from_json("{}", int)  # type: ignore[type-var]


# Files


@records
def test_files_come_back(tmp_path: Path, record: Record) -> None:
    file = tmp_path / "record.json"
    save(file, record)
    assert load(file, type(record)) == record
    save(str(file), record)
    assert load(str(file), type(record)) == record
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(to_json(a_plan())[:-100])
    with pytest.raises(PlanError, match=r"plan\.json, but got text that is truncated or edited"):
        load(file, Plan)


def test_files_that_cannot_be_read_or_written_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"expected a plan in .*missing\.json, but got: No such file"):
        load(tmp_path / "missing.json", Plan)
    with pytest.raises(PlanError, match="but got: Is a directory"):
        load(tmp_path, Plan)
    with pytest.raises(PlanError, match="name a file in a folder that exists"):
        save(tmp_path / "nowhere" / "plan.json", a_plan())
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError):
        save(tmp_path / "folder", a_plan())
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    save(file, a_plan())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match="No space left on device"):
        save(file, replace(a_plan(), policy="other"))
    monkeypatch.undo()
    assert load(file, Plan) == a_plan()
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_of_four_thousand_nodes_loads_at_once() -> None:
    plan = a_plan(num_nodes=2000)
    text = to_json(plan)
    start = time.process_time()
    assert from_json(text, Plan) == plan
    assert time.process_time() - start < 0.5
