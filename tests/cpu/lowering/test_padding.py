"""Products of unaligned size, extended with zeros: the same numbers, and only where there is room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.workloads import Workload
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering_tools import assert_close, example_of, traced
from torch import Tensor, fx, nn

from trainmux.lowering import KernelCache, _kinds, _padding, lower
from trainmux.lowering._padding import extended_product, pad_unaligned

aten = torch.ops.aten
VOCABULARY = 301


@pytest.fixture(autouse=True)
def everything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes are extended too, and small values are not kept inline."""
    monkeypatch.setattr(_padding, "_MIN_SIZE", 2)
    monkeypatch.setattr(_kinds, "SMALL_BYTES", 0)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(seed: int, _: torch.dtype) -> Tensor:
    return torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(seed))


def extended_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if "extended" in node.meta]


@pytest.mark.parametrize(("precision", "step", "bound"), [("fp32", 4, 1e-6), ("bf16", 8, 1e-2)])
def test_the_products_of_an_odd_vocabulary_are_extended(precision: str, step: int, bound: float) -> None:
    case = example_of(Workload("language", build, loss, batch), precision)
    found = extended_nodes(case.source)
    # Not the logits themselves: they read the weight, and there is no room around an input.
    assert found
    for node in found:
        left, right = node.meta["extended"]
        assert left[1] == right[0]
        assert all(size % step == 0 for size in (*left, *right) if size > 8)
        assert VOCABULARY not in (*left, *right)
    assert any(node.target is extended_product for node in case.lowered.module.graph.nodes)
    assert_close(case.run(case.lowered.module), case.run(case.whole), bound)


# ---- graphs by hand ------------------------------------------------------------------------------------


def padded_graph(function: Callable[..., Any], *tensors: Tensor) -> fx.Graph:
    graph = traced(function, *tensors).graph
    pad_unaligned(graph)
    return graph


def check_same(function: Callable[..., Any], *tensors: Tensor, bound: float = 1e-5) -> None:
    """Lowered, with room or without, it gives what it gave."""
    result = lower(traced(function, *tensors), KernelCache()).module(*tensors)
    expected = function(*tensors)
    torch.testing.assert_close(result, expected, rtol=bound, atol=bound)


def product_of_relus(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.relu(), b.relu()).sin()


def test_operands_lie_in_room_and_keep_their_shape() -> None:
    graph = padded_graph(product_of_relus, torch.zeros(6, 7), torch.zeros(7, 9))
    (product,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    nodes = (*product.args, product)
    assert [node.meta.get("padded") for node in nodes] == [(8, 8), (8, 12), None]
    assert [node.meta["val"].shape for node in nodes] == [(6, 7), (7, 9), (6, 9)]
    assert [node.meta["val"].stride() for node in nodes] == [(8, 1), (12, 1), (12, 1)]
    assert product.meta["extended"] == ((8, 8), (8, 12))


def test_a_sum_with_a_product_is_taken_apart() -> None:
    def function(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(bias, a.relu(), b.relu()) * 2

    tensors = (torch.randn(9), torch.randn(8, 8), torch.randn(8, 9))
    graph = padded_graph(function, *tensors)
    assert not graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert len(extended_nodes(graph)) == 1
    check_same(function, *tensors)


NOT_EXTENDED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "aligned": (product_of_relus, (torch.zeros(8, 8), torch.zeros(8, 12))),
    "fp64": (product_of_relus, (torch.zeros(6, 7).double(), torch.zeros(7, 9).double())),
    "an operand is an input": (lambda a, b: torch.mm(a, b.relu()), (torch.zeros(8, 7), torch.zeros(7, 8))),
    "an operand is a view of an input": (
        lambda a, b: torch.mm(a.t(), b.relu()),
        (torch.zeros(7, 8), torch.zeros(7, 8)),
    ),
    "a view needs an operand to be dense": (
        lambda a, b: (lambda hidden: torch.mm(hidden, b.relu()) + hidden.view(-1)[:9])(a.relu()),
        (torch.zeros(6, 7), torch.zeros(7, 9)),
    ),
    "an operand comes from a library": (
        lambda a, b: torch.mm(torch.mm(a, a), b.relu()),
        (torch.zeros(7, 7), torch.zeros(7, 8)),
    ),
}


@pytest.mark.parametrize("why", NOT_EXTENDED)
def test_where_it_does_not_apply(why: str) -> None:
    function, tensors = NOT_EXTENDED[why]
    assert not extended_nodes(padded_graph(function, *tensors))
    check_same(function, *(torch.randn(t.shape, dtype=t.dtype) for t in tensors))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(sizes=st.tuples(*[st.integers(2, 11)] * 3), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_lowered_products_of_any_size(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, columns = sizes
    a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
    check_same(product_of_relus, a, b, bound=1e-5 if dtype == torch.float32 else 2e-2)
