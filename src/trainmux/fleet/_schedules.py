"""Per-member learning-rate schedules, and who waits for an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainmux.errors import MemberError
from trainmux.fleet._group import Group
from trainmux.fleet._slots import Slot
from trainmux.runtime import ignored_warnings

_Due = list[tuple[Slot, tuple[float, ...]]]
"""Slots whose schedule is stepped, with what it is told."""


def await_update(groups: Sequence[Group], newcomer: str, num_steps: int) -> None:
    """Let a member that came between two updates begin with the next whole one: it would miss batches."""
    for group in groups:
        for _, slot in group.members:
            if slot.name == newcomer and slot.active and num_steps % group.config.accumulate:
                slot.waits, slot.active = True, False
                group.forget_fed()


def end_update(groups: Sequence[Group]) -> None:
    """Advance the schedules that count updates, of members that still train; those that waited begin to.

    All advance, then the first error of a schedule is raised.
    """
    due: _Due = []
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
    due: _Due = []
    for slot in (slot for group in groups for _, slot in group.members):
        member = slot.member
        if not slot.active or member.scheduler is None or not member.steps_by_epoch:
            continue
        if not isinstance(member.scheduler, ReduceLROnPlateau):
            due.append((slot, ()))
        elif (values := monitored.get(slot.name)) is not None:
            if member.scheduler_monitor not in values:
                raise MemberError(
                    f"member {slot.name!r}: expected scheduler_monitor to be one of {sorted(values)}, got "
                    f"{member.scheduler_monitor!r}"
                )
            due.append((slot, (values[member.scheduler_monitor],)))
    _step_all(due)


def _step_all(due: _Due) -> None:
    """Step every schedule; then raise the first error, with a note of who failed."""
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
