"""The scrooge scheduler: which segment of which job is enqueued next, and behind which others (Zico §5.3).

It only decides. The dispatcher asks `ScroogeScheduler.next_action` with the present time until there is
nothing to do, carries out the actions in that order, and reports each segment that is complete. The same
logic runs over a simulated clock and over the events of a device.

- *Profiling phase*: a new job's first iteration runs alone, unless its durations are known.
- *Informed phase*: an iteration begins if its trend and the rest of its peer's are predicted to fit into the
  arena, else it is shifted by steps of T. Next to a peer that only gives memory back it begins slightly early
  and waits for memory on its way.
- *Time slicing*: where predictions fail, iterations of a pair run one after the other for a while.

Memory is safe in every phase whatever the clock does (see `_arena`). Predictions only affect time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from trainmux.colocate._arena import Arena, ArenaSide, JobState
from trainmux.colocate._demand import JobDemand, SegmentRef
from trainmux.colocate._layout import MemoryLayout, check_budget, choose_layout
from trainmux.colocate._trend import least_shift

# docs/decisions/0010-scrooge-constants.md says why.
_TIME_STEP_SHARE = 1 / 64
"""T, by which an iteration is shifted, as a share of the waiting job's own iteration."""
_LEAD_SHARE = 1 / 8
"""How much sooner than predicted, as a share of itself, an iteration begins next to a falling peer."""


class Enqueue(NamedTuple):
    """Enqueue ``ref`` on its job's stream now, behind the segments ``after``, all of which are enqueued."""

    ref: SegmentRef
    after: tuple[SegmentRef, ...]


class Remap(NamedTuple):
    """Lay out memory as in ``layout`` from now on, within ``budget_bytes``.

    No job whose place changes has anything in flight. Jobs named for the first time get their local memory
    now; the memory of jobs that are no longer named is free.
    """

    layout: MemoryLayout
    budget_bytes: int


class Idle(NamedTuple):
    """Nothing to enqueue: ask again when a segment is complete, at the latest at ``wake_at`` if given."""

    wake_at: float | None


Action = Enqueue | Remap | Idle


class ScroogeScheduler:
    """Schedules ``demands`` within ``budget_bytes``; jobs and budget may change while it runs.

    Names differ, and regions have one size. Refused as by `check_budget`: jobs that do not fit.
    """

    def __init__(self, demands: Sequence[JobDemand], budget_bytes: int) -> None:
        self._jobs: dict[str, JobState] = {}
        self._ended: dict[str, JobState] = {}
        self._arenas: list[Arena] = []
        self._sides: list[ArenaSide] = []
        self._side_of: dict[str, ArenaSide] = {}
        self._profiling: JobState | None = None
        self._wanted = {demand.name: demand for demand in demands}
        self._wanted_budget = budget_bytes
        self._target: MemoryLayout | None = None
        self.num_fall_backs = 0
        """How often jobs that could share were time-sliced instead."""
        self.layout = MemoryLayout()
        self.budget_bytes = budget_bytes
        """The budget in force; a new one counts from its `Remap` on."""
        check_budget(demands, budget_bytes)
        self._retarget()

    # ---- changes from outside ------------------------------------------------------------------------

    def add(self, demand: JobDemand) -> None:
        """Admit another job; running jobs make room at the ends of their iterations."""
        check_budget([*self._wanted.values(), demand], self._wanted_budget)
        self._wanted[demand.name] = demand
        self._retarget()

    def remove(self, name: str, *, at_once: bool = False) -> None:
        """Remove a job after its present iteration, or ``at_once`` without what is not enqueued of it.

        Segments in flight still have to be reported complete.
        """
        del self._wanted[name]
        job = self._jobs.get(name)
        if job is None:
            self._retarget()
            return
        job.is_leaving = True
        side = self._side_of[name]
        if at_once and side.job is job:
            side.abandon()
            job.num_ended += 1
        self._drop_if_done(job)

    def set_budget(self, budget_bytes: int) -> None:
        """Use ``budget_bytes`` as soon as the jobs at the tops of arenas are between two iterations."""
        check_budget(list(self._wanted.values()), budget_bytes)
        self._wanted_budget = budget_bytes
        self._retarget()

    def settled(self, demand: JobDemand, *, gives_back: bool) -> None:
        """Replace the segments of an admitted job that has not begun; its peak must not be higher.

        With ``gives_back`` arenas get the local bytes that it no longer needs; else these stay with it.
        """
        job = self._jobs[demand.name]
        assert not job.num_begun
        assert demand.peak_bytes <= job.demand.peak_bytes
        asked_bytes = job.demand.local_bytes
        if not gives_back:
            demand = replace(demand, local_bytes=asked_bytes)
        self._wanted[demand.name] = demand
        job.cut_as(demand)
        self._side_of[demand.name].arena.learn()
        if demand.local_bytes < asked_bytes:
            self._retarget()

    # ---- questions and reports of the dispatcher -----------------------------------------------------

    def next_action(self, now: float) -> Action:
        """The next thing to do at time ``now``; `Idle` where there is none."""
        if self._target is not None and self._change_layout(self._target, now):
            return Remap(self.layout, self.budget_bytes)
        ready: list[tuple[ArenaSide, JobState, tuple[SegmentRef, ...]]] = []
        further = ready.copy()
        for side in self._sides:
            job = side.job
            if job is None or not (side.takes_another or side.takes_more):
                continue
            behind = side.gate(job, side.next_segment)
            if behind is not None:
                (ready if side.takes_another else further).append((side, job, behind))
            elif not side.other.is_falling:
                side.is_gated = True
        if not ready:
            action = self._begin_iteration(now)
            if not further or not isinstance(action, Idle):
                return action
            ready = further
        # The side that runs dry first goes first.
        side, job, behind = ready[0] if len(ready) == 1 else min(ready, key=lambda row: row[0].tail_at(now))
        side.is_gated = side.is_gated or bool(behind and not side.other.is_falling)
        return Enqueue(side.push(job, side.next_segment, now), behind)

    def complete(self, ref: SegmentRef, started_at: float, ended_at: float) -> None:
        """Report that a segment ran from ``started_at`` to ``ended_at``. Segments of a side end in order."""
        side = self._side_of[ref.job]
        entry = side.in_flight.popleft()
        assert entry.ref == ref
        job = entry.job
        side.last_end = ended_at
        job.segment_ended(ref.segment, started_at, ended_at, was_gated=entry.was_gated)
        if ref.segment == job.num_segments - 1:
            self._iteration_ended(side, job, ended_at)
        elif job.is_leaving:
            self._drop_if_done(job)

    @property
    def names(self) -> tuple[str, ...]:
        """The jobs that have steps left and were not removed, admitted or not."""
        return tuple(self._wanted)

    def num_begun(self, name: str) -> int | None:
        """The begun iterations of a job; ``None`` if it is not admitted or was removed."""
        return self._jobs[name].num_begun if name in self._jobs and name in self._wanted else None

    @property
    def is_done(self) -> bool:
        """Whether every job has run its steps."""
        return not self._jobs and not self._wanted

    def report(self, name: str) -> JobState | None:
        """The state of a job, also after it has ended; ``None`` if it was never admitted."""
        return self._jobs.get(name) or self._ended.get(name)

    # ---- decisions -----------------------------------------------------------------------------------

    def _begin_iteration(self, now: float) -> Action:
        """Begin an iteration where that is allowed; the job with the least service is asked first."""
        wake_at = math.inf
        waiting: list[tuple[ArenaSide, JobState]] = []
        for side in self._sides:
            job = side.next_job
            if side.job is not None or side.is_held or side.has_two_iterations or not side.takes_another:
                continue
            if job is not None and not job.is_being_watched:
                waiting.append((side, job))
        for side, job in sorted(waiting, key=lambda row: row[1].service):
            behind = self._may_begin(side, job, now)
            if behind is not None:
                shift = 0.0
                if side.asked_at is not None and not side.in_flight:
                    shift = max(0.0, now - max(side.asked_at, side.last_end))
                if side.in_flight and side.in_flight[-1].job is not job:
                    behind = (side.in_flight[-1].ref, *behind)
                job.begin(shift)
                side.asked_at, side.retry_at = None, 0.0
                return Enqueue(side.push(job, 0, now), behind)
            if side.retry_at > now:
                wake_at = min(wake_at, side.retry_at)
        return Idle(None if wake_at == math.inf else wake_at)

    def _may_begin(self, side: ArenaSide, job: JobState, now: float) -> tuple[SegmentRef, ...] | None:
        """The segments behind which an iteration of ``job`` may begin now; ``None`` if it may not."""
        arena, other = side.arena, side.other
        if self._profiling is not None:
            return None
        if any(one.needs_profiling for one in self._jobs.values()):
            if not job.needs_profiling or not all(one.is_idle for one in self._sides):
                return None
            self._profiling = job
            return ()
        if other.is_idle:
            return None if arena.must_yield(other, job) else ()
        if arena.stalls.is_slicing:
            return None if other.job is not None else (other.in_flight[-1].ref,)
        if now < side.retry_at:
            return None
        shift = self._predict(side, job, now)
        behind = None if shift is None or shift > 0 else side.gate(job, 0)
        if behind is not None:
            return behind
        time_step = _TIME_STEP_SHARE * job.trend.iteration_seconds
        side.retry_at = now + time_step * max(1, math.ceil((shift or 0.0) / time_step))
        if side.asked_at is None:
            side.asked_at = now
        return None

    def _predict(self, side: ArenaSide, job: JobState, now: float) -> float | None:
        """The least shift of an iteration of ``job`` that asks now; ``None`` if its peer comes first."""
        arena, other = side.arena, side.other
        if arena.fits_all:
            return 0.0
        if arena.is_served_less(other, job):
            return None
        shift = least_shift(job.trend, side.tail_at(now), other.remainders(now), arena.capacity_bytes)
        if shift > 0 and other.is_falling:
            shift = max(0.0, shift - _LEAD_SHARE * job.trend.iteration_seconds)
        return shift

    # ---- bookkeeping ---------------------------------------------------------------------------------

    def _iteration_ended(self, side: ArenaSide, job: JobState, now: float) -> None:
        arena = side.arena
        job.num_ended += 1
        side.other.retry_at = 0.0
        job.trend.set_seconds(job.observed)  # the feedback of §5.3
        if self._profiling is job:
            self._profiling = None
            job.learn_solo(job.observed)
            job.needs_profiling = False
        else:
            job.num_mispredicted += job.was_mispredicted
            if arena.is_shared:
                pair_seconds = sum(peer.iteration_solo_seconds for peer in arena.jobs)
                stalled = job.was_mispredicted
                if arena.stalls.iteration_ended(job.name, now, pair_seconds, stalled=stalled):
                    self.num_fall_backs += 1
                    self._forget_service()
        self._drop_if_done(job)

    def _drop_if_done(self, job: JobState) -> None:
        """Forget a job that has ended and has nothing in flight."""
        side = self._side_of[job.name]
        if not job.is_done or any(entry.job is job for entry in side.in_flight):
            return
        if self._profiling is job:
            self._profiling = None
        self._ended[job.name] = job
        self._wanted.pop(job.name, None)
        del self._side_of[job.name], self._jobs[job.name]
        side.jobs.remove(job)
        side.other.retry_at = 0.0
        side.arena.learn()
        self._retarget()

    def _retarget(self) -> None:
        """Choose a layout for the wanted jobs and budget; it counts once it can be applied."""
        target = choose_layout(list(self._wanted.values()), self._wanted_budget)
        keeps_places = self._keeps_places(target)
        if keeps_places and target == self.layout:
            self._target, self.budget_bytes = None, self._wanted_budget
        else:
            self._target = target
        for arena in self._arenas:
            arena.base.is_held = not keeps_places
            arena.top.is_held = self._target is not None

    def _keeps_places(self, target: MemoryLayout) -> bool:
        """Whether the same jobs stay where they are, so that only capacities may differ."""
        return self._wanted.keys() == self._jobs.keys() and target.has_places_of(self.layout)

    def _change_layout(self, target: MemoryLayout, now: float) -> bool:
        """Apply the wanted layout if nothing is in flight at the ends that change; returns whether it did."""
        keeps_places = self._keeps_places(target)
        changing = [side for side in self._sides if not keeps_places or side is side.arena.top]
        if not all(side.is_idle for side in changing):
            return False
        self._forget_service()
        if keeps_places:
            for arena, row in zip(self._arenas, target.arenas, strict=True):
                arena.resize(row)
        else:
            for demand in self._wanted.values():
                if demand.name not in self._jobs:
                    self._jobs[demand.name] = JobState(demand)
            self._arenas = [Arena(row, self._jobs, now) for row in target.arenas]
            self._sides = [side for arena in self._arenas for side in (arena.base, arena.top)]
            self._side_of = {job.name: side for side in self._sides for job in side.jobs}
        self.layout, self.budget_bytes, self._target = target, self._wanted_budget, None
        return True

    def _forget_service(self) -> None:
        """Count the service of every job anew.

        While memory is plentiful nobody waits, and jobs get what the device gives them. Nobody owes anything
        for that once memory becomes scarce or time slicing begins.
        """
        for job in self._jobs.values():
            job.service = 0.0
