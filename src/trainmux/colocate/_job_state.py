"""A job while it is scheduled: its progress, and what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._trend import Trend

_STALL_SHARE = 0.05
"""An iteration was mispredicted if gates held it up for more than this share of its solo time."""


@dataclass(frozen=True)
class JobReport:
    """Statistics of a job: how long iterations were shifted in total, how many were mispredicted.

    ``solo_seconds`` and ``shared_seconds`` are the durations of its segments alone and next to other jobs, as
    far as known; ``is_measured`` says whether they were measured.
    """

    total_shift_seconds: float
    num_mispredicted: int
    solo_seconds: tuple[float, ...]
    shared_seconds: tuple[float, ...]
    is_measured: bool


class JobState:
    """Progress and durations of one job. ``service`` is the solo time it got lately, over its share."""

    def __init__(self, demand: JobDemand) -> None:
        self.cut_as(demand)
        self.is_leaving = False
        self.num_begun = self.num_ended = self.num_mispredicted = 0
        self.service = 0.0
        self.total_shift_seconds = 0.0
        self.stall_seconds = 0.0
        """How long gates kept the running iteration idle, without waits for a peer that was falling."""
        self.segment_ended_at = 0.0
        self.observed: list[float] = []
        """The durations of the running iteration's segments."""

    def cut_as(self, demand: JobDemand) -> None:
        """Use the segments of ``demand`` and what is known of them; before the job's first iteration."""
        self.demand = demand
        self.heights = [segment.height_bytes for segment in demand.segments]
        self.holds = [segment.hold_bytes for segment in demand.segments]
        self.num_segments = len(demand.segments)
        self.trend = Trend(demand)
        self.learn_solo([segment.solo_seconds for segment in demand.segments])
        self.needs_profiling = not demand.is_measured

    @property
    def name(self) -> str:
        return self.demand.name

    def report(self) -> JobReport:
        return JobReport(
            self.total_shift_seconds,
            self.num_mispredicted,
            tuple(self.solo_seconds),
            tuple(self.trend.seconds),
            not self.needs_profiling,
        )

    @property
    def has_more(self) -> bool:
        """Whether another iteration is to begin."""
        steps = self.demand.steps
        return not self.is_leaving and (steps is None or self.num_begun < steps)

    @property
    def is_being_watched(self) -> bool:
        """Whether callbacks have yet to see its last iteration."""
        return self.demand.is_watched and self.num_begun > self.num_ended

    @property
    def is_done(self) -> bool:
        return not self.has_more and self.num_ended == self.num_begun

    def learn_solo(self, seconds: Sequence[float]) -> None:
        """Use ``seconds`` as the segments' durations with nothing else on the device."""
        self.solo_seconds = list(seconds)
        self.iteration_solo_seconds = sum(self.solo_seconds)

    def begin(self, shift_seconds: float) -> None:
        """Count an iteration that begins, and charge its time to the job."""
        self.num_begun += 1
        self.service += self.iteration_solo_seconds / self.demand.share
        self.total_shift_seconds += shift_seconds

    @property
    def was_mispredicted(self) -> bool:
        """Whether gates held up the iteration that just ended for too long."""
        return self.stall_seconds > _STALL_SHARE * self.iteration_solo_seconds

    def segment_ended(self, segment: int, started_at: float, ended_at: float, *, was_gated: bool) -> None:
        """Record a segment of the running iteration. Only a gate makes it stall, not a slow host."""
        if segment == 0:
            self.stall_seconds = 0.0
            self.observed = []
        elif was_gated:
            self.stall_seconds += max(0.0, started_at - self.segment_ended_at)
        self.segment_ended_at = ended_at
        self.observed.append(ended_at - started_at)
