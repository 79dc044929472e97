"""``trainmux colocate``: train jobs from Python files on one device, and show their memory meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.live import Live
from rich.table import Table

import trainmux as tm
from trainmux.sizes import format_bytes

from ._load import load

_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_TABLES = 0.1
_BAR_WIDTH = 40


def run_colocate(
    names: Sequence[str], budget: str | None, profiles: Path | None = None
) -> tm.ColocationResult:
    """Train the jobs that each ``FILE:NAME`` names; print their memory meanwhile and their results."""
    jobs = [load(name, tm.Job) for name in names]
    colocation = tm.colocate(jobs, budget, profiles=profiles)
    with _usage_shown(colocation):
        result = colocation.run()
    for job in result.jobs.values():
        print(_summary(job))
    print(
        f"{result.seconds:.1f} s, peak {format_bytes(result.peak_bytes)} of "
        f"{format_bytes(result.budget_bytes)} reserved, {format_bytes(result.used_bytes)} in use"
    )
    return result


@contextmanager
def _usage_shown(colocation: tm.Colocation) -> Iterator[None]:
    """Show what jobs hold, from a thread: a live table on a terminal, a line every few seconds elsewhere."""
    is_terminal = sys.stdout.isatty()
    is_over = threading.Event()
    live = Live(auto_refresh=False)

    def show() -> None:
        while not is_over.wait(_SECONDS_BETWEEN_TABLES if is_terminal else _SECONDS_BETWEEN_LINES):
            rows, budget_bytes = colocation.usage(), colocation.budget_bytes
            if is_terminal:
                live.update(memory_table(rows, budget_bytes), refresh=True)
            else:
                print(memory_line(rows, budget_bytes), flush=True)

    thread = threading.Thread(target=show, daemon=True)
    if is_terminal:
        live.start()
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        live.stop()


def memory_line(rows: Sequence[tm.JobUsage], budget_bytes: int) -> str:
    """Each job with its steps and bytes, and the bytes of all of them."""
    held = [row.local_bytes + row.arena_bytes for row in rows]
    parts = [f"{row.name} {_steps(row)} {format_bytes(size)}" for row, size in zip(rows, held, strict=True)]
    return f"{', '.join(parts)}: {format_bytes(sum(held))} of {format_bytes(budget_bytes)} in use"


def memory_table(rows: Sequence[tm.JobUsage], budget_bytes: int) -> Table:
    """Each job with its steps, its bytes, and a bar as long as its share of the budget."""
    table = Table(title=f"memory within {format_bytes(budget_bytes)}", title_justify="left")
    for heading in ("job", "state", "steps", "own", "arena", "share of the budget"):
        table.add_column(heading)
    for row in rows:
        own = round(_BAR_WIDTH * row.local_bytes / budget_bytes)
        arena = round(_BAR_WIDTH * row.arena_bytes / budget_bytes)
        sizes = (format_bytes(row.local_bytes), format_bytes(row.arena_bytes))
        table.add_row(row.name, row.state, _steps(row), *sizes, "█" * own + "▒" * arena)
    return table


def _steps(row: tm.JobUsage) -> str:
    return f"{row.num_steps}/{row.steps}" if row.steps is not None else str(row.num_steps)


def _summary(job: tm.JobResult) -> str:
    losses = ", ".join(f"{loss:.4g}" for loss in job.losses[-1].tolist()) if job.num_steps else "none"
    text = f"{job.name}: {job.num_steps} steps, {job.steps_per_second:.1f} a second, last loss {losses}"
    if job.is_eager:
        text += ", ran eagerly"
    return text if job.error is None else f"{text}; ended by {type(job.error).__name__}: {job.error}"
