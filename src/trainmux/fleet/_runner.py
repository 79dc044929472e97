"""Running a step of a fleet: one protocol, three implementations.

`Fleet` checks a batch, cuts it into one part per group and asks a runner to prepare them. Everything that may
be refused is refused by then; only the prepared step changes members. The runners are

- `PlainRunner`: every group's own program, on memory of its own (`_plain_runner`),
- `PlannedRunner`: one program for all groups within a plan's budget (`_planned_runner`),
- `SegmentRunner`: programs that somebody else runs segment by segment, in memory that is laid out elsewhere
  (`_segment_runner`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from trainmux.fleet._feed import GroupFeed
from trainmux.fleet._group import Group
from trainmux.fleet._traces import Trace
from trainmux.tracing import BatchSpec

Batches = Mapping[int, Sequence[Tensor]]
"""Leaves of each group's batch on the device, by ``id(group)``."""

Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class GroupPart:
    """One group's part of a step: the graph for its batch, how it is fed, and whether the step updates."""

    group: Group
    trace: Trace
    feed: GroupFeed
    applies: bool

    @property
    def spec(self) -> BatchSpec:
        """Describe the batch of one member."""
        return self.feed.example.spec

    def variant(self) -> Hashable:
        """Tell apart the programs of this group's steps; reads the members' settings as they are now."""
        return (self.group.variant(applies=self.applies), self.spec, self.feed.stacked)


class StepRunner(Protocol[Result_co]):
    """Runs steps of a fleet's groups."""

    def prepare(self, parts: Sequence[GroupPart]) -> Callable[[Batches], Result_co]:
        """Build or find the programs for a step; refuses what cannot run, and changes no member.

        The result, called once with the groups' batches, runs the step (plain, planned), or returns what is
        left for the caller to run (in segments).
        """
        ...

    def finish(self) -> None:
        """Run what is in flight to its end: afterwards the groups' state is current."""
        ...
