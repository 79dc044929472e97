"""Side effects of the user's code on Python state: found while tracing, and refused where they matter.

A graph runs none of the Python code that was traced. Code that counts, keeps a hidden state, fills a list or
draws from ``random`` would be frozen at what it did during the trace. Such code is refused. Two things are
not: a cache, which the first call fills and later calls leave alone without computing anything else, and a
tensor that is stored but never read again by the next call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.errors import TraceError
from trainmux.tracing._cleanup import graph_constant, output_nodes, source_of
from trainmux.tracing._reach import PLAIN, Identity, Items, RandomState, Reach, same_items, tensor_digest
from trainmux.tracing._source import is_user_file
from trainmux.tracing._substitute import ABSENT, Change

_REMEDY = (
    "a fleet runs a graph, not this code: keep the value in a registered buffer of the model, return it as a "
    "metric, or compute it in the data loader"
)


@contextmanager
def watched_lines(read: Callable[[], Items]) -> Iterator[list[str]]:
    """While active, ``read`` a holder after every line of user code; the line that changed it is noted."""
    found: list[str] = []
    seen: list[Items] = []
    last = ""

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last
        if found or not is_user_file(frame.f_code.co_filename):
            return None
        if not seen:
            seen.append(read())
        elif not same_items(read(), seen[0]):
            found.append(last)
        # The line that called goes on where this one returns.
        place = frame.f_back if event == "return" and frame.f_back is not None else frame
        last = f"{place.f_code.co_filename}:{place.f_lineno} in {place.f_code.co_name}"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield found
    finally:
        sys.settrace(before)


def random_error(location: str | None) -> TraceError:
    """The refusal of code that draws from ``random`` or ``numpy.random``."""
    where = f" at {location}" if location else ""
    return TraceError(
        f"numbers are drawn from Python's or NumPy's random generator{where}; expected random numbers of "
        "torch, because a fleet runs a graph and would use this draw for ever: draw with torch (torch.rand, "
        "torch.distributions), or in the data loader",
        location=location,
    )


def state_error(reach: Reach, change: Change, location: str | None) -> TraceError:
    """The refusal of code that changes Python state from call to call."""
    path = reach.path(change.holder, change.key)
    where = f" at {location}" if location else ""
    return TraceError(
        f"{path} is changed{where} by every call of the loss function; expected code without side effects: "
        f"{_REMEDY}",
        location=location,
    )


def first_call_error(reach: Reach, change: Change, location: str | None) -> TraceError:
    """The refusal of code whose first call is unlike later ones."""
    path = reach.path(change.holder, change.key)
    where = f" at {location}" if location else ""
    return TraceError(
        f"{path} is changed{where} by the first call of the loss function, and the next call computes "
        "something else; expected every call to compute alike: call the loss function once before the member "
        f"is made, or keep {path} in a registered buffer",
        location=location,
    )


def outline(value: Any) -> Any:
    """A value without what may differ from call to call in a harmless way: the tensors' identity."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return (type(value), [(outline(key), outline(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [outline(item) for item in value])
    return (type(value), value) if isinstance(value, (*PLAIN, RandomState)) else type(value)


def lasting(reach: Reach, after: Sequence[Items], changes: Sequence[Change]) -> list[Change]:
    """Those of a second call's ``changes`` that a third call could tell from the first.

    ``after`` is what the first call left. A tensor that is stored where there was none before is not among
    them: whether the next call reads it, the graph tells.
    """
    return [
        change
        for change in changes
        if outline(after[change.holder].get(change.key, ABSENT)) != outline(change.value)
        or isinstance(reach.contents[change.holder].get(change.key), Tensor)
    ]


def same_results(once: fx.GraphModule, twice: fx.GraphModule) -> bool:
    """Whether the second of two calls computes what a single call does.

    ``twice`` has the placeholders of ``once`` two times, first those of the first call, and returns what the
    second call gives. Values are numbered by what computes them.
    """
    numbers: dict[Any, int] = {}
    num_inputs = len(once.graph.find_nodes(op="placeholder"))
    return _numbered(once, 0, numbers) == _numbered(twice, num_inputs, numbers)


def _numbered(module: fx.GraphModule, first: int, numbers: dict[Any, int]) -> list[int]:
    found: dict[fx.Node, int] = {}
    num_inputs = 0
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            key: Any = ("input", num_inputs - first)
            num_inputs += 1
        elif node.op == "get_attr":
            key = ("constant", tensor_digest(graph_constant(module, node)))
        elif source_of(node) is not node:
            found[node] = found[source_of(node)]
            continue
        else:
            flat, spec = pytree.tree_flatten((node.args, node.kwargs))
            parts = tuple(
                ("value", found[part]) if isinstance(part, fx.Node) else _literal(part) for part in flat
            )
            key = (node.target, parts, str(spec))
        found[node] = numbers.setdefault(key, len(numbers))
    return [found[node] for node in output_nodes(module)]


def _literal(part: Any) -> Any:
    return (type(part), repr(part)) if not isinstance(part, Tensor) else Identity(part)
