"""``trainmux plan`` as its user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainmux as tm
from trainmux.cli._app import app
from trainmux.errors import BudgetError, ConfigError
from trainmux.lowering import KernelCache


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(KernelCache, "compile", lambda self, kernels: None)
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))


def test_a_plan_for_another_machine_is_shown_and_written(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"plan.{kind}" for kind in ("save", "report", "trace")}
    arguments = ["plan", "small:mlp", "--members", "3", "--device", "a100", "--budget", "50%"]
    for kind, path in files.items():
        arguments += [f"--{kind}", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "plan by auto: 3 members" in result.output
    assert result.output.count("written to") == 3
    plan = tm.Plan.load(files["save"])
    assert plan.budget_bytes == tm.DEVICES["a100-40gb"].memory_bytes // 2
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert files["report"].read_text().lstrip().lower().startswith("<!doctype html>")


def test_a_plan_for_this_machine_is_measured() -> None:
    result = CliRunner().invoke(app, ["plan", "small:mlp", "--members", "2", "--policy", "none"])
    assert result.exit_code == 0, result.output
    assert "plan by none: 2 members" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resnet1001"], "resnet101"),
        (["small:nothing"], "small:mlp"),
        (["small:mlp", "--batch-size", "3"], "leave --batch-size out"),
        (["small:mlp", "--members", "0"], "members"),
        ([], "WORKLOAD"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments], terminal_width=2000)
    assert result.exit_code == 2
    assert said.lower() in result.output.lower()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--budget", "20 GiBs"], BudgetError),
        (["--budget", "41GB"], BudgetError),
        (["--policy", "best"], ConfigError),
        (["--device", "b300"], ConfigError),
    ],
)
def test_typed_errors_reach_the_command_line(options: list[str], error: type[Exception]) -> None:
    result = CliRunner().invoke(app, ["plan", "small:mlp", "--device", "a100", *options])
    assert isinstance(result.exception, error)
