"""A shared arena: two sides that grow towards each other, and the gate that keeps them apart.

The clock does not keep the sides apart; the order in which segments are enqueued does. A segment may be
enqueued if it fits next to the memory that the other side holds after everything enqueued there, and it waits
for the last segment there that it does not fit next to. So of two segments that would overlap, the later one
waits for the earlier, whatever their durations turn out to be, and a segment only waits for one that was
enqueued before it.

Every state is kept *safe* (the banker's rule): one of the two sides can run its iteration to the end next to
what the other holds now. From a safe state that side can go on, and each of its steps leads to a safe state,
so there is no deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainmux.colocate._demand import JobDemand, SegmentRef
from trainmux.colocate._layout import ArenaLayout
from trainmux.colocate._trend import Remainder, Trend

_IN_FLIGHT = 4
"""Segments of one side in flight while they may take memory that the other side waits for (§6.1)."""
_MOST_IN_FLIGHT = 16
"""Segments of one side in flight at most: a row of launches should not block the host from everything
else."""
_LEEWAY = 1.5
"""How many times the service of its peer one of two different jobs may get, where nobody asked for shares:
both do most together when neither waits for the sake of the other's share."""
_SLICING_ROUNDS = 64
"""Rounds of time slicing before sharing is tried again."""
_STALL_WINDOW, _STALLS_TO_FALL_BACK = 8, 4
"""A pair falls back at this many mispredictions among the last iterations of one of its jobs."""
_STALL_SHARE = 0.05
"""An iteration was mispredicted if gates held it up for more than this share of its solo time."""


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


class InFlight(NamedTuple):
    """A segment that is enqueued and not complete.

    ``was_gated`` says whether it had to wait for memory of a peer that was not falling.
    """

    ref: SegmentRef
    job: JobState
    height_bytes: int
    was_gated: bool


class ArenaSide:
    """The jobs that use one end of ``arena``, one iteration after the other."""

    def __init__(self, arena: Arena, jobs: list[JobState], now: float) -> None:
        self.arena = arena
        self.jobs = jobs
        self.in_flight: deque[InFlight] = deque()
        self.job: JobState | None = None
        """The job whose iteration is begun and not fully enqueued."""
        self.next_segment = 0
        self.is_gated = False
        """Whether the next segment waits, or has waited, for memory of a peer that was not falling."""
        self.is_held = False
        """Whether no iteration may begin here, because the layout is about to change."""
        self.tail_hold_bytes = 0
        """The height that is held once everything enqueued is complete."""
        self.last_end = now
        """When the last complete segment ended."""
        self.retry_at = 0.0
        """When to predict again whether an iteration may begin here; sooner if one begins or ends at the
        other side."""
        self.asked_at: float | None = None
        """Since when an iteration waits here for memory."""

    @property
    def other(self) -> ArenaSide:
        """The opposite side."""
        return self.arena.top if self is self.arena.base else self.arena.base

    @property
    def need_bytes(self) -> int:
        """The greatest height that the rest of the begun iteration needs."""
        return self.job.trend.need_from[self.next_segment] if self.job is not None else 0

    @property
    def is_falling(self) -> bool:
        """Whether the rest of the begun iteration only gives memory back.

        A peer that begins now never makes it wait, and waits at most until its end.
        """
        return self.need_bytes <= self.tail_hold_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is begun and nothing in flight: the side holds no memory."""
        return self.job is None and not self.in_flight

    @property
    def has_two_iterations(self) -> bool:
        """Whether segments of two iterations are in flight."""
        return bool(self.in_flight) and self.in_flight[0].ref[:2] != self.in_flight[-1].ref[:2]

    @property
    def next_job(self) -> JobState | None:
        """The job to run next: one to be profiled, else the one with the least service."""
        waiting = [job for job in self.jobs if job.has_more]
        return min(waiting, key=lambda job: (not job.needs_profiling, job.service), default=None)

    @property
    def takes_another(self) -> bool:
        """Whether the limit, which keeps memory from being taken too early, allows another segment."""
        return len(self.in_flight) < _IN_FLIGHT

    @property
    def takes_more(self) -> bool:
        """Whether the next segment of the begun iteration may be in flight beyond the limit.

        Where it only gives memory back from here on, or both peaks fit, nothing is left to decide. Segments
        in flight then bridge the time in which the host is busy with other jobs.
        """
        return len(self.in_flight) < _MOST_IN_FLIGHT and (self.arena.fits_all or self.is_falling)

    def gate(self, job: JobState, segment: int) -> tuple[SegmentRef, ...] | None:
        """The segments behind which ``segment`` may be enqueued here next; ``None`` if it must not be yet."""
        other, room = self.other, self.arena.capacity_bytes - job.heights[segment]
        if other.tail_hold_bytes > room or not self._stays_safe(job, segment):
            return None
        for there in reversed(other.in_flight):
            if there.height_bytes > room:
                return (there.ref,)
        return ()

    def _stays_safe(self, job: JobState, segment: int) -> bool:
        """Whether one of the sides can still run to the end once ``segment`` is enqueued."""
        other, capacity_bytes = self.other, self.arena.capacity_bytes
        this_can_end = job.trend.need_from[segment + 1] + other.tail_hold_bytes <= capacity_bytes
        other_can_end = other.need_bytes + job.holds[segment] <= capacity_bytes
        return this_can_end or other_can_end

    def push(self, job: JobState, segment: int, now: float) -> SegmentRef:
        """Enqueue a segment that has passed its gate."""
        ref = SegmentRef(job.name, job.num_begun - 1, segment)
        if not self.in_flight:
            self.last_end = max(self.last_end, now)
        self.in_flight.append(InFlight(ref, job, job.heights[segment], self.is_gated))
        self.is_gated = False
        self.tail_hold_bytes = job.holds[segment]
        self.next_segment = segment + 1
        self.job = job if self.next_segment < job.num_segments else None
        if segment == 0:
            self.other.retry_at = 0.0
        return ref

    def abandon(self) -> None:
        """Drop the part of the begun iteration that is not enqueued: the job ends here."""
        self.job = None
        self.is_gated = False
        self.tail_hold_bytes = 0
        self.other.retry_at = 0.0

    def _head(self, now: float) -> tuple[JobState, int, float]:
        """The job and segment that run here or come next, and when that iteration began.

        A segment that takes longer than predicted is assumed to end now. Only for a side that is not idle.
        """
        if self.in_flight:
            job, segment = self.in_flight[0].job, self.in_flight[0].ref.segment
            began_at = max(self.last_end, now - job.trend.seconds[segment])
        else:
            assert self.job is not None
            job, segment, began_at = self.job, self.next_segment, now
        return job, segment, began_at - job.trend.begins[segment]

    def remainders(self, now: float) -> list[Remainder]:
        """The rest of the iterations that are begun here and not complete."""
        job, segment, origin = self._head(now)
        found = [Remainder(origin, job.trend.step_of_segment[segment], job.trend)]
        if self.has_two_iterations:
            found.append(Remainder(origin + job.trend.iteration_seconds, 0, self.in_flight[-1].job.trend))
        return found

    def tail_at(self, now: float) -> float:
        """When the last segment enqueued here is predicted to end."""
        if not self.in_flight:
            return now
        job, _, end = self._head(now)
        if self.has_two_iterations:
            end += job.trend.iteration_seconds
        tail = self.in_flight[-1]
        return end + tail.job.trend.begins[tail.ref.segment + 1]


class StallCounter:
    """Counts the mispredicted iterations of a pair of jobs: gates held up iterations that were let in.

    Each job's own last iterations count, so that a job of many short ones does not hide the other's. While
    ``is_slicing`` the pair runs one iteration at a time.
    """

    def __init__(self) -> None:
        self.is_slicing = False
        self._recent: dict[str, deque[bool]] = {}
        self._until = 0.0

    def iteration_ended(self, job: str, now: float, round_seconds: float, *, stalled: bool) -> bool:
        """Count an iteration of one of the pair, whose rounds take ``round_seconds``; true if slicing begins
        now."""
        if self.is_slicing:
            if now >= self._until:
                self.share_again()
            return False
        recent = self._recent.setdefault(job, deque(maxlen=_STALL_WINDOW))
        recent.append(stalled)
        self.is_slicing = sum(recent) >= _STALLS_TO_FALL_BACK
        self._until = now + _SLICING_ROUNDS * round_seconds
        return self.is_slicing

    def share_again(self) -> None:
        """End time slicing."""
        self.is_slicing = False
        self._recent.clear()


class Arena:
    """Both sides of one arena."""

    def __init__(self, layout: ArenaLayout, jobs: Mapping[str, JobState], now: float) -> None:
        self.layout = layout
        self.base = ArenaSide(self, [jobs[name] for name in layout.base], now)
        self.top = ArenaSide(self, [jobs[name] for name in layout.top], now)
        are_different = len({job.demand.fingerprint for job in self.jobs}) == 2 == len(self.jobs)
        has_shares = len({job.demand.share for job in self.jobs}) > 1
        self.leeway = _LEEWAY if are_different and not has_shares else 1.0
        self.stalls = StallCounter()
        self.learn()

    @property
    def capacity_bytes(self) -> int:
        return self.layout.capacity_bytes

    @property
    def jobs(self) -> list[JobState]:
        """The jobs of both sides."""
        return self.base.jobs + self.top.jobs

    @property
    def is_shared(self) -> bool:
        return bool(self.base.jobs and self.top.jobs)

    def resize(self, layout: ArenaLayout) -> None:
        """Change the capacity; every job keeps its place."""
        self.top.is_held = False
        if layout != self.layout:
            self.layout = layout
            self.base.retry_at = self.top.retry_at = 0.0
            self.stalls.share_again()
            self.learn()

    def is_served_less(self, other: ArenaSide, job: JobState) -> bool:
        """Whether the next job of the ``other`` side got less service than ``job``, beyond the leeway."""
        peer = other.next_job
        return peer is not None and self.leeway * peer.service < job.service

    def must_yield(self, other: ArenaSide, job: JobState) -> bool:
        """Whether a job of the idle ``other`` side waits for memory and got less service than ``job``.

        Otherwise iterations of ``job`` could follow one another, and the waiting job would only ever be
        asked in the middle of their peaks.
        """
        if self.fits_all or other.asked_at is None or other.is_held:
            return False
        return self.is_served_less(other, job)

    def learn(self) -> None:
        """Recompute what depends on the jobs and on the capacity."""
        sides = (self.base.jobs, self.top.jobs)
        peaks = [max((job.trend.peak_bytes for job in side), default=0) for side in sides]
        self.fits_all = sum(peaks) <= self.capacity_bytes
        """Whether both sides can be at their peaks at once, so that nothing has to be predicted."""
