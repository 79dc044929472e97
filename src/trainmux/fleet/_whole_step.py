"""A step of all groups, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from trainmux.engine import StepProgram, UpdateMode
from trainmux.errors import FleetError, first_line
from trainmux.fleet._group import Group


class HalfStepError(FleetError):
    """A step failed when some members had changed: they are no longer at one step."""


def half_step(
    error: BaseException,
    *,
    ahead: Iterable[Group] = (),
    torn: Iterable[Group] = (),
    behind: Iterable[Group] = (),
) -> HalfStepError:
    """The error of a fleet whose groups are a step ``ahead``, somewhere in it, or ``behind``."""
    told = (("a step ahead", ahead), ("changed in part", torn), ("as before", behind))
    names = [(what, [slot.name for group in groups for _, slot in group.members]) for what, groups in told]
    found = "; ".join(f"{what}: {', '.join(members)}" for what, members in names if members)
    return HalfStepError(
        f"expected all members to do a step, got {type(error).__name__} ({first_line(error)}) half-way "
        f"({found}); restore() a checkpoint, or make another fleet of members as of their last sync()"
    )


def run_whole(jobs: Sequence[tuple[Group, StepProgram]], batches: Mapping[int, Sequence[Tensor]]) -> None:
    """Compute a step of all groups on their batches, by ``id(group)``; then apply it to all.

    What fails before the first change leaves all groups as they were; afterwards it is `HalfStepError`.
    Groups with immediate updates go one by one: half-way through they hold all of their activations.
    """
    waiting = list(jobs)
    done: list[Group] = []
    torn: list[Group] = []
    num_at_once = 1 if jobs[0][1].settings.mode is UpdateMode.IMMEDIATE else len(jobs)
    try:
        with torch.no_grad():
            while waiting:
                begun = [group.begin(program, batches[id(group)]) for group, program in waiting[:num_at_once]]
                while begun:
                    group, program = waiting[0]
                    torn.append(group)
                    results = begun.pop(0)()
                    group.count(program)
                    group.note(program, results)
                    done.append(torn.pop())
                    del waiting[0]
    except BaseException as error:
        if not done and not torn:
            raise
        behind = [group for group, _ in waiting if group not in torn]
        raise half_step(error, ahead=done, torn=torn, behind=behind) from error
