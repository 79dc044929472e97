"""Programs written by hand: every kind of decision, every kind of wait, where bytes go and come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from small_step import (
    BACKWARD,
    BATCH,
    GRADIENT,
    HEAD,
    LAYER,
    LOSS,
    LOSS_BACKWARD,
    LOSS_NODE,
    MAP,
    MASK,
    SLOPE,
    STEP,
    TOP,
    UPDATE,
    WEIGHT,
    plain,
    schedule,
)

from trainmux.ir import (
    Compute,
    Free,
    Instruction,
    Lane,
    Multiplexing,
    Offload,
    Part,
    Prefetch,
    Program,
    Recomputation,
    Recompute,
    Schedule,
    Swap,
    Tenancy,
    Wait,
    verify,
)
from trainmux.planning import Slab, Tenant, _place, pack, peak_live_bytes, timeline
from trainmux.planning._issue import UNPLACED
from trainmux.planning._rewrite import draft

TURNS, RING = Multiplexing.TURNS, Multiplexing.RING


def run(*nodes: int) -> list[Instruction]:
    return [Compute(0, node) for node in nodes]


def free(*tensors: int) -> list[Instruction]:
    return [Free(0, tensor) for tensor in tensors]


def body_of(
    multiplexing: Multiplexing = TURNS,
    swaps: list[Swap] | None = None,
    again: list[Recomputation] | None = None,
) -> list[Instruction]:
    return list(program_of(multiplexing, swaps, again).body.instructions)


def program_of(
    multiplexing: Multiplexing = TURNS,
    swaps: list[Swap] | None = None,
    again: list[Recomputation] | None = None,
) -> Program:
    program = plain([STEP], schedule(multiplexing, swaps or [], again or []))
    verify(program, [STEP], budget_bytes=program.slab_bytes)
    return program


def spans_of(part: Part, tensor: int) -> list[tuple[int, int]]:
    return [(t.begin, t.end) for t in part.tenancies if t.tensor == tensor]


def test_without_decisions_each_tensor_goes_after_its_last_use() -> None:
    program = program_of()
    assert list(program.body.instructions) == [
        *run(LAYER, HEAD, LOSS_NODE, LOSS_BACKWARD),
        *free(TOP),
        *run(BACKWARD),
        *free(MAP, MASK, SLOPE),
        *run(UPDATE),
        *free(GRADIENT),
        *free(LOSS),  # a result is there to be read until the pass is over
    ]
    assert program.prologue.instructions == program.epilogue.instructions == ()
    assert program.resident == ((0, BATCH), (0, WEIGHT))
    assert program.host_bytes == 0


def test_every_byte_has_a_place_and_static_ones_the_same_throughout() -> None:
    program = program_of()
    assert spans_of(program.body, WEIGHT) == [(-1, 12)]
    assert spans_of(program.body, MAP) == [(0, 6)]
    assert [(t.begin, t.end, t.size_bytes) for t in program.body.tenancies if t.tensor == -1] == [(0, 0, 100)]
    for part in (program.prologue, program.epilogue):
        assert {(t.tensor, t.begin, t.end) for t in part.tenancies} == {(BATCH, -1, 0), (WEIGHT, -1, 0)}
        placed = {t.tensor: t.offset for t in part.tenancies}
        assert all(placed[t.tensor] == t.offset for t in program.body.tenancies if t.tensor in placed)
    # With mask, map, top, loss and slope at once; the slab rounds each up to 512 bytes.
    assert peak_live_bytes(program.body) == 512 + 1024 + 2048 + 512 + 1024 + 4 + 2048
    assert program.slab_bytes == 512 + 1024 + 2048 + 512 + 1024 + 512 + 2048


def test_what_was_placed_before_is_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def counted(tenants: Sequence[Tenant], alignment: int, *, enough_bytes: int) -> Slab:
        packed.append(len(tenants))
        return pack(tenants, alignment, enough_bytes=enough_bytes)

    monkeypatch.setattr(_place, "pack", counted)
    _place._packed.cache_clear()
    first = program_of()
    assert program_of() == first
    assert len(packed) == 1
    swapped = program_of(swaps=[Swap(0, MASK, (0, LAYER), (0, HEAD), (0, BACKWARD))])
    assert swapped.body.tenancies != first.body.tenancies
    assert len(packed) == 2


def test_a_swap_has_its_five_waits_where_they_are_needed() -> None:
    swap = Swap(0, MASK, (0, LAYER), (0, HEAD), (0, BACKWARD))
    assert body_of(swaps=[swap]) == [
        *run(LAYER),
        Wait(Lane.OUT, 0),  # the tensor is complete
        Offload(0, MASK),
        Wait(Lane.COMPUTE, 2),  # the copy has left the bytes
        *free(MASK),
        *run(HEAD, LOSS_NODE, LOSS_BACKWARD),
        *free(TOP),
        Wait(Lane.IN, 8),  # compute is done with the bytes, and knew that the host has its copy
        Prefetch(0, MASK),
        Wait(Lane.COMPUTE, 10),  # the tensor is back
        *run(BACKWARD),
        *free(MAP, MASK, SLOPE),
        *run(UPDATE),
        *free(GRADIENT),
        *free(LOSS),
    ]


def test_a_later_release_and_an_earlier_prefetch() -> None:
    swap = Swap(0, MASK, (0, LAYER), (0, LOSS_NODE), (0, LOSS_BACKWARD))
    program = program_of(swaps=[swap])
    assert list(program.body.instructions)[:12] == [
        *run(LAYER),
        Wait(Lane.OUT, 0),
        Offload(0, MASK),
        *run(HEAD),
        Wait(Lane.COMPUTE, 2),
        *free(MASK),
        *run(LOSS_NODE),
        Wait(Lane.IN, 6),
        Prefetch(0, MASK),
        *run(LOSS_BACKWARD),
        *free(TOP),
        Wait(Lane.COMPUTE, 8),
    ]
    assert spans_of(program.body, MASK) == [(0, 5), (8, 14)]
    assert program.host_bytes == 512
    # 6 seconds of nodes; half a second out and a quarter back, each beside a node.
    found = timeline(program.body, [STEP])
    assert (found.seconds, found.stall_seconds, found.copy_seconds) == (6.0, 0.0, 0.75)
    assert found.hidden_copy_seconds == 0.75


def test_one_wait_serves_all_that_it_implies() -> None:
    swaps = [
        Swap(0, MASK, (0, LAYER), (0, LOSS_NODE), (0, BACKWARD)),
        Swap(0, MAP, (0, HEAD), (0, LOSS_NODE), (0, BACKWARD)),
    ]
    assert body_of(swaps=swaps)[:19] == [
        *run(LAYER),
        Wait(Lane.OUT, 0),
        Offload(0, MASK),
        *run(HEAD),
        Wait(Lane.OUT, 3),
        Offload(0, MAP),
        Wait(Lane.COMPUTE, 5),  # OUT runs in order: the offload of the mask has ended too
        *free(MAP),
        *free(MASK),
        *run(LOSS_NODE, LOSS_BACKWARD),
        *free(TOP),
        Wait(Lane.IN, 11),
        Prefetch(0, MASK),
        Prefetch(0, MAP),
        Wait(Lane.COMPUTE, 14),  # IN runs in order as well
        *run(BACKWARD),
        *free(MAP, MASK),
    ]


def test_a_recomputation_drops_after_the_last_use_and_makes_again() -> None:
    again = Recomputation(0, MASK, (LAYER,), (0, BACKWARD))
    program = program_of(again=[again])
    assert list(program.body.instructions) == [
        *run(LAYER),
        *free(MASK),
        *run(HEAD, LOSS_NODE, LOSS_BACKWARD),
        *free(TOP),
        Recompute(0, LAYER, (MASK,)),
        *run(BACKWARD),
        *free(MAP, MASK, SLOPE),
        *run(UPDATE),
        *free(GRADIENT),
        *free(LOSS),
    ]
    # The map, which the node makes too, is on the device already: the second one is thrown away.
    assert spans_of(program.body, MAP) == [(6, 6), (0, 8)]
    assert timeline(program.body, [STEP]).recompute_seconds == 1.0


def test_what_a_recomputation_makes_on_the_way_goes_at_once() -> None:
    again = [
        Recomputation(0, TOP, (LAYER, HEAD), (0, LOSS_BACKWARD)),
        Recomputation(0, MAP, (LAYER,), (0, BACKWARD)),
    ]
    program = program_of(again=again)
    assert list(program.body.instructions)[:14] == [
        *run(LAYER, HEAD),
        *free(MAP),
        *run(LOSS_NODE),
        *free(TOP),
        Recompute(0, LAYER, (MAP,)),
        Recompute(0, HEAD, (TOP,)),
        *free(MAP),
        *run(LOSS_BACKWARD),
        *free(TOP),
        Recompute(0, LAYER, (MAP,)),
        *run(BACKWARD),
        *free(MAP, MASK),
    ]
    assert spans_of(program.body, MASK) == [(5, 5), (10, 10), (0, 13)]


def test_a_source_stays_until_it_is_read_and_nodes_that_make_nothing_new_are_left_out() -> None:
    top = Recomputation(0, TOP, (HEAD,), (0, LOSS_BACKWARD))
    wide = Recomputation(0, TOP, (LAYER, HEAD), (0, LOSS_BACKWARD))
    kept = body_of(again=[top])
    assert kept[:6] == [
        *run(LAYER, HEAD, LOSS_NODE),
        *free(TOP),
        Recompute(0, HEAD, (TOP,)),
        *run(LOSS_BACKWARD),
    ]
    assert body_of(again=[wide]) == kept  # the map is there: the layer need not run again


def test_recomputations_before_one_node_build_on_one_another() -> None:
    again = [
        Recomputation(0, TOP, (HEAD,), (0, LOSS_BACKWARD)),
        Recomputation(0, MAP, (LAYER,), (0, LOSS_BACKWARD)),
    ]
    assert body_of(again=again)[3:9] == [
        *run(LOSS_NODE),
        *free(TOP),
        Recompute(0, LAYER, (MAP,)),
        Recompute(0, HEAD, (TOP,)),
        *run(LOSS_BACKWARD),
        *free(TOP),
    ]


def test_a_recomputation_waits_for_its_sources() -> None:
    swap = Swap(0, MAP, (0, HEAD), (0, LOSS_NODE), (0, LOSS_BACKWARD))
    again = Recomputation(0, TOP, (HEAD,), (0, LOSS_BACKWARD))
    assert body_of(swaps=[swap], again=[again])[2:13] == [
        Wait(Lane.OUT, 1),
        Offload(0, MAP),
        Wait(Lane.COMPUTE, 3),
        *free(MAP),
        *run(LOSS_NODE),
        *free(TOP),
        Wait(Lane.IN, 7),
        Prefetch(0, MAP),
        Wait(Lane.COMPUTE, 9),
        Recompute(0, HEAD, (TOP,)),
        *run(LOSS_BACKWARD),
    ]


def test_a_static_tensor_is_on_the_host_between_steps() -> None:
    swap = Swap(0, WEIGHT, (0, UPDATE), (0, LAYER), (0, LAYER))
    program = program_of(swaps=[swap])
    instructions = list(program.body.instructions)
    assert instructions[:3] == [Prefetch(0, WEIGHT), Wait(Lane.COMPUTE, 0), *run(LAYER)]
    # The release lies in the next pass: it happens at the end of this one.
    assert instructions[-7:] == [
        *run(UPDATE),
        *free(GRADIENT),
        Wait(Lane.OUT, 11),
        Offload(0, WEIGHT),
        Wait(Lane.COMPUTE, 14),
        *free(WEIGHT),
        *free(LOSS),
    ]
    assert program.resident == ((0, BATCH),)
    assert program.host_bytes == 1024


def test_what_the_host_has_already_is_not_copied_again() -> None:
    swaps = [
        Swap(0, WEIGHT, (0, UPDATE), (0, LAYER), (0, LAYER)),
        Swap(0, WEIGHT, (0, LAYER), (0, HEAD), (0, UPDATE)),
    ]
    instructions = body_of(swaps=swaps)
    assert instructions[:6] == [
        Prefetch(0, WEIGHT),
        Wait(Lane.COMPUTE, 0),
        *run(LAYER),
        *free(WEIGHT),  # read, not changed
        *run(HEAD, LOSS_NODE),
    ]
    assert instructions.count(Offload(0, WEIGHT)) == 1


def test_a_ring_of_one_begins_with_the_backward_pass() -> None:
    program = program_of(RING)
    backward = [
        *run(LOSS_BACKWARD),
        *free(TOP),
        *run(BACKWARD),
        *free(MAP, MASK, SLOPE),
        *run(UPDATE),
        *free(GRADIENT),
        *free(LOSS),
    ]
    forward = run(LAYER, HEAD, LOSS_NODE)
    assert list(program.prologue.instructions) == forward
    assert list(program.body.instructions) == backward + forward
    # The loss of the step that ends is free before the next one's is made.
    assert list(program.epilogue.instructions) == backward
    crossing = {TOP, MAP, MASK, LOSS, BATCH, WEIGHT}
    offsets = [
        {t.tensor: t.offset for t in program.prologue.tenancies if t.end == 3},
        {t.tensor: t.offset for t in program.body.tenancies if t.begin == -1},
        {t.tensor: t.offset for t in program.body.tenancies if t.end == 12},
        {t.tensor: t.offset for t in program.epilogue.tenancies if t.begin == -1},
    ]
    assert set(offsets[0]) == crossing
    assert all(found == offsets[0] for found in offsets)


def test_a_swap_across_the_end_of_the_ring_is_released_there() -> None:
    swap = Swap(0, MASK, (0, LAYER), (0, LOSS_BACKWARD), (0, BACKWARD))
    program = program_of(RING, swaps=[swap])
    out = [
        *run(LAYER),
        Wait(Lane.OUT, 0),
        Offload(0, MASK),
        *run(HEAD, LOSS_NODE),
        Wait(Lane.COMPUTE, 2),
        *free(MASK),
    ]
    assert list(program.prologue.instructions) == out
    back = [
        *run(LOSS_BACKWARD),
        *free(TOP),
        Wait(Lane.IN, 1),
        Prefetch(0, MASK),
        Wait(Lane.COMPUTE, 3),
        *run(BACKWARD),
    ]
    assert list(program.body.instructions)[:6] == list(program.epilogue.instructions)[:6] == back
    assert [type(i) for i in program.body.instructions[-7:]] == [type(i) for i in out]


def test_anchors_at_other_sub_arrays_find_the_nearest_node_in_prologue_and_epilogue() -> None:
    # Sub-array 0's mask is released and fetched around nodes of sub-array 1, which run between.
    swap = Swap(0, MASK, (0, LAYER), (1, LOSS_BACKWARD), (1, LAYER))
    order = (
        *((0, LOSS_BACKWARD), (1, LAYER), (0, BACKWARD), (0, UPDATE), (1, HEAD), (1, LOSS_NODE)),
        *((0, LAYER), (1, LOSS_BACKWARD), (0, HEAD), (0, LOSS_NODE), (1, BACKWARD), (1, UPDATE)),
    )
    program = plain([STEP, STEP], Schedule(RING, order, (swap,), ()))
    verify(program, [STEP, STEP], budget_bytes=program.slab_bytes)
    assert list(program.prologue.instructions) == [
        *run(LAYER),
        Wait(Lane.OUT, 0),
        Offload(0, MASK),
        Wait(Lane.COMPUTE, 2),
        *free(MASK),  # before the next node there is
        *run(HEAD, LOSS_NODE),
    ]
    assert list(program.epilogue.instructions)[:6] == [
        *run(LOSS_BACKWARD),
        *free(TOP),
        Wait(Lane.IN, 1),
        Prefetch(0, MASK),
        Wait(Lane.COMPUTE, 3),
        *run(BACKWARD),
    ]


def test_swapped_static_tensors_of_a_ring_come_and_go_with_prologue_and_epilogue() -> None:
    # On the host from the loss to the loss backward, which is where the body meets itself.
    swap = Swap(0, WEIGHT, (0, LOSS_NODE), (0, LOSS_BACKWARD), (0, UPDATE))
    program = program_of(RING, swaps=[swap])
    assert list(program.prologue.instructions) == [
        Prefetch(0, WEIGHT),
        Wait(Lane.COMPUTE, 0),
        *run(LAYER, HEAD, LOSS_NODE),
        *free(WEIGHT),  # only read: the host's copy is still true
    ]
    assert list(program.epilogue.instructions)[6:] == [
        Wait(Lane.IN, 5),
        Prefetch(0, WEIGHT),
        Wait(Lane.COMPUTE, 7),
        *run(UPDATE),
        *free(GRADIENT),
        Wait(Lane.OUT, 9),
        Offload(0, WEIGHT),  # as soon as it has changed for the last time
        Wait(Lane.COMPUTE, 12),
        *free(WEIGHT),
        *free(LOSS),
    ]
    assert program.resident == ((0, BATCH),)


def test_a_draft_has_everything_but_places() -> None:
    swap = Swap(0, MASK, (0, LAYER), (0, HEAD), (0, BACKWARD))
    plan = schedule(RING, [swap])
    rough, program = draft([STEP], plan), plain([STEP], plan)
    for name in ("prologue", "body", "epilogue"):
        unplaced, placed = getattr(rough, name), getattr(program, name)
        assert unplaced.instructions == placed.instructions
        assert unplaced.tenancies == tuple(
            Tenancy(t.sub_array, t.tensor, t.begin, t.end, UNPLACED, t.size_bytes) for t in placed.tenancies
        )
        assert peak_live_bytes(unplaced) == peak_live_bytes(placed) <= program.slab_bytes
    assert (rough.resident, rough.host_bytes) == (program.resident, program.host_bytes)
