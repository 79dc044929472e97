"""Fuse a graph of one operator and hold it against each member computed alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.fusion import FusedGraph, fuse
from trainmux.ir import GraphInput, GraphOutput, InputKind, OutputKind
from trainmux.runtime import stacked_strides
from trainmux.tracing import FakeTensorMode, TracedGraph

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Layout = Callable[[Sequence[Tensor]], Tensor]


class Values:
    """Makes the arguments of one member: the same shapes for every seed, other numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(dtype)

    def positive(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return (torch.rand(shape, generator=self._generator, dtype=torch.float64) + 0.5).to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator).to(dtype)

    def booleans(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) > 0.5


@dataclass(frozen=True)
class Sample:
    """An operator with a way to make its arguments.

    ``how`` is what the record must say of it at widths above 1, if given. ``unfilled`` marks results whose
    values are not defined.
    """

    op: Any
    make: Callable[[Values], tuple[Any, ...]]
    label: str = ""
    how: str | None = None
    unfilled: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.op}{' ' + self.label if self.label else ''}"

    def arguments(self, seed: int) -> Arguments:
        """Arguments by place, then by name; the last one may be a dict of further ones by name."""
        args = self.make(Values(seed))
        named = args[-1] if isinstance(args[-1], dict) else {}
        return args[: len(args) - bool(named)], {**self.kwargs, **named}

    @property
    def num_tensors(self) -> int:
        return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(self.arguments(0)))


def described(module: fx.GraphModule) -> TracedGraph:
    """A bare graph with the records that ``fuse`` asks for."""
    inputs = tuple(
        GraphInput(InputKind.BATCH, node.name, tuple(node.meta["val"].shape), str(node.meta["val"].dtype))
        for node in module.graph.find_nodes(op="placeholder")
    )
    (output,) = module.graph.find_nodes(op="output")
    outputs = tuple(GraphOutput(OutputKind.METRIC, str(i)) for i in range(len(output.args[0])))
    return TracedGraph(module, inputs, outputs)


def single_op(op: Any, arguments: Arguments, present: Sequence[int] | None = None) -> TracedGraph:
    """A graph of one operator, of the results at ``present``; its placeholders are the tensor arguments."""
    leaves, spec = pytree.tree_flatten(arguments)
    graph, mode = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
    nodes, fakes = list(leaves), list(leaves)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            nodes[position] = graph.placeholder(f"input_{position}")
            nodes[position].meta["val"] = fakes[position] = mode.from_tensor(leaf)
    call = graph.call_function(op, *pytree.tree_unflatten(nodes, spec))
    call.meta["stack_trace"] = f'  File "{__file__}", line 1, in forward\n'
    args, kwargs = pytree.tree_unflatten(fakes, spec)
    with mode:
        call.meta["val"] = op(*args, **kwargs)
    results = [call]
    if not isinstance(call.meta["val"], Tensor):
        results = [graph.call_function(operator.getitem, (call, position)) for position in present or ()]
        for item in results:
            item.meta["val"] = call.meta["val"][item.args[1]]
    graph.output(results)
    return described(fx.GraphModule(torch.nn.Module(), graph))


# ---- layouts of stacked tensors --------------------------------------------------------------------------


def contiguous(members: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(members))


def model_axis_last(members: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(members), -1).movedim(-1, 0)


def model_axis_second(members: Sequence[Tensor]) -> Tensor:
    """As convolution leaves it: members side by side in channels."""
    return torch.stack(list(members), min(1, members[0].dim())).movedim(min(1, members[0].dim()), 0)


def padded(members: Sequence[Tensor]) -> Tensor:
    shape, dtype = members[0].shape, members[0].dtype
    strides = stacked_strides(shape, dtype, torch.device("cpu"))
    stacked = torch.empty(len(members) * strides[0], dtype=dtype).as_strided((len(members), *shape), strides)
    return stacked.copy_(torch.stack(list(members)))


# ---- comparison ------------------------------------------------------------------------------------------


def assert_close(actual: Tensor, expected: Tensor, where: str) -> None:
    """In shape and dtype too; but for rounding, if they are floating."""
    tolerance = 2 * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    tolerance = 1e-12 if expected.dtype == torch.float64 else tolerance
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


def ways_to_stack(num_tensors: int) -> Iterator[tuple[bool, ...]]:
    """All tensors stacked, all but one, and the first alone."""
    yield (True,) * num_tensors
    for shared in range(num_tensors if num_tensors > 1 else 0):
        yield tuple(position != shared for position in range(num_tensors))
    if num_tensors > 2:
        yield (True, *[False] * (num_tensors - 1))


def check(given: Sample, width: int, batched: Sequence[bool], layout: Layout = contiguous) -> FusedGraph:
    """Fuse the operator with some of its tensors stacked, and compare with each member computed alone."""
    where = f"{given.name}, width {width}, stacked {list(batched)}, {layout.__name__}"
    shared, spec = pytree.tree_flatten(given.arguments(1000))
    own = [pytree.tree_leaves(given.arguments(seed)) for seed in range(width)]
    places = [position for position, leaf in enumerate(shared) if isinstance(leaf, Tensor)]
    members = [list(shared) for _ in own]
    inputs = [shared[position] for position in places]
    for number, (position, is_own) in enumerate(zip(places, batched, strict=True)):
        if is_own:
            for member, leaves in zip(members, own, strict=True):
                member[position] = leaves[position]
            inputs[number] = layout([leaves[position] for leaves in own])
    arguments = [pytree.tree_unflatten(member, spec) for member in members]
    expected = [_run_member(given.op, member) for member in arguments]
    present = [position for position, value in enumerate(expected[0]) if isinstance(value, Tensor)]
    strides = {i: tensor.stride() for i, tensor in enumerate(inputs) if batched[i]}
    fused = fuse(single_op(given.op, arguments[0], present), width, batched, strides=strides)
    for number, result in zip(present, fused.module(*inputs), strict=True):
        for index, wanted in enumerate(expected):
            pair = (result[index], wanted[number])
            if given.unfilled:
                pair = (torch.zeros_like(pair[0]), torch.zeros_like(pair[1]))
            assert_close(*pair, f"{where}, member {index}, result {number}")
    if given.how is not None and width > 1:
        assert [(record.how, record.fallback) for record in fused.records] == [(given.how, "")], where
    return fused


def _run_member(op: Any, arguments: Arguments) -> list[Any]:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, arguments)
    result = op(*args, **kwargs)
    return [result] if isinstance(result, Tensor) else list(result)


def check_everything(given: Sample) -> None:
    """Every way to stack the arguments, every layout, and a single member; fewer for a labelled variation."""
    everything, *others = ways_to_stack(given.num_tensors)
    for batched in others:
        check(given, 3, batched)
    for layout in (model_axis_second,) if given.label else (model_axis_last, model_axis_second, padded):
        check(given, 3, everything, layout)
    if not given.label:
        check(given, 1, everything)
