"""``trainmux colocate``: jobs from Python files, side by side within a budget, their memory in view."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import trainmux as tm
from trainmux.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_VIEWS = 0.1
_BAR_WIDTH = 40


class UnknownJobError(ValueError):
    """A job was named that cannot be found."""


def run_colocate(
    names: Sequence[str], budget: str | None, profiles: Path | None = None
) -> tm.ColocationResult:
    """Train the jobs named as FILE:NAME; prints how they fare meanwhile and what came of them."""
    jobs = [load_job(name) for name in names]
    colocation = tm.colocate(jobs, budget, profiles=profiles)
    with _Screen(colocation) if sys.stdout.isatty() else _Lines(colocation):
        result = colocation.run()
    for job in result.jobs.values():
        print(_summary(job))
    print(
        f"{result.seconds:.1f} s, at most {format_bytes(result.peak_bytes)} of "
        f"{format_bytes(result.budget_bytes)} laid "
        f"out, {format_bytes(result.used_bytes)} in use"
    )
    return result


def load_job(text: str) -> tm.Job:
    """The job that ``FILE:NAME`` names: a `trainmux.Job`, or a function that makes one."""
    path_text, colon, name = text.rpartition(":")
    path = Path(path_text)
    if not colon or not name or not path.is_file():
        raise UnknownJobError(f"expected FILE:NAME with a Python file that exists, got {text}")
    module = _load(path)
    found = getattr(module, name, None)
    if found is None:
        raise UnknownJobError(f"expected a job {name!r} in {path}, got none of that name")
    job = found if isinstance(found, tm.Job) else found() if callable(found) else found
    if not isinstance(job, tm.Job):
        raise UnknownJobError(
            f"expected {name!r} in {path} to be a trainmux.Job or a function that makes one, got "
            f"{type(job).__name__}"
        )
    return job


def _load(path: Path) -> ModuleType:
    """The module of a file, once for all the jobs that it has."""
    name = f"trainmux_job_file_{path.resolve().as_posix().encode().hex()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownJobError(f"expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Watch:
    """Shows what jobs hold, every now and then, from a thread of its own."""

    def __init__(self, colocation: tm.Colocation, seconds_between: float) -> None:
        self._colocation = colocation
        self._seconds_between = seconds_between
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(self._seconds_between):
            self.show(self._colocation.usage(), self._colocation.budget_bytes)

    def show(self, rows: Sequence[tm.JobUsage], budget_bytes: int) -> None:
        raise NotImplementedError


class _Lines(_Watch):
    """A line every few seconds, for what is not a terminal."""

    def __init__(self, colocation: tm.Colocation) -> None:
        super().__init__(colocation, _SECONDS_BETWEEN_LINES)

    def show(self, rows: Sequence[tm.JobUsage], budget_bytes: int) -> None:
        print(memory_line(rows, budget_bytes), flush=True)


class _Screen(_Watch):
    """A table that stays in its place, with a bar of each job's memory against the budget."""

    def __init__(self, colocation: tm.Colocation) -> None:
        from rich.live import Live

        super().__init__(colocation, _SECONDS_BETWEEN_VIEWS)
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> _Watch:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._live.stop()

    def show(self, rows: Sequence[tm.JobUsage], budget_bytes: int) -> None:
        self._live.update(memory_table(rows, budget_bytes), refresh=True)


def memory_line(rows: Sequence[tm.JobUsage], budget_bytes: int) -> str:
    """Every job with its steps and its bytes, and what all of them hold of the budget."""
    parts = [f"{row.name} {_steps(row)} {format_bytes(row.local_bytes + row.arena_bytes)}" for row in rows]
    used = sum(row.local_bytes + row.arena_bytes for row in rows)
    return f"{', '.join(parts)}: {format_bytes(used)} of {format_bytes(budget_bytes)} in use"


def memory_table(rows: Sequence[tm.JobUsage], budget_bytes: int) -> Table:
    """Every job with its steps, its bytes, and a bar that is as long as its share of the budget."""
    from rich.table import Table

    table = Table(title=f"memory within {format_bytes(budget_bytes)}", title_justify="left")
    for heading in ("job", "state", "steps", "own", "arena", "share of the budget"):
        table.add_column(heading)
    for row in rows:
        own = round(_BAR_WIDTH * row.local_bytes / budget_bytes)
        arena = round(_BAR_WIDTH * row.arena_bytes / budget_bytes)
        bar = "█" * own + "▒" * arena
        cells = (row.state, _steps(row), format_bytes(row.local_bytes), format_bytes(row.arena_bytes), bar)
        table.add_row(row.name, *cells)
    return table


def _steps(row: tm.JobUsage) -> str:
    return f"{row.num_steps}/{row.steps}" if row.steps is not None else str(row.num_steps)


def _summary(job: tm.JobResult) -> str:
    losses = ", ".join(f"{loss:.4g}" for loss in job.losses[-1].tolist()) if job.num_steps else "none"
    text = f"{job.name}: {job.num_steps} steps, {job.steps_per_second:.1f} a second, last loss {losses}"
    if job.is_eager:
        text += ", ran eagerly"
    return text if job.error is None else f"{text}; ended by {type(job.error).__name__}: {job.error}"
