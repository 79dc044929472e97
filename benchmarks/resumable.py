"""Benchmarks of many cells: a few at a time, each group in a process of its own, into one file of results.

A cell is one measurement with a name (its ``key``). What a run does not get to, or is cut off in, leaves no
row, and the next run measures it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.environment import describe
from benchmarks.processes import guarded_rows, isolated, streamed
from benchmarks.records import Results, name_of
from benchmarks.records import read as read_results

CELL_SECONDS = 420.0
"""A cell may take so long; a process as many times that as it has cells."""
WAY = "way"
"""The part of a cell's name that every benchmark of cells has."""
LATE_SECONDS = 30.0
"""A process is ended so long after the time is over."""


class NamedCell(Protocol):
    """What has a name among the rows of a benchmark."""

    @property
    def key(self) -> dict[str, Any]: ...

    @property
    def process(self) -> tuple[Any, ...]:
        """Cells of which this is equal are measured together."""


Cell = TypeVar("Cell", bound=NamedCell)
Sizes = TypeVar("Sizes")
Ranked = tuple[int, Cell]
"""A cell, and its place in the order: those of rank 0 come first."""
Figures = Mapping[str, Callable[[Sizes], Iterator[Ranked[Cell]]]]
"""The cells of each figure or table, by name."""


@dataclass(frozen=True)
class Bench(Generic[Cell]):
    """How a benchmark of this ``name`` measures the cells of one process.

    ``measure(cells, seconds)`` yields rows with the names of their cells, and begins none after ``seconds``;
    a process must be able to import it. ``told`` says what a row has in a few words. ``around`` is entered
    before the process of these cells is started.
    """

    name: str
    measure: Callable[[Sequence[Cell], float], Iterator[dict[str, Any]]]
    told: Callable[[Mapping[str, Any]], str]
    around: Callable[[Sequence[Cell]], AbstractContextManager[None]] = lambda cells: nullcontext()


@dataclass(frozen=True)
class Session:
    """One call of a benchmark: the ``device``, the file of results, files to ``merge`` into it first, whether
    to ``retry`` what failed, whether only to ``show`` what is left, and when nothing more is begun."""

    device: str
    out: Path
    merge: Sequence[Path] = ()
    retry: bool = False
    show: bool = False
    time_limit: float = 540.0

    def run(self, bench: Bench[Cell], tasks: Sequence[Sequence[Cell]]) -> None:
        """Measure what the file lacks, or list it."""
        environment = describe(self.device) if self.device == "cpu" else isolated(describe, self.device)
        results = Results(self.out, bench.name, environment)
        for other in self.merge:
            results.take(read_results(other, bench.name))
        left = pending(bench.name, tasks, results.rows, self.retry)
        if self.show:
            for number, cells in enumerate(left):
                for cell in cells:
                    print(f"{number:3} {cell}")
            return
        num_left = measure(bench, left, results, self.device, self.time_limit)
        print(f"{num_left} cells are left; what was measured is in {self.out}")


def find_tasks(
    figures: Figures[Sizes, Cell], sizes: Sizes, names: Sequence[str], ways: Sequence[str] = ()
) -> list[list[Cell]]:
    """The cells of the named figures, in groups that share a process, in the order to measure them.

    Naming ``ways`` leaves out the others. A cell of several figures has the lowest rank that one of them
    gives it. `ValueError` for a name that is no figure's.
    """
    for name in names:
        if name not in figures:
            raise ValueError(f"expected figures among {', '.join(figures)}; got {name!r}")
    ranks: dict[Cell, int] = {}
    for name in names:
        for rank, cell in figures[name](sizes):
            if not ways or cell.key[WAY] in ways:
                ranks[cell] = min(rank, ranks.get(cell, rank))
    tasks: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in sorted(ranks, key=lambda cell: ranks[cell]):
        tasks.setdefault((ranks[cell], *cell.process), []).append(cell)
    return list(tasks.values())


def pending(
    benchmark: str, tasks: Sequence[Sequence[Cell]], rows: Sequence[Mapping[str, Any]], retry: bool
) -> list[list[Cell]]:
    """Leave out what has a row; with ``retry``, what has one that is not an error."""
    known = {name_of(benchmark, row) for row in rows if not (retry and "error" in row)}
    left = [[cell for cell in cells if name_of(benchmark, cell.key) not in known] for cells in tasks]
    return [cells for cells in left if cells]


def measure(
    bench: Bench[Cell],
    tasks: Sequence[Sequence[Cell]],
    results: Results,
    device: str,
    time_limit: float,
    tell: Callable[[str], object] = lambda line: print(line, flush=True),
) -> int:
    """Measure tasks until the time is over; the number of cells that are left."""
    begin = time.monotonic()
    for cells in tasks:
        left = time_limit - (time.monotonic() - begin)
        if left <= 0:
            break
        most = CELL_SECONDS * len(cells)
        limit = min(most, left + LATE_SECONDS)
        since = time.monotonic()
        waiting = {name_of(bench.name, cell.key): cell for cell in cells}
        for row in _rows(bench, cells, device, limit, left):
            is_named = WAY in row  # else the process itself failed
            cell = waiting.get(name_of(bench.name, row)) if is_named else next(iter(waiting.values()), None)
            if cell is None:
                continue
            if not is_named and limit < most and "no result within" in row["error"]:
                tell(f"{cell}: cut off, the time is over")
                break
            waiting.pop(name_of(bench.name, cell.key))
            since, took = time.monotonic(), time.monotonic() - since
            if detail := row.pop("detail", None):  # where it failed is for the log: it names folders
                tell(detail)
            results.add({**cell.key, **row, "took_s": round(took, 1)})
            tell(f"{cell}: {row['error'] if 'error' in row else bench.told(row)}")
    known = {name_of(bench.name, row) for row in results.rows}
    return sum(name_of(bench.name, cell.key) not in known for cells in tasks for cell in cells)


def _rows(
    bench: Bench[Cell], cells: Sequence[Cell], device: str, limit: float, left: float
) -> Iterator[dict[str, Any]]:
    if device == "cpu":
        yield from guarded_rows(bench.measure(cells, left))
        return
    try:
        with bench.around(cells):
            yield from streamed(bench.measure, cells, left, limit_s=limit)
    except RuntimeError as error:
        yield {"error": str(error)}
