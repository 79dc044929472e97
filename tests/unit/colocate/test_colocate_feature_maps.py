"""Classes of tensors, the stack of feature maps, and the cuts between segments."""

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
from trainmux.colocate._feature_maps import (
    REGION_BYTES,
    Allocation,
    Iteration,
    TensorClass,
    iteration_of_profile,
    region_bytes_for,
    stack_feature_maps,
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
    assert iteration.feature_maps == (rows["h"], rows["a"], rows["mask"])
    assert iteration.resident_bytes == 40 + 64 + 32 + 64 + 16
    assert iteration.kernel_seconds == (1e-3,) * 9


# ---- the stack -----------------------------------------------------------------------------------------


def test_the_feature_map_used_last_lies_at_the_base() -> None:
    stack = stack_feature_maps(three_layers())
    assert stack.offsets == (0, 64 * MIB, 128 * MIB)
    assert [height // (64 * MIB) for height in stack.kernel_heights] == [1, 2, 3, 3, 2, 1]
    assert [hold // (64 * MIB) for hold in stack.holds] == [1, 2, 3, 2, 1, 0]
    with pytest.raises(ConfigError):
        stack_feature_maps(three_layers(), region_bytes=1000)


def test_only_a_small_early_tensor_lies_at_the_base() -> None:
    """A half-precision bias of the last layer: made by the first kernel, used first in the backward pass."""
    plain = three_layers(size=60 * MIB)
    bias = feature_map("bias", 1280, 0, 3)
    iteration = Iteration("biased", plain.kernel_seconds, (*plain.feature_maps, bias))
    stack = stack_feature_maps(iteration, region_bytes=512)
    assert stack.offsets[-1] == 0
    assert [height - 1536 for height in stack.kernel_heights] == [n * 60 * MIB for n in (1, 2, 3, 3, 2, 1)]
    # A large one stays where its memory comes back soonest.
    plain = three_layers()
    large = feature_map("large", 128 * MIB, 0, 3)
    stack = stack_feature_maps(Iteration("large", plain.kernel_seconds, (*plain.feature_maps, large)))
    assert stack.offsets[-1] == 2 * 64 * MIB
    assert stack.offsets[2] == 4 * 64 * MIB


ROWS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9), st.integers(0, 9)), max_size=12)


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, region=st.sampled_from((512, 1024, 4096)))
def test_heights_cover_what_is_live_and_no_more(rows: list[tuple[int, int, int]], region: int) -> None:
    maps = tuple(feature_map(str(i), size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(rows))
    stack = stack_feature_maps(Iteration("", (1.0,) * 10, maps), region_bytes=region)
    placed = [(o, row) for o, row in zip(stack.offsets, maps, strict=True) if row.size_bytes]
    spans = [(offset, offset + row.size_bytes) for offset, row in placed]
    assert all(one[1] <= two[0] or two[1] <= one[0] for one, two in itertools.combinations(spans, 2))
    for rank in range(10):
        live = [o + row.size_bytes for o, row in placed if row.allocated_by <= rank <= row.last_used_by]
        assert stack.kernel_heights[rank] == -(-max(live, default=0) // region) * region
        kept = [o + row.size_bytes for o, row in placed if row.allocated_by <= rank < row.last_used_by]
        assert stack.holds[rank] == -(-max(kept, default=0) // region) * region


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
    """The update, after the last use of a feature map, is a segment of its own: it leaves the arena."""
    iteration = Iteration("job", (1.0,) * 6, (feature_map("map", MIB, 0, 3),))
    cuts = cut_segments(iteration, 8 * MIB)
    segments = segments_between(cuts, stack_feature_maps(iteration), iteration.kernel_seconds)
    assert [segment.num_kernels for segment in segments] == [4, 2]
    assert [segment.height_bytes for segment in segments] == [REGION_BYTES, 0]
    iteration = three_layers()
    cuts = cut_segments(iteration, 128 * MIB)
    segments = segments_between(cuts, stack_feature_maps(iteration), iteration.kernel_seconds, slowness=2.0)
    assert [segment.height_bytes // REGION_BYTES for segment in segments] == [2, 3, 2]
    assert [segment.hold_bytes // REGION_BYTES for segment in segments] == [2, 2, 0]
    assert [segment.solo_seconds for segment in segments] == [4.0, 6.0, 8.0]


@pytest.mark.parametrize(("seconds", "most"), [(100e-6, 1), (2.1e-3, 7), (1.0, 32)])
def test_on_a_cuda_device_segments_outlast_their_launch(seconds: float, most: int) -> None:
    """300 µs each, and at least 8 MB of feature maps: 128 MiB are allocated and released here."""
    rows = tuple(feature_map(str(n), 4 * MIB, n, 63 - n) for n in range(32))
    kernels: Any = SimpleNamespace(iteration=Iteration("", (1.0,) * 64, rows))
    layout = StepLayout(kernels, stack_feature_maps(kernels.iteration), {}, frozenset(), 0)
    assert most / 2 <= len(layout.cut(None, torch.device("cuda"), seconds)) <= most
    assert len(layout.cut(None, torch.device("cpu"), seconds)) == 32
    assert len(layout.cut(0, torch.device("cuda"), seconds)) == 64
