"""A job while it is there: its batches, its work, what came of it so far."""

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
from trainmux.colocate._device import MemoryNeed
from trainmux.colocate._eager_cuda import BesideOthers, EagerCudaWork
from trainmux.colocate._eager_work import EagerWork
from trainmux.colocate._fused_work import fused_lanes, runs_as_graphs
from trainmux.colocate._job import JobReport
from trainmux.colocate._result import JobResult, JobUsage
from trainmux.colocate._stored import LifespanFolder
from trainmux.colocate._user_job import Job, JobBatches
from trainmux.colocate._work import StepOutcome, Work, forget_locals
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
"""What an eager step's products are of, by precision; in fp64 it would be another model."""


@dataclass(frozen=True)
class _Ahead:
    """What the next iteration begins with: a batch that its work has taken, nothing more, or an error."""

    is_end: bool = False
    error: Exception | None = None


class Tenant:
    """A job that has been looked at and can be scheduled; ``is_watched`` as of `JobDemand`,
    ``beside_others`` as of `EagerCudaWork`. With ``looks_ahead`` its next batch may be taken before the
    iteration begins. What was learned of it is kept in ``profiles``, and used if it was there already.

    It has one lane, or several that run its micro-batches in turns: iteration ``i`` of lane ``l`` of ``n`` is
    number ``i * n + l``. What trainmux refuses about a job is raised here. What the job's own code raises,
    its loader or its loss, ends this job alone: ``error`` has it, and there are no ``demands``.
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
        """Iterations that have ended; further ones may be on their way."""
        self._batches: JobBatches | None = JobBatches(job)
        self._losses: list[tuple[tuple[str, ...], Tensor]] = []
        self._metrics: Mapping[str, Any] = {}
        self._let_in_at: float | None = None
        self._ended_at = 0.0
        self._has_moved_in = self._is_settled = False
        self._ahead: _Ahead | None = None
        """What its next iteration begins with, where that is known before it begins."""
        self._num_launched = 0
        """Iterations of its only lane whose segments have all run, or been launched."""
        self._amid: set[int] = set()
        """The lanes in which segments of an iteration have run, or been launched, and others have not."""
        self._works: tuple[Work, ...] = ()
        self._outcomes: dict[int, tuple[StepOutcome, float]] = {}
        """Of iterations that have ended before one of a lower number did."""
        self._untold: list[tuple[int, StepOutcome]] = []
        """What callbacks have not been told of."""
        self._is_eager = False
        self._local_bytes = self._peak_bytes = self._num_segments = 0
        self._table: tuple[tuple[str, ...], Tensor] | None = None
        """Its losses, once it has left."""
        self.demands: tuple[JobDemand, ...] = ()
        """One for each lane, until it has left."""
        try:
            self._works = _make_works(
                job, self._batches, tracking_bytes, region_bytes, poisons=poisons, beside_others=beside_others
            )
            self._is_eager = self._works[0].is_eager
            self.demands = self._ask()
        except TrainmuxError:
            raise
        except Exception as error:
            self.fail(error)
            forget_locals(error)  # a rehearsal may have worked with much memory
        self.lane_names: tuple[str, ...] = tuple(demand.name for demand in self.demands)
        self.heights = [0] * len(self.demands)
        """What each lane holds of the arena."""
        self._on_their_way: list[deque[tuple[int, int]]] = [deque() for _ in self.demands]

    def _ask(self) -> tuple[JobDemand, ...]:
        demands = self._demands()
        known = None if self._profiles is None else self._profiles.get(demands[0])
        if known is not None:
            if not self._has_moved_in:
                self._works[0].cut_for(known.step_seconds)
                demands = self._demands()
            # Where it was found to take another time since, or is cut otherwise, it has to be profiled.
            if self._works[0].step_seconds == known.step_seconds:
                with contextlib.suppress(PlanError):
                    demands = [known.apply(demand) for demand in demands]
        self._local_bytes = sum(demand.local_bytes for demand in demands)
        self._peak_bytes = sum(demand.peak_bytes for demand in demands)
        self._num_segments = len(demands[0].segments)
        return tuple(replace(demand, is_watched=self._is_watched) for demand in demands)

    def _demands(self) -> list[JobDemand]:
        return [work.demand(self.name, steps=self.steps, share=self._share) for work in self._works]

    @property
    def _work(self) -> Work | None:
        """What its first lane does, until it has left."""
        return self._works[0] if self._works else None

    def use_regions(self, region_bytes: int) -> None:
        """Have heights in regions of that size; before it is let in."""
        for work in self._works:
            work.use_regions(region_bytes)
        self.demands = self._ask() if self._works else ()

    @property
    def peaks(self) -> list[int]:
        """What each of its lanes needs of an arena."""
        return [demand.peak_bytes for demand in self.demands]

    def need(self, lane: int) -> MemoryNeed:
        """The memory that has to be given to a lane."""
        return self._works[lane].need

    def began(self, lane: int, height_bytes: int, hold_bytes: int) -> None:
        """A segment is on its way: it needs its height once those before it have ended, and holds less
        behind its end.
        """
        self._on_their_way[lane].append((height_bytes, hold_bytes))
        if len(self._on_their_way[lane]) == 1:
            self.heights[lane] = height_bytes

    def ended(self, lane: int) -> None:
        """The first of a lane's segments on their way has ended."""
        if self._on_their_way[lane]:
            _, self.heights[lane] = self._on_their_way[lane].popleft()
        if self._on_their_way[lane]:
            self.heights[lane] = self._on_their_way[lane][0][0]

    @property
    def held_bytes(self) -> int:
        """What it holds now, of its own and of the arena; only of a job that was let in."""
        return self._local_bytes + sum(self.heights)

    @property
    def is_over(self) -> bool:
        """Whether no iteration begins any more; those that come before the end may still be on their way."""
        return self._end is not None

    def runs(self, lane: int, iteration: int) -> bool:
        """Whether an iteration is to run, or to run on."""
        return self._end is None or self._number(lane, iteration) < self._end

    def _number(self, lane: int, iteration: int) -> int:
        return iteration * len(self._works) + lane

    def stop(self) -> None:
        """Nothing of the job runs any more."""
        self._end = 0

    def fail(self, error: Exception) -> None:
        """The job ends here, with an error."""
        if self.error is None:
            self.error = error
        self.stop()

    def fail_in(self, lane: int, iteration: int, error: Exception) -> None:
        """The job ends with what an iteration raised; iterations before it go on to their ends."""
        number = self._number(lane, iteration)
        if self._end is None or number < self._end:
            self.error, self._end = error, number
        elif self.error is None:
            self.error = error

    def fail_after_iteration(self, error: Exception) -> bool:
        """The job ends with an error, once an iteration that is partly on its way has ended.

        Its weights are then those after a whole number of steps. Returns whether there is one.
        """
        is_amid = bool(self._amid)
        if not is_amid:
            self.fail(error)
        elif self.error is None:
            self.error = error
        return is_amid

    def settle(self, lane: int, memory: Memory, now: float) -> None:
        """Let a lane in, after those before it: the job's state moves to the ``memory`` of the first."""
        self._has_moved_in = True
        self._works[lane].settle(memory)
        self._is_settled = lane == len(self._works) - 1
        if self._is_settled:
            self.demands = self._ask()  # it may keep less than it asked for, and be cut otherwise
        self._let_in_at = self._ended_at = now

    def ask_for_more(self) -> None:
        """Move out again, further lanes having left, and ask for more memory."""
        self._works[0].leave()
        for work in self._works:
            work.ask_for_more()
        self.demands = self._ask()

    def leave_lane(self, lane: int) -> None:
        """A further lane goes, before the job does."""
        self._works[lane].leave()

    def leave(self, reports: Sequence[JobReport] = ()) -> None:
        """The job goes; what is wrong with its own objects is taken down as its error.

        What it worked with is let go of, so that many jobs may come and go. ``reports`` are as of `result`.
        """
        step_seconds = self._works[0].step_seconds
        if self._profiles is not None and self.num_steps and step_seconds and reports[0].is_measured:
            self._profiles.put(self.demands[0], reports[0], step_seconds)
        self._is_settled = False
        self.stop()
        self._ahead = None
        self.heights = [0] * len(self.heights)
        for lane in self._on_their_way:
            lane.clear()
        if self.error is not None:
            forget_locals(self.error)
        try:
            self._metrics = pytree.tree_map_only(Tensor, Tensor.cpu, self._metrics)
            self._works[0].leave()
        except Exception as error:  # no memory to move to, for one: others are no part of it
            self.fail(error)
            forget_locals(error)
        self._table = _loss_table(self._losses, self._works[0].member_names)
        self._losses, self._works, self._batches, self.demands = [], (), None, ()
        self._outcomes, self._untold = {}, []

    def run(self, lane: int, iteration: int, segment: int) -> StepOutcome | None:
        """Run a segment, with a new batch for the first; what the last one gave."""
        if not self.runs(lane, iteration):
            self._amid.discard(lane)
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
            self._amid.add(lane)
            return None
        self._amid.discard(lane)
        self._num_launched += 1
        return work.end()

    def may_look_ahead(self, num_begun: int) -> bool:
        """Whether `look_ahead` would take a batch now; the scheduler has begun ``num_begun`` iterations.

        Not of a job whose callbacks may change what comes next, of one that runs eagerly, nor of one with
        several lanes, and not before everything that was begun has been launched.
        """
        if self._ahead is not None or self._num_launched != num_begun or self.is_over:
            return False
        if not self._looks_ahead or self._is_eager or len(self._works) != 1:
            return False
        return self.steps is None or num_begun < self.steps

    def look_ahead(self) -> None:
        """Take the next iteration's batch to its place, so that it need not wait for that when it begins.

        What is wrong with it is raised when it begins.
        """
        self._ahead = self._take(self._works[0], is_ahead=True)

    def _take(self, work: Work, *, is_ahead: bool = False) -> _Ahead:
        """Have ``work`` begin with the next batch."""
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
        """An iteration has ended at ``now``; its losses go to the host's memory."""
        self._outcomes[self._number(lane, iteration)] = (outcome, now)
        while self.num_steps in self._outcomes:
            outcome, now = self._outcomes.pop(self.num_steps)
            self._ended_at = now
            self.num_steps += 1
            self._losses.append((outcome.members, outcome.losses.detach().to("cpu", copy=True)))
            self._metrics = outcome.metrics
            self._untold.append((self.num_steps, outcome))

    def tell(self, *, leaves: bool = False) -> list[tuple[int, StepOutcome]]:
        """The steps, counted from 1, that callbacks are to be told of now, with what they gave.

        Of micro-batches that run side by side they are told after the update, when nothing is on its way; or
        when the job ``leaves``.
        """
        micro_batches = self.demands[0].micro_batches
        if not leaves and micro_batches is not None and not micro_batches.opens_step(self.num_steps):
            return []
        told, self._untold = self._untold, []
        return told

    def result(self, reports: Sequence[JobReport]) -> JobResult:
        """How it fared; ``reports`` are the scheduler's on its lanes, if it was let in."""
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
            num_mispredicted=sum(report.num_mispredicted for report in reports),
            shift_seconds=sum(report.total_shift_seconds for report in reports),
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
        return JobUsage(self.name, local, sum(self.heights), self.num_steps, self.steps, state)


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


def _make_works(
    job: Job,
    batches: JobBatches,
    tracking_bytes: int | None,
    region_bytes: int,
    *,
    poisons: bool,
    beside_others: BesideOthers,
) -> tuple[Work, ...]:
    """The job's lanes, fused where its step can be traced; else one, eager."""
    example = batches.first()
    try:
        fleet = job.make_fleet(example)
    except (TraceError, FusionError, MemberError) as error:
        reason = str(error)  # not the error itself: it holds what was traced
    else:
        return fused_lanes(
            fleet,
            example,
            tracking_bytes=tracking_bytes,
            region_bytes=region_bytes,
            poisons=poisons,
            num_lanes=job.num_lanes,
        )
    work = _make_eager_work(job, example, region_bytes, beside_others, reason)
    warnings.warn(
        f"job {job.name!r} cannot be traced and runs eagerly, its iterations as a whole: {reason}",
        TrainmuxWarning,
        stacklevel=2,
    )
    return (work,)


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
    if job.accumulate > 1:
        raise ConfigError(
            f"job {job.name!r} cannot be traced ({reason}) and must have accumulate=1, but got "
            f"{job.accumulate}; change what stops the trace, or leave accumulate out"
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
