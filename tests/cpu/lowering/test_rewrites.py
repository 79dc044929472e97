"""Rewrites for the compiler's sake: the same tensors, and only where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering_tools import traced
from torch import Tensor

from trainmux.lowering import compare_instead_of_scatter
from trainmux.lowering._rewrites import write_to_whole_tensors

aten = torch.ops.aten


def scatter_into_constant(dim: int, value: float, rest: float) -> Callable[[Tensor, Tensor], Tensor]:
    def function(like: Tensor, index: Tensor) -> Tensor:
        base = aten.full.default(list(like.shape), rest, dtype=like.dtype, device=like.device)
        return aten.scatter.value(base, dim, index, value)

    return function


@settings(max_examples=40, deadline=None, derandomize=True)
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


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 6),
    num_classes=st.integers(2, 7),
    ignored=st.sampled_from([-100, 0, 1]),
    seed=st.integers(0, 100),
)
def test_the_gradient_of_a_cross_entropy(num_rows: int, num_classes: int, ignored: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (num_rows,), generator=generator)
    labels[0] = 1 - max(ignored, 0)  # at least one of them counts
    labels[1::2] = ignored

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, ignore_index=ignored)

    def gradient(x: Tensor, target: Tensor) -> Tensor:
        valid = target != ignored
        kept = torch.where(valid, target, 0).unsqueeze(1)
        base = aten.full.default(list(x.shape), 0, dtype=x.dtype, device=x.device)
        chosen = aten.scatter.value(base, 1, kept, -1.0) * valid.unsqueeze(1) / valid.sum()
        return chosen - x.softmax(1) * chosen.sum(1, keepdim=True)

    module = traced(gradient, logits, labels)
    assert compare_instead_of_scatter(module.graph) == 1
    module.recompile()
    expected = torch.func.grad(loss)(logits)
    torch.testing.assert_close(module(logits, labels), expected, rtol=1e-12, atol=1e-12)


LEFT_ALONE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
    "more than one in a row": (
        scatter_into_constant(1, 1.0, 0.0),
        torch.zeros(3, 5),
        torch.tensor([[0, 1], [2, 3], [4, 4]]),
    ),
    "not in every row": (scatter_into_constant(1, 1.0, 0.0), torch.zeros(3, 5), torch.tensor([[1], [2]])),
    "the base is no constant": (
        lambda like, index: aten.scatter.value(like + 1, 1, index, 2.0),
        torch.zeros(3, 5),
        torch.tensor([[1], [2], [0]]),
    ),
    "values are added": (
        lambda like, index: aten.scatter.value_reduce(
            aten.full.default([3, 5], 1.0, dtype=like.dtype), 1, index, 2.0, reduce="add"
        ),
        torch.zeros(3, 5),
        torch.tensor([[1], [2], [0]]),
    ),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_where_it_is_left_alone(why: str) -> None:
    function, like, index = LEFT_ALONE[why]
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


def expanded(base: Tensor) -> Tensor:
    return aten.expand.default(aten.unsqueeze.default(base * 2, 0), [3, *base.shape])


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_an_expanded_tensor_get_a_copy(write: Write) -> None:
    base, index, rows = torch.randn(4, 2), torch.tensor([0, 3, 1]), torch.randn(3, 3, 2)
    module = traced(lambda *given: write(expanded(given[0]), *given[1:]), base, index, rows)
    assert write_to_whole_tensors(module.graph) == 1
    module.recompile()
    assert torch.equal(module(base, index, rows), write(expanded(base), index, rows))
    (copy,) = module.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert copy.meta["val"].is_contiguous()
    assert write_to_whole_tensors(module.graph) == 0


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_other_tensors_are_left_alone(write: Write) -> None:
    base, index, rows = torch.randn(1, 4, 2), torch.tensor([0, 3, 1]), torch.randn(1, 3, 2)
    module = traced(lambda *given: write(given[0].expand(1, 4, 2) + 1, *given[1:]), base, index, rows)
    assert write_to_whole_tensors(module.graph) == 0
