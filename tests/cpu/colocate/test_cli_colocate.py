"""``trainmux colocate`` as its user calls it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import trainmux as tm
from trainmux.cli._app import app
from trainmux.cli.colocate import memory_line, memory_table

JOBS = """
import torch
import trainmux as tm

def loss(model, batch):
    return model(batch).square().mean()

def make(name="made", loader=None):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = loader or [torch.ones(8, 4) for _ in range(3)]
    return tm.Job(name, model, optimizer, loss, loader, steps=4)

job = make("ready")

def breaking():
    return make("breaking", iter([torch.ones(8, 4)]))

number = 3
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.py"
    path.write_text(JOBS, encoding="utf-8")
    return path


def test_jobs_are_trained_and_summed_up(jobs: Path) -> None:
    """A job that failed gives status 1."""
    words = ["--budget", "1GiB", "--profiles", str(jobs.parent / "profiles")]
    names = [f"{jobs}:{name}" for name in ("job", "make", "breaking")]
    for num_jobs in (2, 3):
        result = CliRunner().invoke(app, ["colocate", *names[:num_jobs], *words])
        assert result.exit_code == num_jobs - 2, result.output
        assert "ready: 4 steps" in result.output
        assert "made: 4 steps" in result.output
        assert "of 1.00 GiB reserved" in result.output
        assert ("breaking: 1 steps" in result.output) is (num_jobs == 3)
        assert ("ended by BatchError" in result.output) is (num_jobs == 3)
    assert len(list((jobs.parent / "profiles").glob("*.lifespans.json"))) == 1  # all are alike


@pytest.mark.parametrize("name", ["nothing", "{}:missing", "{}:number", "missing.py:job", "{}:"])
def test_jobs_that_are_not_there_are_refused(jobs: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["colocate", name.format(jobs)])
    assert result.exit_code == 2
    assert "expected" in result.output


def test_memory_in_view() -> None:
    rows = [
        tm.JobUsage("a", 512 << 10, 256 << 10, 3, 10, "running"),
        tm.JobUsage("b", 0, 0, 0, None, "waiting"),
    ]
    assert memory_line(rows, 1 << 20) == "a 3/10 768 KiB, b 0 0 B: 768 KiB of 1.0 MiB in use"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(memory_table(rows, 1 << 20))
    shown = console.export_text()
    assert "█" * 20 + "▒" * 10 in shown
    assert "█" * 21 not in shown
    assert "waiting" in shown
