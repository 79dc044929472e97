"""Jobs that share a device and a budget: the dispatcher between the scheduler and the device.

It asks the scheduler what to do, has the device do it, and reports what has ended, in one global order. Jobs
end by themselves: with their steps, with their loader, or with an error of their own. Whatever ends a job,
the others go on with the numbers that they would have alone.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from trainmux.colocate._actions import Enqueue, Idle, Remap
from trainmux.colocate._constants import ScroogeConstants
from trainmux.colocate._device import Ended
from trainmux.colocate._eager_cuda import BesideOthers
from trainmux.colocate._lane import SegmentRef
from trainmux.colocate._layout import Layout
from trainmux.colocate._result import ColocationResult, JobUsage
from trainmux.colocate._scheduler import ScroogeScheduler
from trainmux.colocate._simulated_gpu import choose_layout
from trainmux.colocate._stored import LifespanFolder
from trainmux.colocate._tenant import Tenant
from trainmux.colocate._turns import Turns, prompt_threads
from trainmux.colocate._user_job import Job, JobCallback, JobStep, check_jobs
from trainmux.colocate._where import (
    budget_in_bytes,
    default_region_bytes,
    make_device,
    name_of,
    region_bytes_on,
)
from trainmux.colocate._work import forget_locals
from trainmux.errors import BudgetError, ConfigError, PlanError
from trainmux.runtime import deferred_interrupts
from trainmux.sizes import exact_bytes

if TYPE_CHECKING:
    from trainmux.colocate._job import JobReport
    from trainmux.colocate._work import StepOutcome


_SECONDS_WITHOUT_INTERRUPT = 0.02


class Colocation:
    """Jobs side by side within a budget; made by `colocate`.

    ``add``, ``remove`` and ``set_budget`` may be called before ``run``, from callbacks, and from other
    threads while it runs.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        budget: int | str | None,
        *,
        tracking_bytes: int | None,
        region_bytes: int | None,
        constants: ScroogeConstants | None,
        callbacks: Sequence[JobCallback],
        profiles: str | os.PathLike[str] | None,
        poisons: bool,
    ) -> None:
        check_jobs(jobs)
        self._where = jobs[0].where
        self._profiles = None if profiles is None else LifespanFolder(profiles, name_of(self._where))
        self._tracking_bytes = tracking_bytes
        self._region_bytes = default_region_bytes(self._where) if region_bytes is None else region_bytes
        self._poisons = poisons
        self._callbacks = tuple(callbacks)
        self._turns = Turns()
        self._changed = threading.Event()
        self._is_running = self._is_broken_off = False
        self._seconds = 0.0
        self._peak_bytes = self._used_bytes = 0
        self._device = make_device(self._where, self._region_bytes, poisons=poisons)
        self._outcomes: dict[SegmentRef, StepOutcome] = {}
        self._callback_error: Exception | None = None
        """What a callback of no job in particular raised: everything ends with it."""
        budget_bytes = budget_in_bytes(budget, self._where)
        self._tenants = {job.name: self._tenant(job, lambda: nullcontext(budget_bytes)) for job in jobs}
        if region_bytes is None:
            self._choose_regions()
        self._lanes: dict[str, tuple[Tenant, int]] = {}
        """By the name that scheduler and device have for it: whose lane it is, and which."""
        for tenant in self._tenants.values():
            self._register(tenant)
        self._inside: dict[str, Tenant] = {}
        """Those whose state lies in memory of the device's layout."""
        demands = [demand for tenant in self._tenants.values() for demand in tenant.demands]
        self._scheduler = ScroogeScheduler(
            demands,
            budget_bytes,
            now=self._device.now(),
            constants=constants,
            choose_layout=choose_layout,
        )

    # ---- what the user does -------------------------------------------------------------------------

    def run(self) -> ColocationResult:
        """Train all jobs to their ends.

        On Ctrl-C every job ends the iteration that it has begun, and goes back into its own objects, before
        ``KeyboardInterrupt`` is raised. Refused with `ConfigError`: a second run while one is on, and a run
        after one that an error has broken off.
        """
        with self._turns.taken():
            if self._is_running or self._is_broken_off:
                raise ConfigError(
                    "a co-location must be run once at a time, and not after an error that ended it, but got "
                    "another run(); wait for the first one, or make another co-location"
                )
            self._is_running = True
        began_at = time.perf_counter()
        try:
            try:
                with prompt_threads():
                    self._run_to_end()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) or error is self._callback_error:
                    with deferred_interrupts():
                        self._wind_down()
                raise
        finally:
            with deferred_interrupts(), self._turns.taken():
                self._is_broken_off = bool(self._inside)
                while self._inside:
                    self._move_out(next(iter(self._inside)))
                if self._is_broken_off:
                    self._device.arrange(Layout(()), {})  # nobody comes back to what is laid out
                self._seconds += time.perf_counter() - began_at
                self._is_running = False
        return self.results()

    def add(self, job: Job) -> None:
        """Let another job in; those that run make room for it at the ends of their iterations.

        Memory goes on in the regions that suited the first jobs. Refused as by `colocate`; nothing changes
        then.
        """
        check_jobs([job])
        with self._turns.taken():
            self._check_new(job)
        tenant = self._tenant(job, self._beside_others)  # tracing takes a while: the others go on meanwhile
        with self._turns.taken():
            self._check_new(job)
            if tenant.demands:
                self._scheduler.add(*tenant.demands)
            self._tenants[job.name] = tenant
            self._register(tenant)
        self._changed.set()

    def remove(self, name: str) -> None:
        """Let a job go when its present iteration has ended. Refused with `ConfigError`: a name of no job."""
        with self._turns.taken():
            tenant = self._tenants.get(name)
            if tenant is None:
                raise ConfigError(
                    f"expected the name of a job, one of {sorted(self._tenants)}, but got {name!r}; it was "
                    "never added"
                )
            self._let_go(tenant)
        self._changed.set()

    def set_budget(self, budget: int | str) -> None:
        """Stay within ``budget`` from the next ends of iterations on; `BudgetError` where that cannot be."""
        budget_bytes = budget_in_bytes(budget, self._where)
        with self._turns.taken():
            self._scheduler.set_budget(budget_bytes)
        self._changed.set()

    def results(self) -> ColocationResult:
        """How every job has fared so far."""
        with self._turns.taken():
            jobs = {name: tenant.result(self._reports(tenant)) for name, tenant in self._tenants.items()}
            budget = self._scheduler.budget_bytes
            fall_backs = self._scheduler.num_fall_backs
            return ColocationResult(
                jobs, self._seconds, budget, self._peak_bytes, self._used_bytes, fall_backs
            )

    def usage(self) -> tuple[JobUsage, ...]:
        """What every job holds now."""
        with self._turns.taken():
            return tuple(tenant.usage() for tenant in self._tenants.values())

    @property
    def budget_bytes(self) -> int:
        """The budget that is in force."""
        return self._scheduler.budget_bytes

    # ---- the dispatcher -----------------------------------------------------------------------------

    def _run_to_end(self) -> None:
        while True:
            wait_seconds = self._advance_for_a_while()
            if self._callback_error is not None:
                raise self._callback_error
            if wait_seconds is None:
                return
            if wait_seconds > 0:
                self._changed.wait(wait_seconds)
            self._changed.clear()

    def _advance_for_a_while(self) -> float | None:
        """Advance until there is something to wait for; returns as `_advance` does.

        An interrupt waits for this. Putting one off and taking it up again takes as long as a decision, so it
        is not done for every segment.
        """
        until = time.perf_counter() + _SECONDS_WITHOUT_INTERRUPT
        with deferred_interrupts():
            while True:
                with self._turns.taken():
                    wait_seconds = self._advance()
                is_late = time.perf_counter() >= until
                if wait_seconds != 0 or is_late or self._callback_error is not None:
                    return wait_seconds

    def _wind_down(self) -> None:
        """End what has begun, begin nothing more."""
        with self._turns.taken():
            for tenant in self._tenants.values():
                self._let_go(tenant)
        while True:
            with self._turns.taken():
                wait_seconds = self._advance()
            if wait_seconds is None:
                return
            time.sleep(wait_seconds)

    def _advance(self) -> float | None:
        """Do all that can be done and see one segment end.

        Returns how long to wait before the next call, ``None`` when every job has ended.
        """
        while True:
            action = self._scheduler.next_action(self._device.now())
            if isinstance(action, Idle):
                break
            if isinstance(action, Remap):
                self._arrange(action)
            elif isinstance(action, Enqueue):
                ref = action.ref
                self._device.enqueue(ref, action.after, functools.partial(self._run_segment, ref))
        ended = self._device.next_ended(0.0)  # what has ended by now; only else is there time to look ahead
        if ended is None:
            self._look_ahead()
            ended = self._device.next_ended(action.wake_at)
        if ended is not None:
            self._complete(ended)
            return 0.0
        if self._device.is_busy:
            return 0.0
        if self._scheduler.is_done:
            return None
        if action.wake_at is None:
            raise PlanError(
                "expected a segment to run or a time to ask again, but got neither while jobs have steps "
                "left; this is a deadlock: the scheduler must keep every state safe"
            )
        return max(0.0, action.wake_at - self._device.now())

    def _look_ahead(self) -> None:
        """While nothing may begin, have a job take the batch of its next iteration."""
        for name, tenant in self._inside.items():
            num_begun = self._scheduler.num_begun(name)
            if num_begun is not None and tenant.may_look_ahead(num_begun):
                with self._device.behind(name):
                    tenant.look_ahead()
                return

    def _arrange(self, action: Remap) -> None:
        """Jobs that have ended move out, memory is laid out anew, new jobs move in."""
        lanes = {name: self._lanes[name] for arena in action.layout.arenas for name in arena.names}
        named = {tenant.name for tenant, _ in lanes.values()}
        for name in self._inside.keys() - named:
            self._move_out(name)
        needs = {name: tenant.need(lane) for name, (tenant, lane) in lanes.items()}
        newcomers = sorted(named - self._inside.keys())
        try:
            self._device.arrange(action.layout, needs)
        except BudgetError as error:
            if not newcomers:
                raise
            for name in newcomers:
                self._turn_away(name, error)
            return  # a layout without them comes next
        reserved = self._device.reserved_bytes
        if reserved > action.budget_bytes:
            raise PlanError(
                f"expected a layout of at most {exact_bytes(action.budget_bytes)}, but got "
                f"{exact_bytes(reserved)}; the scheduler must keep to the budget"
            )
        self._peak_bytes = max(self._peak_bytes, reserved)
        for name in newcomers:
            self._move_in(name)
        self._tell_of([self._inside[name] for name in newcomers if name in self._inside])

    def _move_in(self, name: str) -> None:
        """A job's state moves to the device's layout; what goes wrong there ends this job alone."""
        tenant = self._inside[name] = self._tenants[name]
        try:
            for lane, lane_name in enumerate(tenant.lane_names):
                with self._device.lane(lane_name):
                    tenant.settle(lane, self._device.memory_of(lane_name), self._device.now())
        except BudgetError as error:
            forget_locals(error)  # graphs and their pool among them
            self._give_more(name)
        except Exception as error:
            tenant.fail(error)
            self._let_go(tenant, at_once=True)

    def _tell_of(self, newcomers: list[Tenant]) -> None:
        """Jobs have settled, and may be cut otherwise than they asked for. What they asked for and do not
        need is for arenas, if it is there."""
        wanted = self._scheduler.names
        settled = [one for one in newcomers if one.error is None and one.name in wanted]
        self._scheduler.cut_anew(*[demand for tenant in settled for demand in tenant.demands])
        needs = {name: one.need(lane) for one in settled for lane, name in enumerate(one.lane_names)}
        before = self._device.reserved_bytes
        self._device.keep_less(needs)
        if before - self._device.reserved_bytes <= self._device.free_bytes:
            self._scheduler.keep_less({name: need.local_bytes for name, need in needs.items()})

    def _turn_away(self, name: str, error: BudgetError) -> None:
        """A job for which the device has no memory, whatever the budget says, ends before it begins."""
        tenant = self._tenants[name]
        tenant.fail(error)
        self._scheduler.remove(name, at_once=True)
        tenant.leave()

    def _give_more(self, name: str) -> None:
        """A job needs more memory than it knew: it moves out and comes anew, if the budget has that much."""
        tenant = self._inside.pop(name)
        self._scheduler.remove(name, at_once=True)
        try:
            self._leave_further_lanes(tenant)
            with self._device.lane(name):
                tenant.ask_for_more()
            self._scheduler.add(*tenant.demands)
        except Exception as error:
            tenant.fail(error)
            tenant.leave()

    def _move_out(self, name: str) -> None:
        """A job goes back into its own objects."""
        tenant = self._inside.pop(name)
        self._tell(tenant, leaves=True)
        self._leave_further_lanes(tenant)
        with self._device.lane(name):
            tenant.leave(self._reports(tenant))

    def _leave_further_lanes(self, tenant: Tenant) -> None:
        for lane in range(len(tenant.lane_names) - 1, 0, -1):
            with self._device.lane(tenant.lane_names[lane]):
                tenant.leave_lane(lane)

    def _run_segment(self, ref: SegmentRef) -> None:
        """What the device runs for a segment."""
        tenant, lane = self._lanes[ref.job]
        needed, runs = tenant.demands[lane].segments[ref.segment], tenant.runs(lane, ref.iteration)
        tenant.began(lane, *((needed.height_bytes, needed.hold_bytes) if runs else (0, 0)))
        try:
            outcome = tenant.run(lane, ref.iteration, ref.segment)
        except Exception as error:
            # Now: further segments may be enqueued before the end of this one is told.
            tenant.fail_in(lane, ref.iteration, error)
            raise
        if outcome is not None:
            self._outcomes[ref] = outcome

    def _complete(self, ended: Ended) -> None:
        """Tell the scheduler of a segment, and the job's callbacks of an iteration."""
        ref = ended.ref
        tenant, lane = self._lanes[ref.job]
        self._used_bytes = max(self._used_bytes, sum(one.held_bytes for one in self._inside.values()))
        tenant.ended(lane)
        if ended.error is not None:
            tenant.fail_in(lane, ref.iteration, ended.error)
        if tenant.is_over:
            if not tenant.runs(lane, ref.iteration):
                tenant.heights[lane] = 0
            self._let_go(tenant, at_once=True)
        self._scheduler.complete(ref, ended.started_at, ended.ended_at)
        outcome = self._outcomes.pop(ref, None)
        if outcome is not None:
            tenant.note_end(lane, ref.iteration, outcome, ended.ended_at)
            self._tell(tenant)

    def _tell(self, tenant: Tenant, *, leaves: bool = False) -> None:
        """Tell callbacks of the iterations that they have not been told of, if it is time."""
        for step, outcome in tenant.tell(leaves=leaves):
            event = JobStep(self, tenant.name, step, outcome.losses, outcome.metrics)
            try:
                for callback in tenant.callbacks if tenant.error is None else ():
                    callback(event)
            except Exception as error:
                is_amid = tenant.fail_after_iteration(error)
                self._let_go(tenant, at_once=not is_amid)
            try:
                for callback in self._callbacks:
                    callback(event)
            except Exception as error:
                self._callback_error = error

    # ---- inside -------------------------------------------------------------------------------------

    def _let_go(self, tenant: Tenant, *, at_once: bool = False) -> None:
        """Have the scheduler drop a job, unless it has, or will after the iteration that is running.

        Where several iterations may be running, each is gone through to its end: one may come before
        another that runs no more.
        """
        name = tenant.name
        if name in self._scheduler.names:
            self._scheduler.remove(name, at_once=at_once and len(tenant.lane_names) == 1)
        if name not in self._inside:
            tenant.stop()

    @contextmanager
    def _beside_others(self) -> Iterator[int]:
        """As `EagerCudaWork` wants it: what is enqueued goes on, nothing else happens."""
        with self._turns.taken():
            yield self._scheduler.budget_bytes - self._device.reserved_bytes

    def _tenant(self, job: Job, beside_others: BesideOthers) -> Tenant:
        # Callbacks may look at weights and change members, so nothing may be on its way meanwhile. On a CPU
        # nothing is: there, what is enqueued has not begun. Lanes wait, so that it is the same everywhere.
        may_be_ahead = self._where.type == "cuda" or job.num_lanes > 1
        has_callbacks = bool(job.callbacks or self._callbacks)
        return Tenant(
            job,
            tracking_bytes=self._tracking_bytes,
            region_bytes=self._region_bytes,
            poisons=self._poisons,
            beside_others=beside_others,
            is_watched=may_be_ahead and has_callbacks,
            looks_ahead=not has_callbacks,
            profiles=self._profiles,
        )

    def _choose_regions(self) -> None:
        """Those that suit these jobs. They keep them: what is mapped stays where it is when others come."""
        peaks = [peak for tenant in self._tenants.values() for peak in tenant.peaks]
        chosen = region_bytes_on(self._where, peaks)
        if chosen != self._region_bytes:
            self._region_bytes = chosen
            self._device = make_device(self._where, chosen, poisons=self._poisons)
            for tenant in self._tenants.values():
                tenant.use_regions(chosen)

    def _register(self, tenant: Tenant) -> None:
        self._lanes.update({name: (tenant, lane) for lane, name in enumerate(tenant.lane_names)})

    def _check_new(self, job: Job) -> None:
        if job.where != self._where:
            raise ConfigError(
                f"jobs must share one device, but got job {job.name!r} on {job.where} beside jobs on "
                f"{self._where}; put it there"
            )
        if job.name in self._tenants:
            raise ConfigError(
                f"jobs must have different names, but got {job.name!r} twice; rename one of them"
            )

    def _reports(self, tenant: Tenant) -> list[JobReport]:
        try:
            return [self._scheduler.report(name) for name in tenant.lane_names]
        except ConfigError:
            return []  # it was never let in
