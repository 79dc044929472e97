"""Numbers in a member's code, and graphs that read them as inputs.

A dropout probability, a loss weight or a temperature is a Python number when the member is traced, and so a
literal of its graph. Members whose graphs are equal but for such numbers can train as one: ``structure_of``
reads a graph without them, and ``with_inputs`` makes those that differ inputs of the graph.

A literal can become an input where its operator has a form that takes a tensor in its place
(``NUMBER_FORMS``). Every other number, such as a size or a dimension, stays part of the structure.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.ir import GraphInput, InputKind
from trainmux.tracing._joint import TracedGraph
from trainmux.tracing._number_forms import NUMBER_FORMS
from trainmux.tracing._passes import arguments_by_name, graph_constant, inherit_meta, output_nodes
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
    elif node.op == "call_function" and node.target in NUMBER_FORMS:
        names, result = NUMBER_FORMS[node.target].numbers, node.meta.get("val")
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

        (new,) = self._append(node, shaped, [self._inputs[column]])
        return cast(fx.Node, new)

    def _by_form(self, node: fx.Node) -> fx.Node | tuple[fx.Node, ...]:
        """Write a node with tensors in the place of numbers that differ."""
        assert isinstance(node.target, OpOverload)
        form, own = NUMBER_FORMS[node.target], self._columns[node]
        given = {**arguments_by_name(node), **self._literals.get(node, {})}
        leaves, spec = pytree.tree_flatten(list(given.values()), is_leaf=lambda x: isinstance(x, fx.Node))
        tensors = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        nodes = [self._copied[leaf] for leaf in tensors]
        value = node.meta["val"]
        wide = _wide_dtype([leaf.meta["val"] for leaf in tensors], value, is_wide=form.is_wide)
        names = list(given)
        columns = [self._cast(*own[name], wide) for name in names if name in own]
        factors = {given[name] for name in form.factors}

        def compute(*flat: Tensor) -> Any:
            rest = iter(flat[: len(tensors)])
            numbers = iter(flat[len(tensors) :])
            filled = [
                _widened(next(rest), wide, is_wide=form.is_wide and leaf not in factors)
                if isinstance(leaf, fx.Node)
                else leaf
                for leaf in leaves
            ]
            arguments = dict(zip(names, pytree.tree_unflatten(filled, spec), strict=True))
            arguments |= {name: next(numbers) for name in names if name in own}
            result = form.compute(*arguments.values())
            if isinstance(result, tuple):
                return [
                    None if like is None else part.to(like.dtype)
                    for part, like in zip(result, value, strict=True)
                ]
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

    def _append(self, node: fx.Node, compute: Callable[..., Any], sources: Sequence[fx.Node]) -> list[Any]:
        """Write what ``compute`` does in the place of ``node``; returns a node, or ``None``, per result."""
        with self._mode, torch.no_grad():
            examples = [torch.empty_like(source.meta["val"]) for source in sources]
            part = make_fx(compute)(*examples)
        placed: dict[fx.Node, fx.Node] = {}
        given = iter(sources)
        for inner in part.graph.nodes:
            if inner.op == "placeholder":
                placed[inner] = next(given)
            elif inner.op != "output":
                placed[inner] = copy_node(self._graph, inner, lambda n: placed[n])
                inherit_meta(placed[inner], node)
        return [leaf and placed[leaf] for leaf in output_nodes(part)]


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


def _widened(tensor: Tensor, wide: torch.dtype, *, is_wide: bool) -> Tensor:
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.to(wide) if is_wide and is_half else tensor
