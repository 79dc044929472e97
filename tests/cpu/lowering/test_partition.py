"""Cutting a program: what every cut must hold to, whatever the model."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
from benchmarks.workloads import Workload, mlp
from benchmarks.workloads.seeding import seeded
from lowering_tools import CASES, TINY, Example, example, example_of
from torch import fx

from trainmux.ir import Phase
from trainmux.lowering._kinds import Kind

every_case = pytest.mark.parametrize(("name", "precision"), CASES)


def computed(case: Example) -> list[fx.Node]:
    return [node for node in case.source.nodes if node.op == "call_function"]


def phase_of(node: fx.Node) -> Phase:
    phase: Phase = node.meta.get("phase", Phase.FORWARD)
    return phase


def is_tuple_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


@every_case
def test_every_node_is_in_one_piece_or_costs_nothing(name: str, precision: str) -> None:
    case = example(name, precision)
    places = Counter(node for piece in case.cut.pieces for node in piece)
    assert max(places.values()) == 1
    for node in computed(case):
        if node not in places:
            kind = case.cut.kinds[node]
            assert kind is Kind.INLINE or (kind is Kind.LIBRARY and is_tuple_part(node)), node
    assert not {node for node in places if node.op != "call_function"}


@every_case
def test_whatever_a_piece_reads_is_computed_before_it(name: str, precision: str) -> None:
    case = example(name, precision)
    regions = iter(case.regions())
    done: set[fx.Node] = set()

    def is_there(node: fx.Node) -> bool:
        if node in done or case.cut.kinds[node] is Kind.SOURCE:
            return True
        free = case.cut.kinds[node] is Kind.INLINE or is_tuple_part(node)
        return free and all(is_there(source) for source in node.all_input_nodes)

    for piece in case.cut.pieces:
        read = piece[0].all_input_nodes if case.cut.is_library(piece) else next(regions).inputs
        assert all(is_there(node) for node in read), piece
        done.update(piece)
    (output,) = case.source.find_nodes(op="output")
    assert all(is_there(node) for node in output.all_input_nodes)


@every_case
def test_library_calls_keep_their_order(name: str, precision: str) -> None:
    case = example(name, precision)
    calls = [node for node in computed(case) if case.cut.kinds[node] is Kind.LIBRARY]
    expected = [node for node in calls if not is_tuple_part(node)]
    assert [piece[0] for piece in case.cut.pieces if case.cut.is_library(piece)] == expected
    assert all(len(piece) == 1 for piece in case.cut.pieces if case.cut.is_library(piece))
    assert case.lowered.num_calls == len(expected)


@every_case
def test_phases_do_not_mix(name: str, precision: str) -> None:
    """No backward work before the last library call of the forward pass, and the update comes last."""
    case = example(name, precision)
    pieces = case.cut.pieces
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


@every_case
def test_the_update_keeps_its_order(name: str, precision: str) -> None:
    case = example(name, precision)
    order = {node: place for place, node in enumerate(case.source.nodes)}
    places = [order[n] for piece in case.cut.pieces for n in piece if phase_of(n) is Phase.UPDATE]
    assert places == sorted(places)
    for piece in case.cut.pieces:
        if phase_of(piece[0]) is Phase.UPDATE:
            units = {node.meta.get("unit") for node in piece if not is_tuple_part(node)}
            assert len(units) == 1


@every_case
def test_nodes_of_a_region_are_in_the_graphs_order(name: str, precision: str) -> None:
    case = example(name, precision)
    order = {node: place for place, node in enumerate(case.source.nodes)}
    for region in case.regions():
        places = [order[node] for node in region.body]
        assert places == sorted(places)


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
