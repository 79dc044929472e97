"""A mask that only the backward pass reads is made there, if what it is made from is kept anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from torch import fx

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


def small_graph(*, keeps: str, reads_early: bool = False) -> tuple[fx.Graph, fx.Node, fx.Node]:
    """A ReLU, its mask, and a backward pass that reads the mask, and what else is kept."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    result = node(graph, Phase.FORWARD, aten.relu.default, given)
    view = node(graph, Phase.FORWARD, aten.select.int, result, 0, 0)
    mask = node(graph, Phase.FORWARD, aten.le.Scalar, result, 0)
    if reads_early:
        node(graph, Phase.FORWARD, aten.logical_not.default, mask)
    kept = {"view": view, "result": result, "argument": given}[keeps]
    gradient = node(graph, Phase.BACKWARD, aten.mul.Tensor, kept, 2)
    masked = node(graph, Phase.BACKWARD, aten.mul.Tensor, gradient, mask)
    graph.output(masked)
    return graph, mask, masked


@pytest.mark.parametrize("keeps", ["view", "result"])
def test_a_mask_goes_to_its_first_reader(keeps: str) -> None:
    graph, mask, masked = small_graph(keeps=keeps)
    make_masks_late(graph)
    graph.lint()
    assert mask.next is masked
    assert mask.meta["phase"] is Phase.BACKWARD


def test_a_mask_stays_where_what_it_compares_is_not_kept() -> None:
    graph, mask, masked = small_graph(keeps="argument")
    make_masks_late(graph)
    assert mask.next is not masked
    assert mask.meta["phase"] is Phase.FORWARD


def test_a_mask_stays_that_the_forward_pass_reads() -> None:
    graph, mask, _ = small_graph(keeps="view", reads_early=True)
    make_masks_late(graph)
    assert mask.meta["phase"] is Phase.FORWARD


def test_a_mask_of_an_argument_stays() -> None:
    """An update may have changed it by then."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    mask = node(graph, Phase.FORWARD, aten.le.Scalar, given, 0)
    graph.output(node(graph, Phase.BACKWARD, aten.mul.Tensor, given, mask))
    make_masks_late(graph)
    assert mask.meta["phase"] is Phase.FORWARD


@pytest.mark.parametrize("name", ["bottleneck", "residual"])
def test_no_mask_of_a_relu_waits_for_the_backward_pass(name: str) -> None:
    assert not kept_masks(name)


def test_masks_would_wait_if_they_were_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_program, "make_masks_late", lambda graph: None)
    assert len(kept_masks("bottleneck")) >= 3


def kept_masks(name: str) -> list[int]:
    """The bytes of each mask of at least one image that the forward pass keeps for the backward pass."""
    workload = SMALL[name]
    model = workload.build(0).train()
    member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name="m", seed=0)
    fleet = tm.Fleet([member], workload.loss, workload.batch(0, torch.float32), precision="bf16")
    graph = read_step(fleet._groups[0].sub_array_program(1, kernels="lowered"))
    masks = {
        location.tensor
        for value in graph.values.values()
        for location in locations_of(value)
        if location.dtype is torch.bool and len(location.shape) >= 4
    }
    tensors = [graph.tensors[number] for number in masks]
    return [tensor.size_bytes for tensor in tensors if tensor.byte_class is ByteClass.FEATURE_MAP]
