"""What a job does, as far as the dispatcher has to know it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._device import MemoryNeed
from trainmux.engine import Memory


@dataclass(frozen=True)
class StepOutcome:
    """What an iteration gave: a loss for each of ``members``, and the loss function's metrics."""

    members: tuple[str, ...]
    losses: Tensor
    metrics: Mapping[str, Any]


class Work(Protocol):
    """An iteration in segments. Calls come in this order: ``settle``; then for each iteration ``begin``,
    ``run`` for each segment in turn, ``end``; at last ``leave``, perhaps with an iteration begun that will
    not run."""

    @property
    def need(self) -> MemoryNeed:
        """The memory that has to be given to it."""

    @property
    def member_names(self) -> tuple[str, ...]:
        """Of the losses."""

    @property
    def is_eager(self) -> bool:
        """Whether it is one segment that allocates for itself."""

    def demand(self, name: str, *, steps: int | None, share: float) -> JobDemand:
        """What it asks of the scheduler."""

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """The times that its segments are cut for; none of work that is not cut."""

    def cut_for(self, step_seconds: Sequence[float]) -> None:
        """Be cut for these times, which it had in another run; before it moves in."""

    def use_regions(self, region_bytes: int) -> None:
        """Have heights in regions of that size; before it moves in for the first time."""

    def settle(self, memory: Memory) -> None:
        """Move in: from now on all that it uses lies in ``memory``. It may ``need`` less beside it then.

        Refused with `BudgetError`: work that needs more beside it than it asked for. After ``leave`` and
        ``ask_for_more`` it may try again.
        """

    def ask_for_more(self) -> None:
        """Ask for more memory beside its area from now on."""

    def begin(self, batch: Any, *, is_ahead: bool = False) -> None:
        """Check and take a batch; nothing of the models changes if it is refused, or if nothing runs.

        With ``is_ahead`` it is not its turn yet: the job may have nothing of the arena, and ``renew`` is
        called when it is.
        """

    def renew(self) -> None:
        """Begin again with the same batch, if what an iteration depends on has changed since."""

    def run(self, segment: int) -> None:
        """Run one segment of the iteration that was begun."""

    def end(self) -> StepOutcome:
        """The last segment has run: count the step."""

    def leave(self) -> None:
        """Move out, with weights and optimizer state back in the members' own objects."""


def forget_locals(error: BaseException) -> None:
    """Let go of what the calls that raised an error worked with: tensors, a graph, a whole batch."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
