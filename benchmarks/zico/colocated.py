"""Run a co-location through one budget after another, and watch it from another thread.

Callbacks would see every iteration, but a job with callbacks waits for them between two iterations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import trainmux as tm
from benchmarks.timing import used_bytes

from .jobs import BenchJob, MeasurementError, ZicoOptions, release_cached

ALL_MEMORY = "co-located, all memory"
CHANGES = ("co-located, 70%", "co-located, 50%", "co-located, 70% again")
"""Figure 10's budgets, as shares of what both jobs need at their peaks, as far as these can work."""
_EXCESS_WAY = "co-located, "
_LEAST_CHANGE = 1.1
_WARM_UP_SHARE = 0.4
"""Part of a budget's time that is not counted: profiling iterations, and the ramp of the budget."""
_POLL_SECONDS = 20e-3
_SAMPLE_SECONDS = 4e-4
_START_SECONDS = 120.0
"""Limit for the first iteration of every job, which profiles and captures it."""
_WAIT_SECONDS = 10.0
"""Limit for the iterations to count of a job that hardly progresses."""
_MAX_SAMPLES = 400
_SAMPLED_ITERATIONS = 4
_MAX_SAMPLED_SECONDS = 1.0


@dataclass(frozen=True)
class BudgetPhase:
    """A budget to stay in for a while, by name; ``is_sampled`` records the jobs' memory over time."""

    way: str
    budget_bytes: int
    is_sampled: bool = False


ChoosePhases = Callable[[tm.ColocationResult], Sequence[BudgetPhase]]
"""Called when every job has run an iteration: before that, a job may not know how much memory it needs."""


def excess_way(excess: float) -> str:
    """Name the budget that all jobs' peaks exceed by this factor."""
    return f"{_EXCESS_WAY}{excess:g}x"


def budget_phases(
    whole_bytes: int, smallest_bytes: int, ways: Sequence[str], *, samples: bool
) -> list[BudgetPhase]:
    """The budgets of ``ways``; none is below the smallest that can work, by turns."""
    # Where 50% is raised to the smallest that can work, 70% may be too close to be a change.
    low, high = max(smallest_bytes, whole_bytes // 2), int(0.7 * whole_bytes)
    if high < _LEAST_CHANGE * low:
        high = (low + whole_bytes) // 2
    changes = dict(zip(CHANGES, (high, low, high), strict=True))
    phases = []
    for way in ways:
        if way == ALL_MEMORY:
            phases.append(BudgetPhase(way, whole_bytes))
        elif way in changes:
            phases.append(BudgetPhase(way, changes[way], is_sampled=True))
        else:
            excess = float(way.removeprefix(_EXCESS_WAY).removesuffix("x"))
            phases.append(BudgetPhase(way, max(smallest_bytes, int(whole_bytes / excess)), samples))
    return phases


def needed_bytes(result: tm.ColocationResult) -> tuple[int, int]:
    """Bytes that all jobs need at their peaks together, and at least, by turns."""
    local = sum(row.local_bytes for row in result.jobs.values())
    peaks = [row.peak_bytes for row in result.jobs.values()]
    return local + sum(peaks), local + max(peaks)


def run_phases(
    jobs: Sequence[BenchJob], choose: ChoosePhases, options: ZicoOptions, **settings: Any
) -> Iterator[dict[str, Any]]:
    """Co-locate ``jobs`` with further ``settings``, and yield a record for each budget that was run.

    What stopped the run before its last budget is raised behind the records of those before.
    """
    endless = [
        tm.Job(str(index), fleet=job.fleet, loader=job.batches, steps=10**9) for index, job in enumerate(jobs)
    ]
    colocation = tm.colocate(endless, **settings)
    watch = _Watch(colocation, choose, options)
    watch.start()
    error: Exception | None = None
    try:
        result = colocation.run()
        error = next((row.error for row in result.jobs.values() if row.error is not None), None)
    except Exception as problem:
        error = problem
    finally:
        watch.has_ended.set()
        watch.join()
    records, num_phases, error = watch.records, watch.num_phases, error or watch.error
    del colocation, endless, watch
    release_cached(options.where)
    # The fleets hold their own tensors again, which they did not while they were co-located.
    outside = used_bytes(options.where) - sum(job.state_bytes for job in jobs)
    for record in records:
        if record["device_bytes"]:  # 0 on a CPU
            record["device_bytes"] = max(0, record["device_bytes"] - outside)
        yield record
    if num_phases is None or len(records) < num_phases:
        raise error or MeasurementError("a job ended by itself")


class _EndedError(Exception):
    """A job ended by itself."""


class _Watch(threading.Thread):
    """Moves a co-location from budget to budget, counts iterations, and removes the jobs at the end."""

    def __init__(self, colocation: tm.Colocation, choose: ChoosePhases, options: ZicoOptions) -> None:
        super().__init__(daemon=True)
        self._colocation, self._choose, self._options = colocation, choose, options
        self._most_bytes = self._smallest_bytes = 0
        self.has_ended = threading.Event()
        self.num_phases: int | None = None
        self.records: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        names = [row.name for row in self._colocation.usage()]
        try:
            steps, _ = self._wait([1] * len(names), 0.0, _START_SECONDS)
            if not all(steps):
                raise MeasurementError(
                    f"expected an iteration of each job in {_START_SECONDS:g} s; got {steps}"
                )
            first = self._colocation.results()
            phases = self._choose(first)
            self.num_phases, self._smallest_bytes = len(phases), needed_bytes(first)[1]
            for phase in phases:
                self.records.append(self._measure(phase))
        except _EndedError:
            pass
        except Exception as error:
            self.error = error
        finally:
            for name in names:
                self._colocation.remove(name)

    def _measure(self, phase: BudgetPhase) -> dict[str, Any]:
        change = self._change_to(phase.budget_bytes)
        wanted = self._options.seconds
        self._wait([0] * len(self._steps()), _WARM_UP_SHARE * wanted)
        before = self._colocation.results()
        self._most_bytes = 0
        first, since = self._steps(), time.perf_counter()
        last, now = self._wait(
            [steps + self._options.least_counted for steps in first], (1 - _WARM_UP_SHARE) * wanted
        )
        after = self._colocation.results()
        rows = list(zip(before.jobs.values(), after.jobs.values(), strict=True))
        iterations = [end - begin for begin, end in zip(first, last, strict=True)]
        record = {
            "way": phase.way,
            "iterations_per_second": [count / (now - since) for count in iterations],
            "local_bytes": [row.local_bytes for row in after.jobs.values()],
            "peak_bytes": [row.peak_bytes for row in after.jobs.values()],
            "budget_bytes": phase.budget_bytes,
            "smallest_budget_bytes": self._smallest_bytes,
            "device_bytes": self._most_bytes,
            "iterations": iterations,
            "mispredicted": [new.num_mispredicted - old.num_mispredicted for old, new in rows],
            "shift_seconds": [new.shift_seconds - old.shift_seconds for old, new in rows],
            "num_segments": [new.num_segments for _, new in rows],
            "fall_backs": after.num_fall_backs - before.num_fall_backs,
            "change": change,
        }
        if phase.is_sampled:
            period = (now - since) / max(1, min(iterations))
            record["samples"] = self._samples(min(_MAX_SAMPLED_SECONDS, _SAMPLED_ITERATIONS * period))
        return record

    def _change_to(self, budget_bytes: int) -> dict[str, Any] | None:
        """Set a budget and measure how long the jobs pause for it; ``None`` where it is already in force."""
        if self._colocation.budget_bytes == budget_bytes:
            return None
        begin = time.perf_counter()
        self._colocation.set_budget(budget_bytes)
        in_force_after: float | None = None
        steps = self._steps()
        wanted = [count + 3 for count in steps]
        last_end, longest = [begin] * len(steps), [0.0] * len(steps)
        while in_force_after is None or any(map(int.__lt__, steps, wanted)):
            if time.perf_counter() - begin > _WAIT_SECONDS:
                break
            time.sleep(_SAMPLE_SECONDS)
            seen, now = self._steps(), time.perf_counter()
            if in_force_after is None and self._colocation.budget_bytes == budget_bytes:
                in_force_after = now - begin
            for index, count in enumerate(seen):
                if count > steps[index]:
                    longest[index] = max(longest[index], now - last_end[index])
                    last_end[index] = now
            steps = seen
        if in_force_after is None:
            raise MeasurementError(
                f"a budget of {budget_bytes} bytes was not in force after {_WAIT_SECONDS:g} s"
            )
        now = time.perf_counter()
        for index, count in enumerate(steps):
            if count < wanted[index]:  # still waiting for its next iteration
                longest[index] = max(longest[index], now - last_end[index])
        return {"in_force_after_seconds": in_force_after, "longest_gap_seconds": longest}

    def _samples(self, seconds: float) -> list[list[float]]:
        """Record seconds and the bytes that each job holds, as far as the host knows."""
        begin = time.perf_counter()
        rows: list[list[float]] = []
        while len(rows) < _MAX_SAMPLES and (not rows or rows[-1][0] < seconds):
            held = [row.local_bytes + row.arena_bytes for row in self._colocation.usage()]
            rows.append([round(time.perf_counter() - begin, 6), *held])
            time.sleep(_SAMPLE_SECONDS)
        return rows

    def _steps(self) -> list[int]:
        rows = self._colocation.usage()
        if self.has_ended.is_set() or any(row.state in ("done", "failed") for row in rows):
            raise _EndedError
        return [row.num_steps for row in rows]

    def _wait(
        self, wanted: Sequence[int], seconds: float, limit: float = _WAIT_SECONDS
    ) -> tuple[list[int], float]:
        """Wait ``seconds``, and up to ``limit`` longer for the wanted steps; the steps done, and the time."""
        begin = time.perf_counter()
        while True:
            time.sleep(_POLL_SECONDS)
            self._most_bytes = max(self._most_bytes, used_bytes(self._options.where))
            steps, now = self._steps(), time.perf_counter()
            is_late = now - begin >= seconds + limit
            if is_late or (now - begin >= seconds and all(map(int.__ge__, steps, wanted))):
                return steps, now
