"""A job while it is scheduled: its progress, what was measured of it, and the order of its micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.colocate._demand import JobDemand, MicroBatchLane, SegmentRef
from trainmux.colocate._trend import Trend

_FIRST_LIMIT, MAX_IN_FLIGHT_LIMIT = 2, 16
_LOSS_ALLOWED = 0.01
_STALL_SHARE = 0.05
"""An iteration was mispredicted if gates held it up for more than this share of its solo time."""


@dataclass(frozen=True)
class JobReport:
    """Statistics of a job: iterations run, how long they were shifted in total, how often it
    stalled.

    ``solo_seconds`` and ``shared_seconds`` are the durations of its segments alone and next to other jobs, as
    far as known; ``is_measured`` says whether they were measured. ``in_flight_limit`` segments are kept in
    flight while another job may wait for this job's memory.
    """

    name: str
    num_iterations: int
    total_shift_seconds: float
    num_mispredicted: int
    solo_seconds: tuple[float, ...]
    shared_seconds: tuple[float, ...]
    in_flight_limit: int
    is_measured: bool


class InFlightSweep:
    """Finds how many segments of a job to keep in flight, while it is profiled (§6.1).

    Few, so that memory is not taken too early; enough to keep the device busy. Where the device waits for the
    host between segments, the limit is doubled for the next iteration. The lowest limit within one percent of
    the best iteration time wins. A job without gaps keeps the first limit after one iteration.
    """

    def __init__(self) -> None:
        self.limit = _FIRST_LIMIT
        self.observed: tuple[float, ...] = ()
        """Durations of the segments in an iteration with the limit that was found."""
        self._is_warm = False
        self._by_limit: dict[int, tuple[float, tuple[float, ...]]] = {}

    def iteration_ended(self, observed: Sequence[float], gap_seconds: float) -> bool:
        """Record an iteration that ran alone, with ``gap_seconds`` between its segments; true once the limit
        is found.

        The first iteration of all is slower than later ones, so it is not compared with them.
        """
        busy_seconds = sum(observed)
        has_gaps = gap_seconds > _LOSS_ALLOWED * busy_seconds
        if has_gaps and not self._is_warm:
            self._is_warm = True
            return False
        self._by_limit[self.limit] = (busy_seconds + gap_seconds, tuple(observed))
        if has_gaps and 2 * self.limit <= MAX_IN_FLIGHT_LIMIT:
            self.limit *= 2
            return False
        most = min(taken for taken, _ in self._by_limit.values()) * (1 + _LOSS_ALLOWED)
        self.limit = min(limit for limit, (taken, _) in self._by_limit.items() if taken <= most)
        self.observed = self._by_limit[self.limit][1]
        return True


class JobState:
    """Progress and durations of one job. ``service`` is the solo time it got lately, over its share."""

    def __init__(self, demand: JobDemand) -> None:
        self.order: MicroBatchOrder | None = None
        """The order of all lanes of the job, where it has several."""
        self.cut_as(demand)
        self.is_leaving = False
        self.num_begun = self.num_ended = self.num_mispredicted = 0
        self.service = 0.0
        self.total_shift_seconds = 0.0
        self.stall_seconds = 0.0
        """How long gates kept the running iteration idle, without waits for a peer that was falling."""
        self.gap_seconds = 0.0
        """How long nothing ran between segments of the running iteration, for whatever reason."""
        self.segment_ended_at = 0.0
        self.observed: list[float] = []
        self.runs_alone: deque[bool] = deque()
        """For each iteration that is begun and not ended: whether nothing else may run at the same time."""

    def cut_as(self, demand: JobDemand) -> None:
        """Use the segments of ``demand`` and what is known of them; before the job's first iteration."""
        self.demand = demand
        self.heights = [segment.height_bytes for segment in demand.segments]
        self.holds = [segment.hold_bytes for segment in demand.segments]
        self.num_segments = len(demand.segments)
        self.trend = Trend(demand)
        self.learn_solo([segment.solo_seconds for segment in demand.segments])
        self.needs_profiling = not demand.is_measured
        self.in_flight_limit = demand.in_flight_limit or _FIRST_LIMIT
        self.sweep = None if demand.in_flight_limit else InFlightSweep()
        for lane in self.lanes:
            lane.sweep = self.sweep

    @property
    def name(self) -> str:
        return self.demand.name

    def report(self) -> JobReport:
        return JobReport(
            self.name,
            self.num_ended,
            self.total_shift_seconds,
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
        """Whether callbacks have yet to see its last iteration; the order of lanes takes care of theirs."""
        return self.order is None and self.demand.is_watched and self.num_begun > self.num_ended

    @property
    def lanes(self) -> tuple[JobState, ...]:
        """All lanes of its job; itself where there is only one."""
        return (self,) if self.order is None else self.order.states

    @property
    def is_done(self) -> bool:
        return not self.has_more and self.num_ended == self.num_begun

    def sweep_limit(self) -> bool:
        """After an iteration that ran alone, take the next limit to try, or the one that was found.

        Returns whether it is found; ``observed`` is then an iteration with that limit.
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
        """Use ``seconds`` as the segments' durations with nothing else on the device."""
        self.solo_seconds = list(seconds)
        self.iteration_solo_seconds = sum(self.solo_seconds)

    def refine_solo(self, weight: float) -> None:
        """Move the solo durations towards those of the iteration that just ran alone."""
        pairs = zip(self.solo_seconds, self.observed, strict=True)
        self.learn_solo([old + weight * (new - old) for old, new in pairs])

    def begin(self, shift_seconds: float, *, alone: bool) -> None:
        """Count an iteration that begins, and charge its time to the job."""
        self.num_begun += 1
        self.service += self.iteration_solo_seconds / self.demand.share
        self.total_shift_seconds += shift_seconds
        self.runs_alone.append(alone)

    @property
    def was_mispredicted(self) -> bool:
        """Whether gates held up the iteration that just ended for too long."""
        return self.stall_seconds > _STALL_SHARE * self.iteration_solo_seconds

    def segment_ended(self, segment: int, started_at: float, ended_at: float, *, was_gated: bool) -> None:
        """Record a segment of the running iteration. Only a gate makes it stall, not a slow host."""
        if segment == 0:
            self.stall_seconds = self.gap_seconds = 0.0
            self.observed = []
        else:
            gap = max(0.0, started_at - self.segment_ended_at)
            self.gap_seconds += gap
            self.stall_seconds += gap if was_gated else 0.0
        self.segment_ended_at = ended_at
        self.observed.append(ended_at - started_at)


class MicroBatchOrder:
    """The order among micro-batches of one job that run concurrently in several lanes (§2.2).

    To the scheduler a lane is a job whose iterations are tied to those of the others:

    - micro-batches begin in order, so each gets its batch and its random numbers as if it were alone;
    - the part of a micro-batch that changes shared tensors (gradients are accumulated, weights updated)
      begins when the whole micro-batch before it has ended;
    - the first micro-batch of a step begins when the update before it has ended.

    A segment only ever waits for segments that were enqueued before it. Micro-batches count from 0.
    """

    def __init__(self, states: Sequence[JobState]) -> None:
        def index(state: JobState) -> int:
            assert state.demand.micro_batches is not None
            return state.demand.micro_batches.index

        self.states = tuple(sorted(states, key=index))
        self.num_begun = 0
        self._num_enqueued = 0
        """Micro-batches of which every segment is enqueued."""
        for state in self.states:
            state.order, state.sweep = self, self.states[0].sweep

    @property
    def _first(self) -> MicroBatchLane:
        """The first lane, as it is cut now."""
        first = self.states[0].demand.micro_batches
        assert first is not None
        return first

    @property
    def _last_segment(self) -> int:
        return self.states[0].num_segments - 1

    def is_next(self, job: JobState) -> bool:
        """Whether the next micro-batch is one of ``job``'s and may begin."""
        number = self.num_begun
        if self.states[number % len(self.states)] is not job:
            return False
        if self._first.first_ordered and not self._first.opens_step(number):
            return True
        if self._num_enqueued < number:
            return False
        return not job.demand.is_watched or sum(state.num_ended for state in self.states) == number

    def is_foremost(self, job: JobState) -> bool:
        """Whether ``job`` runs the earliest micro-batch that is not fully enqueued."""
        return self.states[self._num_enqueued % len(self.states)] is job

    def behind(self, job: JobState, segment: int) -> tuple[SegmentRef, ...] | None:
        """The segments of other micro-batches that ``segment`` of ``job`` must wait for.

        Segment 0 is that of a micro-batch that ``is_next``, any other that of the micro-batch begun last in
        its lane. ``None`` where it must not be enqueued yet.
        """
        if segment == 0:
            waits_for_all = not self._first.first_ordered or self._first.opens_step(self.num_begun)
            return self._segment_before(self.num_begun, self._last_segment if waits_for_all else 0)
        if segment != self._first.first_ordered:
            return ()
        number = (job.num_begun - 1) * len(self.states) + self.states.index(job)
        return self._segment_before(number, self._last_segment) if self._num_enqueued == number else None

    def enqueued(self, segment: int) -> None:
        """Count a segment that was enqueued."""
        self.num_begun += segment == 0
        self._num_enqueued += segment == self._last_segment

    def _segment_before(self, number: int, segment: int) -> tuple[SegmentRef, ...]:
        """One segment of the micro-batch before ``number``."""
        if number == 0:
            return ()
        iteration, lane = divmod(number - 1, len(self.states))
        return (SegmentRef(self.states[lane].name, iteration, segment),)
