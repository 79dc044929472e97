"""A job from its admission to its end: its batches, its work, and its results so far."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._eager import EagerCudaWork, EagerStep, EagerWork, SpareMemory
from trainmux.colocate._fused_work import fused_lanes, runs_as_graphs
from trainmux.colocate._job import Job, JobBatches
from trainmux.colocate._job_state import JobReport
from trainmux.colocate._protocols import JobWork, MemoryNeed, StepOutcome, forget_locals
from trainmux.colocate._result import JobResult, JobUsage
from trainmux.colocate._stored import LifespanFolder
from trainmux.engine import Memory
from trainmux.errors import (
    ConfigError,
    FusionError,
    MemberError,
    PlanError,
    TraceError,
    TrainmuxError,
    TrainmuxWarning,
)
from trainmux.fleet import END_OF_PASS

_AUTOCAST: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""The dtype of products in an eager step, by precision; fp64 would need another model."""


@dataclass(frozen=True)
class _Ahead:
    """The beginning of the next iteration: a batch that its work has taken, the end of the data, or an
    error."""

    is_end: bool = False
    error: Exception | None = None


class AdmittedJob:
    """A job that has been traced and can be scheduled.

    It has one lane, or several that run its micro-batches in rotation: iteration ``i`` of lane ``l`` of ``n``
    is number ``i * n + l``. ``is_watched`` is as in `JobDemand`. With ``looks_ahead`` its next batch may be
    taken before the iteration begins. Measured durations are kept in ``profiles`` and used if they exist.

    Jobs that trainmux refuses raise here. An error of the job's own code, its loader or its loss, ends this
    job alone: ``error`` has it, and there are no ``demands``.
    """

    def __init__(
        self,
        job: Job,
        *,
        tracking_bytes: int | None,
        region_bytes: int,
        poisons: bool,
        spare_memory: SpareMemory,
        is_watched: bool = False,
        looks_ahead: bool = False,
        profiles: LifespanFolder | None = None,
    ) -> None:
        self.name, self.steps, self.callbacks = job.name, job.steps, tuple(job.callbacks)
        self._share = float(job.share)
        self._is_watched, self._looks_ahead = is_watched, looks_ahead
        self._profiles = profiles
        self.error: Exception | None = None
        self._end: int | None = None
        """The number from which on no iteration runs, though the scheduler may still wait for segments."""
        self.num_steps = 0
        """Iterations that have ended."""
        self._batches: JobBatches | None = JobBatches(job)
        self._losses: list[tuple[tuple[str, ...], Tensor]] = []
        self._metrics: Mapping[str, Any] = {}
        self._let_in_at: float | None = None
        self._ended_at = 0.0
        self._has_moved_in = self._is_settled = False
        self._ahead: _Ahead | None = None
        self._num_launched = 0
        """Iterations of which all segments have run, or been launched."""
        self._unfinished: set[int] = set()
        """The lanes in which some segments of an iteration have run, or been launched, and others have
        not."""
        self._works: tuple[JobWork, ...] = ()
        self._outcomes: dict[int, tuple[StepOutcome, float]] = {}
        """Results of iterations that have ended before one of a lower number."""
        self._untold: list[tuple[int, StepOutcome]] = []
        """Results that callbacks have not seen."""
        self._is_eager = False
        self._local_bytes = self._peak_bytes = self._num_segments = 0
        self._table: tuple[tuple[str, ...], Tensor] | None = None
        """Its losses, once it has left."""
        self.demands: tuple[JobDemand, ...] = ()
        """One for each lane, until it has left."""
        try:
            self._works = _make_works(
                job, self._batches, tracking_bytes, region_bytes, poisons=poisons, spare_memory=spare_memory
            )
            self._is_eager = self._works[0].is_eager
            self.demands = self._ask()
        except TrainmuxError:
            raise
        except Exception as error:
            self.fail(error)
            forget_locals(error)  # a rehearsal may have used much memory
        self.lane_names: tuple[str, ...] = tuple(demand.name for demand in self.demands)
        self.heights = [0] * len(self.demands)
        """The arena bytes that each lane holds."""
        self._launched: list[deque[tuple[int, int]]] = [deque() for _ in self.demands]
        """Heights and holds of each lane's segments in flight."""

    def _ask(self) -> tuple[JobDemand, ...]:
        demands = self._unmeasured_demands()
        known = None if self._profiles is None else self._profiles.get(demands[0])
        if known is not None:
            if not self._has_moved_in:
                self._works[0].cut_for(known.step_seconds)
                demands = self._unmeasured_demands()
            # If its durations or cuts have changed since, it is profiled again.
            if self._works[0].step_seconds == known.step_seconds:
                with contextlib.suppress(PlanError):
                    demands = [known.apply(demand) for demand in demands]
        self._local_bytes = sum(demand.local_bytes for demand in demands)
        self._peak_bytes = sum(demand.peak_bytes for demand in demands)
        self._num_segments = len(demands[0].segments)
        return tuple(replace(demand, is_watched=self._is_watched) for demand in demands)

    def _unmeasured_demands(self) -> list[JobDemand]:
        return [work.demand(self.name, steps=self.steps, share=self._share) for work in self._works]

    def use_regions(self, region_bytes: int) -> None:
        """Round heights to regions of that size; before it moves in."""
        for work in self._works:
            work.use_regions(region_bytes)
        self.demands = self._ask() if self._works else ()

    @property
    def peaks(self) -> list[int]:
        """The peak of each lane."""
        return [demand.peak_bytes for demand in self.demands]

    def need(self, lane: int) -> MemoryNeed:
        return self._works[lane].need

    # ---- memory in use -----------------------------------------------------------------------------

    def segment_began(self, lane: int, height_bytes: int, hold_bytes: int) -> None:
        """Note a segment in flight: it needs its height once those before it have ended."""
        self._launched[lane].append((height_bytes, hold_bytes))
        if len(self._launched[lane]) == 1:
            self.heights[lane] = height_bytes

    def segment_ended(self, lane: int) -> None:
        """Note the end of the first of a lane's segments in flight."""
        launched = self._launched[lane]
        if launched:
            _, self.heights[lane] = launched.popleft()
        if launched:
            self.heights[lane] = launched[0][0]

    @property
    def held_bytes(self) -> int:
        """Local and arena bytes that it holds now; only for a job that has moved in."""
        return self._local_bytes + sum(self.heights)

    # ---- how it ends -------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether no further iteration begins; earlier ones may still be in flight."""
        return self._end is not None

    def runs(self, lane: int, iteration: int) -> bool:
        """Whether an iteration is to run, or to continue."""
        return self._end is None or self._number(lane, iteration) < self._end

    def _number(self, lane: int, iteration: int) -> int:
        return iteration * len(self._works) + lane

    def stop(self) -> None:
        """Run nothing of the job any more."""
        self._end = 0

    def fail(self, error: Exception) -> None:
        """End the job with an error."""
        if self.error is None:
            self.error = error
        self.stop()

    def fail_in(self, lane: int, iteration: int, error: Exception) -> None:
        """End the job with the error of an iteration; earlier iterations run to their ends."""
        number = self._number(lane, iteration)
        if self._end is None or number < self._end:
            self.error, self._end = error, number
        elif self.error is None:
            self.error = error

    def fail_after_iteration(self, error: Exception) -> bool:
        """End the job with an error, once an iteration of which segments have run has ended.

        Its weights are then those after a whole number of steps. Returns whether there is such an iteration.
        """
        is_unfinished = bool(self._unfinished)
        if not is_unfinished:
            self.fail(error)
        elif self.error is None:
            self.error = error
        return is_unfinished

    # ---- moving in and out -------------------------------------------------------------------------

    def settle(self, lane: int, memory: Memory, now: float) -> None:
        """Move a lane in, after those before it: the job's state goes to the ``memory`` of the first."""
        self._has_moved_in = True
        self._works[lane].settle(memory)
        self._is_settled = lane == len(self._works) - 1
        if self._is_settled:
            self.demands = self._ask()  # it may keep less than it asked for, and be cut differently
        self._let_in_at = self._ended_at = now

    def ask_for_more(self) -> None:
        """Move out again, after further lanes have left, and ask for more memory."""
        self._works[0].leave()
        for work in self._works:
            work.ask_for_more()
        self.demands = self._ask()

    def leave_lane(self, lane: int) -> None:
        """Move out a further lane, before the job leaves."""
        self._works[lane].leave()

    def leave(self, reports: Sequence[JobReport] = ()) -> None:
        """Move the job out; an error in doing so is the job's own.

        Everything it worked with is released, so that many jobs may come and go. ``reports`` as in `result`.
        """
        step_seconds = self._works[0].step_seconds
        if self._profiles is not None and self.num_steps and step_seconds and reports[0].is_measured:
            self._profiles.put(self.demands[0], reports[0], step_seconds)
        self._is_settled = False
        self.stop()
        self._ahead = None
        self.heights = [0] * len(self.heights)
        for launched in self._launched:
            launched.clear()
        if self.error is not None:
            forget_locals(self.error)
        try:
            self._metrics = pytree.tree_map_only(Tensor, Tensor.cpu, self._metrics)
            self._works[0].leave()
        except Exception as error:  # for example no memory to move to: other jobs are not affected
            self.fail(error)
            forget_locals(error)
        self._table = _loss_table(self._losses, self._works[0].member_names)
        self._losses, self._works, self._batches, self.demands = [], (), None, ()
        self._outcomes, self._untold = {}, []

    # ---- iterations --------------------------------------------------------------------------------

    def run(self, lane: int, iteration: int, segment: int) -> StepOutcome | None:
        """Run a segment, with a new batch for the first one; returns the outcome of the last one."""
        if not self.runs(lane, iteration):
            self._unfinished.discard(lane)
            return None
        assert self._batches is not None
        work = self._works[lane]
        if segment == 0:
            was_ahead = self._ahead is not None
            ahead, self._ahead = self._ahead or self._take(work), None
            if ahead.error is not None:
                raise ahead.error
            if ahead.is_end:
                self._end = self._number(lane, iteration)
                return None
            if was_ahead:
                work.renew()
        with self._batches.own_random() if self._is_eager else contextlib.nullcontext():
            work.run(segment)
        if segment < self._num_segments - 1:
            self._unfinished.add(lane)
            return None
        self._unfinished.discard(lane)
        self._num_launched += 1
        return work.end()

    def may_look_ahead(self, num_begun: int) -> bool:
        """Whether `look_ahead` may take a batch now; the scheduler has begun ``num_begun`` iterations.

        Not for a job whose callbacks may change what comes next, for an eager job, nor for one with several
        lanes, and not before everything begun has been launched.
        """
        if self._ahead is not None or self._num_launched != num_begun or self.is_over:
            return False
        if not self._looks_ahead or self._is_eager or len(self._works) != 1:
            return False
        return self.steps is None or num_begun < self.steps

    def look_ahead(self) -> None:
        """Load the next iteration's batch, so that it need not wait for it. Errors are raised when it
        begins."""
        self._ahead = self._take(self._works[0], is_ahead=True)

    def _take(self, work: JobWork, *, is_ahead: bool = False) -> _Ahead:
        """Begin an iteration of ``work`` with the next batch."""
        assert self._batches is not None
        try:
            batch = self._batches.next()
            if batch is END_OF_PASS:
                return _Ahead(is_end=True)
            work.begin(batch, is_ahead=is_ahead)
        except Exception as error:
            return _Ahead(error=error)
        return _Ahead()

    def note_end(self, lane: int, iteration: int, outcome: StepOutcome, now: float) -> None:
        """Record an iteration that ended at ``now``; its losses are copied to the host."""
        self._outcomes[self._number(lane, iteration)] = (outcome, now)
        while self.num_steps in self._outcomes:
            outcome, now = self._outcomes.pop(self.num_steps)
            self._ended_at = now
            self.num_steps += 1
            self._losses.append((outcome.members, outcome.losses.detach().to("cpu", copy=True)))
            self._metrics = outcome.metrics
            self._untold.append((self.num_steps, outcome))

    def take_untold(self, *, leaves: bool = False) -> list[tuple[int, StepOutcome]]:
        """The steps, counted from 1, that callbacks are to see now, with their outcomes.

        Concurrent micro-batches are reported after the update, when none of them is in flight, or when the
        job ``leaves``.
        """
        micro_batches = self.demands[0].micro_batches
        if not leaves and micro_batches is not None and not micro_batches.opens_step(self.num_steps):
            return []
        told, self._untold = self._untold, []
        return told

    def result(self, reports: Sequence[JobReport]) -> JobResult:
        """Its result so far; ``reports`` are the scheduler's on its lanes, if it has moved in."""
        now = self._works[0].member_names if self._works else ()
        members, losses = self._table or _loss_table(self._losses, now)
        return JobResult(
            name=self.name,
            members=members,
            num_steps=self.num_steps,
            losses=losses,
            metrics=self._metrics,
            seconds=0.0 if self._let_in_at is None else self._ended_at - self._let_in_at,
            num_mispredicted=sum(report.num_mispredicted for report in reports),
            shift_seconds=sum(report.total_shift_seconds for report in reports),
            local_bytes=self._local_bytes,
            peak_bytes=self._peak_bytes,
            num_segments=self._num_segments,
            is_eager=self._is_eager,
            error=self.error,
        )

    def usage(self) -> JobUsage:
        """Its present use of memory."""
        local = self._local_bytes if self._is_settled else 0
        if self.error is not None:
            state = "failed"
        elif self._is_settled and not self.is_over:
            state = "running"
        else:
            state = "waiting" if self._let_in_at is None and not self.is_over else "done"
        return JobUsage(self.name, local, sum(self.heights), self.num_steps, self.steps, state)


def _loss_table(
    rows: Sequence[tuple[tuple[str, ...], Tensor]], now: tuple[str, ...]
) -> tuple[tuple[str, ...], Tensor]:
    """A row per step and a column for each member that ever existed; NaN for steps without it."""
    members = tuple(dict.fromkeys(name for names in (*(names for names, _ in rows), now) for name in names))
    dtype = rows[0][1].dtype if rows else torch.float32
    table = torch.full((len(rows), len(members)), torch.nan, dtype=dtype)
    for row, (names, losses) in zip(table, rows, strict=True):
        row[[members.index(name) for name in names]] = losses
    return members, table


def _make_works(
    job: Job,
    batches: JobBatches,
    tracking_bytes: int | None,
    region_bytes: int,
    *,
    poisons: bool,
    spare_memory: SpareMemory,
) -> tuple[JobWork, ...]:
    """The job's lanes, fused where its step can be traced; else one eager lane."""
    example = batches.first()
    try:
        fleet = job.make_fleet(example)
    except (TraceError, FusionError, MemberError) as error:
        reason = str(error)  # not the error itself: it holds the traced objects
    else:
        return fused_lanes(
            fleet,
            example,
            tracking_bytes=tracking_bytes,
            region_bytes=region_bytes,
            poisons=poisons,
            num_lanes=job.num_lanes,
        )
    work = _make_eager_work(job, example, region_bytes, spare_memory, reason)
    warnings.warn(
        f"job {job.name!r} cannot be traced and runs eagerly, its iterations as a whole: {reason}",
        TrainmuxWarning,
        stacklevel=2,
    )
    return (work,)


def _make_eager_work(
    job: Job, example: Any, region_bytes: int, spare_memory: SpareMemory, reason: str
) -> JobWork:
    """Plain training of a job that cannot be traced for ``reason``."""
    assert job.model is not None
    assert job.optimizer is not None
    assert job.loss is not None
    places = {str(tensor.device) for tensor in job.model.parameters()}
    if job.precision not in _AUTOCAST or not places <= {"cpu", str(job.where)}:
        raise ConfigError(
            f"job {job.name!r} cannot be traced ({reason}) and must have its parameters on the CPU or on "
            f"{job.where} and a precision of {sorted(_AUTOCAST)}, but got {sorted(places)} and "
            f"{job.precision!r}; change what stops the trace, or these"
        )
    if job.accumulate > 1:
        raise ConfigError(
            f"job {job.name!r} cannot be traced ({reason}) and must have accumulate=1, but got "
            f"{job.accumulate}; change what stops the trace, or leave accumulate out"
        )
    autocast = _AUTOCAST[job.precision]
    step = EagerStep(job.model, job.optimizer, job.loss, job.scheduler, job.deterministic, autocast)
    if not runs_as_graphs(job.where):
        return EagerWork(job.name, step, example, region_bytes=region_bytes)
    return EagerCudaWork(
        job.name, step, example, region_bytes=region_bytes, device=job.where, spare_memory=spare_memory
    )
