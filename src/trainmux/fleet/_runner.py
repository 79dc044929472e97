"""Running a step of a fleet: one protocol, three implementations.

`Fleet` checks a batch, cuts it into one part per group and asks a runner to prepare them. Everything that may
be refused is refused by then; only the prepared step changes members. The runners are

- `PlainRunner`, here: every group's own program, on memory of its own,
- `PlannedRunner`: one program for all groups within a plan's budget (`_planned_runner`),
- `SegmentRunner`: programs that somebody else runs segment by segment, in memory that is laid out elsewhere
  (`_segment_runner`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from trainmux.engine import StepProgram
from trainmux.errors import FleetError, first_line
from trainmux.fleet._feed import GroupFeed
from trainmux.fleet._group import Group
from trainmux.fleet._traces import Trace
from trainmux.tracing import BatchSpec

Batches = Mapping[int, Sequence[Tensor]]
"""Leaves of each group's batch on the device, by ``id(group)``."""

RowTraces = list[tuple[Trace, list[int]]]
"""The distinct traces of a group with the rows they are for: members that train alike may differ here."""

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


class HalfStepError(FleetError):
    """A step failed when some members had changed: they are no longer at one step."""


def half_step(
    error: BaseException,
    *,
    ahead: Iterable[Group] = (),
    torn: Iterable[Group] = (),
    behind: Iterable[Group] = (),
) -> HalfStepError:
    """Describe a fleet whose groups are a step ``ahead``, somewhere in it, or ``behind``."""
    told = (("a step ahead", ahead), ("changed in part", torn), ("as before", behind))
    names = [(what, [slot.name for group in groups for _, slot in group.members]) for what, groups in told]
    found = "; ".join(f"{what}: {', '.join(members)}" for what, members in names if members)
    return HalfStepError(
        f"expected all members to do a step, got {type(error).__name__} ({first_line(error)}) half-way "
        f"({found}); restore() a checkpoint, or make another fleet of members as of their last sync()"
    )


class PlainRunner:
    """Runs every group's own program. Nothing is ever left in flight."""

    def prepare(self, parts: Sequence[GroupPart]) -> Callable[[Batches], None]:
        """Build or find the program of each group."""
        jobs = [
            (
                part.group,
                part.group.prepare(part.trace, stacked_batch=part.feed.stacked, applies=part.applies),
            )
            for part in parts
        ]
        return partial(_run, jobs)

    def finish(self) -> None:
        """Return at once."""

    def evaluate(
        self,
        groups: Sequence[Group],
        traces: Sequence[RowTraces],
        feeds: Sequence[GroupFeed],
        batches: Batches,
    ) -> list[dict[str, Tensor]]:
        """Compute the metrics of all groups on one batch."""
        results = []
        for group, found, feed in zip(groups, traces, feeds, strict=True):
            merged: dict[str, Tensor] = {}
            for trace, rows in found:
                program = group.forward_program(trace, feed.example.spec, stacked_batch=feed.stacked)
                values = group.programs.engine.run(program, group.arguments(program, batches[id(group)]))
                merge_rows(merged, dict(zip(program.metrics, values, strict=True)), rows)
            results.append(merged)
        return results


def _run(jobs: Sequence[tuple[Group, StepProgram]], batches: Batches) -> None:
    """Compute a step of all groups, with the settings read last, then apply it to all.

    A failure before the first change leaves all groups as they were; afterwards it is `HalfStepError`.
    """
    num_begun = num_done = 0  # groups that have begun to change, and that are a step ahead
    try:
        with torch.no_grad():
            begun = []
            for group, program in jobs:
                group.push_numbers()
                arguments = group.arguments(program, batches[id(group)])
                begun.append(group.programs.engine.begin(program, arguments))
            for group, program in jobs:
                num_begun += 1
                # Popped, so that what a group holds half-way is free before the next one applies.
                results = begun.pop(0)()
                group.count(program)
                group.note(program, results)
                num_done += 1
    except BaseException as error:
        if not num_begun:
            raise
        groups = [group for group, _ in jobs]
        raise half_step(
            error, ahead=groups[:num_done], torn=groups[num_done:num_begun], behind=groups[num_begun:]
        ) from error


def merge_rows(known: dict[str, Tensor], new: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """Put the rows that ``new`` values are for among the known ones."""
    for name, value in new.items():
        if name not in known:
            known[name] = value
        else:
            index = torch.tensor(rows, device=value.device)
            known[name] = known[name].index_copy(0, index, value.index_select(0, index))
