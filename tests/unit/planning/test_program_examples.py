"""Programs of a small step, read as text: every kind of decision, every wait, where bytes go and come.

A node is its name, ``again(node→kept)`` a recomputation, ``>`` an offload, ``<`` a prefetch, ``-`` a free and
``LANE[what]`` a wait of a lane.
"""

from __future__ import annotations

import dataclasses

import pytest
from steps import (
    BACKWARD,
    BATCH,
    HEAD,
    LAYER,
    LOSS,
    LOSS_BACKWARD,
    LOSS_NODE,
    MAP,
    MASK,
    RING,
    STEP,
    TOP,
    TURNS,
    UPDATE,
    WEIGHT,
    plain_order,
    prove,
)

from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Instruction,
    Lane,
    Multiplexing,
    Offload,
    Part,
    Phase,
    Prefetch,
    ProfiledNode,
    Program,
    Recomputation,
    Recompute,
    Schedule,
    Swap,
    Tenancy,
    Wait,
)
from trainmux.planning import fewer_waits, peak_live_bytes, timeline


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


def swap(tensor: int, out: int, release: int, back: int) -> Swap:
    return Swap(0, tensor, (0, out), (0, release), (0, back))


def again(tensor: int, nodes: tuple[int, ...], before: int) -> Recomputation:
    return Recomputation(0, tensor, nodes, (0, before))


def program_of(multiplexing: Multiplexing, *decisions: Swap | Recomputation) -> Program:
    swaps = tuple(each for each in decisions if isinstance(each, Swap))
    recomputes = tuple(each for each in decisions if isinstance(each, Recomputation))
    return prove([STEP], Schedule(multiplexing, plain_order([STEP], multiplexing), swaps, recomputes))


FORWARD = "layer head loss"
BACKWARDS = "∇loss -top ∇layer -map -mask -slope update -gradient -loss"
"""Each tensor goes after its last use; a result is there to be read until the pass is over."""
REST = "∇layer -map -mask -slope update -gradient -loss"


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        pytest.param([], f"{FORWARD} {BACKWARDS}", id="nothing decided"),
        pytest.param(
            [swap(MASK, LAYER, HEAD, BACKWARD)],
            "layer OUT[layer] >mask COMPUTE[>mask] -mask head loss ∇loss -top "
            f"IN[>mask] <mask COMPUTE[<mask] {REST}",
            id="a swap waits for tensor, copy, host and return; nobody else had its bytes",
        ),
        pytest.param(
            [swap(MASK, LAYER, LOSS_NODE, LOSS_BACKWARD)],
            "layer OUT[layer] >mask head COMPUTE[>mask] -mask loss IN[loss] <mask ∇loss -top "
            f"COMPUTE[<mask] {REST}",
            id="a later release and an earlier prefetch",
        ),
        pytest.param(
            [swap(MASK, LAYER, LOSS_NODE, BACKWARD), swap(MAP, HEAD, LOSS_NODE, BACKWARD)],
            "layer OUT[layer] >mask head >map COMPUTE[>map] -map -mask loss ∇loss -top "
            f"IN[>mask] <mask IN[>map] <map COMPUTE[<map] {REST}",
            id="a lane runs in order, so one wait serves all copies before it",
        ),
        pytest.param(
            [again(MASK, (LAYER,), BACKWARD)],
            f"layer -mask head loss ∇loss -top again(layer→mask) {REST}",
            id="a recomputation drops after the last use and makes again",
        ),
        pytest.param(
            [again(TOP, (LAYER, HEAD), LOSS_BACKWARD), again(MAP, (LAYER,), BACKWARD)],
            "layer head -map loss -top again(layer→map) again(head→top) -map ∇loss -top "
            f"again(layer→map) {REST}",
            id="what is made on the way goes at once",
        ),
        *(
            pytest.param(
                [again(TOP, nodes, LOSS_BACKWARD)],
                f"{FORWARD} -top again(head→top) ∇loss -top {REST}",
                id=f"a source stays until it is read, so of {len(nodes)} nodes one runs",
            )
            for nodes in ((HEAD,), (LAYER, HEAD))
        ),
        pytest.param(
            [again(TOP, (HEAD,), LOSS_BACKWARD), again(MAP, (LAYER,), LOSS_BACKWARD)],
            f"layer head -map loss -top again(layer→map) again(head→top) ∇loss -top {REST}",
            id="recomputations before one node build on one another",
        ),
        pytest.param(
            [swap(MAP, HEAD, LOSS_NODE, LOSS_BACKWARD), again(TOP, (HEAD,), LOSS_BACKWARD)],
            "layer head OUT[head] >map COMPUTE[>map] -map loss -top IN[-top] <map COMPUTE[<map] "
            f"again(head→top) ∇loss -top {REST}",
            id="a recomputation waits for its sources",
        ),
        pytest.param(
            [swap(WEIGHT, UPDATE, LAYER, LAYER)],
            f"<weight COMPUTE[<weight] {FORWARD} ∇loss -top ∇layer -map -mask -slope update -gradient "
            "OUT[update] >weight COMPUTE[>weight] -weight -loss",
            id="a static tensor is on the host between steps",
        ),
        pytest.param(
            [swap(WEIGHT, UPDATE, LAYER, LAYER), swap(WEIGHT, LAYER, HEAD, UPDATE)],
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
    assert program.resident == tuple((0, tensor) for tensor in (BATCH, WEIGHT) if tensor not in swapped)
    assert program.host_bytes == sum(STEP.tensors[tensor].size_bytes for tensor in swapped)


@pytest.mark.parametrize(
    ("decisions", "prologue", "body", "epilogue"),
    [
        pytest.param([], FORWARD, f"{BACKWARDS} {FORWARD}", BACKWARDS, id="nothing decided"),
        pytest.param(
            [swap(MASK, LAYER, LOSS_BACKWARD, BACKWARD)],
            "layer OUT[layer] >mask head loss COMPUTE[>mask] -mask",
            f"∇loss -top <mask COMPUTE[<mask] {REST} layer OUT[layer] >mask head loss COMPUTE[>mask] -mask",
            f"∇loss -top IN[-top] <mask COMPUTE[<mask] {REST}",
            id="a release beyond the end happens there",
        ),
        pytest.param(
            [swap(WEIGHT, LOSS_NODE, LOSS_BACKWARD, UPDATE)],
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
    around = Swap(0, MASK, (0, LAYER), (1, LOSS_BACKWARD), (1, LAYER))
    order = (
        *((0, LOSS_BACKWARD), (1, LAYER), (0, BACKWARD), (0, UPDATE), (1, HEAD), (1, LOSS_NODE)),
        *((0, LAYER), (1, LOSS_BACKWARD), (0, HEAD), (0, LOSS_NODE), (1, BACKWARD), (1, UPDATE)),
    )
    program = prove([STEP, STEP], Schedule(RING, order, (around,), ()))
    assert text(program.prologue) == "layer OUT[layer] >mask COMPUTE[>mask] -mask head loss"
    assert text(program.epilogue) == f"∇loss -top IN[-top] <mask COMPUTE[<mask] {REST}"


def test_every_byte_has_a_place_and_what_crosses_parts_keeps_it() -> None:
    program = program_of(TURNS)
    spans = {t.tensor: (t.begin, t.end, t.size_bytes) for t in program.body.tenancies}
    assert (spans[WEIGHT], spans[MAP], spans[-1]) == ((-1, 12, 1024), (0, 6, 2048), (0, 0, 100))
    # With mask, map, top, loss and slope at once; the slab rounds each up to 512 bytes.
    assert peak_live_bytes(program.body) == 512 + 1024 + 2048 + 512 + 1024 + 4 + 2048
    assert program.slab_bytes == 512 + 1024 + 2048 + 512 + 1024 + 512 + 2048
    # What a recomputation makes and nobody needs is thrown away in its own instruction.
    recomputing = program_of(TURNS, again(MASK, (LAYER,), BACKWARD)).body
    assert [(t.begin, t.end) for t in recomputing.tenancies if t.tensor == MAP] == [(6, 6), (0, 8)]
    ring = program_of(RING)
    last = {part: len(part.instructions) for part in (ring.prologue, ring.body)}
    offsets = [
        {t.tensor: t.offset for t in ring.prologue.tenancies if t.end == last[ring.prologue]},
        {t.tensor: t.offset for t in ring.body.tenancies if t.begin == -1},
        {t.tensor: t.offset for t in ring.body.tenancies if t.end == last[ring.body]},
        {t.tensor: t.offset for t in ring.epilogue.tenancies if t.begin == -1},
    ]
    assert set(offsets[0]) == {TOP, MAP, MASK, LOSS, BATCH, WEIGHT}
    assert all(found == offsets[0] for found in offsets)


def test_copies_and_recomputations_take_their_time() -> None:
    """Six seconds of nodes; half a second out and a quarter back, each while a node runs."""
    found = timeline(program_of(TURNS, swap(MASK, LAYER, LOSS_NODE, LOSS_BACKWARD)).body, [STEP])
    assert (found.seconds, found.stall_seconds, found.copy_seconds) == (6.0, 0.0, 0.75)
    assert found.hidden_copy_seconds == 0.75
    found = timeline(program_of(TURNS, again(MASK, (LAYER,), BACKWARD)).body, [STEP])
    assert (found.seconds, found.recompute_seconds) == (7.0, 1.0)


def test_bytes_that_somebody_had_are_waited_for() -> None:
    """The mask is away while two nodes run and comes back to bytes of its own, or to those of the map."""

    def swapped(offset: int) -> Part:
        instructions = (
            Compute(0, LAYER),  # 0
            Wait(Lane.OUT, 0),
            Offload(0, MASK),
            Compute(0, HEAD),  # 3
            Wait(Lane.COMPUTE, 2),
            Free(0, MASK),
            Free(0, MAP),
            Compute(0, LOSS_NODE),  # 7
            Wait(Lane.IN, 7),
            Prefetch(0, MASK),  # 9
            Wait(Lane.COMPUTE, 9),
            Free(0, MASK),
        )
        tenancies = (
            Tenancy(0, BATCH, -1, 12, 8192, 512),
            Tenancy(0, WEIGHT, -1, 12, 9216, 1024),
            Tenancy(0, MAP, 0, 6, 2048, 2048),
            Tenancy(0, MASK, 0, 5, 0, 512),
            Tenancy(0, TOP, 3, 12, 4096, 2048),
            Tenancy(0, LOSS, 7, 12, 6144, 4),
            Tenancy(0, MASK, 9, 11, offset, 512),
        )
        return Part(instructions, tenancies)

    assert "IN[>mask]" in text(fewer_waits(swapped(1024), [STEP]))
    had = text(fewer_waits(swapped(2048), [STEP]))
    assert "IN[-map]" in had or "IN[loss]" in had


def test_copies_are_held_back_to_begin_together() -> None:
    """Three tensors leave one after another; nobody needs their memory for long."""
    names = range(3)
    tensors = tuple(
        dataclasses.replace(
            STEP.tensors[0], name=f"{n}", byte_class=ByteClass.FEATURE_MAP, swap_out_seconds=0.01
        )
        for n in names
    )
    nodes = tuple(
        ProfiledNode(f"{n}", Phase.FORWARD, (), (n,) if n in names else (), (), 1.0) for n in range(300)
    )
    instructions: list[Instruction] = []
    for n in names:
        instructions += [Compute(0, n), Wait(Lane.OUT, 3 * n), Offload(0, n)]
    instructions += [Compute(0, n) for n in range(3, 300)]
    tenancies = []
    for n in names:
        instructions += [Wait(Lane.COMPUTE, 3 * n + 2), Free(0, n)]
        tenancies.append(Tenancy(0, n, 3 * n, len(instructions) - 1, n * 512, 512))
    profile = dataclasses.replace(STEP, tensors=tensors, nodes=nodes)
    part = fewer_waits(Part(tuple(instructions), tuple(tenancies)), [profile])
    assert [item.lane for item in part.instructions if isinstance(item, Wait)] == [Lane.OUT, Lane.COMPUTE]
    assert [i for i in part.instructions if isinstance(i, Offload)] == [Offload(0, n) for n in names]
