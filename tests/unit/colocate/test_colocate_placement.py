"""The stack of feature maps: order, heights, regions, lifespans; and the cuts between segments."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.colocate import (
    COARSE_TRACKING_BYTES,
    EVERY_KERNEL,
    FINE_TRACKING_BYTES,
    PER_TENSOR,
    REGION_BYTES,
    SMALL_REGION_BYTES,
    Allocation,
    Iteration,
    Lifespan,
    Region,
    StackOrder,
    TensorClass,
    cut_segments,
    demand_of_iteration,
    stack_feature_maps,
)
from trainmux.colocate._placement import _holes_below, region_bytes_for
from trainmux.errors import ConfigError

MIB = 1 << 20


def feature_map(name: str, size: int, first: int, last: int) -> Allocation:
    return Allocation(name, size, first, last, TensorClass.FEATURE_MAP)


def three_layers(size: int = 64 * MIB) -> Iteration:
    """Forward kernels 0-2 make a map each, backward kernels 3-5 use them in reverse."""
    rows = tuple(feature_map(f"f{layer}", size, layer, 5 - layer) for layer in range(3))
    return Iteration("three", (1.0, 1.0, 1.0, 2.0, 2.0, 2.0), rows)


def test_the_paper_s_numbers() -> None:
    assert (REGION_BYTES, SMALL_REGION_BYTES) == (64 * MIB, 512 * 1024)
    assert (FINE_TRACKING_BYTES, COARSE_TRACKING_BYTES) == (8 * MIB, 256 * MIB)


def test_what_is_used_last_lies_at_the_base_and_heights_rise_and_fall() -> None:
    stack = stack_feature_maps(three_layers())
    assert stack.offsets == (0, 64 * MIB, 128 * MIB)
    assert [height // (64 * MIB) for height in stack.kernel_heights] == [1, 2, 3, 3, 2, 1]
    assert [hold // (64 * MIB) for hold in stack.holds] == [1, 2, 3, 2, 1, 0]
    assert stack.regions() == tuple(Region(i * 64 * MIB, 64 * MIB, i, 5 - i) for i in range(3))
    assert stack.lifespans(three_layers().kernel_seconds) == (
        Lifespan(0.0, 9.0),
        Lifespan(1.0, 7.0),
        Lifespan(2.0, 5.0),
    )


def test_regions_hold_many_small_tensors_and_tensors_may_span_regions() -> None:
    iteration = three_layers(size=40 * MIB)
    stack = stack_feature_maps(iteration)
    assert stack.extent_bytes == 120 * MIB
    assert [height // (64 * MIB) for height in stack.kernel_heights] == [1, 2, 2, 2, 2, 1]
    assert stack.regions() == (Region(0, 64 * MIB, 0, 5), Region(64 * MIB, 64 * MIB, 1, 4))
    fine = stack_feature_maps(iteration, region_bytes=SMALL_REGION_BYTES)
    assert [height // (40 * MIB) for height in fine.kernel_heights] == [1, 2, 3, 3, 2, 1]
    single = stack_feature_maps(iteration, region_bytes=PER_TENSOR)
    assert [region.size_bytes for region in single.regions()] == [40 * MIB] * 3


def test_a_small_tensor_of_the_first_kernels_is_not_the_top_of_all() -> None:
    """A bias of the last layer in another precision: there from the first kernel on, used first on the way
    back."""
    plain = three_layers(size=60 * MIB)
    bias = feature_map("bias", 1280, 0, 3)
    iteration = Iteration("biased", plain.kernel_seconds, (*plain.feature_maps, bias))
    stack = stack_feature_maps(iteration, region_bytes=PER_TENSOR)
    assert stack.offsets[-1] == 0
    assert stack.extent_bytes == 3 * 60 * MIB + 1536
    assert [height - 1536 for height in stack.kernel_heights] == [
        number * 60 * MIB for number in (1, 2, 3, 3, 2, 1)
    ]
    coarse = stack_feature_maps(iteration, region_bytes=SMALL_REGION_BYTES)
    assert [height // (60 * MIB) for height in coarse.kernel_heights] == [1, 2, 3, 3, 2, 1]


def test_a_large_tensor_of_the_first_kernels_is_left_where_its_memory_comes_back() -> None:
    plain = three_layers()
    large = feature_map("large", 128 * MIB, 0, 3)
    stack = stack_feature_maps(Iteration("large", plain.kernel_seconds, (*plain.feature_maps, large)))
    assert stack.offsets[-1] == 2 * 64 * MIB
    assert stack.offsets[2] == 4 * 64 * MIB


@given(rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_the_hole_below_a_tensor_is_what_is_not_taken_yet(rows: list[tuple[int, int, int]]) -> None:
    maps = [feature_map(str(i), size, first, first + more) for i, (size, first, more) in enumerate(rows)]
    sequence = sorted(range(len(maps)), key=lambda i: (-maps[i].last_used_by, i))
    holes = _holes_below(maps, sequence)
    for place, i in enumerate(sequence):
        below = [maps[j] for j in sequence[:place]]
        later = [row.size_bytes for row in below if row.allocated_by > maps[i].allocated_by]
        assert holes[i] == sum(later)


def test_the_order_of_a_skip_is_a_choice() -> None:
    """A map that is made first and used first in the backward pass: at the top, or at the base."""
    rows = (feature_map("early", 64 * MIB, 0, 3), feature_map("late", 64 * MIB, 1, 5))
    heights = {}
    for order in (StackOrder.LAST_BACKWARD_USE, StackOrder.ALLOCATION):
        stack = stack_feature_maps(Iteration("", (1.0,) * 6, rows), order=order)
        heights[order] = [height // (64 * MIB) for height in stack.kernel_heights]
    assert heights[StackOrder.LAST_BACKWARD_USE] == [2, 2, 2, 2, 1, 1]
    assert heights[StackOrder.ALLOCATION] == [1, 2, 2, 2, 2, 2]

    def best(*seconds: float) -> tuple[int, ...]:
        return stack_feature_maps(Iteration("", seconds, rows), order=StackOrder.SMALLEST_AREA).offsets

    assert best(1.0, 1.0, 1.0, 1.0, 1.0, 1.0) == (64 * MIB, 0)
    assert best(9.0, 1.0, 1.0, 1.0, 1.0, 1.0) == (0, 64 * MIB)


ROWS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9), st.integers(0, 9)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, region=st.sampled_from((512, 1024, 4096)), order=st.sampled_from(StackOrder))
def test_heights_cover_what_is_live_and_no_more(
    rows: list[tuple[int, int, int]], region: int, order: StackOrder
) -> None:
    maps = tuple(feature_map(str(i), size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(rows))
    stack = stack_feature_maps(Iteration("", (1.0,) * 10, maps), region_bytes=region, order=order)
    placed = [(o, row) for o, row in zip(stack.offsets, maps, strict=True) if row.size_bytes]
    spans = [(offset, offset + row.size_bytes) for offset, row in placed]
    assert all(one[1] <= two[0] or two[1] <= one[0] for one, two in itertools.combinations(spans, 2))
    for rank in range(10):
        live = [o + row.size_bytes for o, row in placed if row.allocated_by <= rank <= row.last_used_by]
        assert stack.kernel_heights[rank] == -(-max(live, default=0) // region) * region
        kept = [o + row.size_bytes for o, row in placed if row.allocated_by <= rank < row.last_used_by]
        assert stack.holds[rank] == -(-max(kept, default=0) // region) * region
    for found in stack.regions():
        end = found.offset + found.size_bytes
        inside = [row for o, row in placed if o < end and found.offset < o + row.size_bytes]
        assert found.allocated_by == min(row.allocated_by for row in inside)
        assert found.last_used_by == max(row.last_used_by for row in inside)


def test_segments_end_where_enough_was_allocated_or_released() -> None:
    iteration = three_layers(size=4 * MIB)
    assert cut_segments(iteration, FINE_TRACKING_BYTES) == (2, 4, 6)
    assert cut_segments(iteration, EVERY_KERNEL) == (1, 2, 3, 4, 5, 6)
    assert cut_segments(iteration, COARSE_TRACKING_BYTES) == (6,)
    with pytest.raises(ConfigError, match="0 or more"):
        cut_segments(iteration, -1)


def test_the_update_is_a_segment_of_its_own() -> None:
    """Behind the last use of a feature map the arena is the other job's."""
    rows = (Allocation("map", 1 << 20, 0, 3, TensorClass.FEATURE_MAP),)
    demand = demand_of_iteration("job", Iteration("job", (1.0,) * 6, rows))
    assert [segment.num_kernels for segment in demand.segments] == [4, 2]
    assert [segment.height_bytes for segment in demand.segments] == [REGION_BYTES, 0]


def test_a_demand_has_the_heights_of_its_segments() -> None:
    demand = demand_of_iteration("job", three_layers(), tracking_bytes=EVERY_KERNEL, steps=3)
    assert [segment.height_bytes // REGION_BYTES for segment in demand.segments] == [1, 2, 3, 3, 2, 1]
    assert demand.peak_bytes == 3 * REGION_BYTES
    assert demand.solo_seconds == pytest.approx(9.0)
    coarse = demand_of_iteration("job", three_layers(), tracking_bytes=128 * MIB)
    assert [segment.num_kernels for segment in coarse.segments] == [2, 2, 2]
    assert [segment.height_bytes // REGION_BYTES for segment in coarse.segments] == [2, 3, 2]
    assert [segment.hold_bytes // REGION_BYTES for segment in coarse.segments] == [2, 2, 0]
    eager = demand_of_iteration("job", three_layers(), is_one_segment=True, local_bytes=77)
    assert len(eager.segments) == 1
    assert (eager.peak_bytes, eager.local_bytes) == (3 * REGION_BYTES, 77)


def test_a_region_must_be_a_multiple_of_the_alignment() -> None:
    with pytest.raises(ConfigError, match="multiple of 512"):
        stack_feature_maps(three_layers(), region_bytes=1000)


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ([4 << 30, 3 << 30], 64),  # many regions each
        ([192 * MIB, 320 * MIB], 4),  # 48 and 80 of them
        ([4160 * MIB, 320 * MIB], 8),
        ([70 * MIB], 2),
        ([200 * MIB], 4),
        ([450 * MIB], 8),
        ([10 * MIB, 20 * MIB], 2),  # the device has no smaller ones
        ([60 << 30, 20 * MIB], 32),  # so many calls of the driver would take long
        ([0, 5 << 30], 64),  # one job that has no feature maps
        ([0], 64),
        ([], 64),
    ],
)
def test_small_jobs_have_smaller_regions(peaks: list[int], expected: int) -> None:
    assert region_bytes_for(peaks, unit_bytes=2 * MIB) == expected * MIB


@given(st.lists(st.integers(0, 1 << 37), max_size=5))
def test_regions_are_neither_too_few_nor_too_many(peaks: list[int]) -> None:
    size = region_bytes_for(peaks, unit_bytes=2 * MIB)
    known = [peak for peak in peaks if peak]
    assert size % (2 * MIB) == 0
    assert 2 * MIB <= size <= REGION_BYTES
    if size < REGION_BYTES:
        assert sum(known) <= 2048 * size
        assert min(known) < 64 * size  # twice as large, the smallest job would have had fewer than 32
