"""``trainmux plan`` as its user calls it: on fleets of a file."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainmux as tm
from trainmux.cli._app import app
from trainmux.errors import BudgetError, ConfigError
from trainmux.lowering import KernelCache

pytestmark = pytest.mark.usefixtures("built_once")

FLEETS = """
import torch
import trainmux as tm

def loss(model, batch):
    return model(batch).square().mean()

def make(width=2):
    models = [
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        for _ in range(width)
    ]
    members = [
        tm.Member(model, torch.optim.AdamW(model.parameters()), name=f"member {number}")
        for number, model in enumerate(models)
    ]
    return tm.Fleet(members, loss, torch.ones(4, 16), device="cpu", lowering="aten")

fleet = make(1)
number = 3
"""


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(KernelCache, "compile_batches", lambda self, batches: None)
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "fleets.py"
    path.write_text(FLEETS, encoding="utf-8")
    return str(path)


def test_a_plan_for_another_machine_is_shown_and_written(file: str, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"plan.{kind}" for kind in ("save", "report", "trace")}
    arguments = ["plan", f"{file}:fleet", "--members", "3", "--device", "a100-40gb", "--budget", "50%"]
    for kind, path in files.items():
        arguments += [f"--{kind}", str(path)]
    result = CliRunner().invoke(app, [*arguments, "--curve", "2"])
    assert result.exit_code == 0, result.output
    assert "plan by auto: 3 members" in result.output
    assert "what the budget costs" in result.output
    assert result.output.count("written to") == 3
    plan = tm.Plan.load(files["save"])
    assert plan.budget_bytes == tm.DEVICES["a100-40gb"].memory_bytes // 2
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert files["report"].read_text().lstrip().lower().startswith("<!doctype html>")


def test_a_plan_for_this_machine_and_for_a_device_of_ones_own(file: str, tmp_path: Path) -> None:
    numbers = {**tm.DEVICES["a100-40gb"].__dict__, "name": "mine", "memory_bytes": 3 * 10**9}
    (tmp_path / "mine.json").write_text(json.dumps(numbers))
    arguments = ["plan", f"{file}:make", "--policy", "none", "--save", str(tmp_path / "plan.json")]
    for device, source in (([], "measured"), (["--device", str(tmp_path / "mine.json")], "analytic")):
        result = CliRunner().invoke(app, [*arguments, *device])
        assert result.exit_code == 0, result.output
        assert "plan by none: 2 members" in result.output
        plan = tm.Plan.load(tmp_path / "plan.json")
        assert {profile.source for profile in plan.profiles} == {source}
    assert (plan.budget_bytes, plan.profiles[0].device.name) == (3 * 10**9, "mine")


@pytest.mark.parametrize("name", ["resnet101", "nowhere.py:fleet", "{}:nothing", "{}:number"])
def test_what_is_no_fleet_is_refused(file: str, name: str) -> None:
    assert CliRunner().invoke(app, ["plan", name.format(file)]).exit_code == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--budget", "41GB"], BudgetError),
        (["--policy", "best"], ConfigError),
        (["--device", "b300"], ConfigError),
        (["--device", "nobody.json"], ConfigError),
    ],
)
def test_typed_errors_reach_the_command_line(file: str, options: list[str], error: type[Exception]) -> None:
    result = CliRunner().invoke(app, ["plan", f"{file}:fleet", "--device", "a100", *options])
    assert isinstance(result.exception, error)


def test_ctrl_c_ends_planning_without_a_traceback(file: str) -> None:
    """A process of its own whose error output is a terminal: there are bars on it."""
    ours, theirs = pty.openpty()
    Path(file).write_text(FLEETS.replace("fleet = make(1)", ""), encoding="utf-8")
    words = ["-m", "trainmux", "plan", f"{file}:make", "--members", "32", "--device", "a100-40gb"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown, is_interrupted = "", False
    while True:
        ready, _, _ = select.select([ours], [], [], 120)
        assert ready, shown
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        shown += piece.decode(errors="replace")
        if "profiling" in shown and not is_interrupted:
            running.send_signal(signal.SIGINT)
            is_interrupted = True
    printed, _ = running.communicate(timeout=60)
    os.close(ours)
    assert is_interrupted
    assert running.returncode in (1, 130)
    assert "Traceback" not in shown
    assert printed == b""
