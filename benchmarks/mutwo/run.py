"""Measure cells, each group in a process of its own on a GPU, into one file of results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from benchmarks.processes import guarded, mps_daemon, streamed
from benchmarks.records import KEYS, Results

from .cells import BASELINES, MPS, Cell
from .planned import Protocol

CELL_SECONDS = 420.0
"""A cell may take so long; a process as many times that as it has cells."""
LATE_SECONDS = 30.0
"""A process is ended so long after the time is over."""


def pending(tasks: Sequence[Sequence[Cell]], rows: Sequence[dict[str, Any]], retry: bool) -> list[list[Cell]]:
    """Leave out what has a row; with ``retry``, what has one that is not an error."""
    known = {key_of(row) for row in rows if not (retry and "error" in row)}
    left = [[cell for cell in cells if key_of(cell.key) not in known] for cells in tasks]
    return [cells for cells in left if cells]


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS["mutwo"])


def run(
    tasks: Sequence[list[Cell]],
    results: Results,
    protocol: Protocol,
    time_limit: float,
    tell: Callable[[str], object] = print,
) -> int:
    """Measure tasks until the time is over; the number of cells that are left.

    What is cut off by that limit leaves no row: the next run measures it.
    """
    begin = time.monotonic()
    for cells in tasks:
        left = time_limit - (time.monotonic() - begin)
        if left <= 0:
            break
        limit = min(CELL_SECONDS * len(cells), left + LATE_SECONDS)
        since = time.monotonic()
        waiting = {key_of(cell.key): cell for cell in cells}
        for row in _rows(cells, protocol, limit, left):
            cell = waiting.get(key_of(row)) if "way" in row else next(iter(waiting.values()), None)
            if cell is None:
                continue
            if "way" not in row and limit < CELL_SECONDS * len(cells) and "no result within" in row["error"]:
                tell(f"{cell}: cut off, the time is over")
                break
            waiting.pop(key_of(cell.key))
            since, took = time.monotonic(), time.monotonic() - since
            if detail := row.pop("detail", None):  # where it failed is for the log: it names folders
                tell(detail)
            results.add({**cell.key, **row, "took_s": round(took, 1)})
            tell(f"{cell}: {_told(row)}")
    known = {key_of(row) for row in results.rows}
    return sum(key_of(cell.key) not in known for cells in tasks for cell in cells)


def measured(cells: Sequence[Cell], protocol: Protocol, seconds: float) -> Iterator[dict[str, Any]]:
    """Measure the cells of one process; none is begun after ``seconds``."""
    from . import baselines, convergence, planned

    end = time.monotonic() + seconds
    first = cells[0]
    if first.experiment == "convergence":
        rows = convergence.measure(cells, protocol)
    else:
        rows = (baselines if first.way in BASELINES else planned).measure(cells, protocol)
    for row in rows:
        yield row
        if time.monotonic() > end:
            return


def _rows(cells: Sequence[Cell], protocol: Protocol, limit: float, left: float) -> Iterator[dict[str, Any]]:
    if protocol.device.type == "cpu":
        rows = measured(cells, protocol, left)
        while (found := guarded(lambda: {"row": next(rows, None)})).get("row", {}) is not None:
            yield {**(found.pop("row", None) or {}), **found}
        return
    try:
        with mps_daemon() if cells[0].way == MPS else nullcontext():
            yield from streamed(measured, cells, protocol, left, limit_s=limit)
    except RuntimeError as error:
        yield {"error": str(error)}


def _told(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    if "accuracy" in row:
        return f"accuracy {max(row['accuracy'][-1]):.1%} in {row['seconds']:.0f} s"
    return f"{row['step_ms']:.4g} ms" if "step_ms" in row else f"{len(row['idle'])} feature maps"
