"""Waits that are left once it is known where bytes lie, and how long things take."""

from __future__ import annotations

from dataclasses import replace

from small_step import BATCH, HEAD, LAYER, LOSS_NODE, MASK, STEP, WEIGHT, plain, schedule

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
    Swap,
    Tenancy,
    Wait,
    lane_of,
    verify,
)
from trainmux.planning import fewer_waits, lane_times


def waits(part: Part, lane: Lane) -> list[Instruction]:
    """What a lane waits for."""
    return [part.instructions[i.on] for i in part.instructions if isinstance(i, Wait) and i.lane is lane]


def swapped(offset: int) -> Part:
    """The mask is away while ``head`` and ``loss`` run, and comes back to ``offset``. The map, which lies at
    2048, is given back before ``loss``."""
    instructions = (
        Compute(0, LAYER),  # 0
        Wait(Lane.OUT, 0),
        Offload(0, MASK),
        Compute(0, HEAD),  # 3
        Wait(Lane.COMPUTE, 2),
        Free(0, MASK),  # 5
        Free(0, 2),  # the map
        Compute(0, LOSS_NODE),  # 7
        Wait(Lane.IN, 7),
        Prefetch(0, MASK),  # 9
        Wait(Lane.COMPUTE, 9),
        Free(0, MASK),
    )
    tenancies = (
        Tenancy(0, BATCH, -1, 12, 8192, 512),
        Tenancy(0, WEIGHT, -1, 12, 9216, 1024),
        Tenancy(0, 2, 0, 6, 2048, 2048),
        Tenancy(0, MASK, 0, 5, 0, 512),
        Tenancy(0, 4, 3, 12, 4096, 2048),
        Tenancy(0, 5, 7, 12, 6144, 4),
        Tenancy(0, MASK, 9, 11, offset, 512),
    )
    return Part(instructions, tenancies)


def test_bytes_that_nobody_had_need_no_wait_for_compute() -> None:
    """What the copy has to know then is that the host has the tensor."""
    part = fewer_waits(swapped(1024), [STEP])
    assert waits(part, Lane.IN) == [Offload(0, MASK)]


def test_bytes_that_somebody_had_are_waited_for() -> None:
    """As long as compute has run by the time that the copy begins: later copies may need it."""
    part = fewer_waits(swapped(2048), [STEP])
    (awaited,) = waits(part, Lane.IN)
    assert lane_of(awaited) is Lane.COMPUTE
    assert awaited in (Free(0, 2), Compute(0, LOSS_NODE))


def test_a_copy_needs_who_wrote_the_tensor_not_who_ran_last() -> None:
    """The first wait of the lane that takes tensors away is for the node that made both of them."""
    swaps = [Swap(0, MASK, (0, LAYER), (0, LOSS_NODE), (0, 4)), Swap(0, 2, (0, HEAD), (0, LOSS_NODE), (0, 4))]
    program = plain([STEP], schedule(Multiplexing.TURNS, swaps))
    assert waits(program.body, Lane.OUT) == [Compute(0, LAYER), Compute(0, HEAD)]
    part = fewer_waits(program.body, [STEP])
    assert waits(part, Lane.OUT) == [Compute(0, LAYER)]
    verify(replace(program, body=part), [STEP], budget_bytes=program.slab_bytes)
    assert lane_times(part, [STEP]).seconds <= lane_times(program.body, [STEP]).seconds


def test_copies_are_held_back_to_begin_together() -> None:
    """Three tensors leave one after another; nobody needs their memory for long."""
    names = range(3)
    tensors = tuple(
        replace(STEP.tensors[0], name=str(n), byte_class=ByteClass.FEATURE_MAP, swap_out_seconds=0.01)
        for n in names
    )
    nodes = tuple(
        ProfiledNode(f"{n}", Phase.FORWARD, (), (n,) if n in names else (), (), 1.0) for n in range(300)
    )
    profile = replace(STEP, tensors=tensors, nodes=nodes)
    instructions: list[Instruction] = []
    for n in names:
        instructions += [Compute(0, n), Wait(Lane.OUT, 3 * n), Offload(0, n)]
    instructions += [Compute(0, n) for n in range(3, 300)]
    tenancies = []
    for n in names:
        instructions += [Wait(Lane.COMPUTE, 3 * n + 2), Free(0, n)]
        tenancies.append(Tenancy(0, n, 3 * n, len(instructions) - 1, n * 512, 512))
    part = fewer_waits(Part(tuple(instructions), tuple(tenancies)), [profile])
    assert len(waits(part, Lane.OUT)) == 1
    assert len(waits(part, Lane.COMPUTE)) == 1
    assert [i for i in part.instructions if isinstance(i, Offload)] == [Offload(0, n) for n in names]
