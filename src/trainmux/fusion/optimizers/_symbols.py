"""Numbers that remember how they were computed, and the recording of one run of an optimizer's ``step``.

A ``Symbol`` is a float to all code that it meets. Its value is a *mark*: a random float that occurs nowhere
else, so that a literal in the traced graph tells which symbol it was. Arithmetic, ``math`` and ``min`` and
``max`` make new symbols; a comparison is a decision, which the recording takes as it is told to and notes.
A number that some other code computed from a mark has another value in the next recording, and is found out.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainmux.tracing import replaced

Expression = Any
"""A number, ``("setting", label)``, ``("steps",)``, ``("read", value)``, or a function and its operands."""

MAX_DECISIONS = 12
"""An update with more decisions in a row is a loop that depends on values."""

LEAVES = ("setting", "steps", "read")


class PinnedError(Exception):
    """Settings decide the graph itself: it is traced anew with them as they are."""

    def __init__(self, labels: frozenset[str]) -> None:
        super().__init__(f"settings {sorted(labels)} decide the update itself")
        self.labels = labels


class ForkedError(Exception):
    """Settings decide which state there is: they are traced on one side of their decisions."""


class UnresolvedError(Exception):
    """Code does with a number what cannot be followed; the text says what."""


def leaves_of(expression: Expression) -> Iterator[tuple[Any, ...]]:
    """Settings, counts and values that an expression reads."""
    if isinstance(expression, tuple):
        if expression[0] in LEAVES:
            yield expression
        else:
            for operand in expression[1:]:
                yield from leaves_of(operand)


def pin(expression: Expression, what: str) -> Exception:
    """Return the error for an expression that has to be one number for all members."""
    leaves = list(leaves_of(expression))
    if all(leaf[0] == "setting" for leaf in leaves):
        return PinnedError(frozenset(label for _, label in leaves))
    return UnresolvedError(what)


class Recording:
    """One run of ``step``: symbols by mark, the decisions taken, and tensors whose values were read.

    With ``settings`` decisions that depend on nothing else are taken as these say, and noted in ``fixed``.
    """

    def __init__(
        self,
        outcomes: tuple[bool, ...],
        seed: int,
        most: int = MAX_DECISIONS,
        settings: Mapping[Expression, float] | None = None,
    ) -> None:
        self._outcomes = outcomes
        self._most = most
        self._settings = settings
        self.fixed: dict[Expression, bool] = {}
        self._random = random.Random(seed)
        self.symbols: dict[float, Expression] = {}
        self.decisions: list[tuple[Expression, bool]] = []
        self.reads: list[Tensor] = []

    def symbol(self, expression: Expression) -> Symbol:
        """Make a symbol with a mark of its own."""
        mark = self._random.uniform(0.25, 0.75)
        self.symbols[mark] = expression
        made = Symbol(mark)
        made.expression = expression
        made.recording = self
        return made

    def read(self, tensor: Tensor) -> Symbol:
        """Make a symbol of the value that a tensor of one element has now."""
        self.reads.append(tensor.reshape(()).to(torch.float64, copy=True))
        return self.symbol(("read", len(self.reads) - 1))

    def decide(self, condition: Expression) -> bool:
        """Take a decision as told, or for true; the same one twice in a run has one outcome."""
        if self._settings is not None and all(leaf[0] == "setting" for leaf in leaves_of(condition)):
            fixed = bool(host_value(condition, self._settings.__getitem__, {}))
            self.fixed[condition] = fixed
            return fixed
        for known, outcome in self.decisions:
            if known == condition:
                return outcome
        if len(self.decisions) >= self._most:
            raise UnresolvedError(f"more than {self._most} decisions in a row depend on numbers")
        number = len(self.decisions)
        outcome = self._outcomes[number] if number < len(self._outcomes) else True
        self.decisions.append((condition, outcome))
        return outcome


class Symbol(float):
    """A float that remembers how it was computed."""

    expression: Expression
    recording: Recording

    def __bool__(self) -> bool:
        return not self.recording.decide(("eq", self.expression, 0.0))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = float.__hash__

    def __pos__(self) -> float:
        return self

    def __index__(self) -> int:
        raise pin(self.expression, "a computed number is used as an integer")

    __int__ = __index__

    def __round__(self, digits: Any = None) -> Any:
        raise pin(self.expression, "a computed number is rounded")


def _expression_of(value: float) -> Expression:
    return value.expression if isinstance(value, Symbol) else value


def _apply(name: str, *operands: Any) -> Any:
    recording = next(item.recording for item in operands if isinstance(item, Symbol))
    return recording.symbol((name, *map(_expression_of, operands)))


def _arithmetic(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Symbol, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        return _apply(name, *(reversed((self, *others)) if reflected else (self, *others)))

    return method


def _comparison(name: str) -> Callable[..., Any]:
    def method(self: Symbol, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return self.recording.decide((name, self.expression, _expression_of(other)))

    return method


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in _ARITHMETIC:
    setattr(Symbol, f"__{_name}__", _arithmetic(_name))
    setattr(Symbol, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name in ("neg", "abs"):
    setattr(Symbol, f"__{_name}__", _arithmetic(_name))
for _name in ("eq", "lt", "le", "gt", "ge"):
    setattr(Symbol, f"__{_name}__", _comparison(_name))


# ---- what code finds while it is recorded ------------------------------------------------------------------

_MATH = {name: function for name, function in vars(math).items() if callable(function)}


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(item, Symbol) for item in args):
            return function(*args, **kwargs)
        return _apply(name, *args)

    return call


def _extreme(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        items = args if len(args) > 1 else tuple(args[0])
        if kwargs or not any(isinstance(item, Symbol) for item in items):
            return function(items, **kwargs)
        if not all(isinstance(item, (int, float)) for item in items):
            return function(items)
        return functools.reduce(functools.partial(_apply, name), items)

    return call


def _scalar_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        if not isinstance(data, (bool, int, float)):
            return make(data, dtype=dtype, device=device, **kwargs)
        if dtype is None:
            dtype = type(data) if isinstance(data, bool) else torch.int64 if isinstance(data, int) else None
        return torch.full((), data, dtype=dtype, device=device)

    return call


@contextmanager
def recorded(recording: Recording, step: Callable[..., Any]) -> Iterator[None]:
    """While active, code in this thread computes with symbols, and reads of tensors give symbols."""

    def read(tensor: Tensor) -> Any:
        return recording.read(tensor)

    def mark(tensor: Tensor) -> float:
        return float.__float__(recording.read(tensor))

    def decide(tensor: Tensor) -> bool:
        return bool(recording.read(tensor))

    def integer(tensor: Tensor) -> Any:
        raise UnresolvedError("a tensor's value is used as an integer")

    own = {name: _recorded(name, function) for name, function in _MATH.items()}
    by_function = {id(function): own[name] for name, function in _MATH.items()}
    with ExitStack() as stack:
        stack.enter_context(replaced(math, **own))
        extremes = {name: _extreme(name, getattr(builtins, name)) for name in ("min", "max")}
        stack.enter_context(replaced(builtins, **extremes))
        makers = {name: _scalar_tensor(getattr(torch, name)) for name in ("tensor", "as_tensor")}
        stack.enter_context(replaced(torch, **makers))
        reads = {"item": read, "__float__": mark, "__bool__": decide, "__int__": integer}
        stack.enter_context(replaced(Tensor, **reads, __index__=integer))
        names: Mapping[str, Any] = vars(sys.modules.get(step.__module__, math))
        imported = {name: by_function[id(value)] for name, value in names.items() if id(value) in by_function}
        if imported and names is not vars(math):
            stack.enter_context(replaced(sys.modules[step.__module__], **imported))
        yield


# ---- evaluation --------------------------------------------------------------------------------------------


def _by_element(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of numbers, entry by entry where some are arrays: numpy rounds powers in its own way."""

    def call(*operands: Any) -> Any:
        if not any(isinstance(item, np.ndarray) for item in operands):
            return function(*operands)
        columns = np.broadcast_arrays(*operands)
        return np.array([function(*row) for row in zip(*(c.tolist() for c in columns), strict=True)])

    return call


_ON_HOST: dict[str, Callable[..., Any]] = {
    **{name: _by_element(function) for name, function in _MATH.items()},
    **{name: getattr(operator, name) for name in (*_ARITHMETIC, "neg", "eq", "lt", "le", "gt", "ge")},
    **{name: _by_element(function) for name, function in (("pow", operator.pow), ("min", min), ("max", max))},
    "abs": abs,
}
_ON_TENSORS: dict[str, str] = {"truediv": "true_divide", "floordiv": "floor_divide", "mod": "remainder"} | {
    "min": "minimum",
    "max": "maximum",
}


def host_value(
    expression: Expression, leaf: Callable[[Expression], Any], known: dict[Expression, Any]
) -> Any:
    """The value of an expression in Python's arithmetic, for floats or arrays; each part once."""
    if not isinstance(expression, tuple):
        return expression
    if expression not in known:
        if expression[0] in LEAVES:
            known[expression] = leaf(expression)
        else:
            operands = [host_value(item, leaf, known) for item in expression[1:]]
            known[expression] = _ON_HOST[expression[0]](*operands)
    return known[expression]


def tensor_value(expression: Expression, leaf: Callable[[Expression], Tensor]) -> Tensor:
    """The value of an expression in tensors of no dimension, which ``leaf`` gives, also for plain numbers."""
    if not isinstance(expression, tuple) or expression[0] in LEAVES or is_on_host(expression):
        return leaf(expression)
    operands = [tensor_value(item, leaf) for item in expression[1:]]
    found: Tensor = getattr(torch, _ON_TENSORS.get(str(expression[0]), str(expression[0])))(*operands)
    return found


def is_on_host(expression: Expression) -> bool:
    """Whether the host knows all that an expression reads."""
    return all(leaf[0] != "read" for leaf in leaves_of(expression))
