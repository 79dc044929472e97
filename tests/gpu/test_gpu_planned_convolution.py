"""Convolutions write to given memory: the bits of ``aten.convolution``, nothing allocated, nothing copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainmux.engine._into import convolve_into
from trainmux.runtime import deterministic_algorithms

aten = torch.ops.aten

SHAPES = {
    # By name: images, filters, stride, padding, groups.
    "3x3": ((8, 64, 28, 28), (64, 64, 3, 3), 1, 1, 1),
    "1x1": ((8, 256, 14, 14), (64, 256, 1, 1), 1, 0, 1),
    "strided 7x7": ((8, 3, 64, 64), (64, 3, 7, 7), 2, 3, 1),
    "grouped": ((8, 64, 14, 14), (128, 16, 3, 3), 1, 1, 4),
}
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def arguments(name: str, layout: str, dtype: torch.dtype, *, with_bias: bool) -> list[object]:
    images, filters, stride, padding, groups = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    data = draw(*images).to(memory_format=LAYOUTS[layout])
    weight = draw(*filters).to(memory_format=LAYOUTS[layout])
    bias = draw(filters[0]) if with_bias else None
    return [data, weight, bias, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups]


def profiled(work: Callable[[], object]) -> tuple[Counter[str], int]:
    """What is called, and how many bytes are allocated on the device."""
    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        work()
    allocated = torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before
    return Counter(event.name for event in seen.events()), allocated


@pytest.mark.parametrize(
    ("dtype", "with_bias"), [(torch.float32, False), (torch.bfloat16, True)], ids=["fp32", "bf16 bias"]
)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", list(SHAPES))
def test_the_same_bits_without_a_copy(name: str, layout: str, dtype: torch.dtype, with_bias: bool) -> None:
    given = arguments(name, layout, dtype, with_bias=with_bias)
    with deterministic_algorithms(True):
        expected = aten.convolution(*given)
        out = torch.full_like(expected, torch.nan)
        assert convolve_into(given, out)
        assert torch.equal(out, expected)
        calls, allocated = profiled(lambda: convolve_into(given, out))
        plain_calls, plain_allocated = profiled(lambda: aten.convolution(*given))
    assert calls["aten::cudnn_convolution"] == plain_calls["aten::cudnn_convolution"] == 1
    assert calls["aten::copy_"] == 0
    assert plain_allocated - allocated >= out.nbytes


def test_memory_of_another_layout_is_left_alone() -> None:
    given = arguments("3x3", "channels_last", torch.float32, with_bias=False)
    out = torch.full_like(aten.convolution(*given), torch.nan, memory_format=torch.contiguous_format)
    assert not convolve_into(given, out)
    assert out.isnan().all()
