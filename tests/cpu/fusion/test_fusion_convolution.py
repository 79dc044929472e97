"""Convolution in every geometry, forward and backward, against each member alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fusion_tools import Sample, Values, batched_combinations, check_fused, check_rule, make_case
from torch import Tensor

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


every_shape = pytest.mark.parametrize("name", SHAPES)


def forward_sample(name: str, bias: bool) -> Sample:
    shape = SHAPES[name]

    def make(v: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight, offset = shape.tensors(v)
        return (x, weight, offset if bias else None, *shape.arguments()), {}

    return Sample(aten.convolution.default, make, name)


def backward_sample(name: str, mask: list[bool]) -> Sample:
    shape = SHAPES[name]

    def make(v: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight, offset = shape.tensors(v)
        out = aten.convolution(x, weight, offset, *shape.arguments())
        sizes = [offset.numel()]
        return (v.normal(*out.shape), x, weight, sizes, *shape.arguments(), mask), {}

    return Sample(aten.convolution_backward.default, make, f"{name}, {mask}")


@every_shape
def test_forward_is_each_members_own(name: str) -> None:
    for bias in (True, False):
        given = forward_sample(name, bias)
        for batched in batched_combinations(3 if bias else 2):
            assert check_rule(make_case(given, 3, batched))


@every_shape
def test_one_member_alone(name: str) -> None:
    for batched in batched_combinations(3):
        assert check_rule(make_case(forward_sample(name, True), 1, batched))
    for mask in MASKS:
        assert check_rule(make_case(backward_sample(name, mask), 1, [True] * 3))


@every_shape
def test_backward_is_each_members_own_for_every_mask(name: str) -> None:
    for mask in MASKS:
        assert check_rule(make_case(backward_sample(name, mask), 3, [True] * 3))
    for batched in batched_combinations(3):
        mask = [batched[1], True, True]  # images that all members share need no gradient
        assert check_rule(make_case(backward_sample(name, mask), 2, batched))


@pytest.mark.parametrize("name", ["plain", "one by one", "depthwise", "transposed", "1-d"])
def test_the_same_through_a_fused_graph(name: str) -> None:
    for batched in ([True, True, True], [False, True, True]):
        fused = check_fused(make_case(forward_sample(name, True), 3, batched))
        assert [record.how for record in fused.records] == ["grouped convolution"]
        mask = [batched[0], True, True]
        check_fused(make_case(backward_sample(name, mask), 3, [True, *batched[:2]]))


@pytest.mark.parametrize(
    ("width", "how"),
    [(1, "the member's own convolution"), (2, "grouped convolution"), (6, "grouped convolution")],
)
def test_any_number_of_members_takes_one_call(width: int, how: str) -> None:
    fused = check_fused(make_case(forward_sample("plain", True), width, [True] * 3))
    assert [record.how for record in fused.records] == [how]
    targets = [node.target for node in fused.module.graph.nodes]
    assert targets.count(aten.convolution.default) == 1


def test_images_shared_by_all_members_are_not_repeated() -> None:
    case = make_case(forward_sample("plain", True), 3, [False, True, True])
    graph = check_fused(case).module.graph
    (call,) = [node for node in graph.nodes if node.target == aten.convolution.default]
    assert call.args[0].op == "placeholder"
    assert call.args[-1] == 1
