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

from trainmux.colocate._arena import JobState
from trainmux.colocate._demand import JobDemand
from trainmux.colocate._eager import EagerCudaWork, EagerStep, EagerWork, SpareMemory
from trainmux.colocate._fused_work import FusedWork, runs_as_graphs
from trainmux.colocate._job import Job, JobBatches, JobResult, JobUsage
from trainmux.colocate._protocols import JobWork, StepOutcome, forget_locals
from trainmux.colocate._stored import LifespanFolder
from trainmux.engine import Memory
from trainmux.errors import (
    ConfigError,
    FusionError,
    MemberError,
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

    With ``has_callbacks`` its next batch is not taken before the iteration begins, and on a CUDA device
    iterations do not overlap. Measured durations are kept in ``profiles`` and used if they exist.

    Jobs that trainmux refuses raise here. An error of the job's own code, its loader or its loss, ends this
    job alone: ``error`` has it.
    """

    def __init__(
        self,
        job: Job,
        *,
        tracking_bytes: int | None,
        region_bytes: int,
        poisons: bool,
        spare_memory: SpareMemory,
        has_callbacks: bool,
        profiles: LifespanFolder | None,
    ) -> None:
        self.name, self.steps, self.callbacks = job.name, job.steps, tuple(job.callbacks)
        self._share = float(job.share)
        self._looks_ahead = not has_callbacks
        # Callbacks may read weights and change members, so nothing of the job may be in flight meanwhile. On
        # a CPU nothing is: enqueued segments have not begun.
        self._is_watched = has_callbacks and job.where.type == "cuda"
        self._profiles = profiles
        self.error: Exception | None = None
        self.is_over = False
        """Whether nothing of it runs any more, though the scheduler may still wait for segments."""
        self.num_steps = 0
        """Iterations that have ended."""
        self._batches: JobBatches | None = JobBatches(job)
        self._losses: list[tuple[tuple[str, ...], Tensor]] = []
        self._metrics: Mapping[str, Any] = {}
        self._let_in_at: float | None = None
        self._ended_at = 0.0
        self._is_settled = False
        self._ahead: _Ahead | None = None
        self._num_launched = 0
        """Iterations of which all segments have run, or been launched."""
        self._is_unfinished = False
        """Whether some segments of an iteration have run, or been launched, and others have not."""
        self.height = 0
        """The arena bytes that it holds."""
        self._launched: deque[tuple[int, int, StepOutcome | None]] = deque()
        """Heights, holds and outcomes of its segments in flight."""
        self._work: JobWork | None = None
        self._is_eager = False
        self._demand: JobDemand | None = None
        self._table: tuple[tuple[str, ...], Tensor] | None = None
        """Its losses, once it has left."""
        try:
            self._work = _make_work(
                job, self._batches, tracking_bytes, region_bytes, poisons=poisons, spare_memory=spare_memory
            )
            self._is_eager = self._work.is_eager
            self._ask(may_cut=True)
        except TrainmuxError:
            raise
        except Exception as error:
            self.fail(error)
            forget_locals(error)  # a rehearsal may have used much memory

    @property
    def work(self) -> JobWork:
        """Its work, until it has left."""
        assert self._work is not None
        return self._work

    @property
    def can_run(self) -> bool:
        """Whether its work could be made; ``error`` says why not."""
        return self._demand is not None

    @property
    def demand(self) -> JobDemand:
        """Its request to the scheduler, as of now."""
        assert self._demand is not None
        return self._demand

    def _ask(self, *, may_cut: bool = False) -> None:
        """Renew its demand. With ``may_cut`` it may be cut as durations of another run want it."""
        demand = self._unmeasured_demand()
        known = None if self._profiles is None else self._profiles.get(demand)
        if known is not None:
            if may_cut:
                self.work.cut_for(known.step_seconds)
                demand = self._unmeasured_demand()
            # If its durations or cuts have changed since, it is profiled again.
            if self.work.step_seconds == known.step_seconds:
                demand = known.apply(demand)
        self._demand = replace(demand, is_watched=self._is_watched)

    def _unmeasured_demand(self) -> JobDemand:
        return self.work.demand(self.name, steps=self.steps, share=self._share)

    def use_regions(self, region_bytes: int) -> None:
        """Round heights to regions of that size; before it moves in."""
        if self.can_run:
            self.work.use_regions(region_bytes)
            self._ask(may_cut=True)

    # ---- how it ends -------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the job with an error; iterations that were launched run to their ends."""
        if self.error is None:
            self.error = error
        self.is_over = True

    def fail_after_iteration(self, error: Exception) -> bool:
        """End the job with an error, once an iteration of which segments have run has ended.

        Its weights are then those after a whole number of steps. Returns whether there is such an iteration.
        """
        if not self._is_unfinished:
            self.fail(error)
        elif self.error is None:
            self.error = error
        return self._is_unfinished

    # ---- moving in and out -------------------------------------------------------------------------

    def settle(self, memory: Memory, now: float) -> None:
        """Move the job's state into ``memory``."""
        self.work.settle(memory)
        self._is_settled = True
        self._ask()  # it may keep less than it asked for, and be cut differently
        self._let_in_at = self._ended_at = now

    def ask_for_more(self) -> None:
        """Move out again and ask for more memory."""
        self.work.leave()
        self.work.ask_for_more()
        self._ask()

    def leave(self, report: JobState | None = None) -> None:
        """Move the job out; an error in doing so is the job's own.

        Everything it worked with is released, so that many jobs may come and go. ``report`` as in `result`.
        """
        step_seconds = self.work.step_seconds
        is_measured = self.num_steps and report is not None and not report.needs_profiling
        if self._profiles is not None and step_seconds and report is not None and is_measured:
            self._profiles.put(self.demand, report.solo_seconds, report.trend.seconds, step_seconds)
        self._is_settled = False
        self.is_over = True
        self._ahead = None
        self.height = 0
        self._launched.clear()
        if self.error is not None:
            forget_locals(self.error)
        try:
            self._metrics = pytree.tree_map_only(Tensor, Tensor.cpu, self._metrics)
            self.work.leave()
        except Exception as error:  # for example no memory to move to: other jobs are not affected
            self.fail(error)
            forget_locals(error)
        self._table = _loss_table(self._losses, self.work.member_names)
        self._losses, self._work, self._batches = [], None, None

    # ---- iterations --------------------------------------------------------------------------------

    def launch(self, segment: int) -> None:
        """Run a segment for the device; an error ends this job alone.

        It holds the segment's height once those before it have ended.
        """
        needed = self.demand.segments[segment]
        held = (0, 0) if self.is_over else (needed.height_bytes, needed.hold_bytes)
        outcome = None
        try:
            outcome = self._run(segment)
        except Exception as error:
            self.fail(error)
        self._launched.append((*held, outcome))
        self.height = self._launched[0][0]

    def segment_ended(self) -> StepOutcome | None:
        """Note the end of the first of its segments in flight; returns the outcome of an iteration's last."""
        _, self.height, outcome = self._launched.popleft()
        if self._launched:
            self.height = self._launched[0][0]
        elif self.is_over:
            self.height = 0  # the rest of the iteration does not run
        return outcome

    @property
    def held_bytes(self) -> int:
        """Local and arena bytes that it holds now; only for a job that has moved in."""
        return self.demand.local_bytes + self.height

    def _run(self, segment: int) -> StepOutcome | None:
        """Run a segment, with a new batch for the first one; returns the outcome of the last one."""
        if self.is_over:
            self._is_unfinished = False
            return None
        assert self._batches is not None
        if segment == 0:
            was_ahead = self._ahead is not None
            ahead, self._ahead = self._ahead or self._take(), None
            if ahead.error is not None:
                raise ahead.error
            if ahead.is_end:
                self.is_over = True
                return None
            if was_ahead:
                self.work.renew()
        with self._batches.own_random() if self._is_eager else contextlib.nullcontext():
            self.work.run(segment)
        self._is_unfinished = segment < len(self.demand.segments) - 1
        if self._is_unfinished:
            return None
        self._num_launched += 1
        return self.work.end()

    def may_look_ahead(self, num_begun: int) -> bool:
        """Whether `look_ahead` may take a batch now; the scheduler has begun ``num_begun`` iterations.

        Not for a job whose callbacks may change what comes next, nor for an eager job, and not before
        everything begun has been launched.
        """
        if self._ahead is not None or self._num_launched != num_begun or self.is_over:
            return False
        if not self._looks_ahead or self._is_eager:
            return False
        return self.steps is None or num_begun < self.steps

    def look_ahead(self) -> None:
        """Load the next iteration's batch, so that it need not wait for it. Errors are raised when it
        begins."""
        self._ahead = self._take(is_ahead=True)

    def _take(self, *, is_ahead: bool = False) -> _Ahead:
        """Begin an iteration with the next batch."""
        assert self._batches is not None
        try:
            batch = self._batches.next()
            if batch is END_OF_PASS:
                return _Ahead(is_end=True)
            self.work.begin(batch, is_ahead=is_ahead)
        except Exception as error:
            return _Ahead(error=error)
        return _Ahead()

    def note_end(self, outcome: StepOutcome, now: float) -> None:
        """Record an iteration that ended at ``now``; its losses are copied to the host."""
        self._ended_at = now
        self.num_steps += 1
        self._losses.append((outcome.members, outcome.losses.detach().to("cpu", copy=True)))
        self._metrics = outcome.metrics

    def result(self, report: JobState | None) -> JobResult:
        """Its result so far; ``report`` is the scheduler's, if it has moved in."""
        now = () if self._work is None else self._work.member_names
        members, losses = self._table or _loss_table(self._losses, now)
        demand = self._demand
        return JobResult(
            name=self.name,
            members=members,
            num_steps=self.num_steps,
            losses=losses,
            metrics=self._metrics,
            seconds=0.0 if self._let_in_at is None else self._ended_at - self._let_in_at,
            num_mispredicted=0 if report is None else report.num_mispredicted,
            shift_seconds=0.0 if report is None else report.total_shift_seconds,
            local_bytes=0 if demand is None else demand.local_bytes,
            peak_bytes=0 if demand is None else demand.peak_bytes,
            num_segments=0 if demand is None else len(demand.segments),
            is_eager=self._is_eager,
            error=self.error,
        )

    def usage(self) -> JobUsage:
        """Its present use of memory."""
        local = self.demand.local_bytes if self._is_settled else 0
        if self.error is not None:
            state = "failed"
        elif self._is_settled and not self.is_over:
            state = "running"
        else:
            state = "waiting" if self._let_in_at is None and not self.is_over else "done"
        return JobUsage(self.name, local, self.height, self.num_steps, self.steps, state)


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


def _make_work(
    job: Job,
    batches: JobBatches,
    tracking_bytes: int | None,
    region_bytes: int,
    *,
    poisons: bool,
    spare_memory: SpareMemory,
) -> JobWork:
    """The job's work, fused where its step can be traced, else eager."""
    example = batches.first()
    try:
        fleet = job.make_fleet(example)
    except (TraceError, FusionError, MemberError) as error:
        reason = str(error)  # not the error itself: it holds the traced objects
    else:
        return FusedWork(
            fleet, example, tracking_bytes=tracking_bytes, region_bytes=region_bytes, poisons=poisons
        )
    work = _make_eager_work(job, example, region_bytes, spare_memory, reason)
    warnings.warn(
        f"job {job.name!r} cannot be traced and runs eagerly, its iterations as a whole: {reason}",
        TrainmuxWarning,
        stacklevel=2,
    )
    return work


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
