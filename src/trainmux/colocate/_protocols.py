"""The two interfaces between which the dispatcher stands: a job's work, and the device that runs it.

On a CPU a segment runs in the caller's thread (`_host_device`). On a CUDA device segments run on a stream per
job, ends are events, and a job's addresses are a virtual range of its own into which the arena's regions are
mapped (`_cuda_device`). Work is a fleet's step in segments (`_fused_work`) or plain torch (`_eager`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from trainmux.colocate._demand import JobDemand, SegmentRef
from trainmux.colocate._layout import MemoryLayout
from trainmux.engine import Memory


class Ended(NamedTuple):
    """A segment that has run."""

    ref: SegmentRef
    started_at: float
    ended_at: float


@dataclass(frozen=True)
class StepOutcome:
    """The result of an iteration: a loss for each of ``members``, and the loss function's metrics."""

    members: tuple[str, ...]
    losses: Tensor
    metrics: Mapping[str, Any]


class JobWork:
    """An iteration in segments. Calls without effect on some kinds of work do nothing here.

    They come in this order: ``settle``; for each iteration ``begin``, ``run`` for each segment, ``end``; then
    ``leave``, perhaps with an iteration begun that will not run.
    """

    is_eager = False
    """Whether it is one segment that allocates for itself."""
    step_seconds: tuple[float, ...] = ()
    """The durations that its segments are cut for; empty for work that is not cut."""

    @property
    def member_names(self) -> tuple[str, ...]:
        """The names that belong to the losses."""
        raise NotImplementedError

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """Its request to the scheduler, with unmeasured durations."""
        raise NotImplementedError

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        """Cut for durations known from another run; before ``settle``."""

    def use_regions(self, region_bytes: int) -> None:
        """Round heights to regions of that size; before the first ``settle``."""
        raise NotImplementedError

    def settle(self, memory: Memory) -> None:
        """Move into ``memory``. It may demand less scratch afterwards, and be cut differently.

        Refused with `BudgetError`: work that needs more scratch than it asked for. After ``leave`` and
        ``ask_for_more`` it may try again.
        """

    def ask_for_more(self) -> None:
        """Ask for more scratch from now on."""

    def begin(self, batch: Any, *, is_ahead: bool = False) -> None:
        """Check and take a batch; the models do not change if it is refused, or if nothing runs.

        With ``is_ahead`` the iteration may not run yet: the job may own nothing of the arena, and ``renew``
        is called once it may run.
        """
        raise NotImplementedError

    def renew(self) -> None:
        """Begin again with the same batch if members or settings have changed since."""

    def run(self, segment: int) -> None:
        """Run one segment of the iteration that was begun."""
        raise NotImplementedError

    def end(self) -> StepOutcome:
        """Count the step; the last segment has run."""
        raise NotImplementedError

    def leave(self) -> None:
        """Move out, with weights and optimizer state back in the members' own objects."""
        raise NotImplementedError


class ColocationDevice(Protocol):
    """Runs segments for the dispatcher, in memory that it lays out."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes laid out now: the local bytes of every job, and the arenas."""

    @property
    def free_bytes(self) -> float:
        """Bytes that could be laid out in addition."""

    def now(self) -> float:
        """The clock of ``Ended``, in seconds."""

    def arrange(self, layout: MemoryLayout, demands: Mapping[str, JobDemand]) -> None:
        """Lay out memory for jobs by name; nothing of a job whose place changes is in flight.

        Areas of jobs that are no longer in ``layout`` are given back.
        """

    def keep_less(self, demand: JobDemand) -> None:
        """Lower the scratch of a job that is laid out."""

    def memory_of(self, job: str) -> Memory:
        """The addresses of a job: its area from 0 on, then its end of the arena. One object while it is laid
        out."""

    def lane(self, job: str) -> AbstractContextManager[None]:
        """Run the block on the job's lane, and wait for it at the end."""

    def behind(self, job: str) -> AbstractContextManager[None]:
        """Run the block behind everything enqueued of the job, without waiting for it."""

    def enqueue(self, ref: SegmentRef, after: tuple[SegmentRef, ...], work: Callable[[], None]) -> None:
        """Run ``work`` on its job's lane, behind what is enqueued there and behind ``after``.

        ``work`` keeps its errors to itself.
        """

    @property
    def is_busy(self) -> bool:
        """Whether a segment is enqueued whose end was not reported."""

    def next_ended(self, until: float | None = None) -> Ended | None:
        """Wait for the next segment to end; ``None`` where none is in flight, or none ends before
        ``until``."""


def forget_locals(error: BaseException) -> None:
    """Release the local variables of the calls that raised an error: tensors, graphs, a whole batch."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
