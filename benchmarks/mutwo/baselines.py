"""Cells of the baselines: HFTA in subsets that fit, processes under MPS, and torch's own ways to save memory.

The budget is a limit on torch's allocator here: unlike ours it leaves out what libraries and the driver hold.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.step import StepJob, measure_processes
from benchmarks.ways import Setup, Step, prepare_activation_budget, prepare_save_on_cpu, prepare_vmap
from trainmux.sizes import parse_budget

from .cells import ACTIVATION_BUDGET, HFTA, MPS, Cell
from .planned import Protocol, Row

MAX_PROCESSES = 16
KEPT_SHARES = (0.5, 0.1)
"""Shares of what torch would save that it is asked to keep, until one fits the budget."""


def measure(cells: Sequence[Cell], protocol: Protocol) -> Iterator[Row]:
    """Measure cells of one baseline."""
    cell = cells[0]
    if cell.way == MPS:
        yield {**cell.key, **_processes(cell, protocol)}
        return
    limit = limit_memory(cell.budget, protocol.device)
    job = StepJob(
        cell.workload, cell.batch_size, cell.members, cell.way, protocol.device_name, optimizer=cell.optimizer
    )
    if cell.way == HFTA:
        yield from _hfta(cells, job, protocol, limit)
    else:
        yield {**cell.key, **_whole_array(cell, job, protocol), "budget_bytes": limit}


def limit_memory(budget: str, device: torch.device) -> int | None:
    """Let torch's allocator have no more than the budget; a CPU, and a share of a plan, have no limit."""
    if device.type != "cuda" or not budget.endswith("B"):
        return None
    total = torch.cuda.mem_get_info(device)[1]
    limit = parse_budget(budget, device_bytes=total)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    return limit


# ---- HFTA ------------------------------------------------------------------------------------------------


def subsets(members: int, widest: int) -> list[int]:
    """Split members into subsets that fit, as few as possible."""
    full, rest = divmod(members, widest)
    return [widest] * full + ([rest] if rest else [])


def find_widest(peak_of: Callable[[int], int | None], members: int, limit: int | None) -> int:
    """The most members that fit at once, by what one and two of them take; 0 where one does not fit.

    ``peak_of`` tries a number of members: bytes at the peak, or ``None`` where memory ran out.
    """
    first = peak_of(1)
    if first is None or members == 1:
        return int(first is not None)
    second = peak_of(2)
    if second is None:
        return 1
    growth = second - first
    guess = members if limit is None or growth <= 0 else min(members, 2 + max(0, limit - second) // growth)
    while guess > 2 and peak_of(guess) is None:
        guess -= 1
    while guess < members and growth > 0 and peak_of(guess + 1) is not None:
        guess += 1
    return guess


def _hfta(cells: Sequence[Cell], job: StepJob, protocol: Protocol, limit: int | None) -> Iterator[Row]:
    """Train all members at once where they fit, else one subset after another, for every number of models."""
    most = max(cell.members for cell in cells)
    setup, batches = job(0, most)
    peaks: dict[int, int | None] = {}
    times: dict[int, Row] = {}

    def step_of(width: int) -> Step:
        part = Setup(setup.models[:width], setup.loss, setup.example, setup.device, optimizer=setup.optimizer)
        return prepare_vmap(part)[0]

    def peak_of(width: int) -> int | None:
        if width not in peaks:
            tried = _tried(lambda: step_of(width), batches, protocol)
            peaks[width] = None if tried is None else tried[0]
        return peaks[width]

    widest = find_widest(peak_of, most, limit)
    for cell in cells:
        if not widest:
            yield {**cell.key, "error": f"one model of this size does not fit in {cell.budget}"}
            continue
        parts = subsets(cell.members, widest)
        for width in set(parts) - set(times):
            _release()
            times[width] = protocol.times(step_of(width), batches)
        row: Row = {"subsets": parts, "budget_bytes": limit}
        row["peak_bytes"] = max(peak_of(width) or 0 for width in parts)
        for name in ("step_ms", "min_ms", "max_ms"):
            row[name] = sum(times[width][name] for width in parts)
        row["warmups"] = min(times[width]["warmups"] for width in parts)
        if cell.experiment == "run":
            seconds = {}
            for width in set(parts):
                _release()
                seconds[width] = protocol.really_run(step_of(width), batches)
            row |= {"run_s": sum(seconds[width] for width in parts), "iterations": protocol.real}
        yield {**cell.key, **row}


def _tried(make: Callable[[], Step], batches: Sequence[Any], protocol: Protocol) -> tuple[int, Step] | None:
    """Bytes that torch reserves for two steps, and the step; ``None`` where that is more than it may have."""
    _release()
    is_cuda = protocol.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(protocol.device)
    try:
        step = make()
        for batch in batches[:2]:
            step(batch)
        return torch.cuda.max_memory_reserved(protocol.device) if is_cuda else 0, step
    except torch.OutOfMemoryError:
        return None


def _release() -> None:
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


# ---- others ----------------------------------------------------------------------------------------------


def _whole_array(cell: Cell, job: StepJob, protocol: Protocol) -> Row:
    """All members in one array, by a way of torch to need less memory for it."""
    setup, batches = job(0, cell.members)
    shares: tuple[float | None, ...] = KEPT_SHARES if cell.way == ACTIVATION_BUDGET else (None,)
    for share in shares:

        def make(share: float | None = share) -> Step:
            return (prepare_save_on_cpu(setup) if share is None else prepare_activation_budget(setup, share))[
                0
            ]

        if (tried := _tried(make, batches, protocol)) is not None:
            return {"peak_bytes": tried[0], "kept_share": share, **protocol.times(tried[1], batches)}
        torch.compiler.reset()
    return {"error": f"{cell.members} models at once do not fit in {cell.budget}"}


def _processes(cell: Cell, protocol: Protocol) -> Row:
    """Train every model in a process of its own under MPS, as many at once as fit the budget."""
    at_once = min(MAX_PROCESSES, cell.members)
    job = StepJob(
        *(cell.workload, cell.batch_size, min(2, at_once), MPS, protocol.device_name),
        num_blocks=3,
        optimizer=cell.optimizer,
    )
    if protocol.device.type == "cuda":
        of_two = measure_processes(job)["device_bytes"]
        at_once = max(1, min(at_once, 2 * parse_budget(cell.budget, device_bytes=1 << 50) // of_two))
    found = measure_processes(StepJob(**{**vars(job), "width": at_once, "num_blocks": 5}))
    median, low, high = (cell.members * found[name] for name in ("median_ms", "min_ms", "max_ms"))
    row = {"step_ms": median, "min_ms": low, "max_ms": high}
    return row | {"at_once": at_once, "peak_bytes": found["device_bytes"]}
