"""Numbers of a member's code, followed into the numbers of its graph.

Members of a search differ in Python numbers: a dropout probability, a loss weight, an alpha. Each becomes
literals of the graph. To know which, and how, one member is traced with numbers that note what is done with
them: arithmetic is repeated for other values later, comparisons must come out the same then. Torch itself is
given plain numbers, with digits that occur nowhere else, by which literals that follow from them are known
again. The graph of any further member is then known without another trace.

What cannot be followed in this way, such as a number that decides a size, costs a trace for each of its
values, and never a wrong graph: the result is compared, bit for bit, with that of a member that was traced as
it is.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from trainmux.runtime import WORD_RANGE, ignored_warnings, process_lock
from trainmux.tracing._joint import TracedGraph
from trainmux.tracing._numbers import Number, structure_of
from trainmux.tracing._reach import Items, Place, Reach, kind_of_number

Numbers = Mapping[Place, Number]
"""Numbers of code by the place that holds them."""

Form = Callable[[Numbers], Any]
"""A number worked out from those of the code."""

_BY_VALUE = """
    add sub subtract mul multiply div divide true_divide rsub pow float_power add_ sub_ mul_ div_
    lt le gt ge eq ne __lt__ __le__ __gt__ __ge__ __eq__ __ne__ __pow__ __rpow__ __ipow__
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__
    __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__
    leaky_relu elu celu softplus threshold _threshold huber_loss smooth_l1_loss remainder fmod pad
    layer_norm rms_norm group_norm instance_norm batch_norm clamp clip clamp_ clamp_min clamp_max
    lerp addcmul addcdiv masked_fill masked_fill_ where full full_like new_full fill fill_
"""
_PROBABILITIES = """
    dropout dropout_ feature_dropout alpha_dropout dropout1d dropout2d dropout3d native_dropout
    bernoulli bernoulli_ scaled_dot_product_attention cross_entropy cross_entropy_loss
"""
_OF_PROBABILITIES = frozenset(_PROBABILITIES.split())
_READ_BY_VALUE = _OF_PROBABILITIES.union(_BY_VALUE.split())
"""Functions of torch that take one path for all numbers of a kind (`kind_of_number`)."""

_MOST_PARTS = 1 << 20


_DERIVED: tuple[Callable[[Any], Number], ...] = (
    lambda x: x,
    operator.neg,
    lambda x: 1 - x,
    lambda x: x - 1,
    lambda x: 1 / x,
    lambda x: 1 / (1 - x),
    lambda x: round((1 - x) * WORD_RANGE),
    lambda x: round(x * WORD_RANGE),
)
"""What torch, and the tracer's own operators, make of a number; the likeliest first."""


def _bits(number: Number) -> bytes:
    return struct.pack("d", number)


class _Book:
    """Notes on the numbers while they are followed."""

    def __init__(self) -> None:
        self.guards: list[Callable[[Numbers], bool]] = []
        self.read: dict[bytes, tuple[Number, Form]] = {}
        self.is_lost = False
        """Whether a number went where it cannot be followed."""

    def give(self, value: Followed, function: str) -> Number:
        """Return the plain number, for a function of torch."""
        self.is_lost |= function not in _READ_BY_VALUE
        kind, form = kind_of_number(value.plain), value.form
        self.outcome(lambda numbers: kind_of_number(form(numbers)) == kind, True)
        if function in _OF_PROBABILITIES:  # which it refuses above 1
            self.outcome(lambda numbers: abs(form(numbers)) < 1, abs(value.plain) < 1)
        self.read[_bits(value.plain)] = value.plain, form
        return value.plain

    def outcome(self, form: Form, found: bool) -> bool:
        """Return how a question came out, which is to come out the same for others."""
        self.guards.append(lambda numbers: bool(form(numbers)) == found)
        return found


class Followed(torch.SymFloat):
    """A number that notes what is done with it; it passes for a number where torch checks its arguments."""

    def __init__(self, book: _Book, plain: Number, form: Form) -> None:
        self.book, self.plain, self.form = book, plain, form

    def _lost(self) -> Number:
        self.book.is_lost = True
        return self.plain

    def __deepcopy__(self, memo: object) -> Followed:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._lost(), name)

    def __hash__(self) -> int:
        return hash(self._lost())

    def __bool__(self) -> bool:
        return self.book.outcome(self.form, bool(self.plain))


def _form_of(value: Any) -> Form:
    return value.form if isinstance(value, Followed) else lambda numbers: value


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, Followed) else value


def _arithmetic(compute: Callable[..., Any], is_swapped: bool = False) -> Callable[..., Any]:
    def method(self: Followed, *others: Any) -> Any:
        if not all(isinstance(other, (int, float, Followed)) for other in others):
            return NotImplemented
        given = (*others, self) if is_swapped else (self, *others)
        forms = [_form_of(value) for value in given]
        result = compute(*map(_plain, given))
        if not isinstance(result, (int, float)):
            return self._lost() and result
        return Followed(self.book, result, lambda numbers: compute(*(form(numbers) for form in forms)))

    return method


def _comparison(compute: Callable[[Any, Any], bool]) -> Callable[[Followed, Any], Any]:
    def method(self: Followed, other: Any) -> Any:
        if not isinstance(other, (int, float, Followed)):
            return NotImplemented
        first, second = self.form, _form_of(other)
        found = compute(self.plain, _plain(other))
        return self.book.outcome(lambda numbers: compute(first(numbers), second(numbers)), found)

    return method


def _given_up(read: Callable[[Number], Any]) -> Callable[[Followed], Any]:
    return lambda self, *args: read(self._lost(), *args)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Followed, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Followed, f"__r{_name}__", _arithmetic(getattr(operator, _name), is_swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(Followed, f"__{_name}__", _arithmetic(getattr(operator, _name)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Followed, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("float", "int", "complex", "round", "repr", "str", "format"):
    setattr(Followed, f"__{_name}__", _given_up(getattr(builtins, _name)))
for _name in ("trunc", "floor", "ceil"):
    setattr(Followed, f"__{_name}__", _given_up(getattr(math, _name)))


class _PlainForTorch(TorchFunctionMode):
    """Gives torch's functions plain numbers in the place of followed ones."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")

        def plain(value: Any) -> Any:
            return value.book.give(value, name) if isinstance(value, Followed) else value

        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Followed) for leaf in leaves):
            args, kwargs = pytree.tree_map(plain, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _perturbed(number: Number, draws: random.Random) -> float:
    """A number of the same kind whose digits occur nowhere else.

    The last one counts: what is added to it and taken away again leaves another number.
    """
    room = min(abs(abs(number) - 1.0), 1e-3)
    found = number * (1.0 + draws.uniform(room / 8, room / 2) * (-1.0 if abs(number) > 1 else 1.0))
    (bits,) = struct.unpack("q", _bits(found))
    odd: float = struct.unpack("d", struct.pack("q", bits | 1))[0]
    return odd


@dataclass(frozen=True)
class NumberForms:
    """The numbers of a graph as functions of those of the code, at the places that were followed.

    ``key`` is that of the graph's structure, ``base`` has the numbers of the member that was traced.
    """

    key: str
    places: frozenset[Place]
    base: Numbers
    forms: tuple[Form, ...]
    guards: tuple[Callable[[Numbers], bool], ...]

    def numbers(self, given: Numbers) -> tuple[Number, ...] | None:
        """The graph's numbers for a member's; ``None`` where its code may take another path."""
        if any(_bits(given[place]) != _bits(self.base[place]) for place in self.base.keys() - self.places):
            return None
        try:
            is_alike = all(guard(given) for guard in self.guards)
            return tuple(form(given) for form in self.forms) if is_alike else None
        except (ArithmeticError, ValueError, TypeError):
            return None


def follow(
    trace: Callable[[Callable[..., Any]], TracedGraph],
    code: Callable[..., Any],
    reach: Reach,
    places: frozenset[Place],
    numbers: Numbers,
) -> NumberForms | None:
    """Trace a member with the numbers at ``places`` followed; ``None`` where they cannot be.

    ``trace`` traces a loss or metric function in the place of ``code``; ``numbers`` are the member's. The
    forms are to be compared with the numbers of a graph that was traced as it is.
    """
    book, draws = _Book(), random.Random(0)

    def watched(model: Any, batch: Any) -> Any:
        with _PlainForTorch():
            return code(model, batch)

    def form_at(place: Place) -> Form:
        return lambda numbers: numbers[place]

    with process_lock, reach.restored(), ignored_warnings():
        changed: dict[int, Items] = {}
        for holder, key in sorted(places, key=repr):
            items = changed.setdefault(holder, dict(reach.contents[holder]))
            items[key] = Followed(book, _perturbed(items[key], draws), form_at((holder, key)))
        for holder, items in changed.items():
            reach.holders[holder].write(items)
        try:
            found = structure_of(trace(watched))
        except Exception:  # whatever does not take such numbers
            return None
    if book.is_lost:
        return None
    explained: dict[bytes, Form] = {}
    for rule in _DERIVED:
        for plain, form in book.read.values():
            with suppress(ArithmeticError):
                explained.setdefault(_bits(rule(plain)), _composed(rule, form))
    forms = tuple(explained.get(_bits(y)) or _part(y, book) or _constant(y) for y in found.numbers)
    return NumberForms(found.key, places, dict(numbers), forms, tuple(book.guards))


def same_numbers(some: Sequence[Number], others: Sequence[Number]) -> bool:
    """Whether numbers are the same, bit for bit as doubles."""
    return list(map(_bits, some)) == list(map(_bits, others))


def _composed(rule: Callable[[Any], Number], form: Form) -> Form:
    return lambda numbers: rule(form(numbers))


def _constant(value: Number) -> Form:
    return lambda numbers: value


def _part(value: Number, book: _Book) -> Form | None:
    """One of so many equal parts of a number that was read, such as label smoothing's for each class."""
    for plain, form in book.read.values() if value else ():
        count = round(plain / value)
        if 2 <= count <= _MOST_PARTS and plain / count == value:
            return _composed(functools.partial(_over, count), form)
    return None


def _over(count: int, x: Number) -> float:
    return x / count
