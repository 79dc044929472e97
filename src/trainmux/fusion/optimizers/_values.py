"""A traced update as values: each computed by an operator from others, equal ones once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.fusion.optimizers._rule import scalar_dtype
from trainmux.fusion.optimizers._symbols import (
    LEAVES,
    Expression,
    UnresolvedError,
    is_on_host,
    pin,
    tensor_value,
)
from trainmux.tracing import NUMBER_FORMS, arguments_by_name

_SAME = tuple(
    f"aten::{name}"
    for name in ("_to_copy", "clone", "alias", "detach", "lift_fresh_copy", "copy", "view", "expand")
)
_LIKE = ("aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::_to_copy", "aten::copy")


@dataclass(frozen=True)
class Ref:
    """A value by its number."""

    number: int


@dataclass(frozen=True)
class Computed:
    """A number that is not the same for all members or steps."""

    expression: Expression


@dataclass(frozen=True)
class Value:
    """The computation of a value: an operator, or "leaf" with its role as the only argument.

    ``shape`` is "parameter" where it is the parameter's, so that parameters of many shapes have one update.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shape: tuple[int, ...] | str
    dtype: torch.dtype | None

    @property
    def name(self) -> str:
        """The operator without its overload."""
        return self.target._schema.name if isinstance(self.target, OpOverload) else str(self.target)

    def operands(self, kind: type) -> Iterator[Any]:
        """Operands of one kind, ``Ref`` or ``Computed``."""
        for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))):
            if isinstance(leaf, kind):
                yield leaf


class Values:
    """All values of an update's traces; a value that is computed alike has one number in all of them."""

    def __init__(self) -> None:
        self.found: list[Value] = []
        self._numbers: dict[Any, int] = {}

    def leaf(self, role: str, example: Tensor, shape: tuple[int, ...]) -> int:
        """The number of an input, for parameters of a ``shape``."""
        return self._number(Value("leaf", (role,), {}, _named(example, shape), example.dtype))

    def take(
        self,
        graph: fx.Graph,
        wanted: Sequence[fx.Node],
        given: Mapping[fx.Node, int],
        symbols: Mapping[float, Expression],
        reads: Sequence[fx.Node],
        shape: tuple[int, ...],
    ) -> Callable[[Any], Any]:
        """Number what the ``wanted`` nodes need; the result turns nodes and expressions into operands.

        ``shape`` is the parameter's. ``given`` nodes have numbers already.
        """
        needed: set[fx.Node] = set()
        waiting = list(wanted)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += [] if node in given else node.all_input_nodes
        numbers = dict(given)

        def resolved(expression: Expression) -> Expression:
            if not isinstance(expression, tuple) or expression[0] in LEAVES[:2]:
                return expression
            if expression[0] == "read":
                number = numbers[reads[expression[1]]]
                known = self.known_to_host(number)
                return ("read", number) if known is None else known
            return (expression[0], *map(resolved, expression[1:]))

        def operand(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return Ref(numbers[item])
            if isinstance(item, tuple):
                return Computed(resolved(item))
            return Computed(resolved(symbols[item])) if type(item) is float and item in symbols else item

        for node in graph.nodes:
            if node not in needed or node in numbers:
                continue
            if node.op != "call_function":
                raise UnresolvedError("it reads a tensor that is neither the parameter's nor its state's")
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise UnresolvedError(f"it draws random numbers ({node.target})")
            args, kwargs = pytree.tree_map(operand, (tuple(node.args), dict(node.kwargs)), is_leaf=_is_item)
            for name in ("device", "pin_memory", "layout", "memory_format"):
                kwargs.pop(name, None)
            made = node.meta.get("val")
            is_tensor = isinstance(made, Tensor)
            named, dtype = (_named(made, shape), made.dtype) if is_tensor else ((), None)
            value = Value(node.target, args, kwargs, named, dtype)
            same = value.args[int(value.name == "aten::copy")] if value.name in _SAME else None
            if isinstance(same, Ref):
                source = self.found[same.number]
                if (source.shape, source.dtype) == (named, dtype):
                    numbers[node] = same.number  # values never change, so that a copy is the value itself
                    continue
            free = _numbers_of(value)
            for computed in value.operands(Computed):
                if not any(computed is number for number in free):
                    raise pin(computed.expression, f"{node.target} takes a number that changes")
            numbers[node] = self._number(value)
        return operand

    def reached(self, operands: Iterable[Any]) -> list[int]:
        """Numbers of all values that these operands need, each behind those that it needs."""
        needed: set[int] = set()
        waiting = [item.number for item in operands if isinstance(item, Ref)]
        for item in operands:
            waiting += _reads(item.expression) if isinstance(item, Computed) else []
        while waiting:
            number = waiting.pop()
            if number in needed:
                continue
            needed.add(number)
            waiting += [ref.number for ref in self.found[number].operands(Ref)]
            for computed in self.found[number].operands(Computed):
                waiting += _reads(computed.expression)
        return sorted(needed)

    def is_elementwise(self, operands: Iterable[Any]) -> bool:
        """Whether each element of a parameter is updated without a look at others."""
        for value in map(self.found.__getitem__, self.reached(operands)):
            if value.shape not in ("parameter", ()):
                return False
            sources = [self.found[ref.number].shape for ref in value.operands(Ref)]
            is_point = torch.Tag.pointwise in getattr(value.target, "tags", ())
            if not (is_point or value.target == "leaf" or value.name in _LIKE or not value.shape):
                return False
            if not value.shape and any(sources):
                return False
        return True

    def _number(self, value: Value) -> int:
        key = _frozen((value.target, value.args, sorted(value.kwargs.items()), value.shape, value.dtype))
        if key not in self._numbers:
            self._numbers[key] = len(self.found)
            self.found.append(value)
        return self._numbers[key]

    def known_to_host(self, number: int) -> Expression | None:
        """A count, or a constant, as an expression."""
        value = self.found[number]
        if value.target == "leaf":
            return ("steps",) if value.args[0].startswith("count ") else None
        if value.shape:
            return None
        if value.name == "aten::_to_copy" and value.dtype is torch.float64:
            return self.known_to_host(value.args[0].number)
        if value.name == "aten::full" and isinstance(value.args[1], (int, float)):
            return value.args[1] if float(value.args[1]).is_integer() else None
        if value.name in ("aten::zeros", "aten::ones"):
            return float(value.name == "aten::ones")
        if value.name == "aten::add" and not value.kwargs and isinstance(value.args[1], (int, float)):
            count = self.known_to_host(value.args[0].number)
            return None if count is None else ("add", count, value.args[1])
        return None


class Evaluation:
    """Computes values of one member from its ``leaves``; ``number_of`` gives what the host knows."""

    def __init__(
        self, values: Values, leaves: Mapping[str, Tensor], number_of: Callable[[Expression], Tensor]
    ) -> None:
        self._values = values
        self._leaves = leaves
        self._number_of = number_of
        self._known: dict[int, Tensor] = {}

    def __call__(self, operands: Sequence[Any]) -> list[Tensor]:
        """Compute operands, and all that they need, each once."""
        for number in self._values.reached(operands):
            if number not in self._known:
                self._known[number] = self._computed(self._values.found[number])
        return [
            self._known[item.number]
            if isinstance(item, Ref)
            else tensor_value(item.expression if isinstance(item, Computed) else item, self._scalar)
            for item in operands
        ]

    def _scalar(self, expression: Expression) -> Tensor:
        if isinstance(expression, tuple) and expression[0] == "read":
            return self._known[expression[1]].reshape(()).to(self._number_of(0.0).dtype)
        return self._number_of(expression)

    def _computed(self, value: Value) -> Any:
        if value.target == "leaf":
            return self._leaves[value.args[0]]
        given: list[Tensor] = []

        def operand(item: Any) -> Any:
            if isinstance(item, Ref):
                return self._known[item.number]
            if not isinstance(item, Computed):
                return item
            given.append(tensor_value(item.expression, self._scalar))
            return given[-1]

        args, kwargs = pytree.tree_map(operand, (value.args, dict(value.kwargs)), is_leaf=_is_item)
        if value.name == "aten::copy":
            return args[1].to(value.dtype).expand_as(args[0])
        if not any(True for _ in value.operands(Ref)):
            kwargs["device"] = self._number_of(0.0).device
        if given:
            return self._with_numbers(replace(value, args=args, kwargs=kwargs), given)
        return value.target(*args, **kwargs)

    def _with_numbers(self, call: Value, given: Sequence[Tensor]) -> Tensor:
        """Compute an operator some of whose numbers are ``given`` as tensors of no dimension.

        Torch computes half precision with Python's numbers in single precision, and rounds the result.
        """
        numbers, arguments = {id(item) for item in given}, list(arguments_by_name(call).values())
        tensors = [item for item in pytree.tree_leaves(arguments) if isinstance(item, Tensor)]
        dtypes = [item.dtype for item in tensors if id(item) not in numbers and item.is_floating_point()]
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else self._number_of(0.0).dtype
        dtype = scalar_dtype(dtype)

        def wide(item: Any) -> Any:
            return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item

        result: Tensor = NUMBER_FORMS[call.target].compute(*pytree.tree_map(wide, arguments))
        return result.to(call.dtype)


def _numbers_of(value: Value) -> list[Any]:
    """The arguments of an operator in whose place there may be tensors."""
    if value.target not in NUMBER_FORMS:
        return []
    arguments = arguments_by_name(value)
    return [arguments[name] for name in NUMBER_FORMS[value.target].numbers]


def _named(value: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | str:
    return "parameter" if shape and tuple(value.shape) == shape else tuple(value.shape)


def _is_item(item: Any) -> bool:
    return isinstance(item, (Ref, Computed))


def _reads(expression: Expression) -> list[int]:
    if not isinstance(expression, tuple):
        return []
    if expression[0] in LEAVES:
        return [expression[1]] if expression[0] == "read" else []
    return [number for item in expression[1:] for number in _reads(item)]


def host_parts(expression: Expression) -> Iterator[Expression]:
    """The largest parts of an expression that the host knows."""
    if not isinstance(expression, tuple) or is_on_host(expression):
        if isinstance(expression, tuple):
            yield expression
    elif expression[0] != "read":
        for item in expression[1:]:
            yield from host_parts(item)


def _frozen(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return tuple(map(_frozen, item))
    return item if isinstance(item, (Ref, Computed)) else (type(item).__name__, str(item))
