"""Results that only the next node reads are handed over without being copied to their place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from planned import case_of, differences, train_planned
from torch import Tensor

from trainmux.engine import handed_over, measured_scratch_bytes, scratch_bytes
from trainmux.ir import Multiplexing, Phase
from trainmux.profiling import KernelGraph, PassingPlace
from trainmux.sizes import round_up

pytestmark = pytest.mark.usefixtures("built_once")


def cnn_graph() -> KernelGraph:
    return case_of("residual", (2,)).graphs[0]


def test_only_the_next_node_reads_what_is_handed_over() -> None:
    graph = cnn_graph()
    found = handed_over(graph)
    names = {graph.steps[rank].node.name.rstrip("0123456789_") for rank in found}
    assert "convolution_backward" in names
    assert not names & {"mm", "bmm", "addmm"}  # products write to their place
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


def test_a_planned_step_hands_over_and_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("residual", (2,))
    program = case.program(Multiplexing.TURNS, swaps=True, recomputes=True)
    stayed = []
    take = PassingPlace.take

    def noted(self: PassingPlace, result: Tensor) -> Tensor:
        taken = take(self, result)
        stayed.append(taken is result)
        return taken

    monkeypatch.setattr(PassingPlace, "take", noted)
    planned = case.planned(program, poisons=True)
    assert differences(train_planned(case, planned, 2), case.expected(2)) == []
    assert sum(stayed) >= 2 * 5


def test_a_pool_has_room_for_what_is_handed_over_beside_nodes_that_run_again() -> None:
    graph = cnn_graph()
    held = handed_over(graph)
    most = max(sum(round_up(graph.tensors[n].size_bytes, 512) for n in numbers) for numbers in held.values())

    def scratch(rank: int, size_bytes: int) -> int:
        return measured_scratch_bytes(graph, [size_bytes * (at == rank) for at in range(len(graph.steps))])

    assert scratch_bytes(graph) >= scratch(0, 0) == most
    first = next(rank for rank, step in enumerate(graph.steps) if step.phase is Phase.FORWARD)
    last = len(graph.steps) - 1
    assert scratch(first, 1000) == most + 1000
    assert last - 1 not in held
    assert (scratch(last, 1000), scratch(last, most + 1)) == (most, most + 1)
