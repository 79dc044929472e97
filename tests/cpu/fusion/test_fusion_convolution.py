"""Convolution in every geometry, forward and backward, against each member alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_tools import Sample, Values, check, check_everything, model_axis_second
from torch import Tensor

aten = torch.ops.aten

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2},
    "depthwise, more outputs": {"channels": (4, 8), "groups": 4},
    "one by one, stride": {"kernel": (1, 1), "stride": 2},
    "one by one, groups": {"kernel": (1, 1), "groups": 2},
    "1-d": {"size": (6,), "kernel": (3,)},
    "3-d": {"size": (3, 4, 3), "kernel": (2, 2, 2), "channels": (2, 3)},
    "transposed": {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1},
    "transposed, groups, 1-d": {"size": (6,), "kernel": (3,), "transposed": True, "groups": 2},
}


def arguments(
    v: Values,
    size: tuple[int, ...] = (5, 4),
    kernel: tuple[int, ...] = (3, 2),
    channels: tuple[int, int] = (4, 6),
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: int = 0,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Any, ...]]:
    """Images, filters and offsets; and what the operator takes after its tensors."""
    first, second = channels if transposed else channels[::-1]
    weight = v.normal(first, second // groups, *kernel)
    images, offset = v.normal(2, channels[0], *size), v.normal(channels[1])
    each = [[number] * len(size) for number in (stride, padding, dilation, output_padding)]
    return (images, weight, offset), (*each[:3], transposed, each[3], groups)


def forward_sample(name: str, bias: bool = True) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        (x, weight, offset), numbers = arguments(v, **SHAPES[name])
        return x, weight, offset if bias else None, *numbers

    return Sample(aten.convolution.default, make, name, "grouped convolution")


def backward_sample(name: str, *mask: bool) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        (x, weight, offset), numbers = arguments(v, **SHAPES[name])
        grad = v.normal(*aten.convolution(x, weight, offset, *numbers).shape)
        return grad, x, weight, [offset.numel()], *numbers, list(mask)

    return Sample(aten.convolution_backward.default, make, f"{name}, {mask}", "grouped convolution")


RELATIVES = ("1-d", "one by one, groups")
"""Shapes of which others have each part."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extensive] * (name in RELATIVES)) for name in SHAPES]
)
def test_a_convolution_is_each_members_own(name: str) -> None:
    everything = (forward_sample(name), backward_sample(name, True, True, True))
    for sample in (*everything, backward_sample(name, False, True, False)):
        check_everything(sample)
    for sample in everything:
        check(sample, 1, [True] * 3)
    check(forward_sample(name, bias=False), 2, [True] * 2, model_axis_second)
    for mask in ((True, False, True), (True, True, False)):
        check(backward_sample(name, *mask), 3, [True] * 3, model_axis_second)


def test_any_number_of_members_takes_one_call_and_shared_images_are_not_repeated() -> None:
    ways = [(1, True, "the member's own convolution"), (6, True, "grouped convolution")]
    for width, is_own, how in (*ways, (3, False, "grouped convolution")):
        fused = check(forward_sample("plain"), width, [is_own, True, True])
        assert [record.how for record in fused.records] == [how]
        (call,) = fused.module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert call.args[0].op == "placeholder"
    assert call.args[-1] == 1
