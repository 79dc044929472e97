"""Measure the cells of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

from benchmarks.processes import guarded_rows, mps_daemon
from benchmarks.resumable import Bench

from .cells import HOST_VIEW, MPS, Cell, Sizes
from .jobs import BenchJob, ZicoOptions, release_cached
from .memory import host_view, iteration_record
from .ways import JobsBench

Rows = Iterator[dict[str, Any]]


def bench(options: ZicoOptions, sizes: Sizes) -> Bench[Cell]:
    return Bench("zico", partial(measured, options, dict(sizes.regions)), _told, _daemon)


def measured(options: ZicoOptions, regions: Mapping[str, int], cells: Sequence[Cell], seconds: float) -> Rows:
    """Measure the cells of one process; none is begun after ``seconds``.

    A way that fails is recorded with its error, and the rest goes on.
    """
    end = time.monotonic() + seconds
    built: dict[tuple[str, int], BenchJob] = {}

    def build(name: str, seed: int) -> BenchJob:
        if (name, seed) not in built:
            built[name, seed] = BenchJob(name, seed, options)
            _ = built[name, seed].fleet
        return built[name, seed]

    for _, alike in groupby(cells, key=lambda cell: (cell.experiment, cell.jobs)):
        waiting = {cell.way: cell for cell in alike}
        first = next(iter(waiting.values()))
        for ways, measure in _plan(first, list(waiting), JobsBench(first, build, options), build, regions):
            release_cached(options.where)
            for row in guarded_rows(measure()):
                if "error" not in row:
                    cell = waiting[row["way"]]
                    ways.remove(cell.way)
                    yield {**cell.key, "precision": options.precision, **row}
                else:
                    yield from ({**waiting[way].key, **row} for way in ways)
            if time.monotonic() > end:
                return


def _plan(
    cell: Cell, ways: Sequence[str], jobs: JobsBench, build: Any, regions: Mapping[str, int]
) -> Iterator[tuple[list[str], Callable[[], Rows]]]:
    """What measures these ways of the same jobs, and which of them."""
    if cell.experiment == "train":
        yield from jobs.plan(ways)
    for way in ways if cell.experiment != "train" else ():
        if cell.experiment == "tracking":
            yield [way], partial(jobs.tracked, way)
        elif cell.experiment == "regions":
            yield [way], partial(jobs.in_regions, way, regions[way])
        else:
            yield [way], partial(_look, partial(build, cell.jobs, 0), way)


def _look(build: Callable[[], BenchJob], way: str) -> Rows:
    yield {"way": way, **(host_view if way == HOST_VIEW else iteration_record)(build())}


def _daemon(cells: Sequence[Cell]) -> AbstractContextManager[None]:
    return mps_daemon() if cells[0].way.startswith(MPS) else nullcontext()


def _told(row: Mapping[str, Any]) -> str:
    if "iterations_per_second" in row:
        return " and ".join(f"{rate:.1f}" for rate in row["iterations_per_second"]) + " iterations per second"
    if "solo_ms" in row:
        return " and ".join(f"{taken:.3g}" for taken in row["solo_ms"]) + " ms"
    return "looked at"
