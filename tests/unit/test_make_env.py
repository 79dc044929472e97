"""Which build of torch the Makefile asks for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"


@pytest.fixture(scope="module")
def make_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_env", SCRIPTS / "make_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_which_torch_is_asked_for(make_env: ModuleType) -> None:
    torch = f"torch=={make_env.TORCH_VERSION}"
    cpu = make_env.torch_attempts(False, "", "Linux")
    assert cpu[0] == [f"{torch}+cpu"]
    assert {attempt[0] for attempt in cpu} == {f"{torch}+cpu"}
    for gpu, system in ((True, "Linux"), (False, "Darwin")):
        assert make_env.torch_attempts(gpu, "", system) == [[torch]]
    index = "https://example.invalid/simple"  # one that the user names is the only one
    for gpu in (True, False):
        assert make_env.torch_attempts(gpu, index, "Linux") == [[torch, "--index-url", index]]


def test_another_torch_is_asked_for_in_a_folder_of_its_own() -> None:
    def planned(*words: str) -> str:
        command = ["make", "--dry-run", "lint", *words]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    usual, other = planned("PYTHON=python3"), planned("TORCH=2.12.1", "PYTHON=python3.12")
    assert ".venv/bin/python" in usual
    assert ".venv-2.12.1-python3.12/bin/python -m mypy" in other
    assert ".venv/bin" not in other


def choose_python(folder: Path, wanted: str = "") -> subprocess.CompletedProcess[str]:
    """The chosen interpreter where PATH has only what lies in ``folder``."""
    return subprocess.run(
        ["/bin/sh", str(SCRIPTS / "choose_python.sh"), wanted],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(folder)},
    )


def put_interpreter(folder: Path, name: str, *, fits: bool) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\nexit {0 if fits else 1}\n", encoding="utf-8")
    program.chmod(0o755)


def test_the_first_fitting_interpreter_is_chosen(tmp_path: Path) -> None:
    put_interpreter(tmp_path, "python3", fits=True)
    assert choose_python(tmp_path).stdout.strip() == "python3"
    put_interpreter(tmp_path, "python3.12", fits=True)
    assert choose_python(tmp_path).stdout.strip() == "python3.12"
    put_interpreter(tmp_path, "python3.11", fits=False)
    assert choose_python(tmp_path).stdout.strip() == "python3.12"


def test_no_fitting_interpreter_is_a_clear_error(tmp_path: Path) -> None:
    put_interpreter(tmp_path, "python3", fits=False)
    for wanted in ("", "python3"):
        result = choose_python(tmp_path, wanted)
        assert result.returncode == 1
        assert "3.11 to 3.13" in result.stderr
