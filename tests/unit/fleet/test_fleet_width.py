"""Width of a group: how it is partitioned at first, and when it takes fewer slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

import trainmux.fleet._widths as widths_module
from trainmux.fleet._build import choose_partition
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._widths import Widths

# ---- default partition ---------------------------------------------------------------------------------

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
    """Here no fleet can be made on a GPU, so this asks the function that decides."""
    config = FleetConfig(torch.device(device, 0), "fp32", "shared", 1, False, "auto", **options)
    assert choose_partition(traced(shape, with_gradient=with_gradient), 8, config) == expected


# ---- slots ---------------------------------------------------------------------------------------------


class Clock:
    """Stands still unless told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(widths_module.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_widths_are_halves_of_the_most_slots_there_were(clock: Clock) -> None:
    expected = {50: 50, 26: 50, 25: 25, 24: 25, 13: 13, 12: 13, 4: 4, 1: 1}
    assert {num: Widths(50, can_shrink=True).narrower(50, num, 0.0) for num in expected} == expected
    widths = Widths(4, can_shrink=True)
    widths.note(7)
    assert [widths.narrower(7, num, 0.0) for num in (4, 3, 2)] == [7, 4, 2]
    assert [widths.wider(width) for width in (1, 2, 4)] == [2, 4, 7]
    # A fleet whose results may depend on its width keeps it.
    assert Widths(64, can_shrink=False).narrower(64, 1, 0.0) == 64


def test_slots_go_when_they_have_cost_a_share_of_what_narrower_programs_do(clock: Clock) -> None:
    widths, build_s = Widths(64, can_shrink=True), 3.0
    assert widths.narrower(64, 10, build_s) == 64
    clock.now_s += 1.0
    assert widths.narrower(64, 10, build_s) == 64  # lost: 3/4 of a second
    assert widths.narrower(64, 60, build_s) == 64
    clock.now_s += 1000.0  # all of them were taken
    assert widths.narrower(64, 10, build_s) == 64
    clock.now_s += 1.0
    assert widths.narrower(64, 10, build_s) == 16
    widths.note(16)
    assert widths.narrower(16, 2, build_s) == 16  # another width, another account
