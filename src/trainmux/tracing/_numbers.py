"""Numbers in a member's code, and graphs that read them as inputs.

A dropout probability, a loss weight or a temperature is a Python number when the member is traced, and so a
literal of its graph. Members whose graphs are equal but for such numbers can train as one: ``structure_of``
reads a graph without them, and ``with_inputs`` makes those that differ inputs of the graph.

A literal can become an input where its operator has a form that takes a tensor in its place (``_FORMS``).
Every other number, such as a size or a dimension, stays part of the structure.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.ir import GraphInput, InputKind
from trainmux.tracing._joint import TracedGraph
from trainmux.tracing._passes import arguments_by_name, graph_constant, inherit_meta
from trainmux.tracing._reach import tensor_digest
from trainmux.tracing._source import node_location
from trainmux.tracing._torch_private import FakeTensor, copy_node, graph_module, make_fx

aten = torch.ops.aten

Number = int | float


@dataclass(frozen=True)
class Structure:
    """A graph apart from its numbers: ``key`` is equal for graphs that differ in nothing else."""

    key: str
    numbers: tuple[Number, ...]


# ---- operators that can take a number as a tensor ------------------------------------------------------


def _scaled(x: Any, factor: Any) -> Any:
    """``x * factor``, without a product where the factor is the usual 1."""
    return x if not isinstance(factor, Tensor) and factor == 1 else x * factor


def _clamped(x: Tensor, lower: Any = None, upper: Any = None) -> Tensor:
    def bound(value: Any) -> Any:
        return torch.full_like(x, value) if isinstance(value, (int, float)) else value

    result: Tensor = aten.clamp.Tensor(x, bound(lower), bound(upper))
    return result


def _filled(shape: Sequence[int], value: Tensor) -> Tensor:
    return value.expand(list(shape)).clone()


def _where(condition: Tensor, x: Any, y: Any) -> Tensor:
    return torch.where(condition, x, y)


def _elu(x: Tensor, alpha: Any, scale: Any, input_scale: Any) -> Tensor:
    return torch.where(x > 0, _scaled(x, scale), torch.expm1(_scaled(x, input_scale)) * _scaled(alpha, scale))


def _elu_backward(
    grad: Tensor, alpha: Any, scale: Any, input_scale: Any, is_result: bool, value: Tensor
) -> Tensor:
    if is_result:
        slope = _scaled(value + _scaled(alpha, scale), input_scale)
    else:
        slope = torch.exp(_scaled(value, input_scale)) * _scaled(_scaled(alpha, scale), input_scale)
    return torch.where(value <= 0, grad * slope, _scaled(grad, scale))


def _softplus(x: Tensor, beta: Any, threshold: Any) -> Tensor:
    return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)


def _softplus_backward(grad: Tensor, x: Tensor, beta: Any, threshold: Any) -> Tensor:
    return torch.where(x * beta > threshold, grad, grad * torch.sigmoid(x * beta))


def _huber(x: Tensor, target: Tensor, reduction: int, delta: Any) -> Tensor:
    size = (x - target).abs()
    return _reduced(torch.where(size < delta, 0.5 * size * size, delta * (size - 0.5 * delta)), reduction)


def _huber_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: Any) -> Tensor:
    difference = x - target
    slope = torch.where(difference.abs() < delta, difference, torch.sign(difference) * delta)
    return grad * (slope / x.numel() if reduction == 1 else slope)


def _smooth_l1(x: Tensor, target: Tensor, reduction: int, beta: Any) -> Tensor:
    size = (x - target).abs()
    return _reduced(torch.where(size < beta, 0.5 * size * size / beta, size - 0.5 * beta), reduction)


def _smooth_l1_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: Any) -> Tensor:
    difference = x - target
    slope = torch.where(difference.abs() < beta, difference / beta, torch.sign(difference))
    return grad * (slope / x.numel() if reduction == 1 else slope)


def _reduced(value: Tensor, reduction: int) -> Tensor:
    return (value, value.mean(), value.sum())[reduction] if reduction else value


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    scale = torch.rsqrt(((x - mean) ** 2).mean(dims, keepdim=True) + eps)
    result = (x - mean) * scale
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, scale


@dataclass(frozen=True)
class _Form:
    """``compute`` takes all arguments of an operator in order, tensors of no dimension for its ``numbers``.

    ``is_wide``: the operator itself computes with numbers in single precision where its tensors have half.
    """

    numbers: frozenset[str]
    compute: Callable[..., Any]
    is_wide: bool = True


def _forms() -> Iterator[tuple[OpOverload, _Form]]:
    def form(compute: Callable[..., Any], *numbers: str, wide: bool = True) -> _Form:
        return _Form(frozenset(numbers), compute, wide)

    both = ("other", "alpha")
    for op in (aten.add.Tensor, aten.add.Scalar):
        yield op, form(lambda x, other, alpha: x + _scaled(other, alpha), *both)
    for op in (aten.sub.Tensor, aten.sub.Scalar):
        yield op, form(lambda x, other, alpha: x - _scaled(other, alpha), *both)
    for op in (aten.rsub.Tensor, aten.rsub.Scalar):
        yield op, form(lambda x, other, alpha: other - _scaled(x, alpha), *both)
    for op in (aten.mul.Tensor, aten.mul.Scalar):
        yield op, form(operator.mul, "other")
    for op in (aten.div.Tensor, aten.div.Scalar):
        yield op, form(operator.truediv, "other")
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield getattr(aten, name).Scalar, form(getattr(operator, name), "other", wide=False)
    yield aten.pow.Tensor_Scalar, form(torch.pow, "exponent")
    yield aten.pow.Scalar, form(torch.pow, "self")
    yield aten.clamp.default, form(_clamped, "min", "max", wide=False)
    yield aten.clamp_min.default, form(lambda x, bound: _clamped(x, bound), "min", wide=False)
    yield aten.clamp_max.default, form(lambda x, bound: _clamped(x, None, bound), "max", wide=False)
    yield aten.masked_fill.Scalar, form(aten.masked_fill.Tensor, "value", wide=False)
    yield aten.where.ScalarSelf, form(_where, "self", wide=False)
    yield aten.where.ScalarOther, form(_where, "other", wide=False)
    yield aten.full.default, form(lambda size, value, *_: _filled(size, value), "fill_value", wide=False)
    yield aten.full_like.default, form(lambda x, v, *_: _filled(x.shape, v), "fill_value", wide=False)
    yield aten.new_full.default, form(lambda _, size, v, *__: _filled(size, v), "fill_value", wide=False)
    yield aten.fill.Scalar, form(lambda x, value: _filled(x.shape, value), "value", wide=False)
    yield aten.scalar_tensor.default, form(lambda value, *_: value.clone(), "s", wide=False)
    yield aten.leaky_relu.default, form(lambda x, slope: torch.where(x > 0, x, x * slope), "negative_slope")
    yield (
        aten.leaky_relu_backward.default,
        form(lambda grad, x, slope, _: torch.where(x > 0, grad, grad * slope), "negative_slope"),
    )
    yield aten.celu.default, form(lambda x, alpha: _elu(x, alpha, 1, 1 / alpha), "alpha")
    yield aten.elu.default, form(_elu, "alpha", "scale", "input_scale")
    yield aten.elu_backward.default, form(_elu_backward, "alpha", "scale", "input_scale")
    yield aten.softplus.default, form(_softplus, "beta", "threshold")
    yield aten.softplus_backward.default, form(_softplus_backward, "beta", "threshold")
    yield aten.huber_loss.default, form(_huber, "delta")
    yield aten.huber_loss_backward.default, form(_huber_backward, "delta")
    yield aten.smooth_l1_loss.default, form(_smooth_l1, "beta")
    yield aten.smooth_l1_loss_backward.default, form(_smooth_l1_backward, "beta")
    yield aten.lerp.Scalar, form(torch.lerp, "weight")
    yield aten.addcmul.default, form(lambda x, a, b, value: x + _scaled(a * b, value), "value")
    yield aten.addcdiv.default, form(lambda x, a, b, value: x + _scaled(a / b, value), "value")
    yield aten.native_layer_norm.default, form(_layer_norm, "eps")


_FORMS = dict(_forms())

# ---- a graph apart from its numbers --------------------------------------------------------------------


@dataclass(frozen=True)
class _Literal:
    """A number of a graph: the argument of a node, or the value of a constant with one element."""

    node: fx.Node
    argument: str
    value: Number
    is_whole: bool
    """An integer among integers, such as the threshold of random words."""


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a double holds exactly."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= 2**53
    return isinstance(value, float)


def _literals(module: fx.GraphModule) -> Iterator[_Literal]:
    """The numbers of a graph that can become inputs, in a fixed order."""
    for node in module.graph.nodes:
        yield from _literals_of(module, node)


def _literals_of(module: fx.GraphModule, node: fx.Node) -> Iterator[_Literal]:
    if node.op == "get_attr":
        value = graph_constant(module, node)
        if _is_free_constant(value):
            yield _Literal(node, "", value.item(), is_whole=False)
    elif node.op == "call_function" and node.target in _FORMS:
        names, result = _FORMS[node.target].numbers, node.meta.get("val")
        if isinstance(result, (Tensor, tuple, list)):
            for name, value in arguments_by_name(node).items():
                if name in names and _is_number(value):
                    yield _Literal(node, name, value, isinstance(value, int) and not _is_floating(node))


def _is_free_constant(value: Tensor) -> bool:
    return not isinstance(value, FakeTensor) and value.numel() == 1 and value.dtype.is_floating_point


def _is_floating(node: fx.Node) -> bool:
    """Whether any tensor that a node reads or makes is floating."""
    values = [*(source.meta.get("val") for source in node.all_input_nodes), node.meta.get("val")]
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return any(tensor.dtype.is_floating_point for tensor in tensors)


def structure_of(traced: TracedGraph) -> Structure:
    """The structure of a graph, and its numbers in order."""
    digest = hashlib.sha256(repr((traced.inputs, traced.outputs)).encode())
    for _, line in _lines(traced):
        digest.update(line.encode())
    return Structure(digest.hexdigest(), tuple(place.value for place in _literals(traced.module)))


def first_difference(first: TracedGraph, second: TracedGraph) -> str:
    """Operator and line where the structure of two graphs differs first; "" where it does not."""
    for (one, before), (other, after) in zip(_lines(first), _lines(second), strict=False):
        if before != after:
            told = " and ".join(dict.fromkeys((_told_place(other), _told_place(one))))
            return f"{told} differ"
    return ""


def _told_place(node: fx.Node) -> str:
    location = node_location(node)
    return f"{node.target} at {location}" if location else str(node.target)


def _lines(traced: TracedGraph) -> Iterator[tuple[fx.Node, str]]:
    """Each node of a graph as text without its numbers."""
    for node in traced.module.graph.nodes:
        own = {place.argument: place for place in _literals_of(traced.module, node)}
        if node.op == "get_attr":
            value = graph_constant(traced.module, node)
            told: Any = f"{value.shape}{value.dtype}{value.device}" if own else tensor_digest(value).hex()
        elif own:
            told = {
                name: f"number, whole: {own[name].is_whole}" if name in own else value
                for name, value in arguments_by_name(node).items()
            }
        else:
            told = (node.args, node.kwargs)
        yield node, f"{node.name} {node.op} {node.target} {told!r}\n"


def number_locations(traced: TracedGraph, positions: Sequence[int]) -> list[str]:
    """Operator and line of numbers, by their positions in ``structure_of``."""
    places = list(_literals(traced.module))
    found = []
    for position in positions:
        place, location = places[position], node_location(places[position].node)
        what = f"{place.argument} of {place.node.target}" if place.argument else "a constant"
        found.append(f"{what} at {location}" if location else what)
    return found


# ---- numbers as inputs ---------------------------------------------------------------------------------


def number_name(column: int) -> str:
    """Name of the input for a column of numbers."""
    return f"number {column}"


def with_inputs(traced: TracedGraph, numbers: Sequence[Number], columns: Mapping[int, int]) -> TracedGraph:
    """A copy of a graph with these ``numbers`` as literals, but for those that have a column.

    ``columns`` maps positions to columns; each column is an input of kind ``NUMBER`` then, behind all others:
    a double of no dimension.
    """
    return _Rewriter(traced, numbers, columns).run()


class _Rewriter:
    def __init__(self, traced: TracedGraph, numbers: Sequence[Number], columns: Mapping[int, int]) -> None:
        self._traced = traced
        self._literals: dict[fx.Node, dict[str, Number]] = {}
        self._columns: dict[fx.Node, dict[str, tuple[int, bool]]] = {}
        for position, place in enumerate(_literals(traced.module)):
            if position in columns:
                own = self._columns.setdefault(place.node, {})
                own[place.argument] = (columns[position], place.is_whole)
            else:
                self._literals.setdefault(place.node, {})[place.argument] = numbers[position]
        self._graph = fx.Graph()
        self._owner = torch.nn.Module()
        self._copied: dict[fx.Node, fx.Node | tuple[fx.Node, ...]] = {}
        self._inputs: dict[int, fx.Node] = {}
        self._casts: dict[tuple[int, torch.dtype], fx.Node] = {}
        first = next(iter(traced.module.graph.nodes)).meta["val"]
        assert isinstance(first, FakeTensor)
        self._mode = first.fake_mode
        self._device = first.device

    def run(self) -> TracedGraph:
        used = sorted({column for own in self._columns.values() for column, _ in own.values()})
        for node in self._traced.module.graph.nodes:
            if node.op == "placeholder":
                self._copied[node] = copy_node(self._graph, node, lambda n: n)
                continue
            if not self._inputs:
                self._add_inputs(used)
            self._copied[node] = self._written(node)
        self._graph.lint()
        new = tuple(GraphInput(InputKind.NUMBER, number_name(column), (), "torch.float64") for column in used)
        module = graph_module(self._owner, self._graph)
        return replace(self._traced, module=module, inputs=self._traced.inputs + new)

    def _add_inputs(self, used: Sequence[int]) -> None:
        with self._mode:
            for column in used:
                node = self._graph.placeholder(f"number_{column}")
                node.meta["val"] = torch.empty((), dtype=torch.float64, device=self._device)
                self._inputs[column] = node

    def _written(self, node: fx.Node) -> fx.Node | tuple[fx.Node, ...]:
        if node in self._columns:
            return self._constant(node) if node.op == "get_attr" else self._by_form(node)
        if node.target is operator.getitem:
            source = self._copied[node.args[0]]  # type: ignore[index]
            if isinstance(source, tuple):
                return source[node.args[1]]  # type: ignore[index]
        new = copy_node(self._graph, node, lambda n: self._copied[n])
        if node.op == "get_attr":
            value = graph_constant(self._traced.module, node)
            for number in self._literals.get(node, {}).values():
                value = torch.full_like(value, number)
            new.target = f"constant_{len(self._copied)}"
            self._owner.register_buffer(new.target, value, persistent=False)
            return new
        for name, number in self._literals.get(node, {}).items():
            self._set_literal(new, name, number)
        return new

    def _set_literal(self, node: fx.Node, name: str, number: Number) -> None:
        described = node.target._schema.arguments  # type: ignore[union-attr]
        position = next(i for i, argument in enumerate(described) if argument.name == name)
        if position < len(node.args):
            if node.args[position] != number:
                node.update_arg(position, number)
        elif name in node.kwargs or number != described[position].default_value:
            node.update_kwarg(name, number)

    def _constant(self, node: fx.Node) -> fx.Node:
        """A column in the shape and dtype of the constant whose place it takes."""
        ((column, _),) = self._columns[node].values()
        value = graph_constant(self._traced.module, node)

        def shaped(x: Tensor) -> list[Tensor]:
            return [x.to(value.dtype).reshape(value.shape).clone()]

        return self._append(node, shaped, [self._inputs[column]])[0]

    def _by_form(self, node: fx.Node) -> fx.Node | tuple[fx.Node, ...]:
        """Write a node with tensors in the place of numbers that differ."""
        assert isinstance(node.target, OpOverload)
        form, own = _FORMS[node.target], self._columns[node]
        given = {**arguments_by_name(node), **self._literals.get(node, {})}
        leaves, spec = pytree.tree_flatten(list(given.values()), is_leaf=lambda x: isinstance(x, fx.Node))
        tensors = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        nodes = [self._copied[leaf] for leaf in tensors]
        value = node.meta["val"]
        wide = _wide_dtype([leaf.meta["val"] for leaf in tensors], value, is_wide=form.is_wide)
        names = list(given)
        columns = [self._cast(*own[name], wide) for name in names if name in own]

        def compute(*flat: Tensor) -> Any:
            rest = iter(flat[: len(tensors)])
            numbers = iter(flat[len(tensors) :])
            filled = [
                _widened(next(rest), wide, form) if isinstance(leaf, fx.Node) else leaf for leaf in leaves
            ]
            arguments = dict(zip(names, pytree.tree_unflatten(filled, spec), strict=True))
            arguments |= {name: next(numbers) for name in names if name in own}
            result = form.compute(*arguments.values())
            if isinstance(result, tuple):
                return [part.to(like.dtype) for part, like in zip(result, value, strict=True)]
            return [result.to(value.dtype)]

        written = self._append(node, compute, [*nodes, *columns])  # type: ignore[list-item]
        return tuple(written) if isinstance(value, (tuple, list)) else written[0]

    def _cast(self, column: int, is_whole: bool, dtype: torch.dtype) -> fx.Node:
        """A column in the dtype that an operator computes in, made once."""
        wanted = torch.int64 if is_whole else dtype
        if wanted is torch.float64:
            return self._inputs[column]
        if (column, wanted) not in self._casts:
            source = self._inputs[column]
            last = next(reversed(self._inputs.values()))
            with self._graph.inserting_after(last):
                node = self._graph.call_function(aten._to_copy.default, (source,), {"dtype": wanted})
            with self._mode:
                node.meta["val"] = source.meta["val"].to(wanted)
            self._casts[column, wanted] = node
        return self._casts[column, wanted]

    def _append(
        self, node: fx.Node, compute: Callable[..., Any], sources: Sequence[fx.Node]
    ) -> list[fx.Node]:
        """Write what ``compute`` does in the place of ``node``."""
        with self._mode, torch.no_grad():
            examples = [torch.empty_like(source.meta["val"]) for source in sources]
            part = make_fx(compute)(*examples)
        placed: dict[fx.Node, fx.Node] = {}
        given = iter(sources)
        for inner in part.graph.nodes:
            if inner.op == "placeholder":
                placed[inner] = next(given)
            elif inner.op == "output":
                return [placed[leaf] for leaf in pytree.tree_leaves(inner.args)]
            else:
                placed[inner] = copy_node(self._graph, inner, lambda n: placed[n])
                inherit_meta(placed[inner], node)
        raise RuntimeError("expected a graph with an output node, got none")


def _wide_dtype(tensors: Sequence[Tensor], result: Any, *, is_wide: bool) -> torch.dtype:
    """The dtype in which an operator computes with a number."""
    first = result if isinstance(result, Tensor) else result[0]
    floating = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
    floating = floating or ([first.dtype] if first.dtype.is_floating_point else [])
    if torch.float64 in floating:
        return torch.float64
    if floating and not is_wide:
        return floating[0]
    return torch.float32


def _widened(tensor: Tensor, wide: torch.dtype, form: _Form) -> Tensor:
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.to(wide) if form.is_wide and is_half else tensor
