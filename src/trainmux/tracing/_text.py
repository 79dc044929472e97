"""Text in a batch, such as names of files, which a model seldom looks at.

A trace is made with a stand-in that notes any use. If there is none, batches share its graph whatever their
text is; otherwise the trace is made again with the text, which is then part of a batch's structure.
"""

from __future__ import annotations

from typing import Any


class Text:
    """Whether traced code has read any text of the batches that have this in common.

    ``is_read`` decides whether text is part of their structure, ``was_hidden`` says whether a trace was given
    a stand-in, and ``was_noted`` whether it used one.
    """

    def __init__(self, *, is_read: bool = False) -> None:
        self.is_read = is_read
        self.was_hidden = self.was_noted = False

        def note(*args: Any, **kwargs: Any) -> Any:
            self.was_noted = True
            raise TextReadError

        self._stand_in: Any = type("UnreadText", (), dict.fromkeys(_USES, note))()

    def shown(self, value: Any) -> Any:
        """``value``, or what stands in for it."""
        if self.is_read:
            return value
        self.was_hidden = True
        return self._stand_in


class TextReadError(Exception):
    """Text of the batch was read; raised by its stand-in, and never seen by users."""


def is_text(value: Any) -> bool:
    """Whether it is text, or a list of nothing else."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(type(item) is str for item in value)
    return type(value) is str


_NOT_USES = {"__new__", "__init__", "__init_subclass__", "__class__", "__subclasshook__", "__class_getitem__"}
_USES = {
    name
    for kind in (str, bytes, int, float, complex, list, dict, set)
    for name in dir(kind)
    if name.startswith("__") and callable(getattr(kind, name))
}
_USES |= {"__call__", "__enter__", "__fspath__", "__next__"}
_USES -= _NOT_USES

READ = Text(is_read=True)
"""For batches whose text is always part of their structure."""
