"""Strides of views are those that torch gives them when it runs."""

from __future__ import annotations

import math
import random

import pytest
import torch

from trainmux.profiling._view_strides import view_strides


def random_shape(draw: random.Random, numel: int) -> list[int]:
    """Some shape of so many elements, axes of one among them."""
    shape: list[int] = []
    while numel > 1:
        size = draw.choice([n for n in range(2, numel + 1) if numel % n == 0])
        shape.append(size)
        numel //= size
    for _ in range(draw.randrange(3)):
        shape.insert(draw.randrange(len(shape) + 1), 1)
    draw.shuffle(shape)
    return shape


@pytest.mark.parametrize("seed", range(5))
def test_as_torch_has_them(seed: int) -> None:
    draw = random.Random(seed)
    num_views = 0
    for _ in range(300):
        shape = random_shape(draw, draw.choice([1, 4, 12, 36]))
        order = draw.sample(range(len(shape)), len(shape)) if draw.random() < 0.5 else range(len(shape))
        strides, step = [0] * len(shape), draw.choice([1, 1, 2])
        for axis in reversed(list(order)):
            strides[axis] = draw.choice([1, 7]) if shape[axis] == 1 and draw.random() < 0.5 else step
            step *= shape[axis] * draw.choice([1, 1, 1, 2])
        tensor = torch.empty_strided(shape, strides)
        wanted = random_shape(draw, math.prod(shape))
        try:
            expected = tensor.view(wanted).stride()
        except RuntimeError:
            assert view_strides(shape, strides, wanted) is None
            continue
        num_views += 1
        assert view_strides(shape, strides, wanted) == expected, (shape, strides, wanted)
    assert num_views > 80


def test_nothing_to_look_at() -> None:
    assert view_strides((2, 0), (0, 1), (0,)) is None


def test_filters_of_one_channel_of_two_members() -> None:
    """What a trace has is (9, 1, 3, 1), which is channels last."""
    assert view_strides((2, 16, 1, 3, 3), (144, 9, 1, 3, 1), (32, 1, 3, 3)) == (9, 9, 3, 1)
