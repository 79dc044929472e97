"""Operators that are called by methods of tensors are the same operators, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import trainmux as tm
from trainmux.engine._methods import METHODS, call_by_methods
from trainmux.errors import FleetError

aten = torch.ops.aten

SQUARE, OTHER, COLUMN = torch.rand(3, 3) + 0.5, torch.rand(3, 3) + 0.5, torch.rand(3, 1)
INDEX = torch.tensor([[0], [2], [1]])
PLACES, ONE = torch.tensor([2, 0]), torch.ones(1, 3, 3)
BITS = torch.tensor([[True, False, True]]), torch.tensor([[True, True, False]])
GIVEN: dict[OpOverload, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten.view.default: ((SQUARE, [9, 1]), {}),
    aten.view.dtype: ((SQUARE, torch.int32), {}),
    aten.reshape.default: ((SQUARE.t(), [-1]), {}),
    aten.expand.default: ((COLUMN, [2, 3, -1]), {}),
    aten.permute.default: ((SQUARE, [1, 0]), {}),
    aten.transpose.int: ((SQUARE, 0, 1), {}),
    aten.select.int: ((SQUARE, 0, 1), {}),
    aten.squeeze.dim: ((COLUMN, 1), {}),
    aten.squeeze.dims: ((COLUMN, [1]), {}),
    aten.unsqueeze.default: ((SQUARE, 1), {}),
    aten.mm.default: ((SQUARE, OTHER), {}),
    aten.bmm.default: ((ONE, ONE), {}),
    aten.addmm.default: ((COLUMN, SQUARE, OTHER), {"beta": 2, "alpha": 0.5}),
    aten.baddbmm.default: ((COLUMN, ONE, ONE), {}),
    aten.add.Tensor: ((SQUARE, OTHER), {"alpha": 2}),
    aten.lerp_.Tensor: ((SQUARE, OTHER, COLUMN), {}),
    aten.addcmul.default: ((SQUARE, OTHER, COLUMN), {"value": 2}),
    aten.addcmul_.default: ((SQUARE, OTHER, COLUMN), {}),
    aten.addcdiv.default: ((SQUARE, OTHER, OTHER), {}),
    aten.addcdiv_.default: ((SQUARE, OTHER, OTHER), {"value": -1}),
    aten.sum.default: ((SQUARE,), {"dtype": torch.float64}),
    aten.sum.dim_IntList: ((SQUARE, [1], True), {}),
    aten.mean.dim: ((SQUARE, [0]), {"dtype": torch.float64}),
    aten.amax.default: ((SQUARE, [0], True), {}),
    aten.gather.default: ((SQUARE, 1, INDEX), {}),
    aten.scatter.value: ((SQUARE, 1, INDEX, -1.0), {}),
    aten.index_select.default: ((SQUARE, 0, PLACES), {}),
    aten.clone.default: ((SQUARE.t(),), {"memory_format": torch.contiguous_format}),
    aten.copy_.default: ((SQUARE, COLUMN), {}),
    aten.clamp.default: ((SQUARE, None, 1.0), {}),
    aten.clamp_min.default: ((SQUARE, 1.0), {}),
}


def given_to(operator: OpOverload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for an operator; by its kind, where it has none of its own."""
    if operator in GIVEN:
        return GIVEN[operator]
    if operator._schema.name.partition("::")[2].startswith(("bitwise", "logical")):
        return BITS[: len(operator._schema.arguments)], {}
    others = {"Tensor": OTHER, "Scalar": 0.75, "Tensor_Scalar": 3, "default": None}
    other = others[operator._overloadname]
    return (SQUARE,) if other is None else (SQUARE, other), {}


class Recorded(TorchDispatchMode):
    """Records which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operator", METHODS, ids=str)
def test_a_method_calls_the_operator_that_it_stands_for(operator: OpOverload) -> None:
    found = []
    for by_method in (False, True):
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, given_to(operator))
        graph = fx.Graph()
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        nodes = iter([graph.placeholder(f"given_{number}") for number in range(len(tensors))])
        given = tuple(next(nodes) if isinstance(value, torch.Tensor) else value for value in args)
        graph.output(graph.call_function(operator, given, kwargs))
        if by_method:
            call_by_methods(graph)
        assert len(graph.find_nodes(op="call_function", target=operator)) == 1 - by_method
        with torch.no_grad(), Recorded() as mode:
            result = fx.GraphModule(torch.nn.Module(), graph)(*tensors)
        found.append((mode.operators, result, tensors))
    (expected, by_operator, changed), (operators, by_method_too, changed_too) = found
    assert operators == expected
    for first, second in zip([by_operator, *changed], [by_method_too, *changed_too], strict=True):
        assert torch.equal(first, second)
        assert first.stride() == second.stride()


def test_an_error_names_the_operator_all_the_same() -> None:
    table = torch.nn.Embedding(4, 2)
    members = [tm.Member(table, torch.optim.SGD(table.parameters(), lr=0.1))]
    good, bad = torch.tensor([0, 3]), torch.tensor([0, 4])

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.ones(4, 2).index_select(0, batch).mean() + model(torch.zeros_like(batch)).sum()

    fleet = tm.Fleet(members, loss, good, lowering="aten")
    fleet.step(good)
    with pytest.raises(FleetError, match=r"aten\.index_select\.default at .*test_methods"):
        fleet.step(bad)
