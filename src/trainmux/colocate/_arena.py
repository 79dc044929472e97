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
from collections.abc import Mapping
from typing import NamedTuple

from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._job_state import JobState
from trainmux.colocate._layout import ArenaLayout
from trainmux.colocate._trend import Remainder, Trend

_IN_FLIGHT = 4
"""Segments of one side in flight while they may take memory that the other side waits for (§6.1)."""
_MOST_IN_FLIGHT = 16
"""Segments of one side in flight at most: a row of launches should not block the host from everything
else."""
_PATIENCE_ITERATIONS = 0.25
"""How far, in iterations of the longer job, a job may get ahead of its share where memory is short."""
_LEEWAY = 1.5
"""How many times the service of its peer one of two different jobs may get, where nobody asked for shares:
both do most together when neither waits for the sake of the other's share."""
_REMEMBERED_ITERATIONS = 64
"""With leeway, service counts for about this many iterations of the longest job."""
_FIRST_ROUNDS, _MOST_ROUNDS, _ROUNDS_GROWTH = 16, 1024, 4
"""Rounds of time slicing before sharing is tried again, and their growth with each failure."""
_STALL_WINDOW, _STALLS_TO_FALL_BACK = 8, 4
"""A pair falls back at this many mispredictions among its last iterations."""


class InFlight(NamedTuple):
    """A segment that is enqueued and not complete.

    ``was_gated`` says whether it had to wait for memory of a peer that was not falling.
    """

    ref: SegmentRef
    job: JobState
    height_bytes: int
    was_gated: bool


class ArenaSide:
    """The jobs that use one end of an arena, one iteration after the other."""

    def __init__(self, now: float, jobs: list[JobState]) -> None:
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
        self.epoch = 0
        """Changes whenever an iteration begins or ends here, which outdates predictions of the other side."""
        self.retry_at = 0.0
        """When to predict again, unless the other side's epoch differs from ``seen_epoch`` by then."""
        self.seen_epoch = -1
        self.asked_at: float | None = None
        """Since when an iteration waits here for memory."""

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

    def next_job(self) -> JobState | None:
        """The job to run next: one to be profiled, else the one with the least service."""
        chosen: JobState | None = None
        for job in self.jobs:
            if not job.has_more:
                continue
            if job.needs_profiling:
                return job
            if chosen is None or job.service < chosen.service:
                chosen = job
        return chosen

    @property
    def takes_another(self) -> bool:
        """Whether the limit, which keeps memory from being taken too early, allows another segment."""
        return len(self.in_flight) < _IN_FLIGHT

    def takes_more(self, *, fits_all: bool) -> bool:
        """Whether the next segment of the begun iteration may be in flight beyond the limit.

        Where it only gives memory back from here on, or both peaks fit, nothing is left to decide. Segments
        in flight then bridge the time in which the host is busy with other jobs.
        """
        return len(self.in_flight) < _MOST_IN_FLIGHT and (fits_all or self.is_falling)

    def gate(
        self, job: JobState, segment: int, other: ArenaSide, capacity_bytes: int
    ) -> tuple[SegmentRef, ...] | None:
        """The segments behind which ``segment`` may be enqueued here next; ``None`` if it must not be yet."""
        room = capacity_bytes - job.heights[segment]
        if other.tail_hold_bytes > room:
            return None
        if not self._stays_safe(job, segment, other, capacity_bytes):
            return None
        for there in reversed(other.in_flight):
            if there.height_bytes > room:
                return (there.ref,)
        return ()

    @staticmethod
    def _stays_safe(job: JobState, segment: int, other: ArenaSide, capacity_bytes: int) -> bool:
        """Whether one of the sides can still run to the end once ``segment`` is enqueued."""
        this_can_end = job.trend.need_from[segment + 1] + other.tail_hold_bytes <= capacity_bytes
        other_can_end = other.need_bytes + job.holds[segment] <= capacity_bytes
        return this_can_end or other_can_end

    def push(self, job: JobState, segment: int, ref: SegmentRef, now: float) -> None:
        """Enqueue a segment that has passed its gate."""
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
        """Drop the part of the begun iteration that is not enqueued: the job ends here."""
        self.job = None
        self.is_gated = False
        self.tail_hold_bytes = 0
        self.epoch += 1

    def num_iterations_in_flight(self) -> int:
        """The number of different iterations among the segments in flight."""
        if not self.in_flight:
            return 0
        return 1 if self.in_flight[0].ref[:2] == self.in_flight[-1].ref[:2] else 2

    def head(self, now: float) -> tuple[JobState, int, float]:
        """The job and segment that run here or come next, and when that segment began.

        A segment that takes longer than predicted is assumed to end now. Only for a side that is not idle.
        """
        if not self.in_flight:
            assert self.job is not None
            return self.job, self.next_segment, now
        first = self.in_flight[0]
        taken = first.job.trend.seconds[first.ref.segment]
        return first.job, first.ref.segment, max(self.last_end, now - taken)

    def remainder(self, now: float) -> Remainder:
        """The predicted heights of everything begun here and not complete."""
        job, segment, began_at = self.head(now)
        origin = began_at - job.trend.begins[segment]
        rest = Remainder(job.trend, segment, origin)
        if self.num_iterations_in_flight() < 2:
            return rest
        return rest.followed_by(Remainder(self._tail_trend, 0, origin + job.trend.begins[-1]))

    def free_at(self, now: float) -> float:
        """When everything begun here is predicted to have ended."""
        if self.is_idle:
            return now
        job, segment, began_at = self.head(now)
        end = began_at - job.trend.begins[segment] + job.trend.begins[-1]
        return end if self.num_iterations_in_flight() < 2 else end + self._tail_trend.begins[-1]

    def tail_at(self, now: float) -> float:
        """When the last segment enqueued here is predicted to end."""
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


class StallCounter:
    """Counts the mispredicted iterations of a pair of jobs: gates held up iterations that were let in.

    While ``is_slicing`` the pair runs one iteration at a time; for longer each time that sharing fails again.
    """

    def __init__(self) -> None:
        self.is_slicing = False
        self._num_clean = 0
        self._recent: deque[bool] = deque(maxlen=_STALL_WINDOW)
        self._next_rounds = _FIRST_ROUNDS
        self._until = 0.0

    def iteration_ended(self, now: float, round_seconds: float, *, stalled: bool) -> bool:
        """Count an iteration of a pair, whose rounds take ``round_seconds``; true if slicing begins now."""
        if self.is_slicing:
            if now >= self._until:
                self.is_slicing = False
                self._recent.clear()
            return False
        self._recent.append(stalled)
        if sum(self._recent) >= _STALLS_TO_FALL_BACK:
            self.is_slicing = True
            self._until = now + self._next_rounds * round_seconds
            self._next_rounds = min(_ROUNDS_GROWTH * self._next_rounds, _MOST_ROUNDS)
            self._num_clean = 0
            return True
        self._num_clean += not stalled
        if self._num_clean >= 4 * _STALL_WINDOW:
            self._next_rounds = _FIRST_ROUNDS
        return False

    def share_again(self) -> None:
        """End time slicing, because its cause may be over."""
        self.is_slicing = False
        self._recent.clear()
        self._next_rounds = _FIRST_ROUNDS


class Arena:
    """Both sides of one arena. The stalls that a ``former`` arena of the same jobs counted are kept."""

    def __init__(
        self, layout: ArenaLayout, jobs: Mapping[str, JobState], now: float, former: Arena | None
    ) -> None:
        self.layout = layout
        self.base = ArenaSide(now, [jobs[name] for name in layout.base])
        self.top = ArenaSide(now, [jobs[name] for name in layout.top])
        are_different = len({job.demand.fingerprint for job in self.jobs}) == 2 == len(self.jobs)
        has_shares = len({job.demand.share for job in self.jobs}) > 1
        self.leeway = _LEEWAY if are_different and not has_shares else 1.0
        self.stalls: StallCounter = former.stalls if former is not None else StallCounter()
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

    def sides(self) -> list[tuple[Arena, ArenaSide, ArenaSide]]:
        """Each side with the opposite one."""
        return [(self, self.base, self.top), (self, self.top, self.base)]

    def resize(self, layout: ArenaLayout) -> None:
        """Change the capacity; every job keeps its place."""
        self.layout = layout
        self.base.epoch += 1
        self.top.epoch += 1
        self.stalls.share_again()
        self.learn()

    def is_served_less(self, other: ArenaSide, job: JobState) -> bool:
        """Whether the next job of the ``other`` side got less service than ``job``, by more than patience and
        leeway allow."""
        peer = other.next_job()
        return peer is not None and self.leeway * peer.service + self.patience_seconds < job.service

    def must_yield(self, other: ArenaSide, job: JobState) -> bool:
        """Whether a job of the idle ``other`` side waits for memory and got less service than ``job``.

        Otherwise iterations of ``job`` could follow one another, and the waiting job would only ever be
        asked in the middle of their peaks.
        """
        if self.fits_all or other.asked_at is None or other.is_held:
            return False
        return self.is_served_less(other, job)

    def learn(self) -> None:
        """Recompute the values that only change when an iteration ends."""
        peaks = [
            max((job.trend.peak_bytes for job in side.jobs), default=0) for side in (self.base, self.top)
        ]
        self.fits_all = sum(peaks) <= self.capacity_bytes
        """Whether both sides can be at their peaks at once, so that nothing has to be predicted."""
        jobs = self.jobs
        longest = max((job.iteration_solo_seconds for job in jobs), default=0.0)
        self.patience_seconds = _PATIENCE_ITERATIONS * longest
        if self.leeway > 1 and any(job.service > _REMEMBERED_ITERATIONS * longest for job in jobs):
            for job in jobs:
                job.service /= 2
