"""A cache for facts derived from a profile, keyed by object identity.

Profiles are large, so they are told apart by identity, not by value. What is remembered keeps what it was
worked out of alive, so that no other object can get its identity; only the last so many are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")
_MAX_REMEMBERED = 64


def remembered(function: Callable[[_Given], _Result]) -> Callable[[_Given], _Result]:
    """A pure function of one object, called once for each object that is still remembered."""
    known: OrderedDict[int, tuple[_Given, _Result]] = OrderedDict()

    def asked(given: _Given) -> _Result:
        found = known.get(id(given))
        if found is None:
            found = known[id(given)] = (given, function(given))
            if len(known) > _MAX_REMEMBERED:
                known.popitem(last=False)
        else:
            known.move_to_end(id(given))
        return found[1]

    asked.__doc__, asked.__name__ = function.__doc__, function.__name__
    return asked
