"""Default partition of a group on a GPU: large convolutions are kept apart, everything else is fused.

Here no fleet can be made on a GPU, so this asks the function that decides.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from trainmux.fleet._build import choose_partition
from trainmux.fleet._config import FleetConfig

aten = torch.ops.aten
LARGE, MEDIUM, SMALL = (32, 256, 56, 56), (172, 64, 28, 28), (4, 8, 8, 8)


def traced(shape: tuple[int, int, int, int], *, with_gradient: bool) -> Any:
    """A graph of one 3×3 convolution over ``shape``, and of its gradient."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"] = torch.empty(shape, device="meta")
    weight.meta["val"] = torch.empty((shape[1], shape[1], 3, 3), device="meta")
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = graph.call_function(aten.convolution.default, (x, weight, None, *settings))
    out.meta["val"] = torch.empty(shape, device="meta")
    if with_gradient:
        wanted = [True, True, True]
        graph.call_function(aten.convolution_backward.default, (out, x, weight, None, *settings, wanted))
    graph.output(out)
    return SimpleNamespace(module=fx.GraphModule({}, graph))


@pytest.mark.parametrize(
    ("device", "shape", "with_gradient", "options", "expected"),
    [
        ("cuda", LARGE, False, {}, (1, 4)),
        ("cpu", LARGE, False, {}, (8, 1)),
        ("cuda", SMALL, True, {}, (8, 1)),
        ("cuda", MEDIUM, False, {}, (8, 1)),
        ("cuda", MEDIUM, True, {}, (1, 4)),
        ("cuda", LARGE, False, {"width": 8}, (8, 1)),
        ("cuda", LARGE, False, {"width": 2}, (2, 4)),
        ("cuda", SMALL, False, {"width": 4, "branches": 4}, (4, 2)),
        ("cuda", LARGE, False, {"branches": 2}, (1, 2)),
        ("cuda", SMALL, False, {"branches": 2}, (8, 1)),
    ],
)
def test_width_and_branches_of_eight_members(
    device: str, shape: tuple[int, int, int, int], with_gradient: bool, options: Any, expected: Any
) -> None:
    config = FleetConfig(torch.device(device, 0), "fp32", "shared", 1, False, "auto", **options)
    assert choose_partition(traced(shape, with_gradient=with_gradient), 8, config) == expected
