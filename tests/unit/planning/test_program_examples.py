"""Programs of a small step, read as text: every kind of decision, every wait, where bytes go and come.

A node is its name, ``again(node→kept)`` a recomputation, ``>`` an offload, ``<`` a prefetch, ``-`` a free and
``LANE[what]`` a wait of a lane.
"""

from __future__ import annotations

import pytest
from steps import NODES, RING, STEP, TENSORS, TURNS, again, decided, prove, swap
from tests.slab_check import peak_live_bytes

from trainmux.ir import (
    Compute,
    Free,
    Instruction,
    Multiplexing,
    Offload,
    Part,
    Prefetch,
    Program,
    Recomputation,
    Recompute,
    Schedule,
    Swap,
    Wait,
)


def text(part: Part) -> str:
    def word(instruction: Instruction) -> str:
        match instruction:
            case Compute(sub_array, node):
                return STEP.nodes[node].name + "²" * sub_array
            case Recompute(_, node, keeps):
                return f"again({STEP.nodes[node].name}→{','.join(STEP.tensors[t].name for t in keeps)})"
            case Offload(_, tensor):
                return f">{STEP.tensors[tensor].name}"
            case Prefetch(_, tensor):
                return f"<{STEP.tensors[tensor].name}"
            case Free(_, tensor):
                return f"-{STEP.tensors[tensor].name}"
            case Wait(lane, on):
                return f"{lane.name}[{word(part.instructions[on])}]"

    return " ".join(map(word, part.instructions))


def program_of(multiplexing: Multiplexing, *decisions: Swap | Recomputation) -> Program:
    return prove([STEP], decided(*decisions, multiplexing=multiplexing))


FORWARD = "layer head loss"
BACKWARDS = "∇loss -top ∇layer -map -mask -slope update -gradient -loss"
"""Each tensor goes after its last use; a result is there to be read until the pass is over."""
REST = "∇layer -map -mask -slope update -gradient -loss"


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        pytest.param([], f"{FORWARD} {BACKWARDS}", id="nothing decided"),
        pytest.param(
            [swap("mask", "layer", "head", "∇layer")],
            "layer OUT[layer] >mask COMPUTE[>mask] -mask head loss ∇loss -top "
            f"IN[>mask] <mask COMPUTE[<mask] {REST}",
            id="a swap waits for tensor, copy, host and return; nobody else had its bytes",
        ),
        pytest.param(
            [swap("mask", "layer", "loss", "∇loss")],
            "layer OUT[layer] >mask head COMPUTE[>mask] -mask loss IN[loss] <mask ∇loss -top "
            f"COMPUTE[<mask] {REST}",
            id="a later release and an earlier prefetch",
        ),
        pytest.param(
            [swap("mask", "layer", "loss", "∇layer"), swap("map", "head", "loss", "∇layer")],
            "layer OUT[layer] >mask head >map COMPUTE[>map] -map -mask loss ∇loss -top "
            f"IN[>mask] <mask IN[>map] <map COMPUTE[<map] {REST}",
            id="a lane runs in order, so one wait serves all copies before it",
        ),
        pytest.param(
            [again("mask", "layer", "∇layer")],
            f"layer -mask head loss ∇loss -top again(layer→mask) {REST}",
            id="a recomputation drops after the last use and makes again",
        ),
        pytest.param(
            [again("top", "layer head", "∇loss"), again("map", "layer", "∇layer")],
            "layer head -map loss -top again(layer→map) again(head→top) -map ∇loss -top "
            f"again(layer→map) {REST}",
            id="what is made on the way goes at once",
        ),
        *(
            pytest.param(
                [again("top", nodes, "∇loss")],
                f"{FORWARD} -top again(head→top) ∇loss -top {REST}",
                id=f"a source stays until it is read, so of '{nodes}' one runs",
            )
            for nodes in ("head", "layer head")
        ),
        pytest.param(
            [again("top", "head", "∇loss"), again("map", "layer", "∇loss")],
            f"layer head -map loss -top again(layer→map) again(head→top) ∇loss -top {REST}",
            id="recomputations before one node build on one another",
        ),
        pytest.param(
            [swap("map", "head", "loss", "∇loss"), again("top", "head", "∇loss")],
            "layer head OUT[head] >map COMPUTE[>map] -map loss -top IN[-top] <map COMPUTE[<map] "
            f"again(head→top) ∇loss -top {REST}",
            id="a recomputation waits for its sources",
        ),
        pytest.param(
            [swap("weight", "update", "layer", "layer")],
            f"<weight COMPUTE[<weight] {FORWARD} ∇loss -top ∇layer -map -mask -slope update -gradient "
            "OUT[update] >weight COMPUTE[>weight] -weight -loss",
            id="a static tensor is on the host between steps",
        ),
        pytest.param(
            [swap("weight", "update", "layer", "layer"), swap("weight", "layer", "head", "update")],
            "<weight COMPUTE[<weight] layer -weight head loss ∇loss -top ∇layer -map -mask -slope "
            "IN[-slope] <weight COMPUTE[<weight] update -gradient OUT[update] >weight COMPUTE[>weight] "
            "-weight -loss",
            id="what the host has already is not copied again",
        ),
    ],
)
def test_a_step_in_turns(decisions: list[Swap | Recomputation], expected: str) -> None:
    program = program_of(TURNS, *decisions)
    assert text(program.body) == expected
    assert program.prologue.instructions == program.epilogue.instructions == ()
    swapped = {each.tensor for each in decisions if isinstance(each, Swap)}
    assert program.resident == tuple(
        (0, tensor) for tensor in map(TENSORS.get, ("batch", "weight")) if tensor not in swapped
    )
    assert program.host_bytes == sum(STEP.tensors[tensor].size_bytes for tensor in swapped)


@pytest.mark.parametrize(
    ("decisions", "prologue", "body", "epilogue"),
    [
        pytest.param([], FORWARD, f"{BACKWARDS} {FORWARD}", BACKWARDS, id="nothing decided"),
        pytest.param(
            [swap("mask", "layer", "∇loss", "∇layer")],
            "layer OUT[layer] >mask head loss COMPUTE[>mask] -mask",
            f"∇loss -top <mask COMPUTE[<mask] {REST} layer OUT[layer] >mask head loss COMPUTE[>mask] -mask",
            f"∇loss -top IN[-top] <mask COMPUTE[<mask] {REST}",
            id="a release beyond the end happens there",
        ),
        pytest.param(
            [swap("weight", "loss", "∇loss", "update")],
            f"<weight COMPUTE[<weight] {FORWARD} -weight",
            "∇loss -top ∇layer -map -mask -slope IN[-slope] <weight COMPUTE[<weight] update -gradient -loss "
            f"{FORWARD} OUT[loss] >weight COMPUTE[>weight] -weight",
            "∇loss -top ∇layer -map -mask -slope IN[-slope] <weight COMPUTE[<weight] update -gradient "
            "OUT[update] >weight COMPUTE[>weight] -weight -loss",
            id="static tensors come and go with prologue and epilogue",
        ),
    ],
)
def test_a_ring_of_one_begins_with_the_backward_pass(
    decisions: list[Swap], prologue: str, body: str, epilogue: str
) -> None:
    program = program_of(RING, *decisions)
    parts = (program.prologue, program.body, program.epilogue)
    assert [text(part) for part in parts] == [prologue, body, epilogue]


def test_decisions_at_nodes_of_others_find_the_nearest_node_in_prologue_and_epilogue() -> None:
    """Sub-array 0's mask is released and fetched around nodes of sub-array 1, which run between."""
    around = Swap(0, TENSORS["mask"], (0, NODES["layer"]), (1, NODES["∇loss"]), (1, NODES["layer"]))
    running = "∇loss layer² ∇layer update head² loss² layer ∇loss² head loss ∇layer² update²"
    order = tuple((name.count("²"), NODES[name.rstrip("²")]) for name in running.split())
    program = prove([STEP, STEP], Schedule(RING, order, (around,), ()))
    assert text(program.prologue) == "layer OUT[layer] >mask COMPUTE[>mask] -mask head loss"
    assert text(program.epilogue) == f"∇loss -top IN[-top] <mask COMPUTE[<mask] {REST}"


def test_every_byte_has_a_place() -> None:
    program = program_of(TURNS)
    spans = {t.tensor: (t.begin, t.end, t.size_bytes) for t in program.body.tenancies}
    assert spans[TENSORS["weight"]] == (-1, 12, 1024)
    assert (spans[TENSORS["map"]], spans[-1]) == ((0, 6, 2048), (0, 0, 100))
    # With mask, map, top, loss and slope at once; the slab rounds each up to 512 bytes.
    assert peak_live_bytes(program.body) == 512 + 1024 + 2048 + 512 + 1024 + 4 + 2048
    assert program.slab_bytes == 512 + 1024 + 2048 + 512 + 1024 + 512 + 2048
    # What a recomputation makes and nobody needs is thrown away in its own instruction.
    recomputing = program_of(TURNS, again("mask", "layer", "∇layer")).body
    thrown_away = [(t.begin, t.end) for t in recomputing.tenancies if t.tensor == TENSORS["map"]]
    assert thrown_away == [(6, 6), (0, 8)]
