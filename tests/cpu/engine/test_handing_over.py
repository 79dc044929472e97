"""What only the next node reads goes from one to the other without being copied to its place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from planned import differences, expected_of, small_case, tightest, train_planned
from torch import Tensor

from trainmux.engine import handed_over, measured_scratch_bytes, scratch_bytes
from trainmux.engine._planned import _hand_overs
from trainmux.ir import Compute, Free, Instruction, Lane, Multiplexing, Offload, Part, Phase, Recompute, Wait
from trainmux.profiling import KernelGraph, PassingPlace

HANDED = ({4: frozenset({7})}, {4: frozenset({7})})
"""In both sub-arrays node 4 may hand over tensor 7."""


def cnn_graph() -> KernelGraph:
    return small_case("residual", (2,)).graphs[0]


def test_only_the_next_node_reads_what_is_handed_over() -> None:
    graph = cnn_graph()
    found = handed_over(graph)
    names = {graph.steps[rank].node.name.rstrip("0123456789_") for rank in found}
    assert "convolution_backward" in names
    results = {location.tensor for location in graph.outputs}
    for rank, numbers in found.items():
        assert numbers <= set(graph.steps[rank].creates) - results
        for number in numbers:
            users = [
                position
                for position, step in enumerate(graph.steps)
                if number in (*step.reads, *step.changes)
            ]
            assert users == [rank + 1]


def test_products_write_to_their_place_and_hand_nothing_over() -> None:
    graph = cnn_graph()
    products = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
    ranks = {rank for rank, step in enumerate(graph.steps) if step.node.target in products}
    assert ranks
    assert not ranks & set(handed_over(graph))


@pytest.mark.parametrize(
    ("between", "is_handed"),
    [
        ([], True),
        ([Wait(Lane.COMPUTE, 0), Free(0, 3), Offload(0, 3), Free(1, 7), Offload(1, 7)], True),
        ([Recompute(0, 2, (5,))], True),
        ([Recompute(1, 2, (5,))], False),
        ([Compute(1, 5)], False),
        ([Offload(0, 7)], False),
        ([Free(0, 7)], False),
    ],
)
def test_what_may_come_between(between: Sequence[Instruction], is_handed: bool) -> None:
    part = Part((Compute(0, 3), Compute(0, 4), *between, Compute(0, 5)), ())
    assert _hand_overs(part, HANDED).get(1, frozenset()) == ({7} if is_handed else frozenset())


def test_nothing_is_handed_over_beyond_the_end_of_a_part_or_past_the_next_node() -> None:
    assert not any(_hand_overs(Part((Compute(0, 4),), ()), HANDED).values())
    assert not any(_hand_overs(Part((Compute(0, 4), Compute(0, 6)), ()), HANDED).values())
    assert not any(_hand_overs(Part((Compute(0, 4), Compute(1, 5)), ()), HANDED).values())


def place(shape: Sequence[int], strides: Sequence[int], size_bytes: int, offset: int = 0) -> PassingPlace:
    memory = torch.full((1 << 12,), 0xFF, dtype=torch.uint8)[512 : 512 + size_bytes]
    typed = memory.view(torch.float32)
    return PassingPlace(memory, typed.as_strided(shape, strides, typed.storage_offset() + offset))


@pytest.mark.parametrize(
    ("result", "given", "stays"),
    [
        (torch.ones(4, 6), place((4, 6), (6, 1), 96), True),
        (torch.ones(6, 4).t(), place((4, 6), (6, 1), 96), False),  # in another order
        (torch.ones(5, 6)[1:], place((4, 6), (6, 1), 96), False),  # not at its storage's beginning
        (torch.ones(5, 6)[1:], place((4, 6), (6, 1), 120, offset=6), True),  # where it would be
        (torch.ones(4, 6), place((4, 6), (6, 1), 120), False),  # room behind it is missing
    ],
)
def test_a_result_stays_only_where_it_lies_as_it_would(
    result: Tensor, given: PassingPlace, stays: bool
) -> None:
    taken = given.take(result)
    assert (taken is result) == stays
    assert torch.equal(taken, result)
    untouched = torch.isnan(given.value).all()
    assert bool(untouched) == stays


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_planned_step_hands_over_and_computes_the_same_bits(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small_case("residual", (2,))
    found = tightest(case.candidates("auto", Multiplexing.TURNS), share)
    stayed = []
    take = PassingPlace.take

    def noted(self: PassingPlace, result: Tensor) -> Tensor:
        taken = take(self, result)
        stayed.append(taken is result)
        return taken

    monkeypatch.setattr(PassingPlace, "take", noted)
    planned = case.planned(found.program, poisons=True)
    assert differences(train_planned(case, planned, 3), expected_of("residual", (2,), 3)) == []
    assert sum(stayed) >= 3 * 5


def test_a_pool_has_room_for_what_is_handed_over_beside_nodes_that_run_again() -> None:
    graph = cnn_graph()
    sizes = {
        rank: sum(-(-graph.tensors[number].size_bytes // 512) * 512 for number in numbers)
        for rank, numbers in handed_over(graph).items()
    }
    nothing = [0] * len(graph.steps)
    most = max(sizes.values())
    assert measured_scratch_bytes(graph, nothing) == most
    assert scratch_bytes(graph) >= most
    forward = next(rank for rank, step in enumerate(graph.steps) if step.phase is Phase.FORWARD)
    assert measured_scratch_bytes(graph, [*nothing[:forward], 1000, *nothing[forward + 1 :]]) == most + 1000
    last = len(graph.steps) - 1
    assert last - 1 not in sizes  # nothing is handed over to the last one
    assert measured_scratch_bytes(graph, [*nothing[:last], 1000]) == most
    assert measured_scratch_bytes(graph, [*nothing[:last], most + 1]) == most + 1
    rank = max(sizes, key=sizes.__getitem__)
    behind = [*nothing[: rank + 1], 1000, *nothing[rank + 2 :]]
    assert measured_scratch_bytes(graph, behind) == most + 1000
