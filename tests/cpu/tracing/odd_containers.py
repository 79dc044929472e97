"""Containers of classes of their own, as batches and models hold them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class Closed(OrderedDict[str, Any]):
    """Attributes and entries are the same, and nobody may update it: as transformers' outputs."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("not to be changed")

    update = pop = clear = __delitem__ = _refuse  # type: ignore[assignment]


def closed(**entries: Any) -> Closed:
    found = Closed()
    for name, value in entries.items():
        found[name] = value
    return found


class Doubling(dict[str, Any]):
    """Hands out twice what is stored."""

    def __getitem__(self, key: str) -> Any:
        return 2 * super().__getitem__(key)

    def values(self) -> Any:
        return [self[key] for key in self]


class Two(tuple[Any, ...]):
    """Made of two things, not of one sequence."""

    def __new__(cls, first: Any, second: Any) -> Two:
        return super().__new__(cls, (first, second))

    def __getnewargs__(self) -> tuple[Any, ...]:  # for copies
        return tuple(self)
