"""Every way of a table gives what members compute alone, and the fastest one reaches the fused graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fusion_tools import (
    Sample,
    Values,
    batched_combinations,
    check_fused,
    check_rule,
    contiguous,
    make_case,
    sample,
    single_op,
)
from torch import Tensor

from trainmux.fusion import fuse
from trainmux.fusion._stacked import Context, Stacked, find_rule
from trainmux.fusion.rules.matmul import MATMUL
from trainmux.fusion.rules.normalisation import BATCH_NORM
from trainmux.fusion.strategies import (
    MEASURED,
    HostClock,
    OperatorTimes,
    Partition,
    library_calls,
    partition_time,
)
from trainmux.fusion.strategies._torch_modes import real_tensors
from trainmux.fusion.strategies.matmul_ways import mm_each
from trainmux.tracing import FakeTensorMode, make_fx

aten = torch.ops.aten
CPU = torch.device("cpu")


class NthIsFastest:
    """A clock by which the n-th candidate of every question is the fastest. It does the work all the same."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._asked = 0

    def glance(self, branches: Sequence[Callable[[], Any]]) -> float:
        self._asked = 0
        return 1.0

    def seconds(self, branches: Sequence[Callable[[], Any]]) -> float:
        for work in branches:
            work()
        self._asked += 1
        return 0.1 if self._asked - 1 == self._number else 1.0


# ---- matrix products -------------------------------------------------------------------------------------


def product(way: str) -> Sample:
    # Sizes are multiples of 16 bytes, so that every way fits.
    return sample(
        aten.mm.default, lambda v: (v.normal(4, 6), v.normal(2, 6).t()), way, strategies={"matmul": way}
    )


def sum_and_product(way: str, beta: float, alpha: float) -> Sample:
    def make(v: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (v.normal(2), v.normal(4, 6), v.normal(2, 6).t()), {"beta": beta, "alpha": alpha}

    label = f"{way} beta {beta} alpha {alpha}"
    return Sample(aten.addmm.default, make, label, strategies={"matmul": way})


def as_stored(members: Sequence[Tensor]) -> Tensor:
    """Matrices of which a layer multiplies the transposed ones, one after another."""
    if members[0].dim() == 1:
        return torch.stack(list(members))
    return torch.stack([member.t() for member in members]).transpose(1, 2)


@pytest.mark.parametrize("way", MATMUL.names)
def test_products(way: str) -> None:
    for layout in (contiguous, as_stored):
        for batched in batched_combinations(2):
            assert check_rule(make_case(product(way), 3, batched, layout))
        for beta, alpha in ((1, 1), (0.5, 2), (0, 1)):
            for batched in batched_combinations(3):
                assert check_rule(make_case(sum_and_product(way, beta, alpha), 3, batched, layout))


def how_of(given: Sample, batched: Sequence[bool]) -> list[str]:
    return [record.how for record in check_fused(make_case(given, 3, batched, as_stored)).records]


def test_each_product_is_fused_as_asked_where_that_fits() -> None:
    assert how_of(product("bmm"), [True, True]) == ["bmm"]
    assert how_of(product("separate"), [True, True]) == ["one product per member"]
    assert how_of(product("wide"), [False, True]) == ["one wide product over shared rows"]
    assert how_of(product("wide"), [True, True]) == ["bmm"]  # there are no shared rows
    odd = sample(
        aten.mm.default, lambda v: (v.normal(4, 5), v.normal(5, 2)), "odd", strategies={"matmul": "separate"}
    )
    assert how_of(odd, [True, True]) == ["bmm"]  # lowering extends a plain product


def test_one_product_per_member_keeps_its_contract() -> None:
    a, b = torch.randn(3, 4, 6), torch.randn(3, 2, 6).transpose(1, 2)
    torch.library.opcheck(mm_each, (a, b), test_utils=("test_schema", "test_faketensor"))
    torch.testing.assert_close(mm_each(a, b), torch.bmm(a, b))


# ---- batch norm ------------------------------------------------------------------------------------------


def batch_norm(way: str, affine: bool, size: tuple[int, ...]) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        vectors = (v.normal(2), v.normal(2)) if affine else (None, None)
        return (v.normal(3, 2, *size), *vectors, v.normal(2), v.positive(2), True, 0.3, 1e-3)

    op = aten._native_batch_norm_legit_functional.default
    return sample(op, make, f"{way} affine {affine} {size}", strategies={"batch_norm": way})


def batch_norm_backward(way: str, affine: bool, mask: list[bool]) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        grad, x, weight = v.normal(3, 2, 4, 2), v.normal(3, 2, 4, 2), v.normal(2) if affine else None
        mean, scale = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-3).rsqrt()
        return (grad, x, weight, v.normal(2), v.positive(2), mean, scale, True, 1e-3, mask)

    op = aten.native_batch_norm_backward.default
    return sample(op, make, f"{way} affine {affine} {mask}", strategies={"batch_norm": way})


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("way", BATCH_NORM.names)
def test_batch_norm(way: str, affine: bool) -> None:
    for size in ((4, 2), (5,), ()):
        given = batch_norm(way, affine, size)
        for batched in batched_combinations(5 if affine else 3):
            assert check_rule(make_case(given, 3, batched))
    for mask in ([True, affine, affine], [True, False, False], [False, affine, affine]):
        given = batch_norm_backward(way, affine, mask)
        assert check_rule(make_case(given, 3, [True] * (7 if affine else 6)))
    (how,) = [way_.how for way_ in BATCH_NORM.ways if way_.name == way]
    fused = check_fused(make_case(batch_norm(way, affine, (4, 2)), 3, [True] * (5 if affine else 3)))
    assert [record.how for record in fused.records] == [how]


def test_half_precision_is_normalised_in_single_precision() -> None:
    v = Values(3)
    x = (v.normal(2, 3, 2, 4, 4) * 3 + 200).to(torch.bfloat16)
    vectors = [Stacked(v.positive(2, 2).float()) for _ in range(4)]
    op = aten._native_batch_norm_legit_functional.default
    results = {}
    for way in BATCH_NORM.names:
        value = op(x[0], *(vector.tensor[0] for vector in vectors), True, 0.1, 1e-5)
        context = Context(2, CPU, value, {"batch_norm": way})
        rule = find_rule(op)
        assert rule is not None
        results[way] = rule.apply(context, op, Stacked(x), *vectors, True, 0.1, 1e-5)
    for ours, torchs in zip(results["own_axes"], results["fold"], strict=True):
        assert ours.tensor.dtype == torchs.tensor.dtype
        torch.testing.assert_close(ours.tensor, torchs.tensor, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("compiles", "side_by_side", "expected"),
    [(True, False, "own_axes"), (True, True, "fold"), (False, True, "fold")],
)
def test_compiled_batch_norm_never_copies(compiles: bool, side_by_side: bool, expected: str) -> None:
    x = torch.empty(3, 2, 4, 5, 5)
    if side_by_side:
        x = torch.empty(2, 3, 4, 5, 5).transpose(0, 1)
    vectors = [Stacked(torch.ones(3, 4))] * 4
    times = OperatorTimes(CPU, None, NthIsFastest(0))
    context = Context(3, CPU, None, {"batch_norm": MEASURED}, times, compiles)
    op = aten._native_batch_norm_legit_functional.default
    choice = BATCH_NORM.choose(context, op, (Stacked(x), *vectors, True, 0.1, 1e-5), {})
    assert choice.way.name == expected
    assert times.num_measured == 0


# ---- measuring while a graph is written ------------------------------------------------------------------


def test_tensors_are_real_while_a_graph_is_traced() -> None:
    seen: list[Tensor] = []

    def traced(x: Tensor) -> Tensor:
        with real_tensors():
            seen.append(torch.ones(2) + 1)
        return x + 1

    with FakeTensorMode():
        x = torch.empty(3)
        graph = make_fx(traced)(x).graph
    assert type(seen[0]) is Tensor
    assert seen[0].tolist() == [2.0, 2.0]
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["aten.add.Tensor"]


@pytest.mark.parametrize("number", range(4))
def test_the_fastest_way_is_written_into_the_graph(number: int) -> None:
    weight = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    images = torch.randn(2, 4, 3, 6, 6, dtype=torch.float64)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    traced = single_op(aten.convolution.default, ((images[0], weight, None, *settings), {}))
    times = OperatorTimes(CPU, None, NthIsFastest(number))
    fused = fuse(traced, 2, [True, True], strategies={"convolution": MEASURED}, times=times)
    names = ["grouped convolution", "grouped convolution, channels innermost"]
    names += ["one convolution per member", "one convolution per member, channels innermost"]
    assert [record.how for record in fused.records] == [f"{names[number]} (measured)"]
    assert times.num_measured == 4
    weights = torch.stack([weight, weight + 1])
    (out,) = fused.module(images, weights)
    for index in range(2):
        expected = aten.convolution(images[index], weights[index], None, *settings)
        torch.testing.assert_close(out[index], expected)


def test_the_host_clock_takes_the_median_of_what_it_warmed_up() -> None:
    runs: list[str] = []
    taken = HostClock().seconds([lambda: runs.append("a"), lambda: runs.append("b")])
    assert taken > 0
    assert runs == ["a", "b"] * 6


# ---- partitions ------------------------------------------------------------------------------------------


def small_step() -> Any:
    """A convolution of images that members share, its result once more, and a product of what is left."""

    def step(images: Tensor, first: Tensor, second: Tensor, head: Tensor) -> list[Tensor]:
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        hidden = aten.convolution(images, first, None, *settings)
        hidden = aten.convolution(hidden.relu(), second, None, *settings)
        return [aten.mm(hidden.mean((2, 3)), head), aten.mm(images.mean((2, 3)), images.mean((2, 3)).t())]

    with FakeTensorMode():
        shapes = ((4, 3, 6, 6), (4, 3, 3, 3), (4, 4, 3, 3), (4, 2))
        return make_fx(step)(*(torch.empty(shape) for shape in shapes))


def test_library_calls_are_those_that_depend_on_the_member() -> None:
    calls = library_calls(small_step(), [False, True, True, True])
    assert [call.op for call in calls] == [aten.convolution.default] * 2 + [aten.mm.default]
    assert [isinstance(call.args[0], Stacked) for call in calls] == [False, True, True]


@pytest.mark.parametrize(("width", "branches", "num_arrays"), [(1, 4, 8), (2, 4, 4), (8, 1, 1), (2, 1, 2)])
def test_a_partition_is_timed_per_member(width: int, branches: int, num_arrays: int) -> None:
    """With a clock that counts calls: each member's share of the arrays that were run."""
    arrays: list[int] = []

    class Counting:
        def glance(self, works: Sequence[Callable[[], Any]]) -> float:
            return 1.0

        def seconds(self, works: Sequence[Callable[[], Any]]) -> float:
            for work in works:
                work()
            arrays.append(len(works))
            return 6.0

    calls = library_calls(small_step(), [False, True, True, True])
    times = OperatorTimes(CPU, None, Counting())
    taken = partition_time(calls, 8, Partition(width, branches), {}, times)
    assert taken == 6.0 / (num_arrays * width)
    assert arrays == [min(branches, num_arrays)] * (1 if width == 1 else 2)  # in one layout, or in both
    assert partition_time(calls, 8, Partition(width, branches), {}, times.without_measuring()) == taken
