"""Measure the cells of one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from benchmarks.processes import mps_daemon
from benchmarks.resumable import Bench

from .cells import BASELINES, MPS, Cell
from .planned import Protocol


def bench(protocol: Protocol) -> Bench[Cell]:
    return Bench("mutwo", partial(measured, protocol), _told, _daemon)


def measured(protocol: Protocol, cells: Sequence[Cell], seconds: float) -> Iterator[dict[str, Any]]:
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


def _daemon(cells: Sequence[Cell]) -> AbstractContextManager[None]:
    return mps_daemon() if cells[0].way == MPS else nullcontext()


def _told(row: Mapping[str, Any]) -> str:
    if "accuracy" in row:
        return f"accuracy {max(row['accuracy'][-1]):.1%} in {row['seconds']:.0f} s"
    return f"{row['step_ms']:.4g} ms" if "step_ms" in row else f"{len(row['idle'])} feature maps"
