"""Stacked storage: a member is a plain contiguous slice that starts on an aligned address."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainmux.runtime import ALIGNMENT_BYTES, stacked_strides, stacked_zeros

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)  # named, never used: strides are numbers
shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex128])
limited = settings(max_examples=50, deadline=None, derandomize=True)


@limited
@given(shape=shapes, dtype=dtypes)
def test_members_are_contiguous_and_an_aligned_and_tight_distance_apart(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    member_stride, *inner = stacked_strides(shape, dtype, CPU)
    assert member_stride * dtype.itemsize % ALIGNMENT_BYTES == 0
    assert 0 <= (member_stride - prod(shape)) * dtype.itemsize < ALIGNMENT_BYTES
    assert tuple(inner) == torch.empty(shape, dtype=dtype).stride()
    if len(shape) != 4:
        assert stacked_strides(shape, dtype, CUDA) == (member_stride, *inner)


@limited
@given(shape=st.tuples(*[st.integers(1, 6)] * 4), dtype=dtypes)
def test_on_cuda_the_filters_of_convolutions_have_their_channels_innermost(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    filters = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    member_stride, *inner = stacked_strides(shape, dtype, CUDA)
    assert member_stride == stacked_strides(shape, dtype, CPU)[0]
    strided = torch.empty(shape, dtype=dtype).as_strided(shape, inner)
    assert strided.is_contiguous(memory_format=torch.channels_last)
    assert all(a == b for a, b, size in zip(inner, filters.stride(), shape, strict=True) if size > 1)


@limited
@given(shape=shapes, dtype=dtypes, width=st.integers(1, 5))
@example(shape=(0,), dtype=torch.float32, width=4)
@example(shape=(3, 0, 5), dtype=torch.float32, width=4)
@example(shape=(3,), dtype=torch.float32, width=0)
def test_every_member_is_a_contiguous_view_of_its_own(
    shape: tuple[int, ...], dtype: torch.dtype, width: int
) -> None:
    stacked = stacked_zeros(width, shape, dtype, CPU)
    assert (stacked.shape, stacked.dtype) == ((width, *shape), dtype)
    assert not stacked.any()
    assert all(member.is_contiguous() for member in stacked)
    values = torch.arange(stacked.numel()) % 100
    stacked.copy_(values.view(stacked.shape))
    assert torch.equal(stacked, values.view(stacked.shape).to(dtype)), "expected members not to overlap"
