"""How a group is partitioned: what it is told, what its convolutions say, and what divides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from trainmux.fleet._build import choose_partition, convolution_flops
from trainmux.fleet._config import FleetConfig

aten = torch.ops.aten
LARGE, SMALL = (32, 256, 56, 56), (4, 8, 8, 8)


def traced(shape: tuple[int, int, int, int] | None, *, wanted: tuple[bool, bool, bool] | None = None) -> Any:
    """A graph of one 3×3 convolution over ``shape``, and of its gradient where one is wanted."""
    graph = fx.Graph()
    if shape is None:
        graph.output(graph.placeholder("x"))
        return SimpleNamespace(module=fx.GraphModule({}, graph))
    channels = shape[1]
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"] = torch.empty(shape, device="meta")
    weight.meta["val"] = torch.empty((channels, channels, 3, 3), device="meta")
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = graph.call_function(aten.convolution.default, (x, weight, None, *settings))
    out.meta["val"] = torch.empty(shape, device="meta")
    if wanted is not None:
        gradient = graph.call_function(
            aten.convolution_backward.default, (out, x, weight, None, *settings, list(wanted))
        )
        gradient.meta["val"] = (None, None, None)
    graph.output(out)
    return SimpleNamespace(module=fx.GraphModule({}, graph))


def config(device: str = "cuda", **options: Any) -> FleetConfig:
    # The device is named, never used.
    return FleetConfig(torch.device(device, 0), "fp32", "shared", 1, False, "auto", **options)


def forward_flops(shape: tuple[int, int, int, int]) -> float:
    batch, channels, height, width = shape
    return 2.0 * batch * height * width * channels * channels * 9


@pytest.mark.parametrize(
    ("wanted", "passes"), [(None, 1), ((True, True, False), 3), ((False, True, True), 2), ((False,) * 3, 1)]
)
def test_flops_of_convolutions(wanted: tuple[bool, bool, bool] | None, passes: int) -> None:
    assert convolution_flops(traced(SMALL, wanted=wanted)) == passes * forward_flops(SMALL)


def test_a_model_without_convolutions_has_none() -> None:
    assert convolution_flops(traced(None)) == 0


@pytest.mark.parametrize(
    ("shape", "device", "expected"),
    [
        (LARGE, "cuda", (1, 4)),
        (LARGE, "cpu", (8, 1)),
        (SMALL, "cuda", (8, 1)),
        (None, "cuda", (8, 1)),
    ],
)
def test_large_convolutions_on_cuda_are_kept_apart(
    shape: tuple[int, int, int, int] | None, device: str, expected: tuple[int, int]
) -> None:
    assert choose_partition(traced(shape), 8, config(device)) == expected


def test_the_gradient_counts() -> None:
    batch = int(2e10 / forward_flops((1, 64, 28, 28)) / 2)
    shape = (batch, 64, 28, 28)
    assert choose_partition(traced(shape), 8, config())[0] == 8
    assert choose_partition(traced(shape, wanted=(True, True, True)), 8, config())[0] == 1


@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize(
    ("width", "branches", "expected"),
    [(8, None, (8, 1)), (2, None, (2, 4)), (2, 1, (2, 1)), (4, 4, (4, 2)), (1, 8, (1, 8)), (1, 3, (1, 3))],
)
def test_what_is_told_wins(
    shape: tuple[int, int, int, int], width: int, branches: int | None, expected: tuple[int, int]
) -> None:
    assert choose_partition(traced(shape), 8, config(width=width, branches=branches)) == expected


def test_told_branches_leave_the_width_to_be_chosen() -> None:
    assert choose_partition(traced(LARGE), 8, config(branches=2)) == (1, 2)
    assert choose_partition(traced(SMALL), 8, config(branches=2)) == (8, 1)


@pytest.mark.parametrize("num_members", range(1, 13))
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 100])
def test_sub_arrays_are_alike_and_no_wider_than_told(num_members: int, width: int) -> None:
    array, branches = choose_partition(traced(SMALL), num_members, config(width=width))
    assert num_members % array == 0
    assert array <= width
    assert not [w for w in range(array + 1, min(width, num_members) + 1) if num_members % w == 0]
    assert 1 <= branches <= num_members // array
