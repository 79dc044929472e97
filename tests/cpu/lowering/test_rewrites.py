"""Rewrites for the compiler's sake: the same tensors, and only where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering_tools import traced
from torch import Tensor

from trainmux.lowering import compare_instead_of_scatter
from trainmux.lowering._rewrites import write_to_whole_tensors

aten = torch.ops.aten


def scatter_into_constant(dim: int, value: float, rest: float) -> Callable[[Tensor, Tensor], Tensor]:
    """As the gradient of a cross-entropy loss begins."""

    def function(like: Tensor, index: Tensor) -> Tensor:
        base = aten.full.default(list(like.shape), rest, dtype=like.dtype, device=like.device)
        return aten.scatter.value(base, dim, index, value)

    return function


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    value=st.sampled_from([-1.0, 0.5, 3.0]),
    rest=st.sampled_from([0, 0.0, 2.0]),
)
def test_one_value_in_each_row(
    shape: list[int], data: st.DataObject, dtype: torch.dtype, value: float, rest: float
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    rows = list(shape)
    rows[dim] = 1
    index = torch.randint(shape[dim], rows, generator=torch.Generator().manual_seed(sum(shape)))
    function = scatter_into_constant(dim, value, rest)
    like = torch.zeros(shape, dtype=dtype)
    module = traced(function, like, index)
    assert compare_instead_of_scatter(module.graph) == 1
    module.recompile()
    got, expected = module(like, index), function(like, index)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    assert not module.graph.find_nodes(op="call_function", target=aten.scatter.value)


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("rest", [0.0, 2.0])
def test_rows_of_one_value_need_no_sum(dim: int, rest: float) -> None:
    """As the gradient of log-softmax has it, which subtracts a share of each row's sum."""
    scattered = scatter_into_constant(dim, -1.0, rest)

    def function(like: Tensor, index: Tensor, factor: Tensor) -> Tensor:
        rows = scattered(like, index) * factor
        return rows - like.exp() * rows.sum(dim, keepdim=True)

    given = torch.randn(3, 5), torch.tensor([[1], [4], [0]]), torch.randn(3, 1)
    module = traced(function, *given)
    assert compare_instead_of_scatter(module.graph) == 1
    module.recompile()
    assert torch.equal(module(*given), function(*given))
    sums = module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert len(sums) == (rest != 0.0)


def test_sums_of_other_rows_stay() -> None:
    """One factor per element, a sum over the other dimension, and one over rows that members share."""

    def function(like: Tensor, index: Tensor, factor: Tensor, by_column: Tensor) -> tuple[Tensor, ...]:
        rows = scatter_into_constant(1, -1.0, 0.0)(like, index)
        sums = (rows * like).sum(1, keepdim=True), (rows * factor).sum(0, keepdim=True)
        return *sums, (rows * by_column).sum(1, keepdim=True)

    given = torch.randn(3, 5), torch.tensor([[1], [4], [0]]), torch.randn(3, 1), torch.randn(2, 1, 5)
    module = traced(function, *given)
    assert compare_instead_of_scatter(module.graph) == 1
    module.recompile()
    for got, expected in zip(module(*given), function(*given), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(3, 1), (2, 3, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_sums_of_rows_keep_their_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Sums of short integers are long. Rows may be the same for all members, whose factors differ."""

    def function(like: Tensor, index: Tensor, factor: Tensor) -> Tensor:
        return (scatter_into_constant(1, 1.0, 0.0)(like, index) * factor).sum(-1, keepdim=True)

    given = torch.zeros(3, 5).to(dtype), torch.tensor([[1], [4], [0]]), torch.randn(shape).mul(3).to(dtype)
    module = traced(function, *given)
    assert compare_instead_of_scatter(module.graph) == 1
    module.recompile()
    got, expected = module(*given), function(*given)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    sums = module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert len(sums) == (not dtype.is_floating_point)


ROWS = torch.tensor([[1], [2], [0]])
LEFT_ALONE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "more than one in a row": (scatter_into_constant(1, 1.0, 0.0), torch.tensor([[0, 1], [2, 3], [4, 4]])),
    "not in every row": (scatter_into_constant(1, 1.0, 0.0), ROWS[:2]),
    "the base is no constant": (lambda like, index: aten.scatter.value(like + 1, 1, index, 2.0), ROWS),
    "values are added": (
        lambda like, index: aten.scatter.value_reduce(
            aten.full.default([3, 5], 1.0, dtype=like.dtype), 1, index, 2.0, reduce="add"
        ),
        ROWS,
    ),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_where_it_is_left_alone(why: str) -> None:
    function, index = LEFT_ALONE[why]
    like = torch.zeros(3, 5)
    module = traced(function, like, index)
    assert compare_instead_of_scatter(module.graph) == 0
    assert torch.equal(module(like, index), function(like, index))


Write = Callable[[Tensor, Tensor, Tensor], Tensor]
WRITES: dict[str, Write] = {
    "add": lambda base, index, rows: aten.index_add.default(base, 1, index, rows),
    "copy": lambda base, index, rows: aten.index_copy.default(base, 1, index, rows),
    "fill": lambda base, index, rows: aten.index_fill.int_Scalar(base, 1, index, 7.0),
    "put": lambda base, index, rows: aten.index_put.default(base, [None, index], rows, True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_an_expanded_tensor_get_a_copy(write: Write) -> None:
    def function(base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        return write(aten.expand.default(aten.unsqueeze.default(base * 2, 0), [3, *base.shape]), index, rows)

    given = torch.randn(4, 2), torch.tensor([0, 3, 1]), torch.randn(3, 3, 2)
    module = traced(function, *given)
    assert write_to_whole_tensors(module.graph) == 1
    module.recompile()
    assert torch.equal(module(*given), function(*given))
    assert write_to_whole_tensors(module.graph) == 0
    whole = traced(
        lambda *given: write(given[0] + 1, *given[1:]), torch.randn(1, 4, 2), given[1], given[2][:1]
    )
    assert write_to_whole_tensors(whole.graph) == 0
