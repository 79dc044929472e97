"""The public calls of a fleet: the same numbers in every surrounding, and none from a broken fleet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from trainmux.errors import FleetError
from trainmux.fleet._runner import HalfStepError
from trainmux.tracing import is_plain, plain_torch

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
        if is_plain(fleet._config.default_dtype):
            return method(fleet, *args, **kwargs)
        with plain_torch(fleet._config.default_dtype):
            return method(fleet, *args, **kwargs)

    return whole(call)
