"""``trainmux colocate`` as its user calls it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import trainmux as tm
from trainmux.cli._app import app
from trainmux.cli.colocate import UnknownJobError, load_job, memory_line, memory_table

JOBS = """
import torch
import trainmux as tm

def loss(model, batch):
    return model(batch).square().mean()

def make(name="made", batches=3):
    model = torch.nn.Linear(4, 1)
    loader = [torch.ones(8, 4) for _ in range(batches)]
    return tm.Job(name, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, loader, steps=3)

job = make("ready")

def breaking():
    job = make("breaking")
    return tm.Job("breaking", job.model, job.optimizer, loss, iter(job.loader), steps=9)

number = 3
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.py"
    path.write_text(JOBS, encoding="utf-8")
    return path


def test_jobs_are_trained_and_summed_up(jobs: Path) -> None:
    words = ["--budget", "1GiB", "--profiles", str(jobs.parent / "profiles")]
    result = CliRunner().invoke(app, ["colocate", f"{jobs}:job", f"{jobs}:make", *words])
    assert result.exit_code == 0, result.output
    assert "ready: 3 steps" in result.output
    assert "made: 3 steps" in result.output
    assert "of 1.00 GiB laid out" in result.output
    assert len(list((jobs.parent / "profiles").glob("*.lifespans.json"))) == 1  # the two are alike


def test_a_job_that_failed_gives_status_1(jobs: Path) -> None:
    result = CliRunner().invoke(app, ["colocate", f"{jobs}:breaking", f"{jobs}:make", "--budget", "1GiB"])
    assert result.exit_code == 1
    assert "breaking: 3 steps" in result.output
    assert "ended by BatchError" in result.output
    assert "made: 3 steps" in result.output


@pytest.mark.parametrize("name", ["nothing", "{}:missing", "{}:number", "missing.py:job", "{}:"])
def test_jobs_that_are_not_there_are_refused(jobs: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["colocate", name.format(jobs)])
    assert result.exit_code == 2
    with pytest.raises(UnknownJobError):
        load_job(name.format(jobs))


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
