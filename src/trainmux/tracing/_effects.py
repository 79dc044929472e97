"""Run a member's code on stand-ins for its tensors, put everything back, and refuse side effects that matter.

A graph runs none of the Python code that was traced. Code that counts, keeps a hidden state, fills a list or
draws from ``random`` would be frozen at what it did during the trace. Such code is refused. Two things are
not: a cache, which the first call fills and later calls leave alone without computing anything else, and a
tensor that is stored but never read again by the next call.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn

from trainmux.errors import TraceError
from trainmux.tracing._passes import graph_constant, output_nodes, source_of
from trainmux.tracing._reach import (
    PLAIN,
    GeneratorState,
    Items,
    Reach,
    is_same,
    process_generators,
    same_items,
    tensor_digest,
)
from trainmux.tracing._source import is_user_file, refusal


@dataclass(frozen=True)
class Change:
    """An entry of a holder that code has changed."""

    holder: int
    key: Any
    value: Any  # ``ABSENT`` where it was deleted


ABSENT = object()


class Substitution:
    """Replaces a model's own tensors wherever its code, or a loss function's, can reach them.

    Covers registered parameters and buffers, and plain attributes, containers, closures and globals that
    hold one of them or a view of one. Afterwards everything reachable is as it was before, whatever the code
    has stored or drawn meanwhile.
    """

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        self.reach = Reach(model, *functions)
        self.reach.include(process_generators())
        self._registries = {
            id(registry) for module in model.modules() for registry in (module._parameters, module._buffers)
        }

    @contextmanager
    def active(
        self, replacements: Sequence[Tensor], contents: Sequence[Items] | None = None
    ) -> Iterator[Callable[[], list[Items]]]:
        """Let ``replacements`` stand in for the model's tensors, ``reach.own``.

        ``contents`` overrides what holders hold otherwise. Yields a function that reads what they hold now,
        with the model's own tensors in the place of their stand-ins.
        """
        made: dict[int, tuple[Any, Any]] = {}
        own = self.reach.own
        originals: dict[int, Any] = {id(new): old for new, old in zip(replacements, own, strict=True)}

        def read() -> list[Items]:
            originals.update((id(new), old) for old, new in made.values())
            return [
                {key: originals.get(id(value), value) for key, value in holder.read().items()}
                for holder in self.reach.holders
            ]

        with self.reach.restored():
            for number, holder in enumerate(self.reach.holders):
                before = self.reach.contents[number]
                items = before if contents is None else contents[number]
                if id(holder.value) in self._registries:
                    items = {**items, **before}  # values of the model's own tensors are inputs
                new = {
                    key: self.reach.stand_in(value, replacements.__getitem__, made)
                    for key, value in items.items()
                }
                if not same_items(before, new):
                    holder.write(new)
            yield read

    def changes(self, before: Sequence[Items], after: Sequence[Items]) -> list[Change]:
        """Changed entries, except new values of the model's own buffers."""
        found = []
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if same_items(old, new):
                continue
            is_registry = id(self.reach.holders[number].value) in self._registries
            found += [
                Change(number, key, new.get(key, ABSENT))
                for key in {**old, **new}
                if not is_same(new.get(key, ABSENT), old.get(key, ABSENT))
                and not (is_registry and key in self.reach.contents[number])
            ]
        return found


@contextmanager
def watched_lines(read: Callable[[], Items]) -> Iterator[list[str]]:
    """``read`` a holder after every line of user code; yields a list that gets the line that changed it."""
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
    """Refuse code that draws from ``random`` or ``numpy.random``."""
    return refusal(
        "numbers are drawn from Python's or NumPy's random generator",
        "; expected random numbers of torch, because a fleet runs a graph and would use this draw for ever: "
        "draw with torch (torch.rand, torch.distributions), or in the data loader",
        location,
    )


def state_error(path: str, location: str | None, *, is_first_call: bool = False) -> TraceError:
    """Refuse code that changes Python state with every call, or computes something else the first time."""
    reason = (
        " by every call of the loss function; expected code without side effects: a fleet runs a graph, "
        "not this code: keep the value in a registered buffer of the model, return it as a metric, or "
        "compute it in the data loader"
    )
    if is_first_call:
        reason = (
            " by the first call of the loss function, and the next call computes something else; expected "
            "every call to compute alike: call the loss function once before the member is made, or keep "
            f"{path} in a registered buffer"
        )
    return refusal(f"{path} is changed", reason, location)


def _outline(value: Any) -> Any:
    """A value without the identity of its tensors, which may differ from call to call."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return (type(value), [(_outline(key), _outline(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [_outline(item) for item in value])
    return (type(value), value) if isinstance(value, (*PLAIN, GeneratorState)) else type(value)


def lasting(reach: Reach, after: Sequence[Items], changes: Sequence[Change]) -> list[Change]:
    """A second call's ``changes`` that a third call could tell from the first.

    ``after`` is what the first call left. A tensor that is stored where there was none before does not
    count: the graph tells whether the next call reads it.
    """
    return [
        change
        for change in changes
        if _outline(after[change.holder].get(change.key, ABSENT)) != _outline(change.value)
        or isinstance(reach.contents[change.holder].get(change.key), Tensor)
    ]


def same_results(once: fx.GraphModule, twice: fx.GraphModule) -> bool:
    """Whether the second of two calls computes what a single call does.

    ``twice`` has the placeholders of both calls, the first one's in front, and returns the results of the
    second. Values are numbered by what computes them.
    """
    numbers: dict[Any, int] = {}
    num_inputs = len(once.graph.find_nodes(op="placeholder"))
    return _numbered(once, 0, numbers) == _numbered(twice, num_inputs, numbers)


def _numbered(module: fx.GraphModule, num_skipped: int, numbers: dict[Any, int]) -> list[int]:
    """Numbers of the outputs; inputs are counted on from ``-num_skipped``."""
    found: dict[fx.Node, int] = {}
    inputs = itertools.count(-num_skipped)
    for node in module.graph.nodes:
        source = source_of(node)
        if source is not node:
            found[node] = found[source]
        elif node.op != "output":
            key: Any = ("input", next(inputs))
            if node.op == "get_attr":
                key = ("constant", tensor_digest(graph_constant(module, node)))
            elif node.op == "call_function":
                key = (node.target, str(fx.map_arg((node.args, node.kwargs), lambda n: f"value {found[n]}")))
            found[node] = numbers.setdefault(key, len(numbers))
    return [found[node] for node in output_nodes(module)]
