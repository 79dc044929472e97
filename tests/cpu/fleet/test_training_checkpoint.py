"""Checkpoints: round trips, damage, and failures at every system call."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.record_files import edit

from trainmux.errors import CheckpointError
from trainmux.fleet._checkpoint_files import checkpoint_exists, read_checkpoint, write_checkpoint

BASE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
TENSORS = {
    "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "f64": torch.linspace(0, 1, 5, dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "int8": torch.tensor([-1, 2], dtype=torch.int8),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4, dtype=torch.float16),
    "transposed": BASE.transpose(0, 2),
    "expanded": torch.tensor([1.0]).expand(3, 4),
    "view a": BASE[0],
    "view b": BASE[:, 1],
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "complex": torch.tensor([1 + 2j, 3], dtype=torch.complex128),
    "conj": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
    "complex empty": torch.empty(0, 2, dtype=torch.complex64),
    "f8": torch.tensor([0.5, 1.0, 2.0]).to(torch.float8_e4m3fn),
    "u16": torch.tensor([1, 65535], dtype=torch.uint16),
    "nan": torch.tensor([float("nan"), float("inf")]),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "ünïcode/名": torch.ones(1),
}


def content(number: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return {"w": torch.full((16,), float(number))}, {"number": number, "inside": torch.tensor([number])}


def number_in(path: Path) -> int:
    tensors, document = read_checkpoint(path)
    number = document["number"]
    assert torch.equal(tensors["w"], torch.full((16,), float(number)))
    assert document["inside"].tolist() == [number]
    return number


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*flat)


def test_tensors_round_trip(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a" / "b", TENSORS, {"x": [TENSORS["complex"]]})
    tensors, document = read_checkpoint(tmp_path / "a" / "b")
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert same_bytes(tensors[name], tensor), name
        assert tensors[name].is_contiguous()
        assert not tensors[name].requires_grad
    assert same_bytes(document["x"][0], TENSORS["complex"])


def test_read_tensors_own_their_memory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *content(1))
    tensors, _ = read_checkpoint(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(b"\0" * file.stat().st_size)
    assert tensors["w"].tolist() == [1.0] * 16
    tensors["w"].add_(1)


def test_file_is_plain_safetensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64)}, {})
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == {"a", "b"}


def test_sweep_leaves_foreign_files(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    ours = [
        f"tensors-{token}.safetensors",
        f".tensors-{token}.safetensors.{token}.tmp",
        f".checkpoint.json.{token}.tmp",
    ]
    foreign = ["notes.txt", "tensors-mine.safetensors", "model.safetensors"]
    for name in ours + foreign:
        (tmp_path / name).write_text("x")
    write_checkpoint(tmp_path, *content(1))
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names.issuperset(foreign)
    assert not names.intersection(ours)


def test_exists(tmp_path: Path) -> None:
    assert not checkpoint_exists(tmp_path)
    assert not checkpoint_exists(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert not checkpoint_exists(tmp_path / "file")
    write_checkpoint(tmp_path, *content(1))
    assert checkpoint_exists(tmp_path)
    assert checkpoint_exists(str(tmp_path))


def test_exists_does_not_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint_exists(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "document", "says"),
    [
        ({"s": torch.ones(2, 2).to_sparse()}, {}, "'s'"),
        ({"m": torch.ones(2, device="meta")}, {}, "meta"),
        ({}, {"s": torch.ones(2, 2).to_sparse()}, "sparse"),
        ({}, {"f": [print]}, r"f\[0\]"),
    ],
)
def test_refused_before_writing(tmp_path: Path, tensors: Any, document: Any, says: str) -> None:
    write_checkpoint(tmp_path, *content(1))
    before = sorted(entry.name for entry in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=says):
        write_checkpoint(tmp_path, tensors, document)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    assert number_in(tmp_path) == 1


# ---- damage


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("intact")
    write_checkpoint(
        folder, {"w": torch.randn(9), "c": torch.ones(2, dtype=torch.complex64)}, {"a": [1, 0.5, "x"]}
    )
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found(intact: dict[str, bytes], tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(intact)))
    position = data.draw(st.integers(0, 8 * len(intact[name]) - 1))
    for other, raw in intact.items():
        (tmp_path / other).write_bytes(raw)
    damaged = bytearray(intact[name])
    damaged[position // 8] ^= 1 << position % 8
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)
    # A damaged JSON file may name other tensors, or another version, but it is still that file that is named.
    assert name in str(caught.value)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_is_found(intact: dict[str, bytes], tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(intact)))
    length = data.draw(st.integers(0, len(intact[name]) - 1))
    for other, raw in intact.items():
        (tmp_path / other).write_bytes(raw[:length] if other == name else raw)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)
    assert name in str(caught.value)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read_checkpoint(tmp_path)
    write_checkpoint(tmp_path, *content(1))
    (file,) = tmp_path.glob("*.safetensors")
    file.unlink()
    with pytest.raises(CheckpointError, match=file.name):
        read_checkpoint(tmp_path)
    for text in ('{"something": "else"}', "[" * 100_000):
        (tmp_path / "checkpoint.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
            read_checkpoint(tmp_path)


def test_unknown_version(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *content(1))
    file = tmp_path / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 1}))
    with pytest.raises(CheckpointError, match="version 1"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensors_file", "../../etc/passwd"),
        ("tensors_file", 3),
        ("raw_tensors", []),
        ("raw_tensors", {"w": ["nn", [1]]}),
        ("raw_tensors", {"w": ["float64", [1]]}),
        ("raw_tensors", {"other": ["float64", [1]]}),
        ("document", {"$tuple": []}),
        ("document", 1),
    ],
)
def test_forged_json_is_refused(tmp_path: Path, field: str, value: object) -> None:
    write_checkpoint(tmp_path, *content(1))
    edit(tmp_path / "checkpoint.json", [field], value)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)


def test_reader_follows_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors vanish between the reader's two looks because a newer checkpoint was committed."""
    write_checkpoint(tmp_path, *content(1))
    original = json.loads
    calls = []

    def overtaken(*args: Any, **options: Any) -> Any:
        if not calls:
            calls.append(1)
            write_checkpoint(tmp_path, *content(2))
        return original(*args, **options)

    monkeypatch.setattr(json, "loads", overtaken)
    assert number_in(tmp_path) == 2


# ---- failures while writing


class Killed(BaseException):
    """The process ends here: nothing after it may run, clean-up neither."""


def fail_at_call(
    monkeypatch: pytest.MonkeyPatch, when: int, error: BaseException, forever: bool
) -> list[str]:
    """Let the ``when``-th of the calls that change the disk fail; with ``forever`` all later ones, too."""
    calls: list[str] = []

    def wrap(name: str) -> None:
        original: Callable[..., Any] = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == when or (forever and len(calls) > when):
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapped)

    for name in ("replace", "fsync", "unlink"):
        wrap(name)
    return calls


# Per write: fsync + rename of the tensors, fsync of the directory, fsync + rename of the JSON, fsync of the
# directory, removal of the old tensors.
NUM_CALLS = 7


def test_number_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, *content(1))
    calls = fail_at_call(monkeypatch, 1000, OSError(), forever=False)
    write_checkpoint(tmp_path, *content(2))
    assert calls == ["fsync", "replace", "fsync", "fsync", "replace", "fsync", "unlink"]
    assert len(calls) == NUM_CALLS


@pytest.mark.parametrize("when", range(1, NUM_CALLS + 1))
def test_kill_at_every_call(tmp_path: Path, when: int) -> None:
    write_checkpoint(tmp_path, *content(1))
    with pytest.MonkeyPatch.context() as patch:
        fail_at_call(patch, when, Killed(), forever=True)
        with pytest.raises(Killed):
            write_checkpoint(tmp_path, *content(2))
    assert number_in(tmp_path) == (2 if when > 5 else 1)
    write_checkpoint(tmp_path, *content(3))
    assert number_in(tmp_path) == 3
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", range(1, 7))
def test_error_at_every_call(tmp_path: Path, when: int, error: BaseException) -> None:
    write_checkpoint(tmp_path, *content(1))
    with pytest.MonkeyPatch.context() as patch:
        fail_at_call(patch, when, error, forever=False)
        with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
            write_checkpoint(tmp_path, *content(2))
    committed = when == 6
    assert number_in(tmp_path) == (2 if committed else 1)
    assert not list(tmp_path.glob(".*"))
    # Once committed the old tensors stay until the next save; before, nothing of the new ones does.
    assert len(list(tmp_path.iterdir())) == (3 if committed else 2)
    if isinstance(error, OSError):
        assert "Free space" in str(caught.value)
        assert ("in place" if committed else "untouched") in str(caught.value)


def test_interrupt_right_after_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, *content(1))
    original = os.replace

    def replace_then_interrupt(source: Any, target: Any) -> None:
        original(source, target)
        if str(target).endswith("checkpoint.json"):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, *content(2))
    assert number_in(tmp_path) == 2


def test_failed_first_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_call(monkeypatch, 2, OSError(errno.EIO, "Input/output error"), forever=False)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_checkpoint(tmp_path, *content(1))
    assert not list(tmp_path.iterdir())
    assert not checkpoint_exists(tmp_path)


def test_failed_removal_of_the_old_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, *content(1))
    fail_at_call(monkeypatch, NUM_CALLS, OSError(errno.EPERM, "no"), forever=False)
    write_checkpoint(tmp_path, *content(2))
    assert number_in(tmp_path) == 2


def test_directory_without_fsync_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, *content(1))
    fail_at_call(monkeypatch, 3, OSError(errno.EINVAL, "Invalid argument"), forever=False)
    write_checkpoint(tmp_path, *content(2))
    assert number_in(tmp_path) == 2


def test_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="is a file: name another path"):
            write_checkpoint(path, *content(1))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_during_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, *content(1))
    original = open

    def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        return original("/dev/full", "wb") if mode == "xb" else original(path, mode, *args, **options)

    monkeypatch.setattr("builtins.open", opened)
    with pytest.raises(CheckpointError, match="Free space"):
        write_checkpoint(tmp_path, {"w": torch.ones(100_000)}, {})
    monkeypatch.undo()
    assert number_in(tmp_path) == 1


# Forks writers and kills each at another moment; torch is imported once, which is what takes the time.
KILLER = """
import os, signal, sys, time
import torch
from trainmux.fleet._checkpoint_files import read_checkpoint, write_checkpoint

torch.set_num_threads(1)  # threads do not survive a fork
path, number = sys.argv[1], 0

def write(number):
    tensors = {"w": torch.full((16,), float(number)), "big": torch.zeros(200_000)}
    write_checkpoint(path, tensors, {"number": number, "inside": torch.tensor([number])})

for delay in range(8):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            number += 1
            write(number)
            os.write(writer, f"{number} ".encode())
    os.close(writer)
    reported = os.read(reader, 100)
    time.sleep(0.0037 * delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 1 << 16):
        reported += more
    os.close(reader)
    last = int(reported.split()[-1])
    tensors, document = read_checkpoint(path)
    number = document["number"]
    # What was reported as written is there; at most the write after it may be, too.
    assert number in (last, last + 1), (number, last)
    assert tensors["w"].tolist() == [float(number)] * 16
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", KILLER, str(tmp_path)], check=True, timeout=120)
    assert number_in(tmp_path) >= 8
    write_checkpoint(tmp_path, *content(1))
    assert len(list(tmp_path.iterdir())) == 2
