"""How many bytes of feature maps lie between two cuts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainmux.colocate import FINE_TRACKING_BYTES
from trainmux.colocate._step_plan import _SEGMENT_SECONDS, tracking_bytes_for

GIB = 1 << 30


def layout_of(feature_map_bytes: int) -> Any:
    row = SimpleNamespace(size_bytes=feature_map_bytes)
    return SimpleNamespace(kernels=SimpleNamespace(iteration=SimpleNamespace(feature_maps=[row])))


@pytest.mark.parametrize("num_segments", [1, 2, 7, 60])
def test_segments_last_as_long_as_they_should(num_segments: int) -> None:
    """Each feature map is allocated once and released once: between two cuts lies twice its part."""
    seconds = (num_segments + 0.5) * _SEGMENT_SECONDS
    tracked = tracking_bytes_for(layout_of(GIB), torch.device("cuda"), seconds)
    assert tracked == 2 * GIB // num_segments


def test_no_cut_before_what_the_paper_tracks() -> None:
    assert tracking_bytes_for(layout_of(GIB), torch.device("cuda"), 10.0) == FINE_TRACKING_BYTES
    assert tracking_bytes_for(layout_of(GIB), torch.device("cpu"), 1e-6) == FINE_TRACKING_BYTES


def test_a_short_step_is_one_segment() -> None:
    tracked = tracking_bytes_for(layout_of(GIB), torch.device("cuda"), 1e-6)
    assert tracked == 2 * GIB
