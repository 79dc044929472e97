"""One end of an arena: segments in order, each with the height that it needs, and the gate to the other end.

Two lanes grow towards each other. What keeps them apart is not the clock but the order in which segments are
enqueued. A segment may be enqueued if it fits beside what the other lane holds after everything that is
enqueued there; it waits for the last segment there that it does not fit beside. So of two segments that
would overlap, the later one waits for the earlier, whatever the times turn out to be, and a segment only ever
waits for one that was enqueued before it.

Every state is kept *safe* (the banker's rule): one of the two lanes can run to the end of its iteration
beside what the other holds now. From a safe state that lane can go on, and each of its steps leads to a safe
state: there is no deadlock. Where both lanes run micro-batches of one job, the later one may have to wait for
the earlier: then it must be the earlier that can.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from trainmux.colocate._job import JobState
from trainmux.colocate._trend import Remainder, Trend

_MOST_IN_FLIGHT = 16
"""Segments of a lane, in any case: a row of launches should not keep the host from everything else."""


class SegmentRef(NamedTuple):
    """A segment of one iteration of a job; iterations and segments count from 0."""

    job: str
    iteration: int
    segment: int


class InFlight(NamedTuple):
    """A segment that is enqueued and not complete."""

    ref: SegmentRef
    job: JobState
    height_bytes: int
    was_gated: bool
    """Whether it had to wait for memory of a peer that was not falling, before it was enqueued or since."""


class Gate(NamedTuple):
    """A segment may be enqueued, after ``behind`` of the other lane where that is given."""

    behind: SegmentRef | None


class Lane:
    """The jobs that use one end of an arena, one iteration after the other."""

    __slots__ = (
        "asked_at",
        "epoch",
        "in_flight",
        "is_gated",
        "is_held",
        "job",
        "jobs",
        "last_end",
        "next_segment",
        "retry_at",
        "seen_epoch",
        "tail_hold_bytes",
    )

    def __init__(self, now: float) -> None:
        self.jobs: list[JobState] = []
        self.in_flight: deque[InFlight] = deque()
        self.job: JobState | None = None
        """Whose iteration is begun and not enqueued to its end."""
        self.next_segment = 0
        self.is_gated = False
        """Whether the next segment waits, or has waited, for memory of a peer that was not falling."""
        self.is_held = False
        """Whether no iteration may begin here, because the lane's place is about to change."""
        self.tail_hold_bytes = 0
        """The height that is held once all that is enqueued is complete."""
        self.last_end = now
        """When the lane's last complete segment ended."""
        self.epoch = 0
        """Changes whenever an iteration begins or ends here: what the other lane predicted is outdated."""
        self.retry_at = 0.0
        """When to predict again, unless the other lane's epoch is no longer ``seen_epoch``."""
        self.seen_epoch = -1
        self.asked_at: float | None = None
        """Since when an iteration waits here for memory."""

    @property
    def need_bytes(self) -> int:
        """The most height that the rest of the begun iteration needs."""
        return self.job.trend.need_from[self.next_segment] if self.job is not None else 0

    @property
    def is_falling(self) -> bool:
        """Whether what is not enqueued yet of the begun iteration only gives memory back.

        Whoever begins across never makes it wait, and need not wait for longer than until its end.
        """
        return self.need_bytes <= self.tail_hold_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is begun and nothing in flight: the lane holds no memory."""
        return self.job is None and not self.in_flight

    def next_job(self) -> JobState | None:
        """Of the jobs that may run another iteration, one to be profiled, else the one served least."""
        chosen: JobState | None = None
        for job in self.jobs:
            if not job.has_more or not job.is_in_order:
                continue
            if job.needs_profiling:
                return job
            if chosen is None or job.service < chosen.service:
                chosen = job
        return chosen

    def takes_another(self, job: JobState) -> bool:
        """Whether a segment of ``job`` may be in flight besides what is, within the limit.

        The limit is there so that memory is not taken too early.
        """
        return len(self.in_flight) < job.in_flight_limit

    def takes_more(self, job: JobState, *, fits_all: bool) -> bool:
        """Whether the next segment of the begun iteration may be in flight beyond the limit.

        Where it only gives memory back from here on, or there is room for all that both lanes ever need,
        nothing is left to be decided. What is in flight then bridges the time in which the host is busy with
        others, for this lane and for one that begins behind it. Not while the limit is looked for.
        """
        if job.needs_profiling or len(self.in_flight) >= _MOST_IN_FLIGHT:
            return False
        return fits_all or self.is_falling

    def gate(self, job: JobState, segment: int, other: Lane, capacity_bytes: int) -> Gate | None:
        """How ``segment`` of ``job`` may be enqueued here next; ``None`` if it must not be now."""
        room = capacity_bytes - job.heights[segment]
        if other.tail_hold_bytes > room:
            return None
        if not self._stays_safe(job, segment, other, capacity_bytes):
            return None
        for there in reversed(other.in_flight):
            if there.height_bytes > room:
                return Gate(there.ref)
        return Gate(None)

    @staticmethod
    def _stays_safe(job: JobState, segment: int, other: Lane, capacity_bytes: int) -> bool:
        """Whether one of the lanes can still run to the end once ``segment`` is enqueued."""
        this_can_end = job.trend.need_from[segment + 1] + other.tail_hold_bytes <= capacity_bytes
        other_can_end = other.need_bytes + job.holds[segment] <= capacity_bytes
        if job.order is not None and other.job is not None and other.job.order is job.order:
            return this_can_end if job.order.is_foremost(job) else other_can_end
        return this_can_end or other_can_end

    def push(self, job: JobState, segment: int, ref: SegmentRef, now: float) -> None:
        """Enqueue a segment whose gate was asked for."""
        if not self.in_flight:
            self.last_end = max(self.last_end, now)
        self.in_flight.append(InFlight(ref, job, job.heights[segment], self.is_gated))
        self.is_gated = False
        self.tail_hold_bytes = job.holds[segment]
        self.next_segment = segment + 1
        self.job = job if self.next_segment < job.num_segments else None
        if segment == 0:
            self.epoch += 1

    def abandon(self) -> None:
        """Forget what is not enqueued of the begun iteration: the job will not go on."""
        self.job = None
        self.is_gated = False
        self.tail_hold_bytes = 0
        self.epoch += 1

    def num_iterations_in_flight(self) -> int:
        """How many different iterations have segments here that are enqueued and not complete."""
        if not self.in_flight:
            return 0
        return 1 if self.in_flight[0].ref[:2] == self.in_flight[-1].ref[:2] else 2

    def head(self, now: float) -> tuple[JobState, int, float]:
        """Job and segment that run here or are next, and when that one began, or would have.

        A segment that takes longer than believed is taken to end now. Only of a lane that is not idle.
        """
        if not self.in_flight:
            assert self.job is not None
            return self.job, self.next_segment, now
        first = self.in_flight[0]
        taken = first.job.trend.seconds[first.ref.segment]
        return first.job, first.ref.segment, max(self.last_end, now - taken)

    def remainder(self, now: float) -> Remainder:
        """The trend of what is begun here and not complete."""
        job, segment, began_at = self.head(now)
        origin = began_at - job.trend.begins[segment]
        rest = Remainder(job.trend, segment, origin)
        if self.num_iterations_in_flight() < 2:
            return rest
        return rest.followed_by(Remainder(self._tail_trend, 0, origin + job.trend.begins[-1]))

    def free_at(self, now: float) -> float:
        """When all that is begun here is believed to have ended."""
        if self.is_idle:
            return now
        job, segment, began_at = self.head(now)
        end = began_at - job.trend.begins[segment] + job.trend.begins[-1]
        return end if self.num_iterations_in_flight() < 2 else end + self._tail_trend.begins[-1]

    def tail_at(self, now: float) -> float:
        """When the last segment that is enqueued here is believed to end."""
        if not self.in_flight:
            return now
        job, segment, began_at = self.head(now)
        end = began_at - job.trend.begins[segment]
        if self.num_iterations_in_flight() > 1:
            end += job.trend.begins[-1]
        tail = self.in_flight[-1]
        return end + tail.job.trend.begins[tail.ref.segment + 1]

    @property
    def _tail_trend(self) -> Trend:
        return self.in_flight[-1].job.trend
