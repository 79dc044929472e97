"""A mask that only the backward pass reads is made there, if what it is made from is kept anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import trainmux as tm
from trainmux.engine import _program
from trainmux.engine._order import make_masks_late
from trainmux.fleet._other_steps import read_step
from trainmux.ir import ByteClass, Phase
from trainmux.profiling import locations_of

aten = torch.ops.aten


def node(graph: fx.Graph, phase: Phase, target: Callable[..., Any], *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    made.meta["phase"] = phase
    return made


@pytest.mark.parametrize(
    ("compared", "kept", "reads_early", "is_late"),
    [
        ("result", "view", False, True),
        ("result", "result", False, True),
        ("result", "argument", False, False),  # what it compares is not kept
        ("result", "view", True, False),  # the forward pass reads it
        ("argument", "argument", False, False),  # an update may have changed it by then
    ],
)
def test_where_a_mask_goes(compared: str, kept: str, reads_early: bool, is_late: bool) -> None:
    """A ReLU, its mask, and a backward pass that reads the mask, and what else is kept."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    result = node(graph, Phase.FORWARD, aten.relu.default, given)
    values = {"argument": given, "result": result}
    values["view"] = node(graph, Phase.FORWARD, aten.select.int, result, 0, 0)
    mask = node(graph, Phase.FORWARD, aten.le.Scalar, values[compared], 0)
    if reads_early:
        node(graph, Phase.FORWARD, aten.logical_not.default, mask)
    gradient = node(graph, Phase.BACKWARD, aten.mul.Tensor, values[kept], 2)
    masked = node(graph, Phase.BACKWARD, aten.mul.Tensor, gradient, mask)
    graph.output(masked)
    make_masks_late(graph)
    graph.lint()
    assert (mask.next is masked) == is_late
    assert mask.meta["phase"] is (Phase.BACKWARD if is_late else Phase.FORWARD)


def test_no_mask_of_a_relu_waits_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_kept() -> int:
        """Masks of images that the forward pass keeps."""
        layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3))
        model, images = nn.Sequential(*layers), torch.randn(2, 3, 8, 8)
        member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name="m")
        fleet = tm.Fleet([member], lambda m, x: m(x).square().mean(), images, precision="bf16")
        graph = read_step(fleet._groups[0].sub_array_program(1, kernels="lowered"))
        locations = [at for value in graph.values.values() for at in locations_of(value)]
        masks = {at.tensor for at in locations if at.dtype is torch.bool and len(at.shape) >= 4}
        return sum(graph.tensors[number].byte_class is ByteClass.FEATURE_MAP for number in masks)

    assert num_kept() == 0
    monkeypatch.setattr(_program, "make_masks_late", lambda graph: None)
    monkeypatch.setattr("trainmux.fleet._build.load", lambda *_: None)  # not the step that was stored
    assert num_kept() >= 2
