"""Fuse one operator, or one small graph, and hold it against each member computed alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from trainmux.fusion import FusedGraph, fuse
from trainmux.fusion._stacked import Context, Stacked, find_rule
from trainmux.fusion.rules.pointwise import is_pointwise, pointwise
from trainmux.ir import GraphInput, GraphOutput, InputKind, OutputKind
from trainmux.runtime import stacked_strides
from trainmux.tracing import FakeTensorMode, TracedGraph

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Values:
    """Makes the arguments of one member: the same shapes for every seed, other numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(dtype)

    def positive(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return (torch.rand(shape, generator=self._generator, dtype=torch.float64) + 0.5).to(dtype)

    def integers(self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)

    def booleans(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) > 0.5


@dataclass(frozen=True)
class Sample:
    """An operator with a way to make its arguments.

    ``how`` is what the record must say of it, where the sample is meant to reach one rule. ``unfilled``
    marks results whose values are not defined. A sample with a ``label`` is a variation of another one: its
    rule is called, but no graph is fused unless ``traces`` asks for it.
    """

    op: Any
    make: Callable[[Values], Arguments]
    label: str = ""
    how: str | None = None
    unfilled: bool = False
    traces: bool = False

    @property
    def name(self) -> str:
        return f"{self.op}{' ' + self.label if self.label else ''}"


def sample(op: Any, make: Callable[[Values], tuple[Any, ...]], label: str = "", **settings: Any) -> Sample:
    """A sample without keyword arguments."""
    return Sample(op, lambda values: (make(values), {}), label, **settings)


def single_op(op: Any, arguments: Arguments) -> TracedGraph:
    """A member's graph of one operator; its placeholders are the tensors among the arguments."""
    leaves, spec = pytree.tree_flatten(arguments)
    graph = fx.Graph()
    nodes: list[Any] = []
    fakes: list[Any] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            nodes.append(leaf)
            fakes.append(leaf)
            continue
        node = graph.placeholder(f"input_{position}")
        node.meta["val"] = mode.from_tensor(leaf)
        nodes.append(node)
        fakes.append(node.meta["val"])
    args, kwargs = pytree.tree_unflatten(nodes, spec)
    call = graph.call_function(op, args, kwargs)
    call.meta["stack_trace"] = f'  File "{__file__}", line 1, in forward\n'
    fake_args, fake_kwargs = pytree.tree_unflatten(fakes, spec)
    with mode:
        call.meta["val"] = op(*fake_args, **fake_kwargs)
    results: list[fx.Node] = [call]
    if not isinstance(call.meta["val"], Tensor):
        results = []
        for position, value in enumerate(call.meta["val"]):
            if isinstance(value, Tensor):
                item = graph.call_function(operator.getitem, (call, position))
                item.meta["val"] = value
                results.append(item)
    graph.output(results)
    return described(fx.GraphModule(torch.nn.Module(), graph))


def described(module: fx.GraphModule) -> TracedGraph:
    """A bare graph with the records that ``fuse`` asks for."""
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = tuple(
        GraphInput(InputKind.BATCH, node.name, tuple(node.meta["val"].shape), str(node.meta["val"].dtype))
        for node in placeholders
    )
    (output,) = module.graph.find_nodes(op="output")
    outputs = tuple(GraphOutput(OutputKind.METRIC, str(i)) for i in range(len(output.args[0])))
    return TracedGraph(module, inputs, outputs)


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


LAYOUTS = (model_axis_last, model_axis_second, padded)


# ---- comparison ------------------------------------------------------------------------------------------


def batched_combinations(num_tensors: int) -> Iterator[tuple[bool, ...]]:
    """Every way to have at least one stacked tensor."""
    for batched in product((True, False), repeat=num_tensors):
        if any(batched):
            yield batched


def assert_close(actual: Tensor, expected: Tensor, where: str, tolerance: float = 1e-12) -> None:
    assert actual.shape == expected.shape, where
    assert actual.dtype == expected.dtype, where
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), where
        return
    if expected.dtype != torch.float64:
        tolerance = 2 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


def run_member(op: Any, arguments: Arguments) -> list[Any]:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, arguments)
    result = op(*args, **kwargs)
    return [result] if isinstance(result, Tensor) else list(result)


@dataclass(frozen=True, eq=False)
class Case:
    """A sample at one width, with some of its tensors stacked: inputs, and the members they stand for."""

    given: Sample
    width: int
    batched: tuple[bool, ...]
    inputs: list[Tensor]  # one for each tensor among the arguments
    members: list[Arguments]
    where: str

    def expected(self) -> list[list[Any]]:
        return [run_member(self.given.op, member) for member in self.members]

    def stacked_arguments(self) -> Arguments:
        """The arguments as a rule sees them."""
        leaves, spec = pytree.tree_flatten(self.members[0])
        values = iter(zip(self.inputs, self.batched, strict=True))
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                tensor, is_batched = next(values)
                leaves[position] = Stacked(tensor) if is_batched else tensor
        return pytree.tree_unflatten(leaves, spec)


def make_case(
    given: Sample,
    width: int,
    batched: Sequence[bool],
    layout: Callable[[Sequence[Tensor]], Tensor] = contiguous,
) -> Case:
    shared, spec = pytree.tree_flatten(given.make(Values(1000)))
    own = [pytree.tree_leaves(given.make(Values(seed))) for seed in range(width)]
    members = [list(shared) for _ in range(width)]
    inputs: list[Tensor] = []
    choices = iter(batched)
    for position, leaf in enumerate(shared):
        if not isinstance(leaf, Tensor):
            continue
        if not next(choices):
            inputs.append(leaf)
            continue
        for member, leaves in zip(members, own, strict=True):
            member[position] = leaves[position]
        inputs.append(layout([leaves[position] for leaves in own]))
    where = f"{given.name}, width {width}, stacked {list(batched)}, {layout.__name__}"
    unflattened = [pytree.tree_unflatten(member, spec) for member in members]
    return Case(given, width, tuple(batched), inputs, unflattened, where)


def compare(case: Case, results: Sequence[Any], expected: list[list[Any]]) -> None:
    """``results`` have the model axis first, or are shared; what a member does not have is not looked at."""
    for index, wanted in enumerate(expected):
        for number, (result, member) in enumerate(zip(results, wanted, strict=True)):
            if not isinstance(member, Tensor):
                continue
            actual = result.tensor[index] if isinstance(result, Stacked) else result
            place = f"{case.where}, member {index}, result {number}"
            if case.given.unfilled:
                assert (actual.shape, actual.dtype) == (member.shape, member.dtype), place
            else:
                assert_close(actual, member, place)


def check_rule(case: Case) -> bool:
    """Call the operator's rule on real tensors; false where it leaves the case to the general way."""
    op = case.given.op
    expected = case.expected()
    value = expected[0][0] if len(expected[0]) == 1 else expected[0]
    context = Context(case.width, torch.device("cpu"), value)
    args, kwargs = case.stacked_arguments()
    named = find_rule(op)
    results = NotImplemented
    if named is not None:
        results = named.apply(context, op, *args, **kwargs)
    if results is NotImplemented and is_pointwise(op):
        results = pointwise(context, op, *args, **kwargs)
    if results is NotImplemented:
        return False
    compare(case, [results] if isinstance(results, (Tensor, Stacked)) else list(results), expected)
    return True


def check_fused(case: Case) -> FusedGraph:
    """Fuse a graph of the operator alone and run it; returns the fused graph."""
    given = case.given
    traced = single_op(given.op, case.members[0])
    strides = {i: tensor.stride() for i, tensor in enumerate(case.inputs) if case.batched[i]}
    fused = fuse(traced, case.width, case.batched, strides=strides)
    with torch.no_grad():
        tensors = fused.module(*case.inputs)
    # Only results that the traced operator has are outputs of the graph.
    has = [isinstance(value, Tensor) for value in traced_results(traced)]
    expected = case.expected()
    results = iter(tensors)
    full = [Stacked(next(results)) if present else None for present in has]
    compare(case, full, expected)
    if given.how is not None:
        assert [record.how for record in fused.records] == [given.how], case.where
        assert not fused.records[0].fallback, case.where
    return fused


def traced_results(traced: TracedGraph) -> list[Any]:
    (call,) = [node for node in traced.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    value = call.meta["val"]
    return [value] if isinstance(value, Tensor) else list(value)


def num_tensors(given: Sample) -> int:
    return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(given.make(Values(0))))


def check_everything(given: Sample) -> None:
    """Every combination and layout through the rule itself, the plainest one through ``fuse`` as well.

    What the rule leaves to the general way goes through ``fuse`` instead.
    """
    everything = [True] * num_tensors(given)
    cases = [make_case(given, 3, batched) for batched in batched_combinations(len(everything))]
    cases.append(make_case(given, 1, everything))
    cases += [make_case(given, 3, everything, layout) for layout in LAYOUTS]
    through_fuse = cases[:1] if given.traces or not given.label else []
    failures = []
    for case in cases:
        try:
            if not check_rule(case) and case not in through_fuse:
                through_fuse.append(case)
        except (AssertionError, RuntimeError, IndexError) as error:
            reason = str(error).splitlines()[0].removeprefix(f"{case.where}, ")
            failures.append(f"{case.where}: {reason}")
    shown = "\n".join(failures[:6])
    assert not failures, f"{len(failures)} of {len(cases)} cases differ, among them\n{shown}"
    for case in through_fuse:
        check_fused(case)
