"""The public calls of a fleet: the same numbers in every surrounding, and none from a broken fleet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from trainmux.errors import FleetError, first_line
from trainmux.fleet._group import Group
from trainmux.tracing import is_plain, plain_torch


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


if TYPE_CHECKING:
    from trainmux.fleet._fleet import Fleet

P = ParamSpec("P")
T = TypeVar("T")
Call = Callable[Concatenate["Fleet", P], T]


def whole(method: Call[P, T]) -> Call[P, T]:
    """Refuse the call where a step has failed half-way before; a step that does so now is remembered."""

    @functools.wraps(method)
    def call(fleet: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if fleet._broken:
            raise FleetError(fleet._broken)
        try:
            return method(fleet, *args, **kwargs)
        except HalfStepError as error:
            fleet._broken = str(error)
            raise

    return call


def door(method: Call[P, T]) -> Call[P, T]:
    """As `whole`, and with torch's ambient switches put aside: autocast, a default device and the like."""

    @functools.wraps(method)
    def call(fleet: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if fleet._broken:
            raise FleetError(fleet._broken)
        try:
            if is_plain(fleet._config.default_dtype):
                return method(fleet, *args, **kwargs)
            with plain_torch(fleet._config.default_dtype):
                return method(fleet, *args, **kwargs)
        except HalfStepError as error:
            fleet._broken = str(error)
            raise

    return call
