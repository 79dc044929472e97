"""Per-member learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from trainmux.errors import MemberError
from trainmux.fleet._group import Group
from trainmux.fleet._slots import Slot
from trainmux.runtime import ignored_warnings


def step_schedulers(groups: Sequence[Group]) -> None:
    """Advance the schedules that count updates, of members that still train."""
    due = [
        slot
        for group in groups
        for _, slot in group.members
        if slot.member.scheduler is not None and slot.active and not slot.member.steps_by_epoch
    ]
    if due:
        with _silenced():
            for slot in due:
                _step(slot)


def end_epoch(groups: Sequence[Group], monitored: Mapping[str, Mapping[str, float]]) -> None:
    """Advance the schedules that count epochs; refuses an unknown monitor before any is advanced."""
    for group in groups:
        for _, slot in group.members:
            _check_monitor(slot, monitored.get(slot.name))
    with _silenced():
        for group in groups:
            for _, slot in group.members:
                member = slot.member
                if not slot.active or member.scheduler is None or not member.steps_by_epoch:
                    continue
                if not isinstance(member.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    _step(slot)
                    continue
                values = monitored.get(slot.name)
                if values is not None:
                    _step(slot, values[member.scheduler_monitor])


def _check_monitor(slot: Slot, values: Mapping[str, float] | None) -> None:
    member = slot.member
    plateau = isinstance(member.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if slot.active and plateau and values is not None and member.scheduler_monitor not in values:
        raise MemberError(
            f"member {slot.name!r}: expected scheduler_monitor to be one of {sorted(values)}, got "
            f"{member.scheduler_monitor!r}"
        )


def _silenced() -> AbstractContextManager[None]:
    """A scheduler looks for calls of optimizer.step(), which never happen here, and warns."""
    return ignored_warnings(".*lr_scheduler.step\\(\\).*")


def _step(slot: Slot, *arguments: float) -> None:
    try:
        slot.member.scheduler.step(*arguments)
    except Exception as error:
        error.add_note(f"in the scheduler of member {slot.name!r}")
        raise
