"""Jobs that share a device, looked at from another thread: one budget after another, each for a while.

Callbacks would see every iteration, but a job with callbacks waits for them between two iterations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import trainmux as tm

from .job import BenchError
from .zico_jobs import used_bytes

_WARM_SHARE = 0.4
"""Of the time of a budget that is not counted: profiling, and the ramp of the budget."""
_LEAST_COUNTED = 64
"""Iterations of each job, however long they take: one more or less at a window's ends is 2% at most."""
_SECONDS_BETWEEN_LOOKS = 20e-3
_SECONDS_BETWEEN_SAMPLES = 4e-4
_MAX_START_SECONDS = 120.0
"""Until every job has done its first iteration: it is profiled, and captured, before that."""
_MAX_WAIT_SECONDS = 10.0
"""For iterations of a job that hardly gets any; what it did until then counts."""
_MAX_SAMPLES = 400
_SAMPLED_ITERATIONS = 4
"""Of the slower job, over which samples are taken."""
_MAX_SAMPLED_SECONDS = 1.0


@dataclass(frozen=True)
class Stay:
    """A budget to stay within for a while. With ``has_samples`` the jobs' bytes over time are taken down."""

    way: str
    budget_bytes: int
    has_samples: bool = False


@dataclass(frozen=True)
class Stayed:
    """What was seen: iterations of each job in ``seconds``, and what goes into a result's detail."""

    stay: Stay
    counted: tuple[int, ...]
    seconds: float
    most_bytes: int
    detail: dict[str, Any] = field(default_factory=dict)


ChooseStays = Callable[[tm.ColocationResult], Sequence[Stay]]
"""Of jobs that have all done an iteration: until then one may have asked for more memory than it knew of."""


class _OverError(Exception):
    """A job has ended by itself."""


class Watch(threading.Thread):
    """Takes a co-location from budget to budget, counts its jobs' iterations, and lets them go at the end."""

    def __init__(
        self, colocation: tm.Colocation, choose: ChooseStays, seconds: float, device: torch.device
    ) -> None:
        super().__init__(daemon=True)
        self._colocation, self._choose, self._device = colocation, choose, device
        self._wanted_seconds = seconds
        self._most_bytes = 0
        self.has_ended = threading.Event()
        """Whether there is nothing more to see."""
        self.stays: Sequence[Stay] | None = None
        """What was chosen, once it was."""
        self.stayed: list[Stayed] = []
        self.error: Exception | None = None

    def run(self) -> None:
        names = [row.name for row in self._colocation.usage()]
        try:
            steps, _ = self._until([1] * len(names), 0.0, _MAX_START_SECONDS)
            if not all(steps):
                raise BenchError(
                    f"a job did no iteration in {_MAX_START_SECONDS:g} s, beside others' {steps}"
                )
            self.stays = self._choose(self._colocation.results())
            for stay in self.stays:
                self._stay(stay)
        except _OverError:
            pass
        except Exception as error:
            self.error = error
        finally:
            for name in names:
                self._colocation.remove(name)

    def _stay(self, stay: Stay) -> None:
        change = self._change_to(stay.budget_bytes)
        self._until([0] * len(self._steps()), _WARM_SHARE * self._wanted_seconds)
        results_before = self._colocation.results()
        before = results_before.jobs.values()
        self._most_bytes = 0
        first, since = self._steps(), time.perf_counter()
        least = [steps + _LEAST_COUNTED for steps in first]
        last, now = self._until(least, (1 - _WARM_SHARE) * self._wanted_seconds)
        results_after = self._colocation.results()
        after = results_after.jobs.values()
        counted = tuple(end - begin for begin, end in zip(first, last, strict=True))
        detail = {
            "mispredicted": [
                row.num_mispredicted - old.num_mispredicted for row, old in zip(after, before, strict=True)
            ],
            "shift_seconds": [
                row.shift_seconds - old.shift_seconds for row, old in zip(after, before, strict=True)
            ],
            "fall_backs": results_after.num_fall_backs - results_before.num_fall_backs,
            "iterations": list(counted),
            "seconds": now - since,
            "change": change,
        }
        most_bytes = self._most_bytes
        if stay.has_samples:
            period = (now - since) / max(1, min(counted))
            detail["samples"] = self._samples(min(_MAX_SAMPLED_SECONDS, _SAMPLED_ITERATIONS * period))
        self.stayed.append(Stayed(stay, counted, now - since, most_bytes, detail))

    def _change_to(self, budget_bytes: int) -> dict[str, Any] | None:
        """Set a budget, and see how long the jobs pause for it; ``None`` where it is the one in force."""
        if self._colocation.budget_bytes == budget_bytes:
            return None
        begin = time.perf_counter()
        self._colocation.set_budget(budget_bytes)
        in_force_after: float | None = None
        steps = self._steps()
        last_end = [begin] * len(steps)
        longest = [0.0] * len(steps)
        least = [count + 3 for count in steps]
        while in_force_after is None or any(map(int.__lt__, steps, least)):
            if time.perf_counter() - begin > _MAX_WAIT_SECONDS:
                break
            time.sleep(_SECONDS_BETWEEN_SAMPLES)
            seen, now = self._steps(), time.perf_counter()
            if in_force_after is None and self._colocation.budget_bytes == budget_bytes:
                in_force_after = now - begin
            for index, count in enumerate(seen):
                if count > steps[index]:
                    longest[index] = max(longest[index], now - last_end[index])
                    last_end[index] = now
            steps = seen
        now = time.perf_counter()
        if in_force_after is None:
            raise BenchError(
                f"a budget of {budget_bytes} bytes was not in force {now - begin:.0f} s after it was set"
            )
        for index, count in enumerate(steps):
            if count < least[index]:  # it still waits for its next one
                longest[index] = max(longest[index], now - last_end[index])
        return {"in_force_after_seconds": in_force_after, "longest_gap_seconds": longest}

    def _samples(self, seconds: float) -> list[list[float]]:
        """Seconds and what each job holds, by what runs as far as the host knows."""
        begin = time.perf_counter()
        rows: list[list[float]] = []
        while len(rows) < _MAX_SAMPLES and (not rows or rows[-1][0] < seconds):
            usage = self._colocation.usage()
            rows.append(
                [round(time.perf_counter() - begin, 6), *(row.local_bytes + row.arena_bytes for row in usage)]
            )
            time.sleep(_SECONDS_BETWEEN_SAMPLES)
        return rows

    def _steps(self) -> list[int]:
        rows = self._colocation.usage()
        if self.has_ended.is_set() or any(row.state in ("done", "failed") for row in rows):
            raise _OverError
        return [row.num_steps for row in rows]

    def _until(
        self, least: Sequence[int], seconds: float, most_seconds: float = _MAX_WAIT_SECONDS
    ) -> tuple[list[int], float]:
        """Wait that long, and until the jobs have done so many steps; how many, and when that was.

        Not for more than ``most_seconds`` longer: nothing says that every job gets on.
        """
        begin = time.perf_counter()
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            self._most_bytes = max(self._most_bytes, used_bytes(self._device))
            steps, now = self._steps(), time.perf_counter()
            is_late = now - begin >= seconds + most_seconds
            if is_late or (now - begin >= seconds and all(map(int.__ge__, steps, least))):
                return steps, now


@dataclass(frozen=True)
class Watched:
    """What was seen of the stays that were chosen, how the jobs fared, and what went wrong if anything.

    There are no ``stays`` where it went wrong before they were chosen.
    """

    stays: Sequence[Stay] | None
    stayed: Sequence[Stayed]
    result: tm.ColocationResult | None
    error: Exception | None


def run_watched(
    colocation: tm.Colocation, choose: ChooseStays, seconds: float, device: torch.device
) -> Watched:
    """Run to the end of the last stay. What went wrong does not take away what was seen before."""
    watch = Watch(colocation, choose, seconds, device)
    watch.start()
    result: tm.ColocationResult | None = None
    error: Exception | None = None
    try:
        result = colocation.run()
    except Exception as problem:
        error = problem
    finally:
        watch.has_ended.set()
        watch.join()
    if result is not None:
        error = next((row.error for row in result.jobs.values() if row.error is not None), None)
    error = error or watch.error
    if error is None and (watch.stays is None or len(watch.stayed) < len(watch.stays)):
        error = BenchError("a job ended by itself")
    return Watched(watch.stays, watch.stayed, result, error)
