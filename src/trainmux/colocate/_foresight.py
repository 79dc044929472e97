"""What co-location would do, before anything runs: a job's memory over an iteration, and a simulated run.

A fleet's step is read as kernels, as for a job. Their times are worked out for a device by name; where the
whole iteration has been measured, they can be scaled to it. The simulated run drives the real scheduler over
a simulated GPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

from trainmux.colocate._actions import Action, Enqueue
from trainmux.colocate._demand import FINE_TRACKING_BYTES, PAIR_GAIN, JobDemand, demand_of_iteration
from trainmux.colocate._lane import SegmentRef
from trainmux.colocate._layout import smallest_budget
from trainmux.colocate._placement import region_bytes_for
from trainmux.colocate._scheduler import ScroogeScheduler
from trainmux.colocate._simulated_gpu import Contention, SimulatedGpu
from trainmux.colocate._tensors import Iteration, iteration_of_profile
from trainmux.errors import ConfigError
from trainmux.fleet import Fleet
from trainmux.profiling import analytic_profile, find_device

_UNIT_BYTES = 2 << 20
"""What a CUDA device maps at least."""


@dataclass(frozen=True)
class TensorSpan:
    """A tensor of an iteration: its bytes, its class in the paper's words, and when it is there."""

    size_bytes: int
    tensor_class: str
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class IterationMemory:
    """The memory of one iteration of a job, kernel by kernel; `iteration_memory` makes it."""

    iteration: Iteration

    @property
    def seconds(self) -> float:
        """How long the iteration takes."""
        return sum(self.iteration.kernel_seconds)

    @property
    def num_kernels(self) -> int:
        return len(self.iteration.kernel_seconds)

    def lasting(self, seconds: float) -> IterationMemory:
        """The same with every kernel's time scaled, so that the iteration takes ``seconds``."""
        factor = seconds / self.seconds
        scaled = tuple(taken * factor for taken in self.iteration.kernel_seconds)
        return IterationMemory(replace(self.iteration, kernel_seconds=scaled))

    def spans(self) -> tuple[TensorSpan, ...]:
        """Every tensor that the iteration makes."""
        begins = _begins(self.iteration)
        return tuple(
            TensorSpan(
                row.size_bytes,
                row.tensor_class.value,
                begins[row.allocated_by],
                begins[row.last_used_by + 1],
            )
            for row in self.iteration.allocations
        )

    def curve(self) -> tuple[tuple[float, int], ...]:
        """When each kernel begins, and the bytes that are there while it runs; the end with what lasts."""
        num_kernels = self.num_kernels
        changes = [0] * (num_kernels + 1)
        for row in self.iteration.allocations:
            changes[row.allocated_by] += row.size_bytes
            changes[row.last_used_by + 1] -= row.size_bytes
        begins, live, points = _begins(self.iteration), self.iteration.resident_bytes, []
        for rank in range(num_kernels):
            live += changes[rank]
            points.append((begins[rank], live))
        return (*points, (begins[-1], self.iteration.resident_bytes))


def iteration_memory(fleet: Fleet, batch: Any, device: str = "h200-141gb") -> IterationMemory:
    """What a step of ``fleet`` on ``batch`` allocates, and when on a ``device`` (one of ``DEVICES``).

    Refused with `ConfigError`: a fleet of several groups, and one that cannot be co-located.
    """
    pieces = fleet._in_segments()
    parts = pieces.begin(batch, applies=True)
    if len(parts) != 1:
        raise ConfigError(
            f"expected a fleet of one group, got {len(parts)}; look at members of one architecture at a time"
        )
    _, graph = parts[0].kernels()
    profile = analytic_profile(graph, parts[0].group.width, find_device(device), half=pieces.uses_half)
    return IterationMemory(iteration_of_profile(profile))


@dataclass(frozen=True)
class ForeseenSegment:
    """A segment of a simulated run: when it ran, and the job's bytes of the arena during and after it."""

    job: str
    iteration: int
    number: int
    started_at: float
    ended_at: float
    height_bytes: int
    hold_bytes: int


@dataclass(frozen=True)
class Foresight:
    """A simulated run: segments in the order of their ends, iterations and shifts by job.

    ``local_bytes`` are the jobs' own all the time, beside ``height_bytes`` of the arena.
    ``decision_us`` is what the scheduler took for an answer, in microseconds on this machine: the median and
    the 95th percentile, by what it answered.
    """

    budget_bytes: int
    smallest_budget_bytes: int
    sum_of_peaks_bytes: int
    local_bytes: Mapping[str, int]
    num_iterations: Mapping[str, int]
    shift_seconds: Mapping[str, float]
    seconds: float
    segments: tuple[ForeseenSegment, ...]
    decision_us: Mapping[str, tuple[float, float]]

    def held(self) -> tuple[tuple[float, Mapping[str, int]], ...]:
        """Moments at which what a job holds changes, and what every job holds from then on, in bytes."""
        changes = [(row.started_at, row.job, row.height_bytes) for row in self.segments]
        changes += [(row.ended_at, row.job, row.hold_bytes) for row in self.segments]
        held = dict(self.local_bytes)
        rows: list[tuple[float, Mapping[str, int]]] = []
        # At one moment ends come before starts, so that a job's own next segment is what counts.
        order = sorted(range(len(changes)), key=lambda i: (changes[i][0], i < len(self.segments)))
        for moment, job, size in (changes[i] for i in order):
            held[job] = self.local_bytes[job] + size
            rows.append((moment, dict(held)))
        return tuple(rows)


def foresee(
    memories: Mapping[str, IterationMemory],
    budget: int | None = None,
    *,
    seconds: float,
    gain: float = PAIR_GAIN,
    tracking_bytes: int = FINE_TRACKING_BYTES,
    region_bytes: int | None = None,
    budget_changes: Sequence[tuple[float, int]] = (),
) -> Foresight:
    """Simulate jobs side by side for about ``seconds`` within ``budget`` bytes, ``None`` being all they need.

    ``region_bytes`` ``None`` is what suits the jobs, as for `colocate` on a CUDA device.
    ``gain`` is the work that two of them at once do per second: 1 is that of turns. ``budget_changes`` are
    seconds from the start and budgets from then on. Refused as by `colocate`: a budget that is too small.
    """

    def demands_in(region_bytes: int) -> list[JobDemand]:
        return [
            replace(
                demand_of_iteration(
                    name,
                    memory.iteration,
                    tracking_bytes=tracking_bytes,
                    region_bytes=region_bytes,
                    steps=max(1, round(seconds / memory.seconds)),
                    is_measured=True,
                ),
                compute_demand=min(1.0, 1 / gain),
            )
            for name, memory in memories.items()
        ]

    if region_bytes is None:
        peaks = [demand.peak_bytes for demand in demands_in(_UNIT_BYTES)]
        region_bytes = region_bytes_for(peaks, _UNIT_BYTES)
    demands = demands_in(region_bytes)
    whole = sum(demand.local_bytes + demand.peak_bytes for demand in demands)
    scheduler = _TimedScheduler(demands, whole if budget is None else budget)
    times = {demand.name: [segment.solo_seconds for segment in demand.segments] for demand in demands}
    contention = Contention({demand.name: demand.compute_demand for demand in demands})
    gpu = SimulatedGpu(scheduler, lambda ref: times[ref.job][ref.segment], contention)
    for moment, size in budget_changes:
        gpu.at(moment, partial(_set_budget, scheduler, size))
    run = gpu.run()
    by_name = {demand.name: demand for demand in demands}
    reports = {name: scheduler.report(name) for name in by_name}
    return Foresight(
        budget_bytes=whole if budget is None else budget,
        smallest_budget_bytes=smallest_budget(demands),
        sum_of_peaks_bytes=whole,
        local_bytes={name: demand.local_bytes for name, demand in by_name.items()},
        num_iterations={name: report.num_iterations for name, report in reports.items()},
        shift_seconds={name: report.total_shift_seconds for name, report in reports.items()},
        seconds=run.ended_at,
        segments=tuple(
            _foreseen(row.ref, by_name[row.ref.job], row.started_at, row.ended_at) for row in run.executed
        ),
        decision_us=scheduler.decision_us(),
    )


def _foreseen(ref: SegmentRef, demand: JobDemand, started_at: float, ended_at: float) -> ForeseenSegment:
    segment = demand.segments[ref.segment]
    return ForeseenSegment(
        ref.job,
        ref.iteration,
        ref.segment,
        started_at,
        ended_at,
        segment.height_bytes,
        segment.hold_bytes,
    )


class _TimedScheduler(ScroogeScheduler):
    """Takes down how long every answer takes."""

    def __init__(self, demands: Sequence[JobDemand], budget_bytes: int) -> None:
        self._taken: dict[str, list[float]] = {}
        super().__init__(demands, budget_bytes)

    def next_action(self, now: float) -> Action:
        begin = time.perf_counter_ns()
        action = super().next_action(now)
        taken = (time.perf_counter_ns() - begin) / 1e3
        what = "wait"
        if isinstance(action, Enqueue):
            what = "a segment follows" if action.ref.segment else "an iteration begins"
        self._taken.setdefault(what, []).append(taken)
        return action

    def decision_us(self) -> dict[str, tuple[float, float]]:
        return {
            what: (median(taken), sorted(taken)[len(taken) * 95 // 100])
            for what, taken in self._taken.items()
        }


def _set_budget(scheduler: ScroogeScheduler, budget_bytes: int, now: float) -> None:
    scheduler.set_budget(budget_bytes)


def _begins(iteration: Iteration) -> list[float]:
    """When each kernel begins, and when the last one ends."""
    return list(accumulate(iteration.kernel_seconds, initial=0.0))
