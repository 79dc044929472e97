"""The paper's figures of memory, as numbers: a job over an iteration, jobs side by side on a simulated GPU.

Everything here comes from how a job's kernels allocate. Their times are worked out for an H200, and scaled to
the iteration where that was measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch

import trainmux as tm

from .job import BenchError
from .zico import ROOMY, budgets_of
from .zico_jobs import BenchJob, PairNames, ZicoOptions, wait_for
from .zico_watch import Stay

FEATURE_MAP = "feature map"
RESIDENT = "resident"
NUM_POINTS = 400
_NUM_QUANTILES = 100
_SIMULATED_ITERATIONS = 12
_SHOWN_ITERATIONS = 5
_SMALL_JOB_BYTES = 64 << 20
_SMALL_REGION_BYTES = 512
_SMALL_JOB_CUTS = 32
"""A job of less than one region has regions of single tensors, and is cut where so much of it has changed."""

_HOST_VIEW_ITERATIONS = 3
_SECONDS_BETWEEN_SAMPLES = 1e-4


def memory_record(memory: tm.IterationMemory, note: str) -> dict[str, Any]:
    """Figures 1, 2 and 6 of one job: lifespans of its tensors by class, and its bytes over time."""
    spans = memory.spans()
    classes = {
        "feature maps": [span for span in spans if span.tensor_class == FEATURE_MAP],
        "others": [span for span in spans if span.tensor_class not in (FEATURE_MAP, RESIDENT)],
    }
    lifespans = {}
    for what, rows in classes.items():
        taken = sorted(span.end_seconds - span.begin_seconds for span in rows)
        lifespans[what] = {
            "count": len(rows),
            "bytes": sum(span.size_bytes for span in rows),
            "mean_seconds": fmean(taken) if taken else None,
            "median_seconds": median(taken) if taken else None,
            "quantiles_seconds": quantiles(taken, _NUM_QUANTILES),
            "size_quantiles_bytes": quantiles(sorted(span.size_bytes for span in rows), _NUM_QUANTILES),
        }
    curve = memory.curve()
    return {
        "note": note,
        "seconds": memory.seconds,
        "num_kernels": memory.num_kernels,
        "lifespans": lifespans,
        "lowest_bytes": min(size for _, size in curve),
        "peak_bytes": max(size for _, size in curve),
        "curve": thinned(curve, memory.seconds),
    }


def quantiles(ordered: Sequence[float], number: int) -> list[float]:
    """``number`` + 1 values from the lowest to the highest; none of nothing."""
    if not ordered:
        return []
    return [ordered[round(place * (len(ordered) - 1) / number)] for place in range(number + 1)]


def thinned(curve: Sequence[tuple[float, int]], seconds: float) -> list[list[float]]:
    """At most `NUM_POINTS` moments; of all that lie between two of them, the highest."""
    if len(curve) <= NUM_POINTS:
        return [[moment, size] for moment, size in curve]
    best: dict[int, tuple[float, int]] = {}
    for moment, size in curve[:-1]:
        place = min(NUM_POINTS - 2, int(moment / seconds * (NUM_POINTS - 1)))
        if place not in best or size > best[place][1]:
            best[place] = (moment, size)
    return [[moment, size] for moment, size in [*best.values(), curve[-1]]]


def simulated_pair(
    names: PairNames,
    memories: tuple[tm.IterationMemory, tm.IterationMemory],
    excesses: Sequence[float],
    gain: float | None,
    *,
    has_machine: bool,
) -> dict[str, Any]:
    """Figures 7, 9 and 10 on a simulated GPU: a run in every budget, and one while the budget changes.

    ``gain`` is what the pair was measured to do at once with all memory; ``None`` takes the planner's prior.
    """
    jobs = {"0": memories[0], "1": memories[1]}
    longest = max(memory.seconds for memory in memories)
    seconds = _SIMULATED_ITERATIONS * longest
    given: dict[str, Any] = {} if gain is None else {"gain": max(1.0, gain)}
    peak = max(size for memory in memories for _, size in memory.curve())
    if peak < _SMALL_JOB_BYTES:
        given |= {"region_bytes": _SMALL_REGION_BYTES, "tracking_bytes": peak // _SMALL_JOB_CUTS}
    roomy = tm.foresee(jobs, seconds=seconds, **given)
    whole, least = roomy.sum_of_peaks_bytes, roomy.smallest_budget_bytes
    stays = budgets_of(names, (whole, least), excesses, has_machine=has_machine, changes=False)
    runs = {}
    for stay in stays:
        if stay.budget_bytes >= least:
            seen = tm.foresee(jobs, stay.budget_bytes, seconds=seconds, **given)
            runs[stay.way] = _run_record(seen, memories, longest)
    change = _changing_run(
        jobs, budgets_of(names, (whole, least), (), has_machine=False, changes=True)[1:], seconds, given
    )
    tightest = min(runs.values(), key=lambda run: int(run["budget_bytes"]))
    for run in runs.values():
        if run is not tightest:
            run["held"] = []  # only the tightest one is drawn
    return {
        "names": list(names),
        "gain": gain,
        "whole_bytes": whole,
        "smallest_budget_bytes": least,
        "runs": runs,
        "change": change,
        "decision_us": {what: list(times) for what, times in _decision_times(runs, change).items()},
    }


def _changing_run(
    jobs: Mapping[str, tm.IterationMemory], stays: Sequence[Stay], seconds: float, given: Mapping[str, Any]
) -> dict[str, Any]:
    """A run whose budget changes twice; there is work for one phase more than are looked at."""
    phase = 2 * seconds / given.get("gain", 1.0)  # two jobs have so much work
    moments = [place * phase for place in range(len(stays) + 1)]
    changes = [(moment, stay.budget_bytes) for moment, stay in zip(moments[1:], stays[1:], strict=False)]
    seen = tm.foresee(
        jobs,
        stays[0].budget_bytes,
        seconds=(len(stays) + 1) * seconds,
        budget_changes=changes,
        **given,
    )
    last = min(max(row.ended_at for row in seen.segments if row.job == job) for job in jobs)
    moments[-1] = min(moments[-1], last)  # while both jobs run
    record = _run_record(seen, tuple(jobs.values()), None)
    return record | {
        "held": [row for row in record["held"] if row[0] <= moments[-1]],
        "budgets": [[0.0, stays[0].budget_bytes], *map(list, changes)],
        "phases": _phases(seen, moments, stays),
    }


def _decision_times(runs: Mapping[str, Any], change: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
    """The decision times of the run with the most to decide: the tightest budget, else the change."""
    tight = [way for way in runs if way != ROOMY]
    found: Mapping[str, Sequence[float]] = (runs[tight[-1]] if tight else change)["decision_us"]
    return found


def _run_record(
    seen: tm.Foresight, memories: tuple[tm.IterationMemory, ...], longest: float | None
) -> dict[str, Any]:
    """A run as numbers: work against turns, iterations, shifts, and the jobs' bytes over time."""
    work = sum(seen.num_iterations[str(index)] * memory.seconds for index, memory in enumerate(memories))
    held = [(moment, [rows["0"], rows["1"]]) for moment, rows in seen.held()]
    most = max((sum(both) for _, both in held), default=0)
    if longest is not None:  # the middle of the run, as the paper's figures show it
        begin = max(0.0, seen.seconds / 2 - _SHOWN_ITERATIONS * longest / 2)
        held = [row for row in held if begin <= row[0] <= begin + _SHOWN_ITERATIONS * longest]
    step = max(1, len(held) // (3 * NUM_POINTS))
    return {
        "budget_bytes": seen.budget_bytes,
        "work": work / seen.seconds,
        "iterations": [seen.num_iterations["0"], seen.num_iterations["1"]],
        "shift_seconds": [seen.shift_seconds["0"], seen.shift_seconds["1"]],
        "most_bytes": most,
        "held": [[round(moment, 7), *both] for moment, both in held[::step]],
        "decision_us": {what: list(times) for what, times in seen.decision_us.items()},
    }


def _phases(seen: tm.Foresight, moments: Sequence[float], stays: Sequence[Stay]) -> list[dict[str, Any]]:
    """Of each budget in a run that changes: iterations per second and the most bytes held, once settled."""
    held = [(moment, sum(rows.values())) for moment, rows in seen.held()]
    last = {job: max(row.number for row in seen.segments if row.job == job) for job in ("0", "1")}
    ends = [(row.ended_at, row.job) for row in seen.segments if row.number == last[row.job]]
    found = []
    for begin, end, stay in zip(moments, moments[1:], stays, strict=False):
        settled = begin + (end - begin) / 3
        inside = [job for moment, job in ends if settled <= moment < end]
        found.append(
            {
                "way": stay.way,
                "budget_bytes": stay.budget_bytes,
                "iterations_per_second": [inside.count(job) / (end - settled) for job in ("0", "1")],
                "most_bytes": max((size for moment, size in held if settled <= moment < end), default=0),
            }
        )
    return found


def host_view(job: BenchJob, options: ZicoOptions) -> dict[str, Any]:
    """Figure 3: allocated bytes as the host sees them, while it issues iterations of plain torch.

    Refused with `BenchError`: a device that does what it is told at once, so that there is nothing to see.
    """
    device = options.where
    if device.type != "cuda":
        raise BenchError("on a CPU nothing is enqueued: host and device see the same memory")
    step = job.eager_step()
    for number in range(3):
        step(number)
    wait_for(device)
    samples: list[list[float]] = []
    is_over = threading.Event()
    begin = time.perf_counter()

    def sample() -> None:
        while not is_over.is_set():
            samples.append([time.perf_counter() - begin, float(torch.cuda.memory_allocated(device))])
            time.sleep(_SECONDS_BETWEEN_SAMPLES)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    issued, ended = [], []
    try:
        for number in range(_HOST_VIEW_ITERATIONS):
            step(number)
            issued.append(time.perf_counter() - begin)
            wait_for(device)
            ended.append(time.perf_counter() - begin)
    finally:
        is_over.set()
        thread.join()
    stride = max(1, len(samples) // (4 * NUM_POINTS))
    return {"samples": samples[::stride], "issued": issued, "ended": ended}
