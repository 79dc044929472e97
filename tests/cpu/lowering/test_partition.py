"""Cutting a program: what every cut must hold to, whatever the model."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence

import pytest
from benchmarks.workloads import Workload, mlp
from benchmarks.workloads.seeding import seeded
from lowering_tools import CASES, TINY, Example, example, example_of
from torch import fx

from trainmux.ir import Phase
from trainmux.lowering._kinds import Kind


def computed(case: Example) -> list[fx.Node]:
    return [node for node in case.source.nodes if node.op == "call_function"]


def phase_of(node: fx.Node) -> Phase:
    phase: Phase = node.meta.get("phase", Phase.FORWARD)
    return phase


def is_tuple_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_cut_is_complete_and_in_order(name: str, precision: str) -> None:
    """Every node is in one piece or costs nothing, and what a piece reads is computed before it."""
    case = example(name, precision)
    kinds, pieces = case.cut.kinds, case.cut.pieces
    places = Counter(node for piece in pieces for node in piece)
    assert max(places.values()) == 1
    assert all(node.op == "call_function" for node in places)
    for node in computed(case):
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
        if case.cut.is_library(piece):
            read: Sequence[fx.Node] = piece[0].all_input_nodes
        else:
            region = next(regions)
            read = region.inputs
            body = [order[node] for node in region.body]
            assert body == sorted(body)
        assert all(is_there(node) for node in read), piece
        done.update(piece)
    (output,) = case.source.find_nodes(op="output")
    assert all(is_there(node) for node in output.all_input_nodes)


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_library_calls_phases_and_updates_keep_their_order(name: str, precision: str) -> None:
    """No backward work before the last library call of the forward pass, and the update comes last."""
    case = example(name, precision)
    pieces = case.cut.pieces
    calls = [node for node in computed(case) if case.cut.kinds[node] is Kind.LIBRARY]
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


def deep_mlp(num_hidden: int) -> Workload:
    shallow = TINY["mlp"]
    return Workload(
        shallow.name,
        seeded(lambda: mlp(16, 32, 4, num_hidden)),
        shallow.loss,
        shallow.batch,
    )


def test_the_number_of_kernels_does_not_grow_with_depth() -> None:
    few, many = example_of(deep_mlp(3)).lowered, example_of(deep_mlp(8)).lowered
    assert many.num_regions >= few.num_regions + 5 * 2  # a region forward and one backward for each layer
    assert len(many.kernels) <= len(few.kernels) + 1
