"""Per-member learning-rate schedules, and who waits for an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainmux.errors import MemberError
from trainmux.fleet._group import Group
from trainmux.fleet._slots import Slot
from trainmux.runtime import ignored_warnings


def await_update(groups: Sequence[Group], newcomer: str, num_steps: int) -> None:
    """Let a member that came between two updates begin with the next whole one: it would miss batches."""
    for group in groups:
        for _, slot in group.members:
            if slot.name == newcomer and num_steps % group.config.accumulate:
                slot.waits, slot.active = True, False
                group.forget_fed()


def end_update(groups: Sequence[Group]) -> None:
    """Advance the schedules that count updates, of members that still train; those that waited begin to.

    All advance, then the first error of a schedule is raised.
    """
    due: list[tuple[Slot, tuple[float, ...]]] = []
    for group in groups:
        members = group.members
        for _, slot in members:
            if slot.member.scheduler is not None and slot.active and not slot.member.steps_by_epoch:
                due.append((slot, ()))
        waiting = [slot for _, slot in members if slot.waits] if group.config.accumulate > 1 else []
        for slot in waiting:
            slot.waits, slot.active = False, True
        if waiting:
            group.forget_fed()
    if due:
        _step_all(due)


def end_epoch(groups: Sequence[Group], monitored: Mapping[str, Mapping[str, float]]) -> None:
    """Advance the schedules that count epochs; refuses an unknown monitor before any is advanced."""
    for group in groups:
        for _, slot in group.members:
            _check_monitor(slot, monitored.get(slot.name))
    due: list[tuple[Slot, tuple[float, ...]]] = []
    for group in groups:
        for _, slot in group.members:
            member = slot.member
            if not slot.active or member.scheduler is None or not member.steps_by_epoch:
                continue
            if not isinstance(member.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                due.append((slot, ()))
                continue
            values = monitored.get(slot.name)
            if values is not None:
                due.append((slot, (values[member.scheduler_monitor],)))
    _step_all(due)


def _check_monitor(slot: Slot, values: Mapping[str, float] | None) -> None:
    member = slot.member
    plateau = isinstance(member.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if slot.active and plateau and values is not None and member.scheduler_monitor not in values:
        raise MemberError(
            f"member {slot.name!r}: expected scheduler_monitor to be one of {sorted(values)}, got "
            f"{member.scheduler_monitor!r}"
        )


def _step_all(due: Sequence[tuple[Slot, tuple[float, ...]]]) -> None:
    """Step every schedule, each with its arguments; then raise the first error, with a note of who failed."""
    first: Exception | None = None
    # A scheduler looks for calls of optimizer.step(), which never happen here, and warns.
    with ignored_warnings(".*lr_scheduler.step\\(\\).*"):
        for slot, arguments in due:
            try:
                slot.member.scheduler.step(*arguments)
            except Exception as error:
                first = first or error
                said = "" if first is error else f": {type(error).__name__}: {error}"
                first.add_note(f"in the scheduler of member {slot.name!r}{said}")
    if first is not None:
        raise first
