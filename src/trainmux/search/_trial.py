"""A trial: one configuration in a search, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trainmux.fleet import EpochRecord, Member


class TrialState(StrEnum):
    """Where a trial is in its life."""

    WAITING = "waiting"  # built, without a slot yet
    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"

    @property
    def is_finished(self) -> bool:
        """Whether nothing more happens to the trial."""
        return self in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED)


@dataclass(eq=False)
class Candidate:
    """A member that a search is to train, and what is particular to it there.

    ``params`` is what was chosen for it, for tables and logs. ``epochs`` overrides the search's
    ``max_epochs``. ``loader`` has batches of its own, cycled; epochs remain those of the search.
    """

    member: Member
    params: Mapping[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    loader: Iterable[Any] | None = None


@dataclass(eq=False)
class Trial:
    """One configuration in a search, and what became of it.

    ``number`` counts from 0 in the order in which trials were asked for. ``params`` and ``loader`` are those
    of its `Candidate`; it trains for ``max_epochs`` unless it is pruned or stopped. ``records`` has an
    `EpochRecord` for each epoch, counted by trial. ``values`` are the metrics of the last epoch, in the order
    of the search's ``metric``; ``None`` before the first epoch. ``error`` says why a trial failed, ``cause``
    is the exception if there was one. ``seconds`` is the time that it had a slot. ``resumes`` has the numbers
    of trials that were this one under other numbers, latest first; it goes on from where they were saved.
    ``resumed_epoch`` is the last epoch that is taken over from an earlier search, 0 where there is none.
    ``member`` has the trained weights once the trial is finished, or is ``None`` where the search does not
    keep it.
    """

    number: int
    name: str
    params: Mapping[str, Any]
    max_epochs: int
    member: Member | None = field(default=None, repr=False)
    loader: Iterable[Any] | None = field(default=None, repr=False)
    resumes: tuple[int, ...] = ()
    resumed_epoch: int = 0
    state: TrialState = TrialState.WAITING
    records: list[EpochRecord] = field(default_factory=list, repr=False)
    values: tuple[float, ...] | None = None
    error: str | None = None
    cause: BaseException | None = field(default=None, repr=False)
    seconds: float = 0.0

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return len(self.records)

    @property
    def value(self) -> float | None:
        """The value of a search with one metric."""
        return None if self.values is None else self.values[0]

    def fail(self, error: str) -> None:
        """Record why the trial goes no further."""
        self.state, self.error = TrialState.FAILED, error
