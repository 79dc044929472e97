"""Convolution in every geometry, forward and backward, against each member alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_tools import Sample, Values, check, model_axis_second, ways_to_stack
from torch import Tensor

aten = torch.ops.aten
ALL = [True] * 3

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


def geometry(
    size: tuple[int, ...] = (5, 4),
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: int = 0,
    **shape: Any,
) -> tuple[Any, ...]:
    """The operator's arguments after its tensors."""
    stride_, padding_, dilation_, output_ = (
        [number] * len(size) for number in (stride, padding, dilation, output_padding)
    )
    return stride_, padding_, dilation_, transposed, output_, groups


def tensors(
    v: Values,
    size: tuple[int, ...] = (5, 4),
    kernel: tuple[int, ...] = (3, 2),
    channels: tuple[int, int] = (4, 6),
    groups: int = 1,
    transposed: bool = False,
    **numbers: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, filters and offsets."""
    first, second = channels if transposed else channels[::-1]
    weight = v.normal(first, second // groups, *kernel)
    return v.normal(2, channels[0], *size), weight, v.normal(channels[1])


def forward_sample(name: str, bias: bool = True) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        x, weight, offset = tensors(v, **SHAPES[name])
        return x, weight, offset if bias else None, *geometry(**SHAPES[name])

    return Sample(aten.convolution.default, make, name, "grouped convolution")


def backward_sample(name: str, mask: list[bool]) -> Sample:
    def make(v: Values) -> tuple[Any, ...]:
        x, weight, offset = tensors(v, **SHAPES[name])
        numbers = geometry(**SHAPES[name])
        grad = v.normal(*aten.convolution(x, weight, offset, *numbers).shape)
        return grad, x, weight, [offset.numel()], *numbers, mask

    return Sample(aten.convolution_backward.default, make, f"{name}, {mask}", "grouped convolution")


@pytest.mark.parametrize("name", SHAPES)
def test_forward_is_each_members_own(name: str) -> None:
    for batched in ways_to_stack(3):
        check(forward_sample(name), 3, batched)
    check(forward_sample(name, bias=False), 2, [True] * 2, model_axis_second)
    check(forward_sample(name), 1, ALL)


@pytest.mark.parametrize("name", SHAPES)
def test_backward_is_each_members_own_for_every_mask(name: str) -> None:
    for mask in ([True, True, True], [True, False, True], [True, True, False]):
        check(backward_sample(name, mask), 3, ALL, model_axis_second)
    for batched in ways_to_stack(3):
        # Images that all members share need no gradient.
        check(backward_sample(name, [batched[1], True, True]), 2, batched)
    for mask in ([True, True, True], [False, True, False]):
        check(backward_sample(name, mask), 1, ALL)


@pytest.mark.parametrize(("width", "how"), [(1, "the member's own convolution"), (6, "grouped convolution")])
def test_any_number_of_members_takes_one_call(width: int, how: str) -> None:
    fused = check(forward_sample("plain"), width, ALL)
    assert [record.how for record in fused.records] == [how]
    targets = [node.target for node in fused.module.graph.nodes]
    assert targets.count(aten.convolution.default) == 1


def test_images_shared_by_all_members_are_not_repeated() -> None:
    graph = check(forward_sample("plain"), 3, [False, True, True]).module.graph
    (call,) = graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert call.args[0].op == "placeholder"
    assert call.args[-1] == 1
