"""Jobs that share a device and a budget: the dispatcher between the scheduler and the device.

It asks the scheduler what to do, has the device do it, and reports the segments that have ended, in one
global order. A job ends with its steps, with its loader, or with an error of its own. However it ends, the
others go on with the same results as training alone.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from trainmux.colocate._admitted import AdmittedJob
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.colocate._eager import SpareMemory
from trainmux.colocate._host_device import HostDevice
from trainmux.colocate._job import ColocationResult, Job, JobCallback, JobStep, JobUsage, check_jobs
from trainmux.colocate._layout import MemoryLayout
from trainmux.colocate._placement import ALIGNMENT_BYTES, region_bytes_for
from trainmux.colocate._protocols import ColocationDevice, Ended, StepOutcome, forget_locals
from trainmux.colocate._scheduler import Enqueue, Idle, Remap, ScroogeScheduler
from trainmux.colocate._stored import LifespanFolder
from trainmux.colocate._threads import FairLock, prompt_threads
from trainmux.colocate._virtual_memory import granularity_bytes
from trainmux.errors import BudgetError, ConfigError, PlanError
from trainmux.runtime import deferred_interrupts, device_name, look_at_host
from trainmux.sizes import parse_budget


class Colocation:
    """Co-located jobs within a budget; made by `colocate`.

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
        callbacks: Sequence[JobCallback],
        profiles: str | os.PathLike[str] | None,
        poisons: bool,
    ) -> None:
        check_jobs(jobs)
        self._where = jobs[0].where
        measured_on = f"{device_name(self._where)}, torch {torch.__version__}"
        self._profiles = None if profiles is None else LifespanFolder(profiles, measured_on)
        self._tracking_bytes = tracking_bytes
        self._region_bytes = smallest_region_bytes(self._where) if region_bytes is None else region_bytes
        self._poisons = poisons
        self._callbacks = tuple(callbacks)
        self._lock = FairLock()
        self._changed = threading.Event()
        self._is_running = self._is_aborted = False
        self._seconds = 0.0
        self._peak_bytes = self._used_bytes = 0
        self._callback_error: Exception | None = None
        """The error of a callback for all jobs, which ends the run."""
        budget_bytes = budget_in_bytes(budget, self._where)
        self._jobs = {job.name: self._admit(job, lambda: nullcontext(budget_bytes)) for job in jobs}
        if region_bytes is None:
            self._choose_regions()
        self._device = make_device(self._where, self._region_bytes, poisons=poisons)
        self._inside: dict[str, AdmittedJob] = {}
        """The jobs whose state lies in memory of the device's layout."""
        demands = [job.demand for job in self._jobs.values() if job.can_run]
        self._scheduler = ScroogeScheduler(demands, budget_bytes)

    # ---- the user's calls --------------------------------------------------------------------------

    def run(self) -> ColocationResult:
        """Train all jobs to their ends.

        On Ctrl-C every job ends the iteration that it has begun, and its state returns to its own objects,
        before ``KeyboardInterrupt`` is raised. Refused with `ConfigError`: a second run at the same time, and
        a run after one that was aborted by an error.
        """
        with self._lock.held():
            if self._is_running or self._is_aborted:
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
            with deferred_interrupts(), self._lock.held():
                self._is_aborted = bool(self._inside)
                while self._inside:
                    self._move_out(next(iter(self._inside)))
                if self._is_aborted:
                    self._device.arrange(MemoryLayout(), {})
                self._seconds += time.perf_counter() - began_at
                self._is_running = False
        return self.results()

    def add(self, job: Job) -> None:
        """Add a job; running jobs make room for it at the ends of their iterations.

        Regions keep the size chosen for the first jobs. Refused as by `colocate`; nothing changes then.
        """
        check_jobs([job])
        with self._lock.held():
            self._check_new(job)
        admitted = self._admit(job, self._spare_memory)  # tracing takes a while: the others go on meanwhile
        with self._lock.held():
            self._check_new(job)
            if admitted.can_run:
                self._scheduler.add(admitted.demand)
            self._jobs[job.name] = admitted
        self._changed.set()

    def remove(self, name: str) -> None:
        """Remove a job when its present iteration has ended. Refused with `ConfigError`: an unknown name."""
        with self._lock.held():
            job = self._jobs.get(name)
            if job is None:
                raise ConfigError(
                    f"expected the name of a job, one of {sorted(self._jobs)}, but got {name!r}; it was "
                    "never added"
                )
            self._let_go(job)
        self._changed.set()

    def set_budget(self, budget: int | str) -> None:
        """Stay within ``budget`` from the next ends of iterations on; `BudgetError` if it is too small."""
        budget_bytes = budget_in_bytes(budget, self._where)
        with self._lock.held():
            self._scheduler.set_budget(budget_bytes)
        self._changed.set()

    def results(self) -> ColocationResult:
        """The results of every job so far."""
        with self._lock.held():
            jobs = {name: job.result(self._scheduler.report(name)) for name, job in self._jobs.items()}
            budget = self._scheduler.budget_bytes
            fall_backs = self._scheduler.num_fall_backs
            return ColocationResult(
                jobs, self._seconds, budget, self._peak_bytes, self._used_bytes, fall_backs
            )

    def usage(self) -> tuple[JobUsage, ...]:
        """The present memory use of every job."""
        with self._lock.held():
            return tuple(job.usage() for job in self._jobs.values())

    @property
    def budget_bytes(self) -> int:
        """The budget in force."""
        return self._scheduler.budget_bytes

    # ---- the dispatcher -----------------------------------------------------------------------------

    def _run_to_end(self) -> None:
        while self._callback_error is None:
            with deferred_interrupts(), self._lock.held():
                wait_seconds = self._advance()
            if wait_seconds is None:
                return
            if wait_seconds > 0:
                self._changed.wait(wait_seconds)
            self._changed.clear()
        raise self._callback_error

    def _wind_down(self) -> None:
        """Finish begun iterations and begin no more."""
        with self._lock.held():
            for job in self._jobs.values():
                self._let_go(job)
        while True:
            with self._lock.held():
                wait_seconds = self._advance()
            if wait_seconds is None:
                return
            time.sleep(wait_seconds)

    def _advance(self) -> float | None:
        """Enqueue everything that may be enqueued, then report one segment that ends.

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
                work = functools.partial(self._jobs[ref.job].launch, ref.segment)
                self._device.enqueue(ref, action.after, work)
        ended = self._device.next_ended(0.0)  # look ahead only if nothing has ended
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
        """While nothing may begin, load the batch of a job's next iteration."""
        for name, job in self._inside.items():
            num_begun = self._scheduler.num_begun(name)
            if num_begun is not None and job.may_look_ahead(num_begun):
                with self._device.behind(name):
                    job.look_ahead()
                return

    def _arrange(self, action: Remap) -> None:
        """Move ended jobs out, lay out memory, and move new jobs in."""
        named = action.layout.names
        for name in self._inside.keys() - named:
            self._move_out(name)
        demands = {name: self._jobs[name].demand for name in named}
        newcomers = sorted(named - self._inside.keys())
        try:
            self._device.arrange(action.layout, demands)
        except BudgetError as error:
            if not newcomers:
                raise
            for name in newcomers:  # the device has no memory for them, whatever the budget says
                self._jobs[name].fail(error)
                self._scheduler.remove(name, at_once=True)
                self._jobs[name].leave()
            return  # a layout without them comes next
        self._peak_bytes = max(self._peak_bytes, self._device.reserved_bytes)
        for name in newcomers:
            self._move_in(name)
        self._tell_scheduler_of([self._inside[name] for name in newcomers if name in self._inside])

    def _move_in(self, name: str) -> None:
        """Move a job's state into the layout; an error ends this job alone."""
        job = self._inside[name] = self._jobs[name]
        try:
            with self._device.lane(name):
                job.settle(self._device.memory_of(name), self._device.now())
        except BudgetError as error:
            forget_locals(error)  # graphs and their pool among them
            self._give_more(name)
        except Exception as error:
            job.fail(error)
            self._let_go(job, at_once=True)

    def _tell_scheduler_of(self, newcomers: list[AdmittedJob]) -> None:
        """Tell the scheduler how newcomers are cut now. Memory that they asked for and do not need goes to
        the arenas, if the device has it."""
        settled = [job.demand for job in newcomers if job.error is None]
        before = self._device.reserved_bytes
        for demand in settled:
            self._device.keep_less(demand)
        given_back = before - self._device.reserved_bytes
        is_there = given_back <= self._device.free_bytes
        for demand in settled:
            self._scheduler.settled(demand, gives_back=is_there)

    def _give_more(self, name: str) -> None:
        """Move a job out that needs more memory than it asked for, and add it again if the budget allows."""
        job = self._inside.pop(name)
        self._scheduler.remove(name, at_once=True)
        try:
            with self._device.lane(name):
                job.ask_for_more()
            self._scheduler.add(job.demand)
        except Exception as error:
            job.fail(error)
            job.leave()

    def _move_out(self, name: str) -> None:
        """Move a job's state back into its own objects."""
        job = self._inside.pop(name)
        with self._device.lane(name):
            job.leave(self._scheduler.report(name))

    def _complete(self, ended: Ended) -> None:
        """Report a segment to the scheduler, and an iteration to callbacks."""
        ref = ended.ref
        job = self._jobs[ref.job]
        self._used_bytes = max(self._used_bytes, sum(one.held_bytes for one in self._inside.values()))
        outcome = job.segment_ended()
        if job.is_over:
            self._let_go(job, at_once=True)
        self._scheduler.complete(ref, ended.started_at, ended.ended_at)
        if outcome is not None:
            job.note_end(outcome, ended.ended_at)
            self._tell(job, outcome)

    def _tell(self, job: AdmittedJob, outcome: StepOutcome) -> None:
        """Call callbacks for an iteration that has ended."""
        event = JobStep(self, job.name, job.num_steps, outcome.losses, outcome.metrics)
        try:
            for callback in job.callbacks if job.error is None else ():
                callback(event)
        except Exception as error:
            is_unfinished = job.fail_after_iteration(error)
            self._let_go(job, at_once=not is_unfinished)
        try:
            for callback in self._callbacks:
                callback(event)
        except Exception as error:
            self._callback_error = error

    # ---- internals ----------------------------------------------------------------------------------

    def _let_go(self, job: AdmittedJob, *, at_once: bool = False) -> None:
        """Remove a job from the scheduler, unless it is removed already."""
        if job.name in self._scheduler.names:
            self._scheduler.remove(job.name, at_once=at_once)
        if job.name not in self._inside:
            job.is_over = True

    @contextmanager
    def _spare_memory(self) -> Iterator[int]:
        with self._lock.held():
            yield self._scheduler.budget_bytes - self._device.reserved_bytes

    def _admit(self, job: Job, spare_memory: SpareMemory) -> AdmittedJob:
        return AdmittedJob(
            job,
            tracking_bytes=self._tracking_bytes,
            region_bytes=self._region_bytes,
            poisons=self._poisons,
            spare_memory=spare_memory,
            has_callbacks=bool(job.callbacks or self._callbacks),
            profiles=self._profiles,
        )

    def _choose_regions(self) -> None:
        """Choose the region size for these jobs; later jobs use it too, as mapped regions stay in place."""
        peaks = [job.demand.peak_bytes for job in self._jobs.values() if job.can_run]
        chosen = region_bytes_on(self._where, peaks)
        if chosen != self._region_bytes:
            self._region_bytes = chosen
            for job in self._jobs.values():
                job.use_regions(chosen)

    def _check_new(self, job: Job) -> None:
        if job.where != self._where:
            raise ConfigError(
                f"jobs must share one device, but got job {job.name!r} on {job.where} and others on "
                f"{self._where}; put it there"
            )
        if job.name in self._jobs:
            raise ConfigError(
                f"jobs must have different names, but got {job.name!r} twice; rename one of them"
            )


def make_device(where: torch.device, region_bytes: int, *, poisons: bool) -> ColocationDevice:
    """The device that runs segments; without CUDA, the host."""
    if where.type == "cuda" and torch.cuda.is_available():
        return CudaDevice(where, region_bytes=region_bytes, poisons=poisons)
    return HostDevice(poisons=poisons)


def smallest_region_bytes(where: torch.device) -> int:
    """The smallest region that can be mapped there."""
    return granularity_bytes(where) if where.type == "cuda" else ALIGNMENT_BYTES


def region_bytes_on(where: torch.device, peaks: Sequence[int]) -> int:
    """The region size for jobs with these peaks."""
    smallest = smallest_region_bytes(where)
    return region_bytes_for(peaks, smallest) if where.type == "cuda" else smallest


def budget_in_bytes(budget: int | str | None, where: torch.device) -> int:
    """The budget in bytes; ``None`` is all free memory of a CUDA device, or all memory of the host."""
    if where.type == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(where)
        return free if budget is None else parse_budget(budget, device_bytes=total)
    facts = look_at_host()
    known = [size for size in (facts.memory_bytes, facts.limit_bytes) if size is not None]
    if not known:
        raise BudgetError(
            "expected to learn the host's memory from the system, got nothing; name the budget in bytes"
        )
    return min(known) if budget is None else parse_budget(budget, device_bytes=min(known))


def colocate(
    jobs: Sequence[Job],
    budget: int | str | None = None,
    *,
    tracking_bytes: int | None = None,
    region_bytes: int | None = None,
    callbacks: Sequence[JobCallback] = (),
    profiles: str | os.PathLike[str] | None = None,
    poisons: bool = False,
) -> Colocation:
    """Co-locate jobs on one device, never past ``budget`` bytes; ``run()`` trains them.

    ``budget`` is in bytes, or text such as "24GiB" or "70%"; ``None`` is all free memory. A job's iteration
    is cut into segments wherever ``tracking_bytes`` of the arena have been allocated or released, 0
    cutting after every kernel: by default 8 MB on a CPU, and on a CUDA device enough for segments to outlast
    their launch. Memory is shared in regions of ``region_bytes``: by default 64 MB on a CUDA device, less
    where one of ``jobs`` would have only a few; single tensors on a CPU. ``callbacks`` see every iteration of
    every job. Measured durations are kept in the folder ``profiles``: a similar job, with regions of the same
    size, then needs no profiling iteration on this device and with this torch. ``poisons`` fills freed memory
    with NaN, for tests.

    Everything is traced, and on a CUDA device compiled, here. Refused with a typed error: no jobs, two of one
    name or one fleet, jobs on several devices, a job that trainmux cannot train; with `BudgetError`, which
    has the smallest workable budget: jobs that do not fit even when time-sliced.
    """
    return Colocation(
        list(jobs),
        budget,
        tracking_bytes=tracking_bytes,
        region_bytes=region_bytes,
        callbacks=callbacks,
        profiles=profiles,
        poisons=poisons,
    )
