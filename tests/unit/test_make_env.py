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


def test_without_a_gpu_only_cpu_builds_are_asked_for(make_env: ModuleType) -> None:
    attempts = make_env.torch_attempts(False, "", "Linux")
    assert attempts[0] == ["torch==2.13.0+cpu"]
    assert all(attempt[0] == "torch==2.13.0+cpu" for attempt in attempts)


@pytest.mark.parametrize(("gpu", "system"), [(True, "Linux"), (False, "Darwin")])
def test_elsewhere_the_usual_build_is_asked_for(make_env: ModuleType, gpu: bool, system: str) -> None:
    assert make_env.torch_attempts(gpu, "", system) == [["torch==2.13.0"]]


@pytest.mark.parametrize("gpu", [True, False])
def test_an_index_that_the_user_names_is_the_only_one(make_env: ModuleType, gpu: bool) -> None:
    index = "https://example.invalid/simple"
    assert make_env.torch_attempts(gpu, index, "Linux") == [["torch==2.13.0", "--index-url", index]]


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
        assert "3.11 or 3.12" in result.stderr
