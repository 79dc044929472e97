"""Running a step of a fleet: one protocol, three implementations; and evaluating it.

`Fleet` checks a batch, cuts it into one part per group and asks a runner to prepare them. Everything that may
be refused is refused by then; only the prepared step changes members. The runners are

- `PlainRunner`, here: every group's own program, on memory of its own,
- `PlannedRunner`: one program for all groups within a plan's budget (`_planned_runner`),
- `SegmentRunner`: programs that somebody else runs segment by segment, in memory that is laid out elsewhere
  (`_segment_runner`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trainmux.engine import StepProgram
from trainmux.errors import BatchError, FleetError, LossError, PlanError, first_line
from trainmux.fleet._feed import BatchFeed, GroupFeed
from trainmux.fleet._free_numbers import GroupTrace
from trainmux.fleet._group import Group
from trainmux.fleet._slots import Slot
from trainmux.fleet._traces import Trace
from trainmux.ir import MemoryUse, Timeline
from trainmux.lowering import on_cores_left
from trainmux.tracing import BatchSpec, FlatBatch, failed_node, failure_text, plain_torch

Batches = Sequence[Sequence[Tensor]]
"""Leaves of each part's batch on the device."""

Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class GroupPart:
    """One group's part of a step: the graph for its batch, how it is fed, and whether the step updates.

    Also of an evaluation, by the graph of a forward pass.
    """

    group: Group
    trace: GroupTrace
    feed: GroupFeed
    applies: bool = False

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

    memory: MemoryUse | None = None
    """Each group has its own."""

    def prepare(self, parts: Sequence[GroupPart]) -> Callable[[Batches], None]:
        """Build or find the program of each group."""
        groups = [part.group for part in parts]
        programs = [
            part.group.prepare(part.trace, stacked_batch=part.feed.stacked, applies=part.applies)
            for part in parts
        ]
        return partial(_run, list(zip(groups, programs, strict=True)))

    def finish(self) -> None:
        """Return at once."""

    def watch(self, step: Callable[[], object]) -> Timeline:
        """Refuse: only a plan has instructions to watch."""
        raise PlanError(
            "expected a fleet that trains by a plan, got one without; call plan() or use(), and step once"
        )

    def forward(self, parts: Sequence[GroupPart], batches: Batches) -> list[dict[str, Tensor]]:
        """Compute the metrics of each group on its batch, ``[width]`` each."""
        results = []
        for part, batch in zip(parts, batches, strict=True):
            group = part.group
            program = group.forward_program(part.trace, part.spec, stacked_batch=part.feed.stacked)
            group.push_free()
            with on_cores_left():
                values = group.programs.engine.run(program, group.arguments(program, batch))
            results.append(dict(zip(program.metrics, values, strict=True)))
        return results


def _run(jobs: Sequence[tuple[Group, StepProgram]], batches: Batches) -> None:
    """Compute a step of all groups, with the settings read last, then apply it to all.

    A failure before the first change leaves all groups as they were; afterwards it is `HalfStepError`.
    """
    num_begun = num_done = 0  # groups that have begun to change, and that are a step ahead
    try:
        with torch.no_grad(), on_cores_left():
            begun = []
            for (group, program), batch in zip(jobs, batches, strict=True):
                group.push_numbers()
                begun.append(group.programs.engine.begin(program, group.arguments(program, batch)))
            for group, program in jobs:
                num_begun += 1
                # Popped, so that what a group holds half-way is free before the next one applies.
                results = begun.pop(0)()
                group.count(program)
                group.note(program, results)
                num_done += 1
    except BaseException as error:
        if not num_begun:
            if failed_node(error) is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise FleetError(
                f"a step failed in {failure_text(error)}; all members are as they were: expected labels and "
                "indices in range, and operators that run on this device"
            ) from error
        groups = [group for group, _ in jobs]
        raise half_step(
            error, ahead=groups[:num_done], torn=groups[num_done:num_begun], behind=groups[num_begun:]
        ) from error


class Gather:
    """Puts values that the groups' last steps returned into the order of names."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._index = torch.empty(0)

    def __call__(self, key: str, names: Sequence[str], groups: Sequence[Group]) -> Any:
        """Return one tensor with a row per member.

        Where some members have no such number, theirs is NaN. Where shapes differ between groups, it is a
        list, with ``None`` for members that have no such value.
        """
        values = [group.last.get(key) for group in groups]
        offsets = itertools.accumulate((group.width for group in groups), initial=0)
        places = {
            slot.name: (number, row, offset + row)
            for number, (group, offset) in enumerate(zip(groups, offsets, strict=False))
            for row, slot in group.members
        }
        present = [value for value in values if value is not None]
        shapes = {value.shape[1:] for value in present}
        if len(shapes) == 1 and present[0].dim() == 1:
            floating = [value.dtype for value in present if value.dtype.is_floating_point]
            filler = functools.reduce(torch.promote_types, floating) if floating else torch.float32
            present = [
                present[0].new_full((group.width,), math.nan, dtype=filler) if value is None else value
                for value, group in zip(values, groups, strict=True)
            ]
        if len(shapes) != 1 or len(present) < len(values):
            found = ((values[number], row) for number, row, _ in (places[name] for name in names))
            return [None if value is None else value[row] for value, row in found]
        joined = present[0] if len(present) == 1 else torch.cat(present)
        order = [places[name][2] for name in names]
        if order == list(range(joined.shape[0])):
            return joined
        if order != self._order:
            # From pinned memory nobody waits for it.
            index = torch.tensor(order, pin_memory=joined.is_cuda)
            self._order, self._index = order, index.to(joined.device, non_blocking=True)
        return joined.index_select(0, self._index)


# ---- evaluation --------------------------------------------------------------------------------------------


def evaluate_fleet(
    forward: Callable[[Sequence[GroupPart], Batches], list[dict[str, Tensor]]],
    groups: Sequence[Group],
    names: Sequence[str],
    feed: BatchFeed,
    loader: Iterable[Any],
    trace_of: Callable[[Slot, FlatBatch], Trace],
) -> dict[str, dict[str, float]]:
    """Means over samples, by member and metric. Sums stay on the device until the loader is exhausted.

    ``trace_of`` traces a member's metrics. Members that train alike may differ there: then there are as many
    passes as the group with the most traces needs, and the others repeat their last one.
    """
    sums: list[dict[str, Tensor]] = [{} for _ in groups]
    known: dict[tuple[int, BatchSpec], list[tuple[GroupTrace, list[int]]]] = {}
    num_samples = dict.fromkeys(names, 0)
    for index, given in enumerate(loader):
        batch, absent = feed.attendance(given, names)
        with plain_torch(groups[0].config.default_dtype):
            feeds = feed.for_evaluation(batch, groups, names)
            tensors = feed.tensors(feeds, groups, names)
            found = []
            for number, (group, part) in enumerate(zip(groups, feeds, strict=True)):
                group.number_evaluation(index)
                place = (number, part.example.spec)
                if place not in known:
                    known[place] = _row_traces(group, part.example, trace_of)
                found.append(known[place])
            values: list[dict[str, Tensor]] = [{} for _ in groups]
            for number in range(max(map(len, found))):
                chosen = [traces[min(number, len(traces) - 1)] for traces in found]
                parts = [
                    GroupPart(group, trace, part)
                    for group, (trace, _), part in zip(groups, chosen, feeds, strict=True)
                ]
                for total, (_, rows), new in zip(values, chosen, forward(parts, tensors), strict=True):
                    _merge_rows(total, new, rows)
            size = 1
            for group, total, new, part in zip(groups, sums, values, feeds, strict=True):
                first = part.example.tensors[0]
                size = first.shape[0] if first.dim() else 1
                gone = [row for row, slot in group.members if slot.name in absent]
                for name, value in new.items():
                    weighted = _checked(name, value).to(torch.float64) * size
                    if gone:
                        weighted[torch.tensor(gone, device=weighted.device)] = 0.0
                    total[name] = total[name] + weighted if name in total else weighted
            for name in num_samples.keys() - absent:
                num_samples[name] += size
    missed = [name for name, count in num_samples.items() if not count]
    if missed:
        raise BatchError(
            f"expected at least one batch to evaluate each member on, got none for {', '.join(missed[:5])}; "
            "does the loader have any?"
        )
    results: dict[str, dict[str, float]] = {name: {} for name in names}
    for group, totals in zip(groups, sums, strict=True):
        for metric, values_sum in totals.items():
            values_sums = values_sum.tolist()
            for row, slot in group.members:
                results[slot.name][metric] = values_sums[row] / num_samples[slot.name]
    return results


def _checked(name: str, value: Tensor) -> Tensor:
    if value.dim() != 1:
        raise LossError(
            f"metric {name!r}: expected a scalar per member, got shape {tuple(value.shape[1:])}; reduce it "
            "with .mean()"
        )
    return value


def _row_traces(
    group: Group, example: FlatBatch, trace_of: Callable[[Slot, FlatBatch], Trace]
) -> list[tuple[GroupTrace, list[int]]]:
    """Find the distinct traces of a group, with the rows that each is for."""
    found: dict[str, tuple[list[Trace], list[int]]] = {}
    for row, slot in group.members:
        trace = trace_of(slot, example)
        traces, rows = found.setdefault(trace.key, ([], []))
        traces.append(trace)
        rows.append(row)
    purpose = ("evaluate", example.spec)
    return [(group.merged(purpose, rows, traces), rows) for traces, rows in found.values()]


def _merge_rows(known: dict[str, Tensor], new: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """Put the rows that ``new`` values are for among the known ones."""
    for name, value in new.items():
        if name not in known:
            known[name] = value
        else:
            index = torch.tensor(rows, device=value.device)
            known[name] = known[name].index_copy(0, index, value.index_select(0, index))
