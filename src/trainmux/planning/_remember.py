"""A cache for what is worked out of profiles, keyed by object identity.

Profiles are large, so they are told apart by identity, not by value. What is remembered keeps what it was
worked out of alive, so that no other object can get its identity; only the last so many are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_MAX_REMEMBERED = 64


def remembered(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """A pure function of objects by position, called once for those that are still remembered."""
    known: OrderedDict[tuple[int, ...], tuple[object, _Result]] = OrderedDict()

    @wraps(function)
    def asked(*given: _Given.args, **none: _Given.kwargs) -> _Result:
        key = tuple(map(id, given))
        if key not in known:
            known[key] = (given, function(*given, **none))
            if len(known) > _MAX_REMEMBERED:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key][1]

    return asked
