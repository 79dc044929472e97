"""Pieces that look alike, loops, records, and what cannot be fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_tools import Sample, check, described, single_op, ways_to_stack
from torch import Tensor, fx

from trainmux.errors import FusionError
from trainmux.fusion import _stacked, fuse
from trainmux.tracing import FakeTensorMode, make_fx

aten = torch.ops.aten
MM = Sample(aten.mm.default, lambda v: (v.normal(2, 3), v.normal(3, 4)))


def graph_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return described(make_fx(function)(*[torch.empty(shape) for shape in shapes]))


MASK, OTHER = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([5.0, 5.0, 5.0, 5.0])
# Calls of one operator that differ in something that a cache of traced calls could miss.
ALIKE: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "one value twice": lambda x, y: [aten.mul.Tensor(x, x), aten.mul.Tensor(x, y), aten.mul.Tensor(y, x)],
    "zeros": lambda x, y: [1 / aten.mul.Scalar(x, 0.0), 1 / aten.mul.Scalar(x, -0.0)],
    "number types": lambda x, y: [aten.add.Scalar(x.long(), 1), aten.add.Scalar(x.long(), 1.0)],
    "strides": lambda x, y: [x.clone(), x.t().contiguous().t().clone()],
    "offsets": lambda x, y: [x[:, 1:3] * 3, x[:, :2] * 3],
    "constants": lambda x, y: [x * MASK, y * MASK, x * MASK * OTHER, y * OTHER],
}


@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_are_almost_alike_are_not_taken_for_each_other(name: str) -> None:
    given = torch.arange(24.0).reshape(2, 3, 4) - 7, torch.arange(24.0).reshape(2, 3, 4)
    fused = fuse(graph_of(ALIKE[name], (3, 4), (3, 4)), 2, [True, True])
    for index in range(2):
        expected = ALIKE[name](given[0][index], given[1][index])
        for result, wanted in zip(fused.module(*given), expected, strict=True):
            assert result.dtype == wanted.dtype
            assert torch.equal(result[index], wanted)


LIBRARY = torch.library.Library("trainmux_fusion_test", "DEF")
LIBRARY.define("opaque(Tensor x, Tensor y) -> (Tensor, Tensor)")
LIBRARY.impl("opaque", lambda x, y: (x + y.sum(), x.amax()), "CPU")
torch.library.register_fake(
    "trainmux_fusion_test::opaque", lambda x, y: (torch.empty_like(x), x.new_empty(())), lib=LIBRARY
)


def test_an_operator_that_nobody_knows_is_looped_over_with_a_reason_and_a_place() -> None:
    opaque = torch.ops.trainmux_fusion_test.opaque.default
    for batched in ways_to_stack(2):
        fused = check(Sample(opaque, lambda v: (v.normal(2, 3), v.normal(4))), 3, batched)
        (record,) = fused.records
        assert (record.how, record.fallback) == ("loop", "torch.vmap has no rule for it")
        assert record.locations == (f"{single_op.__code__.co_filename}:1 in forward",)
        assert len(fused.module.graph.find_nodes(op="call_function", target=opaque)) == 3
        for node in fused.module.graph.nodes:  # nothing is left of a failed attempt
            assert node.users or node.op in ("output", "placeholder"), node


def not_an_operator(x: Tensor) -> Tensor:
    return x * 2


def graph_of_a_python_function() -> Any:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = FakeTensorMode().from_tensor(torch.ones(3))
    call = graph.call_function(not_an_operator, (node,))
    call.meta["val"] = node.meta["val"]
    call.meta["stack_trace"] = '  File "model.py", line 12, in forward\n    y = f(x)\n'
    graph.output([call])
    return described(fx.GraphModule(torch.nn.Module(), graph))


def test_what_is_not_an_operator_is_refused_with_its_place_but_runs_at_width_one() -> None:
    with pytest.raises(FusionError) as raised:
        fuse(graph_of_a_python_function(), 2, [True])
    assert "not_an_operator" in (raised.value.op or "")
    assert raised.value.location == "model.py:12 in forward"
    fused = fuse(graph_of_a_python_function(), 1, [True])
    assert fused.records[0].fallback == "not an ATen operator"
    assert fused.module(torch.ones(1, 3))[0].tolist() == [[2.0, 2.0, 2.0]]


def test_what_is_shared_by_all_members_is_computed_once() -> None:
    def run(shared: Tensor, own: Tensor) -> list[Tensor]:
        sines = shared.sin()
        return [sines, sines * own]

    fused = fuse(graph_of(run, (3,), (3,)), 4, [False, True])
    assert [(record.op, record.how) for record in fused.records] == [
        ("aten.sin.default", "shared"),
        ("aten.mul.Tensor", "pointwise"),
    ]
    (sin,) = fused.module.graph.find_nodes(op="call_function", target=aten.sin.default)
    assert sin.meta["val"].shape == (3,)
    x, y = torch.randn(3), torch.randn(4, 3)
    outputs = fused.module(x, y)
    assert torch.equal(outputs[0], x.sin().expand(4, 3))
    assert outputs[0].is_contiguous()
    assert torch.equal(outputs[1], x.sin() * y)
    assert [item.batched for item in fused.inputs] == [False, True]


def test_a_result_of_another_shape_than_the_members_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _stacked.NamedRule("wrong", "wrong", lambda context, op, x, y: _stacked.Stacked(x.tensor))
    monkeypatch.setitem(_stacked._RULES, MM.op, wrong)
    with pytest.raises(FusionError):
        check(MM, 2, [True, True])
