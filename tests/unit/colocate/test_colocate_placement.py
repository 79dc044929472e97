"""Classes of tensors, their places in the arena, and the cuts between segments."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.colocate._demand import cut_segments, segments_between
from trainmux.colocate._placement import (
    REGION_BYTES,
    Allocation,
    Iteration,
    TensorClass,
    iteration_of_profile,
    place_in_arena,
    region_bytes_for,
)
from trainmux.colocate._step_layout import StepLayout
from trainmux.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "ir"))
from ir_programs import two_layers

MIB = 1 << 20


def feature_map(name: str, size: int, first: int, last: int) -> Allocation:
    return Allocation(name, size, first, last, TensorClass.FEATURE_MAP)


def three_layers(size: int = 64 * MIB) -> Iteration:
    """Forward kernels 0-2 make a map each, backward kernels 3-5 use them in reverse."""
    rows = tuple(feature_map(f"f{layer}", size, layer, 5 - layer) for layer in range(3))
    return Iteration("three", (1.0, 1.0, 1.0, 2.0, 2.0, 2.0), rows)


def test_a_profile_becomes_an_iteration() -> None:
    iteration = iteration_of_profile(two_layers())
    rows = {row.name: row for row in iteration.allocations}
    assert rows["h"] == Allocation("h", 100, 0, 7, TensorClass.FEATURE_MAP)
    assert rows["t"] == Allocation("t", 90, 1, 3, TensorClass.TEMPORARY)
    # The loss is read in the backward pass, but it is the user's: it stays local, to the end.
    assert rows["loss"] == Allocation("loss", 4, 3, 8, TensorClass.RESIDENT)
    assert rows["g_h"].tensor_class is TensorClass.TEMPORARY
    assert rows["g_w1"] == Allocation("g_w1", 64, 7, 8, TensorClass.TEMPORARY)
    assert set(iteration.shared) == set(rows.values()) - {rows["loss"]}
    assert iteration.resident_bytes == 40 + 64 + 32 + 64 + 16
    assert iteration.kernel_seconds == (1e-3,) * 9


# ---- places in the arena -------------------------------------------------------------------------------


def test_the_feature_map_used_last_lies_at_the_base() -> None:
    placement = place_in_arena(three_layers())
    assert placement.offsets == (0, 64 * MIB, 128 * MIB)
    assert [height // (64 * MIB) for height in placement.kernel_heights] == [1, 2, 3, 3, 2, 1]
    assert [hold // (64 * MIB) for hold in placement.holds] == [1, 2, 3, 2, 1, 0]
    with pytest.raises(ConfigError):
        place_in_arena(three_layers(), region_bytes=1000)


def test_what_lives_longest_lies_lowest() -> None:
    """A small tensor from the first kernel to the last costs its own bytes, not the height of the rest."""
    plain = three_layers(size=60 * MIB)
    bias = feature_map("bias", 1280, 0, 5)
    iteration = Iteration("", plain.kernel_seconds, (bias, *plain.shared))
    placement = place_in_arena(iteration, region_bytes=512)
    assert placement.offsets == (60 * MIB, 0, 60 * MIB + 1536, 120 * MIB + 1536)
    assert [height - 1536 for height in placement.kernel_heights] == [
        n * 60 * MIB for n in (1, 2, 3, 3, 2, 1)
    ]


def test_temporaries_lie_in_what_feature_maps_leave_free() -> None:
    """Gradients of the layers above lie where the feature maps were that these gave back."""
    maps = three_layers().shared
    gradients = tuple(Allocation(f"g{n}", 64 * MIB, 3 + n, 4 + n) for n in range(2))
    iteration = Iteration("", (1.0,) * 6, (*maps, *gradients))
    placement = place_in_arena(iteration)
    assert [height // (64 * MIB) for height in placement.kernel_heights] == [1, 2, 3, 4, 4, 3]


def test_past_its_peak_a_job_only_gives_memory_back() -> None:
    """A short rise behind the peak counts from the peak on: the height held in between never falls below."""
    rows = tuple(feature_map(str(n), size, n, n) for n, size in enumerate((1, 4, 9, 2, 5, 1)))
    placement = place_in_arena(Iteration("", (1.0,) * 6, rows), region_bytes=512)
    assert set(placement.kernel_heights) == {512}
    rows = tuple(feature_map(str(n), size * MIB, n, n) for n, size in enumerate((1, 4, 9, 2, 5, 1)))
    placement = place_in_arena(Iteration("", (1.0,) * 6, rows), region_bytes=MIB)
    assert [height // MIB for height in placement.kernel_heights] == [1, 4, 9, 5, 5, 1]
    assert [hold // MIB for hold in placement.holds] == [0, 0, 5, 5, 1, 0]


ROWS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9), st.integers(0, 9)), max_size=12)


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, region=st.sampled_from((512, 1024, 4096)))
def test_live_bytes_lie_apart_and_below_the_height(rows: list[tuple[int, int, int]], region: int) -> None:
    maps = tuple(feature_map(str(i), size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(rows))
    placement = place_in_arena(Iteration("", (1.0,) * 10, maps), region_bytes=region)
    placed = [(o, o + row.size_bytes, row) for o, row in zip(placement.offsets, maps, strict=True)]
    for (low, high, one), (other_low, other_high, two) in itertools.combinations(placed, 2):
        are_live = max(one.allocated_by, two.allocated_by) <= min(one.last_used_by, two.last_used_by)
        assert not are_live or high <= other_low or other_high <= low
    peak = placement.kernel_heights.index(max(placement.kernel_heights))
    for rank in range(10):
        live = [
            top for _, top, row in placed if row.size_bytes and row.allocated_by <= rank <= row.last_used_by
        ]
        kept = [
            top for _, top, row in placed if row.size_bytes and row.allocated_by <= rank < row.last_used_by
        ]
        height, hold = placement.kernel_heights[rank], placement.holds[rank]
        assert max(live, default=0) <= height
        assert max(kept, default=0) <= hold <= height
        assert height % region == hold % region == 0
        if rank < peak:
            assert height < max(live, default=0) + region
        elif rank < 9:
            assert hold == placement.kernel_heights[rank + 1]


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ([4 << 30, 3 << 30], 64),
        ([192 * MIB, 320 * MIB], 4),  # 48 and 80 regions
        ([10 * MIB, 20 * MIB], 2),  # the device's smallest
        ([60 << 30, 20 * MIB], 32),  # smaller ones would be too many driver calls
        ([0, 5 << 30], 64),  # one job without feature maps
        ([], 64),
    ],
)
def test_small_jobs_have_smaller_regions(peaks: list[int], expected: int) -> None:
    assert region_bytes_for(peaks, unit_bytes=2 * MIB) == expected * MIB


# ---- cuts ----------------------------------------------------------------------------------------------


def test_segments_end_where_enough_was_allocated_or_released() -> None:
    iteration = three_layers(size=4 * MIB)
    assert cut_segments(iteration, 8 * MIB) == (2, 4, 6)
    assert cut_segments(iteration, 0) == (1, 2, 3, 4, 5, 6)
    assert cut_segments(iteration, 256 * MIB) == (6,)
    with pytest.raises(ConfigError):
        cut_segments(iteration, -1)


def test_segments_have_the_heights_of_their_kernels() -> None:
    iteration = three_layers()
    cuts = cut_segments(iteration, 128 * MIB)
    segments = segments_between(cuts, place_in_arena(iteration), iteration.kernel_seconds, slowness=2.0)
    assert [segment.height_bytes // REGION_BYTES for segment in segments] == [2, 3, 2]
    assert [segment.hold_bytes // REGION_BYTES for segment in segments] == [2, 2, 0]
    assert [segment.solo_seconds for segment in segments] == [4.0, 6.0, 8.0]


@pytest.mark.parametrize(("seconds", "most"), [(100e-6, 1), (2.1e-3, 7), (1.0, 32)])
def test_on_a_cuda_device_segments_outlast_their_launch(seconds: float, most: int) -> None:
    """300 µs each, and at least 8 MB of the arena: 128 MiB are allocated and released here."""
    rows = tuple(feature_map(str(n), 4 * MIB, n, 63 - n) for n in range(32))
    kernels: Any = SimpleNamespace(iteration=Iteration("", (1.0,) * 64, rows))
    layout = StepLayout(kernels, place_in_arena(kernels.iteration), {}, frozenset(), 0)
    assert most / 2 <= len(layout.cut(None, torch.device("cuda"), seconds)) <= most
    assert len(layout.cut(None, torch.device("cpu"), seconds)) == 32
    assert len(layout.cut(0, torch.device("cuda"), seconds)) == 64
