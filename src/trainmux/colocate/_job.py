"""A job while it is scheduled: what it asks for, how far it is, what was learned of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._in_flight import InFlightSweep
from trainmux.colocate._trend import Trend

if TYPE_CHECKING:
    from trainmux.colocate._micro_batches import MicroBatchOrder


@dataclass(frozen=True)
class JobReport:
    """How a job fared: iterations run, how long they were shifted in all and last, how often it stalled."""

    name: str
    num_iterations: int
    total_shift_seconds: float
    last_shift_seconds: float
    num_mispredicted: int
    solo_seconds: tuple[float, ...]
    """What each segment takes alone, as far as was learned."""
    shared_seconds: tuple[float, ...]
    """What each segment takes beside the other jobs, as far as was learned."""
    in_flight_limit: int
    """How many segments are kept in flight while somebody may wait for the job's memory."""
    is_measured: bool
    """Whether these were measured: in a profiling iteration, or before."""


class JobState:
    """Counters and lifespans of one job. ``service`` is the solo time it got lately, over its share."""

    __slots__ = (
        "demand",
        "gap_seconds",
        "heights",
        "holds",
        "in_flight_limit",
        "is_leaving",
        "iteration_solo_seconds",
        "needs_profiling",
        "num_begun",
        "num_ended",
        "num_mispredicted",
        "num_segments",
        "observed",
        "order",
        "runs_alone",
        "segment_ended_at",
        "service",
        "shift_seconds",
        "solo_seconds",
        "stall_seconds",
        "sweep",
        "total_shift_seconds",
        "trend",
    )

    def __init__(self, demand: JobDemand, in_flight_limit: int) -> None:
        self.order: MicroBatchOrder | None = None
        """Of the lanes of a job whose micro-batches run side by side, this one among them."""
        self.cut_as(demand, in_flight_limit)
        self.is_leaving = False
        self.num_begun = 0
        self.num_ended = 0
        self.num_mispredicted = 0
        self.service = 0.0
        self.shift_seconds = 0.0
        """How far the last iteration was shifted."""
        self.total_shift_seconds = 0.0
        self.stall_seconds = 0.0
        """How long gates kept anything of the job from running, in the iteration that is running.

        Without what it waited for a peer that was falling: in turns it would have waited for longer.
        """
        self.gap_seconds = 0.0
        """How long nothing of the job ran between segments of that iteration, whatever the reason."""
        self.segment_ended_at = 0.0
        self.observed: list[float] = []
        self.runs_alone: deque[bool] = deque()
        """Of the iterations that are begun and not ended: whether nothing else may run beside them."""

    def cut_as(self, demand: JobDemand, in_flight_limit: int) -> None:
        """Take the segments of ``demand`` and what is known of them; before the job's first iteration.

        ``in_flight_limit`` segments are kept in flight until it is found how many are needed, unless that is
        known.
        """
        self.demand = demand
        self.heights = [segment.height_bytes for segment in demand.segments]
        self.holds = [segment.hold_bytes for segment in demand.segments]
        self.num_segments = len(demand.segments)
        self.trend = Trend(demand)
        self.learn_solo([segment.solo_seconds for segment in demand.segments])
        self.needs_profiling = not demand.is_measured
        known = demand.in_flight_limit
        self.in_flight_limit = known or in_flight_limit
        self.sweep = None if known else InFlightSweep(in_flight_limit)
        for lane in self.lanes:
            lane.sweep = self.sweep

    @property
    def name(self) -> str:
        return self.demand.name

    def report(self) -> JobReport:
        """How it fares."""
        return JobReport(
            self.name,
            self.num_ended,
            self.total_shift_seconds,
            self.shift_seconds,
            self.num_mispredicted,
            tuple(self.solo_seconds),
            tuple(self.trend.seconds),
            self.in_flight_limit,
            not self.needs_profiling,
        )

    @property
    def has_more(self) -> bool:
        """Whether another iteration is to begin."""
        steps = self.demand.steps
        return not self.is_leaving and (steps is None or self.num_begun < steps)

    @property
    def is_in_order(self) -> bool:
        """Whether no micro-batch of another lane has to begin, or be enqueued, before its next iteration."""
        return self.order is None or self.order.is_next(self)

    @property
    def is_being_watched(self) -> bool:
        """Whether somebody has yet to look at its last iteration; where lanes are in order, they have."""
        return self.order is None and self.demand.is_watched and self.num_begun > self.num_ended

    @property
    def lanes(self) -> tuple[JobState, ...]:
        """All lanes of the job that it is a lane of; a job by itself."""
        return (self,) if self.order is None else self.order.states

    @property
    def is_done(self) -> bool:
        return not self.has_more and self.num_ended == self.num_begun

    def sweep_limit(self) -> bool:
        """After an iteration that ran alone: take the next limit to try, or the one that is found.

        Returns whether it is found; ``observed`` is then an iteration with it.
        """
        if self.sweep is None:
            return True
        is_found = self.sweep.iteration_ended(self.observed, self.gap_seconds)
        for lane in self.lanes:
            lane.in_flight_limit = self.sweep.limit
        if is_found:
            self.observed = list(self.sweep.observed)
        return is_found

    def learn_solo(self, seconds: Sequence[float]) -> None:
        """Take ``seconds`` as what the segments take with nothing else on the device."""
        self.solo_seconds = list(seconds)
        self.iteration_solo_seconds = sum(self.solo_seconds)

    def refine_solo(self, weight: float) -> None:
        """Move the solo times towards those of the iteration that just ran alone."""
        pairs = zip(self.solo_seconds, self.observed, strict=True)
        self.learn_solo([old + weight * (new - old) for old, new in pairs])

    def begin(self, shift_seconds: float, *, alone: bool) -> None:
        """Count an iteration that begins, and charge its time to the job."""
        self.num_begun += 1
        self.service += self.iteration_solo_seconds / self.demand.share
        self.shift_seconds = shift_seconds
        self.total_shift_seconds += shift_seconds
        self.runs_alone.append(alone)

    def was_mispredicted(self, stall_share: float) -> bool:
        """Whether gates held up the iteration that just ended for more than a share of its solo time."""
        return self.stall_seconds > stall_share * self.iteration_solo_seconds

    def segment_ended(self, segment: int, started_at: float, ended_at: float, *, was_gated: bool) -> None:
        """Take down one segment of the running iteration; only a gate makes it stall, not a slow host."""
        if segment == 0:
            self.stall_seconds = self.gap_seconds = 0.0
            self.observed = []
        else:
            gap = max(0.0, started_at - self.segment_ended_at)
            self.gap_seconds += gap
            self.stall_seconds += gap if was_gated else 0.0
        self.segment_ended_at = ended_at
        self.observed.append(ended_at - started_at)
