"""Convolution in every strategy and geometry, forward and backward, against each member alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fusion_tools import Sample, Values, batched_combinations, check_fused, check_rule, make_case
from torch import Tensor

from trainmux.fusion import CONVOLUTION_STRATEGIES
from trainmux.fusion._stacked import Context, Stacked
from trainmux.fusion.rules.convolution import CONVOLUTION
from trainmux.fusion.strategies.convolution_each import convolution_each, convolution_each_backward

aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """A convolution of one member: channels, sizes and numbers."""

    size: tuple[int, ...] = (5, 4)
    kernel: tuple[int, ...] = (3, 2)
    channels: tuple[int, int] = (4, 6)
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0

    def arguments(self) -> tuple[Any, ...]:
        rank = len(self.size)
        return (
            [self.stride] * rank,
            [self.padding] * rank,
            [self.dilation] * rank,
            self.transposed,
            [self.output_padding] * rank,
            self.groups,
        )

    def tensors(self, v: Values) -> tuple[Tensor, Tensor, Tensor]:
        inputs, outputs = self.channels
        first, second = (inputs, outputs) if self.transposed else (outputs, inputs)
        weight = v.normal(first, second // self.groups, *self.kernel)
        return v.normal(2, inputs, *self.size), weight, v.normal(outputs)


SHAPES = {
    "plain": Shape(),
    "stride": Shape(stride=2),
    "padding": Shape(padding=1),
    "dilation": Shape(padding=2, dilation=2),
    "everything": Shape(stride=2, padding=2, dilation=2, groups=2),
    "groups": Shape(groups=2),
    "depthwise": Shape(channels=(4, 4), groups=4),
    "depthwise, more outputs": Shape(channels=(4, 8), groups=4),
    "one by one": Shape(kernel=(1, 1)),
    "one by one, stride": Shape(kernel=(1, 1), stride=2),
    "one by one, padding": Shape(kernel=(1, 1), padding=1),
    "one by one, groups": Shape(kernel=(1, 1), groups=2),
    "one channel": Shape(channels=(1, 1)),
    "1-d": Shape(size=(6,), kernel=(3,)),
    "1-d, one": Shape(size=(6,), kernel=(1,)),
    "3-d": Shape(size=(3, 4, 3), kernel=(2, 2, 2), channels=(2, 3)),
    "3-d, one": Shape(size=(2, 3, 2), kernel=(1, 1, 1), channels=(2, 3)),
    "transposed": Shape(transposed=True),
    "transposed, stride": Shape(transposed=True, stride=2, padding=1, output_padding=1),
    "transposed, groups": Shape(transposed=True, groups=2),
    "transposed, one by one": Shape(transposed=True, kernel=(1, 1)),
    "transposed, 1-d": Shape(size=(6,), kernel=(3,), transposed=True, stride=2),
    "transposed, 3-d": Shape(size=(2, 3, 2), kernel=(2, 2, 2), channels=(2, 3), transposed=True),
}
MASKS = [list(mask) for mask in itertools.product((True, False), repeat=3) if any(mask)]


def ways(name: str, width: int) -> list[str]:
    """The ways that fit a convolution of that shape."""
    x, weight, _ = SHAPES[name].tensors(Values(0))
    context = Context(width, torch.device("cpu"), None)
    args = (x, Stacked(weight.expand(width, *weight.shape)), None, *SHAPES[name].arguments())
    return [way.name for way in CONVOLUTION.candidates(context, aten.convolution.default, args, {})]


every_way_for_several = pytest.mark.parametrize(
    ("name", "strategy"), [(name, way) for name in SHAPES for way in ways(name, 3)]
)
every_way_for_one = pytest.mark.parametrize(
    ("name", "strategy"), [(name, way) for name in SHAPES for way in ways(name, 1)]
)


def forward_sample(name: str, strategy: str, bias: bool) -> Sample:
    shape = SHAPES[name]

    def make(v: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight, offset = shape.tensors(v)
        return (x, weight, offset if bias else None, *shape.arguments()), {}

    return Sample(aten.convolution.default, make, f"{name}, {strategy}", strategies={"convolution": strategy})


def backward_sample(name: str, strategy: str, mask: list[bool]) -> Sample:
    shape = SHAPES[name]

    def make(v: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight, offset = shape.tensors(v)
        out = aten.convolution(x, weight, offset, *shape.arguments())
        sizes = [offset.numel()]
        return (v.normal(*out.shape), x, weight, sizes, *shape.arguments(), mask), {}

    label = f"{name}, {strategy}, {mask}"
    return Sample(aten.convolution_backward.default, make, label, strategies={"convolution": strategy})


@every_way_for_several
def test_forward_is_each_members_own(name: str, strategy: str) -> None:
    for bias in (True, False):
        given = forward_sample(name, strategy, bias)
        for batched in batched_combinations(3 if bias else 2):
            assert check_rule(make_case(given, 3, batched))


@every_way_for_one
def test_one_member_alone(name: str, strategy: str) -> None:
    for batched in batched_combinations(3):
        assert check_rule(make_case(forward_sample(name, strategy, True), 1, batched))
    for mask in MASKS:
        assert check_rule(make_case(backward_sample(name, strategy, mask), 1, [True] * 3))


@every_way_for_several
def test_backward_is_each_members_own_for_every_mask(name: str, strategy: str) -> None:
    for mask in MASKS:
        assert check_rule(make_case(backward_sample(name, strategy, mask), 3, [True] * 3))
    for batched in batched_combinations(3):
        mask = [batched[1], True, True]  # images that all members share need no gradient
        assert check_rule(make_case(backward_sample(name, strategy, mask), 2, batched))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        (name, way)
        for name in ("plain", "one by one", "depthwise", "transposed", "1-d")
        for way in ways(name, 3)
    ],
)
def test_the_same_through_a_fused_graph(name: str, strategy: str) -> None:
    (how,) = [way.how for way in CONVOLUTION.ways if way.name == strategy and not way.single]
    for batched in ([True, True, True], [False, True, True]):
        fused = check_fused(make_case(forward_sample(name, strategy, True), 3, batched))
        assert [record.how for record in fused.records] == [how]
        mask = [batched[0], True, True]
        check_fused(make_case(backward_sample(name, strategy, mask), 3, [True, *batched[:2]]))


def calls(name: str, strategy: str, width: int = 3) -> list[str]:
    case = make_case(forward_sample(name, strategy, True), width, [True] * 3)
    graph = check_fused(case).module.graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_each_strategy_does_what_its_name_says() -> None:
    assert calls("one by one", "grouped").count("aten.convolution.default") == 1
    assert calls("one by one", "separate").count("trainmux.convolution_each.default") == 1
    assert "aten.bmm.default" in calls("one by one", "bmm")
    assert not any("convolution" in call for call in calls("one by one", "bmm"))


@pytest.mark.parametrize("strategy", CONVOLUTION_STRATEGIES)
def test_the_graph_does_not_grow_with_the_width(strategy: str) -> None:
    assert len(calls("one by one", strategy, 2)) == len(calls("one by one", strategy, 6))


def test_a_strategy_that_does_not_fit_gives_way() -> None:
    for name in ("plain", "one by one, stride", "one by one, groups", "transposed, one by one"):
        assert calls(name, "bmm") == calls(name, "grouped")


def test_no_strategy_named_is_the_default() -> None:
    given = forward_sample("plain", "grouped", True)
    unnamed = Sample(given.op, given.make, "no strategy")
    fused = check_fused(make_case(unnamed, 2, [True] * 3))
    assert [str(n.target) for n in fused.module.graph.nodes if n.op == "call_function"] == calls(
        "plain", "grouped", 2
    )


def test_images_shared_by_all_members_are_not_repeated() -> None:
    case = make_case(forward_sample("plain", "grouped", True), 3, [False, True, True])
    graph = check_fused(case).module.graph
    (call,) = [node for node in graph.nodes if node.target == aten.convolution.default]
    assert call.args[0].op == "placeholder"
    assert call.args[-1] == 1


@pytest.mark.parametrize("name", ["plain", "transposed", "1-d", "depthwise"])
def test_the_operators_of_our_own_keep_their_contract(name: str) -> None:
    shape, v = SHAPES[name], Values(0)
    x, weight, bias = (torch.stack([t, t + 1]) for t in shape.tensors(v))
    tests = ("test_schema", "test_faketensor")
    for innermost in {False, x.dim() == 5}:
        args = (x, weight, bias, *shape.arguments(), innermost)
        torch.library.opcheck(convolution_each, args, test_utils=tests)
        out = convolution_each(*args)
        for mask in ([True, True, True], [False, True, False]):
            args = (out, x, weight, [bias.shape[1]], *shape.arguments(), mask, innermost)
            torch.library.opcheck(convolution_each_backward, args, test_utils=tests)
