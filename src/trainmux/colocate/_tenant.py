"""A job while it is there: its batches, its work, what came of it so far."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from trainmux.colocate._actions import JobReport
from trainmux.colocate._demand import JobDemand
from trainmux.colocate._device import MemoryNeed
from trainmux.colocate._eager_cuda import BesideOthers, EagerCudaWork
from trainmux.colocate._eager_work import EagerWork
from trainmux.colocate._fused_work import FusedWork, runs_as_graphs
from trainmux.colocate._result import JobResult, JobUsage
from trainmux.colocate._user_job import Job, JobBatches
from trainmux.colocate._work import StepOutcome, Work, forget_locals
from trainmux.engine import Memory
from trainmux.errors import (
    ConfigError,
    FusionError,
    OptimizerError,
    TraceError,
    TrainmuxError,
    TrainmuxWarning,
)
from trainmux.training._batches import END_OF_PASS

_AUTOCAST: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""What an eager step's products are of, by precision; in fp64 it would be another model."""


class Tenant:
    """A job that has been looked at and can be scheduled; ``is_watched`` as of `JobDemand`,
    ``beside_others`` as of `EagerCudaWork`.

    What trainmux refuses about a job is raised here. What the job's own code raises, its loader or its loss,
    ends this job alone: ``error`` has it, and there is no ``demand``.
    """

    def __init__(
        self,
        job: Job,
        *,
        tracking_bytes: int | None,
        region_bytes: int,
        poisons: bool,
        beside_others: BesideOthers,
        is_watched: bool = False,
    ) -> None:
        self.name, self.steps, self.callbacks = job.name, job.steps, tuple(job.callbacks)
        self._share = float(job.share)
        self._is_watched = is_watched
        self.error: Exception | None = None
        self.is_over = False
        """Whether it runs no more, though the scheduler may still wait for segments of it."""
        self.num_steps = 0
        """Iterations that have ended; further ones may be on their way."""
        self.height_bytes = 0
        self._batches: JobBatches | None = JobBatches(job)
        self._losses: list[tuple[tuple[str, ...], Tensor]] = []
        self._metrics: Mapping[str, Any] = {}
        self._let_in_at: float | None = None
        self._ended_at = 0.0
        self._is_settled = False
        self._is_amid = False
        """Whether segments of an iteration have run, or been launched, and others have not."""
        self._work: Work | None = None
        self._is_eager = False
        self._local_bytes = self._peak_bytes = self._num_segments = 0
        self._table: tuple[tuple[str, ...], Tensor] | None = None
        """Its losses, once it has left."""
        self.demand: JobDemand | None = None
        try:
            self._work = _make_work(
                job, self._batches, tracking_bytes, region_bytes, poisons=poisons, beside_others=beside_others
            )
            self._is_eager = self._work.is_eager
            self.demand = self._ask(self._work)
            self._local_bytes, self._peak_bytes = self.demand.local_bytes, self.demand.peak_bytes
            self._num_segments = len(self.demand.segments)
        except TrainmuxError:
            raise
        except Exception as error:
            self.fail(error)
            forget_locals(error)  # a rehearsal may have worked with much memory

    def _ask(self, work: Work) -> JobDemand:
        demand = work.demand(self.name, steps=self.steps, share=self._share)
        return replace(demand, is_watched=self._is_watched)

    @property
    def _at_work(self) -> Work:
        """What it does; only of a job that has a demand and has not left."""
        assert self._work is not None
        return self._work

    @property
    def need(self) -> MemoryNeed:
        """The memory that has to be given to it."""
        return self._at_work.need

    @property
    def held_bytes(self) -> int:
        """What it holds now, of its own and of the arena; only of a job that was let in."""
        return self._local_bytes + self.height_bytes

    def fail(self, error: Exception) -> None:
        """The job ends here, with an error."""
        if self.error is None:
            self.error = error
        self.is_over = True

    def fail_after_iteration(self, error: Exception) -> bool:
        """The job ends with an error, once an iteration that is partly on its way has ended.

        Its weights are then those after a whole number of steps. Returns whether there is one.
        """
        if not self._is_amid:
            self.fail(error)
        elif self.error is None:
            self.error = error
        return self._is_amid

    def settle(self, memory: Memory, now: float) -> None:
        """Let the job in: its state moves to ``memory``."""
        self._at_work.settle(memory)
        self._is_settled = True
        self._let_in_at = self._ended_at = now

    def ask_for_more(self) -> JobDemand:
        """Move out again, and ask for more memory; what it asks for now."""
        work = self._at_work
        work.leave()
        work.ask_for_more()
        self.demand = self._ask(work)
        self._local_bytes = self.demand.local_bytes
        return self.demand

    def leave(self) -> None:
        """The job goes; what is wrong with its own objects is taken down as its error.

        What it worked with is let go of, so that many jobs may come and go.
        """
        self._is_settled = False
        self.is_over = True
        self.height_bytes = 0
        if self.error is not None:
            forget_locals(self.error)
        try:
            self._metrics = pytree.tree_map_only(Tensor, Tensor.cpu, self._metrics)
            self._at_work.leave()
        except Exception as error:  # no memory to move to, for one: others are no part of it
            self.fail(error)
            forget_locals(error)
        self._table = _loss_table(self._losses, self._at_work.member_names)
        self._losses, self._work, self._batches, self.demand = [], None, None, None

    def run(self, segment: int) -> StepOutcome | None:
        """Run a segment, with a new batch for the first; what the last one gave."""
        if self.is_over:
            return None
        assert self._batches is not None
        assert self.demand is not None
        if segment == 0:
            batch = self._batches.next()
            if batch is END_OF_PASS:
                self.is_over = True
                return None
            self._at_work.begin(batch)
        with self._batches.own_random() if self._is_eager else contextlib.nullcontext():
            self._at_work.run(segment)
        self._is_amid = segment < len(self.demand.segments) - 1
        if self._is_amid:
            return None
        return self._at_work.end()

    def note_end(self, outcome: StepOutcome, now: float) -> None:
        """An iteration has ended at ``now``; its losses go to the host's memory."""
        self._ended_at = now
        self.num_steps += 1
        self._losses.append((outcome.members, outcome.losses.detach().to("cpu", copy=True)))
        self._metrics = outcome.metrics

    def result(self, report: JobReport | None) -> JobResult:
        """How it fared; ``report`` is the scheduler's, if it was let in."""
        members, losses = self._table or _loss_table(
            self._losses, () if self._work is None else self._work.member_names
        )
        return JobResult(
            name=self.name,
            members=members,
            num_steps=self.num_steps,
            losses=losses,
            metrics=self._metrics,
            seconds=0.0 if self._let_in_at is None else self._ended_at - self._let_in_at,
            num_mispredicted=0 if report is None else report.num_mispredicted,
            shift_seconds=0.0 if report is None else report.total_shift_seconds,
            local_bytes=self._local_bytes,
            peak_bytes=self._peak_bytes,
            num_segments=self._num_segments,
            is_eager=self._is_eager,
            error=self.error,
        )

    def usage(self) -> JobUsage:
        """What it holds now."""
        local = self._local_bytes if self._is_settled else 0
        if self.error is not None:
            state = "failed"
        elif self._is_settled and not self.is_over:
            state = "running"
        else:
            state = "waiting" if self._let_in_at is None and not self.is_over else "done"
        return JobUsage(self.name, local, self.height_bytes, self.num_steps, self.steps, state)


def _loss_table(
    rows: Sequence[tuple[tuple[str, ...], Tensor]], now: tuple[str, ...]
) -> tuple[tuple[str, ...], Tensor]:
    """A row per step and a column for each member that there ever was; NaN for steps without it."""
    members = tuple(dict.fromkeys(name for names in (*(names for names, _ in rows), now) for name in names))
    if all(names == members for names, _ in rows):
        return members, torch.stack([losses for _, losses in rows]) if rows else torch.zeros(
            (0, len(members))
        )
    table = torch.full((len(rows), len(members)), torch.nan, dtype=rows[0][1].dtype)
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
    beside_others: BesideOthers,
) -> Work:
    """The job's step, fused where it can be traced, eager otherwise."""
    example = batches.first()
    try:
        fleet = job.make_fleet(example)
    except (TraceError, FusionError, OptimizerError) as error:
        reason = str(error)  # not the error itself: it holds what was traced
    else:
        return FusedWork(
            fleet, example, tracking_bytes=tracking_bytes, region_bytes=region_bytes, poisons=poisons
        )
    work = _make_eager_work(job, example, region_bytes, beside_others, reason)
    warnings.warn(
        f"job {job.name!r} cannot be traced and runs eagerly, its iterations as a whole: {reason}",
        TrainmuxWarning,
        stacklevel=2,
    )
    return work


def _make_eager_work(
    job: Job, example: Any, region_bytes: int, beside_others: BesideOthers, reason: str
) -> Work:
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
    autocast = _AUTOCAST[job.precision]
    if runs_as_graphs(job.where):
        return EagerCudaWork(
            job.name,
            job.model,
            job.optimizer,
            job.loss,
            example,
            device=job.where,
            scheduler=job.scheduler,
            deterministic=job.deterministic,
            autocast=autocast,
            region_bytes=region_bytes,
            beside_others=beside_others,
        )
    return EagerWork(
        job.name,
        job.model,
        job.optimizer,
        job.loss,
        example,
        scheduler=job.scheduler,
        deterministic=job.deterministic,
        autocast=autocast,
        region_bytes=region_bytes,
    )
