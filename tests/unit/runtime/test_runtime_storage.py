"""Stacked storage: a member is a plain contiguous slice that starts on an aligned address."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.runtime import ALIGNMENT_BYTES, stacked_strides, stacked_zeros

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)  # named, never used: strides are numbers
shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
dtypes = st.sampled_from(
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    ]
)
limited = settings(max_examples=50, deadline=None, derandomize=True)


@limited
@given(shape=shapes, dtype=dtypes)
def test_members_are_an_aligned_and_tight_distance_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    member_bytes = stacked_strides(shape, dtype, CPU)[0] * dtype.itemsize
    assert member_bytes % ALIGNMENT_BYTES == 0
    assert 0 <= member_bytes - prod(shape) * dtype.itemsize < ALIGNMENT_BYTES


@limited
@given(shape=shapes, dtype=dtypes)
def test_a_member_has_the_strides_of_a_contiguous_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert stacked_strides(shape, dtype, CPU)[1:] == torch.empty(shape, dtype=dtype).stride()


@limited
@given(shape=st.tuples(*[st.integers(1, 6)] * 4), dtype=dtypes)
def test_on_cuda_the_filters_of_convolutions_have_their_channels_innermost(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    filters = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    member_stride, *inner = stacked_strides(shape, dtype, CUDA)
    assert member_stride == stacked_strides(shape, dtype, CPU)[0]
    assert (
        torch.empty(shape, dtype=dtype)
        .as_strided(shape, inner)
        .is_contiguous(memory_format=torch.channels_last)
    )
    assert all(a == b for a, b, size in zip(inner, filters.stride(), shape, strict=True) if size > 1)


@limited
@given(shape=shapes.filter(lambda shape: len(shape) != 4), dtype=dtypes)
def test_on_cuda_everything_else_is_in_the_order_of_its_axes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert stacked_strides(shape, dtype, CUDA) == stacked_strides(shape, dtype, CPU)


@limited
@given(shape=shapes, dtype=dtypes, width=st.integers(1, 5))
def test_every_member_is_a_contiguous_aligned_view(
    shape: tuple[int, ...], dtype: torch.dtype, width: int
) -> None:
    stacked = stacked_zeros(width, shape, dtype, CPU)
    assert stacked.shape == (width, *shape)
    assert stacked.dtype == dtype
    assert not stacked.any()
    for member in stacked.unbind():
        assert member.is_contiguous()
        assert (member.data_ptr() - stacked.data_ptr()) % ALIGNMENT_BYTES == 0
        assert member.untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr()


@limited
@given(shape=shapes, width=st.integers(1, 5))
def test_members_do_not_overlap(shape: tuple[int, ...], width: int) -> None:
    stacked = stacked_zeros(width, shape, torch.int64, CPU)
    stacked.copy_(torch.arange(stacked.numel()).view(stacked.shape))
    assert stacked.unique().numel() == stacked.numel()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 5)])
def test_empty_members_are_allowed(shape: tuple[int, ...]) -> None:
    stacked = stacked_zeros(4, shape, torch.float32, CPU)
    assert stacked.shape == (4, *shape)
    assert stacked[2].is_contiguous()


def test_width_zero_is_empty() -> None:
    assert stacked_zeros(0, (3,), torch.float32, CPU).shape == (0, 3)
