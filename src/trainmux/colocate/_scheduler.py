"""The scrooge scheduler: which segment of which job is enqueued next, behind which others (Zico §5.3).

It decides and does nothing else. Whoever drives the device asks `ScroogeScheduler.next_action` with the
present time until there is nothing to do, carries the actions out in that order, and reports each segment
that is complete. The same logic runs over a simulated clock and over events of a real device.

- *Profiling phase*: a new job's first iteration runs alone, unless its times are known.
- *Informed phase*: an iteration begins if its trend and what remains of its peer's are predicted to fit into
  the budget, else it is shifted by steps of T. The budget of predictions begins low and is raised. Beside a
  peer that only gives memory back it begins a little early, and waits for that memory on its way.
- *Turns*: where predictions fail, or sharing is slower than turns, iterations run one after the other for a
  while.

Memory is safe in every phase whatever the clock does: see `_lane`. Predictions only decide about time.
Micro-batches of one job that run side by side are jobs here, tied to each other: see `_micro_batches`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainmux.colocate._actions import Action, Enqueue, Idle, Remap
from trainmux.colocate._arena import Arena
from trainmux.colocate._constants import ScroogeConstants
from trainmux.colocate._demand import JobDemand
from trainmux.colocate._health import GainMeter
from trainmux.colocate._job import JobReport, JobState
from trainmux.colocate._lane import Gate, Lane, SegmentRef
from trainmux.colocate._layout import ChooseLayout, Layout, check_demands, check_layout, layout_by_rule
from trainmux.colocate._micro_batches import tie_lanes
from trainmux.colocate._trend import Remainder, least_shift
from trainmux.errors import ConfigError, PlanError


class ScroogeScheduler:
    """Schedules ``demands`` within ``budget_bytes``; jobs and budget may change while it runs.

    ``choose_layout`` decides who shares an arena with whom. Refused as by `check_demands`: jobs that cannot
    be scheduled together.
    """

    def __init__(
        self,
        demands: Sequence[JobDemand],
        budget_bytes: int,
        *,
        now: float = 0.0,
        constants: ScroogeConstants | None = None,
        choose_layout: ChooseLayout = layout_by_rule,
    ) -> None:
        self._constants = constants or ScroogeConstants()
        self._choose_layout = choose_layout
        self._jobs: dict[str, JobState] = {}
        self._ended: dict[str, JobReport] = {}
        self._arenas: list[Arena] = []
        self._sides: list[tuple[Arena, Lane, Lane]] = []
        self._lane_of: dict[str, tuple[Arena, Lane]] = {}
        self._gain = GainMeter(self._constants)
        self._profiling: JobState | None = None
        self._num_to_profile = 0
        self._wanted: dict[str, JobDemand] = {}
        self._wanted_budget = budget_bytes
        self._target: Layout | None = None
        self.num_fall_backs = 0
        """How often jobs that could share went over to turns."""
        self.layout = Layout(())
        self.budget_bytes = budget_bytes
        """The budget that is in force; one that was set counts from the `Remap` on."""
        check_demands(demands, budget_bytes)
        self._wanted = {demand.name: demand for demand in demands}
        self._retarget()
        self._now = now

    # What the outside changes

    def add(self, *demands: JobDemand) -> None:
        """Let another job in, all of its lanes. Those that run make room for it at their iterations' ends."""
        for demand in demands:
            if demand.name in self._wanted or demand.name in self._jobs:
                raise ConfigError(
                    f"jobs must have different names, but got {demand.name!r} twice; rename one of them"
                )
        check_demands([*self._wanted.values(), *demands], self._wanted_budget)
        self._wanted.update({demand.name: demand for demand in demands})
        self._retarget()

    def remove(self, name: str, *, at_once: bool = False) -> None:
        """Let a job go after its present iteration, or ``at_once``: without what is not enqueued of it.

        With a lane of a job all of them go. Segments that are in flight still have to be reported complete.
        Refused with `ConfigError`: a name that no job has.
        """
        if name not in self._wanted:
            raise ConfigError(
                f"expected the name of a job that is scheduled, one of {sorted(self._wanted)}, but got "
                f"{name!r}; a job that has ended is gone already"
            )
        job_name = self._wanted[name].job
        self._wanted = {key: demand for key, demand in self._wanted.items() if demand.job != job_name}
        job = self._jobs.get(name)
        if job is None:
            self._retarget()
            return
        for state in job.lanes:
            state.is_leaving = True
            lane = self._lane_of[state.name][1]
            if at_once and lane.job is state:
                lane.abandon()
                state.num_ended += 1
        self._drop_if_done(job)

    def set_budget(self, budget_bytes: int) -> None:
        """Use ``budget_bytes`` as soon as the jobs at the arenas' tops are between two iterations."""
        check_demands(list(self._wanted.values()), budget_bytes)
        self._wanted_budget = budget_bytes
        self._retarget()

    def keep_less(self, local_bytes: Mapping[str, int]) -> None:
        """Jobs turn out to need only so much of their own: arenas get the rest of what they asked for."""
        changed = False
        for name, demand in self._wanted.items():
            if local_bytes.get(name, demand.local_bytes) < demand.local_bytes:
                self._wanted[name] = demand = replace(demand, local_bytes=local_bytes[name])
                changed = True
                if name in self._jobs:
                    self._jobs[name].demand = demand
        if changed:
            self._retarget()

    def cut_anew(self, *demands: JobDemand) -> None:
        """Jobs that were let in have other segments, after all; what they keep to themselves, and who shares
        with whom, is as before.

        Refused with `PlanError`: jobs that are not there, that have begun, or whose peaks are higher now.
        Those named before such a one are cut.
        """
        for demand in demands:
            job = self._jobs.get(demand.name) if demand.name in self._wanted else None
            if job is None or job.num_begun or demand.peak_bytes > job.demand.peak_bytes:
                raise PlanError(
                    f"expected job {demand.name!r} to be let in, not to have begun and not to need more, but "
                    "it is not so; remove it and add it as it is now"
                )
            self._wanted[demand.name] = replace(demand, local_bytes=job.demand.local_bytes)
            self._num_to_profile -= job.needs_profiling
            job.cut_as(self._wanted[demand.name], self._constants.in_flight_limit)
            self._num_to_profile += job.needs_profiling
            self._lane_of[demand.name][0].learn()

    # What the driver of the device asks and tells

    def next_action(self, now: float) -> Action:
        """The next thing to do at time ``now``; `Idle` where there is none."""
        self._now = now
        if self._target is not None and self._change_layout(now):
            return Remap(self.layout, self.budget_bytes)
        ready: list[tuple[Lane, Lane, JobState, Gate]] = []
        further: list[tuple[Lane, Lane, JobState, Gate]] = []
        for arena, lane, other in self._sides:
            job = lane.job
            if job is None or not (lane.takes_another(job) or lane.takes_more(job, fits_all=arena.fits_all)):
                continue
            if job.order is not None and job.order.behind(job, lane.next_segment) is None:
                continue
            gate = lane.gate(job, lane.next_segment, other, arena.capacity_bytes)
            if gate is not None:
                (ready if lane.takes_another(job) else further).append((lane, other, job, gate))
            elif not other.is_falling:
                lane.is_gated = True
        if not ready:
            action = self._begin_iteration(now)
            if not further or not isinstance(action, Idle):
                return action
            ready = further
        # The lane that runs dry first goes first.
        first = ready[0] if len(ready) == 1 else min(ready, key=lambda row: row[0].tail_at(now))
        lane, other, job, gate = first
        if gate.behind is None:
            return self._enqueue(lane, job, lane.next_segment, ())
        lane.is_gated = lane.is_gated or not other.is_falling
        return self._enqueue(lane, job, lane.next_segment, (gate.behind,))

    def complete(self, ref: SegmentRef, started_at: float, ended_at: float) -> None:
        """Report that a segment ran from ``started_at`` to ``ended_at``. A job's segments end in order.

        Refused with `PlanError`: a segment that is not the oldest in flight on its lane.
        """
        arena, lane = self._lane_of.get(ref.job, (None, None))
        if arena is None or lane is None or not lane.in_flight or lane.in_flight[0].ref != ref:
            raise PlanError(
                f"expected a report of the oldest segment in flight of job {ref.job!r}, but got {ref}; "
                "report segments once each, in the order in which they were enqueued"
            )
        entry = lane.in_flight.popleft()
        job = entry.job
        lane.last_end = ended_at
        job.segment_ended(ref.segment, started_at, ended_at, was_gated=entry.was_gated)
        self._gain.segment_ended(job.solo_seconds[ref.segment], ended_at)
        if ref.segment == job.num_segments - 1:
            self._iteration_ended(arena, lane, job, ended_at)
        elif job.is_leaving:
            self._drop_if_done(job)

    @property
    def names(self) -> tuple[str, ...]:
        """The jobs that have steps left and were not removed, whether they were let in or not."""
        return tuple(self._wanted)

    def num_begun(self, name: str) -> int | None:
        """The iterations of a job that have begun; ``None`` of one that is not let in, or is to go."""
        return self._jobs[name].num_begun if name in self._jobs and name in self._wanted else None

    @property
    def is_done(self) -> bool:
        """Whether every job has run its steps."""
        return not self._jobs and not self._wanted

    @property
    def reserved_bytes(self) -> int:
        """What the jobs keep to themselves and the arenas, as laid out now."""
        local = sum(job.demand.local_bytes for job in self._jobs.values())
        return local + sum(arena.capacity_bytes for arena in self._arenas)

    @property
    def takes_turns(self) -> bool:
        """Whether any jobs that could share are taking turns instead."""
        return self._gain.turns.are_on or any(arena.health.turns.are_on for arena in self._arenas)

    @property
    def measured_gain(self) -> float | None:
        """Solo seconds of work done per second in the last window that was measured."""
        return self._gain.gain

    def report(self, name: str) -> JobReport:
        """How a job fares, or fared if it has ended."""
        if name in self._ended and name not in self._jobs:
            return self._ended[name]
        if name not in self._jobs:
            raise ConfigError(
                f"expected the name of a job, one of {sorted({*self._jobs, *self._ended})}, but got "
                f"{name!r}; a job has a report once it was let in"
            )
        return self._jobs[name].report()

    # Decisions

    def _begin_iteration(self, now: float) -> Action:
        """Begin an iteration where that is allowed; the job that was served least is asked first."""
        wake_at: float | None = None
        waiting: list[tuple[float, int, Arena, Lane, Lane, JobState]] = []
        for arena, lane, other in self._sides:
            if lane.job is not None or lane.is_held or lane.num_iterations_in_flight() > 1:
                continue
            job = lane.next_job()
            if job is None or job.is_being_watched:
                continue
            if lane.takes_another(job):
                waiting.append((job.service, len(waiting), arena, lane, other, job))
        for _, _, arena, lane, other, job in sorted(waiting):
            behind = self._may_begin(arena, lane, other, job, now)
            if behind is not None:
                shift = 0.0
                if lane.asked_at is not None and not lane.in_flight:
                    shift = max(0.0, now - max(lane.asked_at, lane.last_end))
                if lane.in_flight and lane.in_flight[-1].job is not job:
                    behind = (lane.in_flight[-1].ref, *behind)
                alone = self._profiling is job or self._gain.turns.are_on
                job.begin(shift, alone=alone)
                lane.asked_at = None
                return self._enqueue(lane, job, 0, behind)
            if lane.retry_at > now:
                wake_at = lane.retry_at if wake_at is None else min(wake_at, lane.retry_at)
        return Idle(wake_at)

    def _may_begin(
        self, arena: Arena, lane: Lane, other: Lane, job: JobState, now: float
    ) -> tuple[SegmentRef, ...] | None:
        """The segments behind which an iteration of ``job`` may begin now; ``None`` if it may not."""
        if self._profiling is not None:
            return None
        if self._num_to_profile:
            if not job.needs_profiling or not all(side.is_idle for _, side, _ in self._sides):
                return None
            self._profiling = job
            return ()
        if self._gain.turns.are_on:
            others = [side for _, side, _ in self._sides if side is not lane]
            if any(side.job is not None for side in others):
                return None
            return tuple(side.in_flight[-1].ref for side in others if side.in_flight)
        if other.is_idle:
            return None if arena.is_turn_of_waiting(other, job) else ()
        if arena.health.turns.are_on:
            return None if other.job is not None else (other.in_flight[-1].ref,)
        if lane.asked_at is not None and now < lane.retry_at and lane.seen_epoch == other.epoch:
            return None
        shift = self._predict(arena, lane, other, job, now)
        gate = None if shift is None or shift > 0 else lane.gate(job, 0, other, arena.capacity_bytes)
        if gate is not None:
            lane.retry_at = 0.0
            return () if gate.behind is None else (gate.behind,)
        time_step = self._constants.time_step_share * job.trend.iteration_seconds
        lane.retry_at = now + (time_step * max(1, math.ceil((shift or 0.0) / time_step)))
        lane.seen_epoch = other.epoch
        if lane.asked_at is None:
            lane.asked_at = now
        return None

    def _predict(self, arena: Arena, lane: Lane, other: Lane, job: JobState, now: float) -> float | None:
        """The least TimeShift for an iteration of ``job`` that asks now; ``None`` if it is a peer's turn."""
        if arena.fits_all:
            return 0.0
        if arena.is_served_less(other, job):
            return None
        soft_budget = arena.soft_budget_bytes
        free_at = lane.free_at(now)
        rest = other.remainder(now)
        shift = least_shift(job.trend, free_at, rest, soft_budget)
        if shift > 0 and other.is_falling:
            shift = max(0.0, shift - self._constants.lead_share * job.trend.iteration_seconds)
        return shift if shift > 0 else self._yield_to_peer(job, free_at, other, rest, now, soft_budget)

    def _yield_to_peer(
        self, job: JobState, free_at: float, other: Lane, rest: Remainder, now: float, budget_bytes: int
    ) -> float:
        """The TimeShift with which an iteration that fits now also leaves room for the peer's next one.

        A long iteration that begins just before a short one could makes that wait for its whole peak. Where
        waiting costs this job less than the peer, and the peer was not served more, this job waits.
        """
        peer = other.next_job()
        if peer is None or peer.service > job.service or other.num_iterations_in_flight() > 1:
            return 0.0
        next_begin = other.free_at(now)
        longer_by = job.trend.iteration_seconds - peer.trend.iteration_seconds
        if longer_by <= 0 or next_begin - free_at >= longer_by:
            return 0.0
        peer_waits = least_shift(peer.trend, next_begin, Remainder(job.trend, 0, free_at), budget_bytes)
        if peer_waits <= next_begin - free_at:
            return 0.0
        both = rest.followed_by(Remainder(peer.trend, 0, next_begin))
        this_waits = least_shift(job.trend, free_at, both, budget_bytes)
        return this_waits if this_waits < peer_waits else 0.0

    # Bookkeeping

    def _enqueue(self, lane: Lane, job: JobState, segment: int, behind: tuple[SegmentRef, ...]) -> Enqueue:
        """Enqueue a segment behind others for memory's sake, and behind those that its order asks for."""
        ref = SegmentRef(job.name, job.num_begun - 1, segment)
        lane.push(job, segment, ref, self._now)
        if job.order is not None:
            behind += job.order.behind(job, segment) or ()
            job.order.enqueued(segment)
        return Enqueue(ref, behind)

    def _iteration_ended(self, arena: Arena, lane: Lane, job: JobState, now: float) -> None:
        job.num_ended += 1
        lane.epoch += 1
        ran_alone = job.runs_alone.popleft()
        constants = self._constants
        if self._profiling is job:
            self._profiling = None
            if not job.sweep_limit():
                self._drop_if_done(job)
                return  # it is profiled once more
            for state in job.lanes:
                state.learn_solo(job.observed)
                state.trend.believe(job.observed)
                state.needs_profiling = False
                self._num_to_profile -= 1
            self._gain.restart()
            arena.learn()
        else:
            job.trend.refine(job.observed, constants.feedback_weight)
            was_mispredicted = job.was_mispredicted(constants.stall_share)
            job.num_mispredicted += was_mispredicted
            if ran_alone and self._gain.turns.are_on:  # and nothing has begun beside it since
                job.refine_solo(constants.feedback_weight)
            if arena.is_shared:
                peers = arena.jobs
                pair_seconds = sum(peer.iteration_solo_seconds for peer in peers)
                if arena.health.iteration_ended(now, pair_seconds, len(peers), stalled=was_mispredicted):
                    self._fell_back()
                arena.learn()
            round_seconds = sum(peer.iteration_solo_seconds for peer in self._jobs.values())
            if self._gain.iteration_ended(now, round_seconds, len(self._jobs)):
                self._fell_back()
        self._drop_if_done(job)

    def _drop_if_done(self, job: JobState) -> None:
        """Forget a job that has ended, with all of its lanes, and of which nothing is in flight."""
        for state in job.lanes:
            in_flight = self._lane_of[state.name][1].in_flight
            if not state.is_done or any(entry.job is state for entry in in_flight):
                return
        for state in job.lanes:
            self._num_to_profile -= state.needs_profiling
            if self._profiling is state:
                self._profiling = None
            self._ended[state.name] = state.report()
            self._wanted.pop(state.name, None)
            arena, lane = self._lane_of.pop(state.name)
            lane.jobs.remove(state)
            lane.epoch += 1
            del self._jobs[state.name]
            arena.learn()
        self._gain.forget()
        self._retarget()

    def _retarget(self) -> None:
        """Lay out anew for the jobs and the budget that are wanted; it counts once it can be applied."""
        demands = list(self._wanted.values())
        self._target = self._choose_layout(demands, self._wanted_budget) if demands else Layout(())
        check_layout(self._target, demands)
        keeps_places = self._target.has_places_of(self.layout)
        for arena, _, _ in self._sides:
            arena.base.is_held = not keeps_places
            arena.top.is_held = True

    def _change_layout(self, now: float) -> bool:
        """Apply the layout that is wanted, or as much of it as can be now; true if anything changed."""
        target = self._target
        assert target is not None
        same_jobs = self._wanted.keys() == self._jobs.keys()
        if same_jobs and target.has_places_of(self.layout):
            return self._change_capacities(target)
        if not all(lane.is_idle for _, lane, _ in self._sides):
            return False
        self._gain.forget()
        self._forget_debts()
        lanes: dict[str, list[JobState]] = {}
        for demand in self._wanted.values():
            if demand.name not in self._jobs:
                job = JobState(demand, self._constants.in_flight_limit)
                self._jobs[demand.name] = job
                self._num_to_profile += not demand.is_measured
                if demand.micro_batches is not None:
                    lanes.setdefault(demand.job, []).append(job)
        for states in lanes.values():
            tie_lanes(states)
        kept = {frozenset(arena.layout.names): arena for arena in self._arenas}
        self._arenas = []
        for row in target.arenas:
            arena = Arena(row, self._jobs, self._constants, now, kept.get(frozenset(row.names)))
            self._arenas.append(arena)
        self._sides = [side for arena in self._arenas for side in arena.sides()]
        self._lane_of = {job.name: (arena, lane) for arena, lane, _ in self._sides for job in lane.jobs}
        self.layout, self.budget_bytes, self._target = target, self._wanted_budget, None
        return True

    def _change_capacities(self, target: Layout) -> bool:
        """Shrink arenas whose top is idle; once all have shrunk, let the others grow.

        Who shares how much memory is new then, and so is whether sharing works.
        """
        changed = False
        for is_growth in (False, True):
            pending = False
            for arena, row in zip(self._arenas, target.arenas, strict=True):
                if row.capacity_bytes == arena.capacity_bytes:
                    arena.top.is_held = False
                elif (row.capacity_bytes > arena.capacity_bytes) is not is_growth:
                    continue
                elif arena.top.is_idle:
                    arena.resize(row)
                    arena.top.is_held = False
                    changed = True
                else:
                    pending = True
            if pending:
                break
            changed = changed or self.budget_bytes != self._wanted_budget
            self.budget_bytes = self._wanted_budget  # nothing is larger than it will be
        self.layout = Layout(tuple(arena.layout for arena in self._arenas))
        if all(
            arena.capacity_bytes == row.capacity_bytes
            for arena, row in zip(self._arenas, target.arenas, strict=True)
        ):
            self._target = None
        if changed:
            self._forget_debts()
            self._gain.share_again()
        return changed

    def _forget_debts(self) -> None:
        """Count anew what each job gets.

        While there is memory for everyone nobody waits for anybody, and jobs get what the device gives them.
        Nobody owes anything for that when memory becomes scarce, or turns begin.
        """
        for job in self._jobs.values():
            job.service = 0.0

    def _fell_back(self) -> None:
        """Turns begin, with whoever is asked first."""
        self.num_fall_backs += 1
        self._forget_debts()
