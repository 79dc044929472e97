"""Steps without a plan: all groups compute, then all of them change, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from trainmux.engine import StepProgram, UpdateMode
from trainmux.fleet._doors import half_step
from trainmux.fleet._evaluate import RowTraces, take_over
from trainmux.fleet._feed import GroupFeed
from trainmux.fleet._group import Group
from trainmux.fleet._runner import Batches, GroupPart

_Job = tuple[Group, StepProgram]


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
                take_over(merged, dict(zip(program.metrics, values, strict=True)), rows)
            results.append(merged)
        return results


def _run(jobs: Sequence[_Job], batches: Batches) -> None:
    """Compute a step of all groups, then apply it to all.

    A failure before the first change leaves all groups as they were; afterwards it is `HalfStepError`.
    Groups with immediate updates go one by one: half-way through they hold all of their activations.
    """
    num_at_once = 1 if jobs[0][1].settings.mode is UpdateMode.IMMEDIATE else len(jobs)
    num_begun = num_done = 0  # groups that have begun to change, and that are a step ahead
    try:
        with torch.no_grad():
            for first in range(0, len(jobs), num_at_once):
                together = jobs[first : first + num_at_once]
                begun = [_begin(group, program, batches[id(group)]) for group, program in together]
                for group, program in together:
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


def _begin(group: Group, program: StepProgram, batch: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Compute a micro-batch of all active members, with the settings read last; the result applies it."""
    group.push_numbers()
    return group.programs.engine.begin(program, group.arguments(program, batch))
