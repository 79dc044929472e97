"""Cutting a program into regions: complete, in order and the same numbers, whatever the model; kernels."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from benchmarks.workloads import Workload, mlp
from benchmarks.workloads.seeding import seeded
from lowering_tools import CASES, Example, assert_close, example_of, regions_of, traced
from short_workloads import SHORT
from torch import Tensor, fx

from trainmux.errors import TrainmuxWarning
from trainmux.ir import Phase
from trainmux.lowering import KernelCache, _inductor, lower
from trainmux.lowering._kinds import Kind
from trainmux.lowering._partition import cut
from trainmux.lowering._regions import RegionGraph, from_payload, spec_of, to_payload

pytestmark = pytest.mark.usefixtures("traced_once")


def phase_of(node: fx.Node) -> Phase:
    phase: Phase = node.meta.get("phase", Phase.FORWARD)
    return phase


def is_tuple_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


@pytest.mark.parametrize(("workload", "precision"), CASES, ids=lambda one: getattr(one, "name", one))
def test_every_cut_is_complete_in_order_and_computes_the_same(workload: Workload, precision: str) -> None:
    case = example_of(workload, precision)
    check_complete(case)
    check_order(case)
    keys = [region.key() for region in case.regions()]
    assert len(keys) == case.lowered.num_regions
    assert sorted(kernel.key for kernel in case.lowered.kernels) == sorted(set(keys))
    for region in case.regions():
        sent = from_payload(to_payload(region))
        assert (sent.key(), sent.combines) == (region.key(), region.combines)
    lowered = case.run(case.lowered.module)
    # The operators are the same ones, only in another order; in bf16 a region rounds as often as before.
    assert_close(lowered, case.run(case.whole), 1e-12 if precision == "fp64" else 1e-6)
    arguments = [lowered[f"argument {i}"] for i in range(len(case.arguments))]
    assert any(not torch.equal(a, b) for a, b in zip(arguments, case.arguments, strict=True))
    if precision == "fp64":
        # ATen's kernel for the gradient of hardsigmoid has one sixth in single precision, even for fp64.
        assert_close(lowered, case.run(case.on_aten), 1e-8 if workload.name == "mobilenet" else 1e-10)


def check_complete(case: Example) -> None:
    """Every node is in one piece or costs nothing, and what a piece reads is computed before it."""
    kinds, pieces = case.cut.kinds, case.cut.pieces
    places = Counter(node for piece in pieces for node in piece)
    assert max(places.values()) == 1
    for node in (node for node in case.source.nodes if node.op == "call_function"):
        is_free = kinds[node] is Kind.INLINE or (kinds[node] is Kind.LIBRARY and is_tuple_part(node))
        assert node in places or is_free, node

    done: set[fx.Node] = set()

    def is_there(node: fx.Node) -> bool:
        if node in done or kinds[node] is Kind.SOURCE:
            return True
        is_free = kinds[node] is Kind.INLINE or is_tuple_part(node)
        return is_free and all(is_there(source) for source in node.all_input_nodes)

    order = {node: place for place, node in enumerate(case.source.nodes)}
    regions = iter(case.regions())
    for piece in pieces:
        read: Sequence[fx.Node] = piece[0].all_input_nodes
        if not case.cut.is_library(piece):
            region = next(regions)
            read = region.inputs
            body = [order[node] for node in region.body]
            assert body == sorted(body)
        assert all(is_there(node) for node in read), piece
        done.update(piece)
    (output,) = case.source.find_nodes(op="output")
    assert all(is_there(node) for node in output.all_input_nodes)


def check_order(case: Example) -> None:
    """No backward work before the last library call of the forward pass, and the update comes last."""
    pieces = case.cut.pieces
    calls = [node for node in case.cut.kinds if case.cut.kinds[node] is Kind.LIBRARY]
    expected = [node for node in calls if not is_tuple_part(node)]
    assert [piece for piece in pieces if case.cut.is_library(piece)] == [(node,) for node in expected]
    assert case.lowered.num_calls == len(expected)
    last_forward = max(
        place
        for place, piece in enumerate(pieces)
        if case.cut.is_library(piece) and phase_of(piece[0]) is Phase.FORWARD
    )
    updates = [place for place, piece in enumerate(pieces) if phase_of(piece[0]) is Phase.UPDATE]
    assert updates == list(range(updates[0], len(pieces)))
    for place, piece in enumerate(pieces):
        phases = {phase_of(node) for node in piece}
        assert Phase.BACKWARD not in phases or place > last_forward
        assert Phase.UPDATE not in phases or len(phases) == 1
    order = {node: place for place, node in enumerate(case.source.nodes)}
    updated = [pieces[place] for place in updates]
    in_order = [order[node] for piece in updated for node in piece]
    assert in_order == sorted(in_order)
    for piece in updated:
        assert len({node.meta.get("unit") for node in piece if not is_tuple_part(node)}) == 1


# ---- kernels that several regions share ------------------------------------------------------------------


def deep_mlp(num_hidden: int) -> Workload:
    return replace(SHORT["mlp"], build=seeded(lambda: mlp(16, 32, 4, num_hidden)))


def test_layers_share_kernels() -> None:
    few, many = example_of(deep_mlp(1)), example_of(deep_mlp(3))
    assert many.lowered.num_regions >= few.lowered.num_regions + 2 * 2  # one forward and one backward each
    assert len(many.lowered.kernels) <= len(few.lowered.kernels) + 1
    assert_close(many.run(many.lowered.module), many.run(many.whole), 1e-6)


def only_region(factor: float = 2.0, like: Tensor | None = None, last: str = "relu") -> RegionGraph:
    like = torch.zeros(4, 6) if like is None else like
    graph = traced(lambda x: getattr(x * factor, last)(), like).graph
    (region,) = regions_of(graph, cut(graph))
    return region


def test_keys_tell_structures_apart() -> None:
    others = [
        only_region(3.0),
        only_region(like=torch.zeros(6, 4)),
        only_region(like=torch.zeros(6, 4).t()),
        only_region(like=torch.zeros(4, 6, dtype=torch.float64)),
        only_region(last="tanh"),
        replace(only_region(), placed=(True,)),
    ]
    assert only_region().key() == only_region().key()
    assert len({region.key() for region in (*others, only_region())}) == len(others) + 1
    cache = KernelCache()
    first, second = (lower(traced(lambda x: x.relu() + 1, torch.zeros(4)), cache) for _ in range(2))
    assert first.kernels == second.kernels


def test_a_kernel_that_cannot_be_compiled_stays_on_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=RuntimeError("no compiler today\nand more lines"))
    monkeypatch.setattr(_inductor, "compile_graph", refuse)
    cache = KernelCache()
    lowered = lower(traced(lambda x: x.relu() + 7.5, torch.zeros(4)), cache)
    with pytest.warns(TrainmuxWarning, match="no compiler today"):
        cache.compile(lowered.kernels)
    cache.compile(lowered.kernels)  # said once
    assert not lowered.kernels[0].is_compiled
    x = torch.randn(4)
    assert torch.equal(lowered.module(x), x.relu() + 7.5)


def test_what_a_region_computes_never_lies_in_memory_once() -> None:
    """Torch 2.11 says so of some results of expanded tensors, which differ from member to member."""
    (node,) = only_region().outputs
    node.meta["val"] = torch.empty(1, 6, device="meta").expand(4, 6)
    assert spec_of(node).strides == (6, 1)
