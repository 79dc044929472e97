"""The error of a step that failed when some members had changed."""

from __future__ import annotations

from collections.abc import Iterable

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
    """Describe a fleet whose groups are a step ``ahead``, somewhere in it, or ``behind``."""
    told = (("a step ahead", ahead), ("changed in part", torn), ("as before", behind))
    names = [(what, [slot.name for group in groups for _, slot in group.members]) for what, groups in told]
    found = "; ".join(f"{what}: {', '.join(members)}" for what, members in names if members)
    return HalfStepError(
        f"expected all members to do a step, got {type(error).__name__} ({first_line(error)}) half-way "
        f"({found}); restore() a checkpoint, or make another fleet of members as of their last sync()"
    )
