"""Which memory a convolution may be written to: what torch would have chosen itself, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from trainmux.engine._into import _has_channels_last, can_write, convolve_into

LAST, FIRST = torch.channels_last, torch.contiguous_format


def tensor(*shape: int, layout: torch.memory_format, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").to(memory_format=layout)


def test_layouts_are_told_apart_as_torch_does() -> None:
    draw = random.Random(0)
    found = []
    for _ in range(1000):
        shape = [draw.choice([1, 1, 2, 3, 4]) for _ in range(4)]
        strides, step = [0] * 4, 1
        for axis in draw.sample(range(4), 4) if draw.random() < 0.5 else (1, 3, 2, 0):
            strides[axis] = step * draw.choice([1, 1, 1, 2])
            step = strides[axis] * shape[axis]
            if shape[axis] == 1 and draw.random() < 0.3:
                strides[axis] = draw.choice([1, shape[1], shape[1] * shape[2] * shape[3]])
        given = torch.empty_strided(shape, strides, device="meta")
        expected = suggest_memory_format(given) is LAST
        assert _has_channels_last(given) is expected, (shape, strides)
        found.append(expected)
    assert 0 < sum(found) < len(found)


@pytest.mark.parametrize(
    ("data", "weight", "dtype", "fitting"),
    [
        (LAST, LAST, torch.float32, LAST),
        (FIRST, LAST, torch.bfloat16, LAST),
        (LAST, FIRST, torch.float32, LAST),
        (FIRST, FIRST, torch.float32, FIRST),
        (LAST, LAST, torch.float64, FIRST),
    ],
)
def test_memory_must_have_the_layout_of_the_result(
    data: torch.memory_format, weight: torch.memory_format, dtype: torch.dtype, fitting: torch.memory_format
) -> None:
    x, w = tensor(2, 4, 8, 8, layout=data, dtype=dtype), tensor(6, 4, 3, 3, layout=weight, dtype=dtype)
    for layout in (LAST, FIRST):
        out = tensor(2, 6, 8, 8, layout=layout, dtype=dtype)
        assert can_write(x, w, out, is_transposed=False) is (layout is fitting)
        assert not can_write(x, w, out, is_transposed=True)


def test_what_else_is_left_alone() -> None:
    x, w = tensor(2, 4, 8, 8, layout=FIRST), tensor(6, 4, 3, 3, layout=FIRST)
    out = tensor(2, 6, 8, 8, layout=FIRST)
    gaps = tensor(2, 6, 8, 16, layout=FIRST)[..., ::2]
    for given in ((x, w.bfloat16(), out), (x[0], w, out[0]), (x, w, out[:0]), (x, w, gaps)):
        assert not can_write(*given, is_transposed=False)
    on_host = torch.zeros(2, 6, 8, 8)
    args = (torch.ones(2, 4, 8, 8), torch.ones(6, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert not convolve_into(args, on_host)
    assert not on_host.any()


def test_the_names_that_are_used_are_there() -> None:
    assert "out" in torch.ops.aten.cudnn_convolution.overloads()
    assert isinstance(torch._C._get_cudnn_allow_tf32(), bool)
    chosen = torch._C._select_conv_backend(
        torch.ones(2, 4, 8, 8), torch.ones(6, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    assert isinstance(chosen.name, str)
    assert hasattr(torch._C._ConvBackend, "Cudnn")
