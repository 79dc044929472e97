"""Three lanes on the clock and bytes in use: worked examples with exact numbers, and what always holds."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import DEVICE
from tests.slab_check import peak_live_bytes

from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Instruction,
    Lane,
    MemoryPoint,
    Offload,
    Part,
    Phase,
    Prefetch,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Recompute,
    Span,
    Tenancy,
    Timeline,
    Wait,
    lane_of,
)
from trainmux.planning import lane_times, measured_timeline, timeline

# Tensor 0: 4 seconds out, 2 back; 8 and 4 while the other direction is busy. Tensor 1: 1 second, 3 then.
PROFILE = Profile(
    "two tensors",
    "analytic",
    1,
    DEVICE,
    (
        ProfiledTensor("big", ByteClass.FEATURE_MAP, 100, 4.0, 2.0, 8.0, 4.0),
        ProfiledTensor("small", ByteClass.FEATURE_MAP, 10, 1.0, 1.0, 3.0, 3.0),
    ),
    tuple(
        ProfiledNode(f"{seconds} seconds", Phase.FORWARD, (), (), (), seconds) for seconds in (1.0, 2.0, 5.0)
    ),
)
ONE, TWO, FIVE = Compute(0, 0), Compute(0, 1), Compute(0, 2)


def run(*instructions: Instruction, profile: Profile = PROFILE) -> Timeline:
    return timeline(Part(instructions, ()), [profile])


def ends(*instructions: Instruction, profile: Profile) -> list[float]:
    return list(lane_times(Part(instructions, ()), [profile]).ends)


@pytest.mark.parametrize(
    ("instructions", "spans", "seconds", "stall", "copies", "hidden"),
    [
        pytest.param((), {}, 0, 0, 0, 0, id="nothing"),
        pytest.param(
            (ONE, TWO, Free(0, 0), FIVE), {0: (0, 1), 1: (1, 3), 3: (3, 8)}, 8, 0, 0, 0, id="nodes alone"
        ),
        pytest.param(
            (ONE, Wait(Lane.OUT, 0), Offload(0, 0), FIVE),
            {0: (0, 1), 2: (1, 5), 3: (1, 6)},
            *(6, 0, 4, 4),
            id="an offload while the next node runs",
        ),
        pytest.param(
            (ONE, Wait(Lane.OUT, 0), Offload(0, 0), TWO, Wait(Lane.COMPUTE, 2), Free(0, 0), ONE),
            {0: (0, 1), 2: (1, 5), 3: (1, 3), 6: (5, 6)},
            *(6, 2, 4, 2),
            id="compute stalls before a free until the offload has ended",
        ),
        pytest.param(
            (TWO, Wait(Lane.IN, 0), Prefetch(0, 0), ONE, Wait(Lane.COMPUTE, 2), FIVE),
            {0: (0, 2), 2: (2, 4), 3: (2, 3), 5: (4, 9)},
            *(9, 1, 2, 1),
            id="a prefetch waits for compute and compute for it",
        ),
        pytest.param(
            (Offload(0, 0), Wait(Lane.IN, 0), Prefetch(0, 0), FIVE),
            {0: (0, 4), 2: (4, 6), 3: (0, 5)},
            *(6, 1, 6, 5),
            id="a prefetch waits for the offload, and the lanes join at the end",
        ),
        pytest.param(
            (Offload(0, 0), Offload(0, 1), TWO),
            {0: (0, 4), 1: (4, 5), 2: (0, 2)},
            *(5, 3, 5, 2),
            id="copies of one direction queue",
        ),
        pytest.param(
            # Half of the offload is done when the prefetch ends; the rest takes half of its time alone.
            (Offload(0, 0), Prefetch(0, 0)),
            {0: (0, 6), 1: (0, 4)},
            *(6, 6, 6, 0),
            id="both directions slow each other from the beginning",
        ),
        pytest.param(
            # Out alone from 1 to 3: half is done. The other half takes half of 8 seconds.
            (ONE, Wait(Lane.OUT, 0), Offload(0, 0), TWO, Wait(Lane.IN, 3), Prefetch(0, 0)),
            {0: (0, 1), 2: (1, 7), 3: (1, 3), 5: (3, 7)},
            *(7, 4, 6, 2),
            id="a copy meets another half way",
        ),
        pytest.param(
            # A quarter alone, three eighths in three seconds with the other, three eighths alone again.
            (Offload(0, 0), ONE, Wait(Lane.IN, 1), Prefetch(0, 1)),
            {0: (0, 5.5), 1: (0, 1), 3: (1, 4)},
            *(5.5, 4.5, 5.5, 1),
            id="a copy is slowed in the middle only",
        ),
        pytest.param(
            (Offload(0, 1), Wait(Lane.IN, 0), Prefetch(0, 0), Offload(0, 1), ONE),
            {0: (0, 1), 2: (1, 4.5), 3: (1, 4), 4: (0, 1)},
            *(4.5, 3.5, 4.5, 1),
            id="a lane waits only where it is told to",
        ),
        pytest.param(
            (ONE, Offload(0, 1), Wait(Lane.COMPUTE, 1), Free(0, 1), Wait(Lane.IN, 3), Prefetch(0, 1)),
            {0: (0, 1), 1: (0, 1), 5: (1, 2)},
            *(2, 1, 2, 1),
            id="waits for frees",
        ),
        pytest.param(
            (ONE, Wait(Lane.OUT, 0), Offload(0, 1), Wait(Lane.IN, 1), Prefetch(0, 1)),
            {0: (0, 1), 2: (1, 4), 4: (1, 4)},
            *(4, 3, 3, 0),
            id="waits for waits",
        ),
    ],
)
def test_lanes_on_the_clock(
    instructions: tuple[Instruction, ...],
    spans: dict[int, tuple[float, float]],
    seconds: float,
    stall: float,
    copies: float,
    hidden: float,
) -> None:
    found = run(*instructions)
    assert {span.instruction: (span.start, span.end) for span in found.spans} == spans
    assert (found.seconds, found.stall_seconds) == (seconds, stall)
    assert (found.copy_seconds, found.hidden_copy_seconds) == (copies, hidden)
    # The same spans, measured, in whatever order they were read, amount to the same.
    part = Part(instructions, ())
    measured = measured_timeline(part, [PROFILE], list(reversed(found.spans)), found.seconds)
    assert (measured.source, measured.spans) == ("measured", found.spans)
    for name in ("compute_seconds", "recompute_seconds", "stall_seconds", "copy_seconds"):
        assert getattr(measured, name) == pytest.approx(getattr(found, name)), name
    assert measured.hidden_copy_seconds == pytest.approx(hidden)


def test_measured_gaps_are_stalls_in_which_copies_are_not_hidden() -> None:
    spans = [Span(Lane.COMPUTE, 0, 0.0, 1.0), Span(Lane.OUT, 1, 0.5, 2.0), Span(Lane.COMPUTE, 2, 1.5, 3.5)]
    found = measured_timeline(Part((ONE, Offload(0, 1), TWO), ()), [PROFILE], spans, 4.0)
    assert (found.compute_seconds, found.stall_seconds) == (3.0, 1.0)
    assert (found.copy_seconds, found.hidden_copy_seconds) == (1.5, 1.0)


def test_recomputed_seconds_are_counted_apart() -> None:
    found = run(ONE, Recompute(0, 1, ()), Recompute(0, 2, ()))
    assert (found.recompute_seconds, found.compute_seconds, found.seconds) == (7.0, 8.0, 8.0)
    assert found.source == "predicted"


def test_half_of_a_node_while_a_copy_runs() -> None:
    """Five seconds, twice as long while copies run; the copy takes four, in which two are done."""
    found = run(Offload(0, 0), FIVE, profile=replace(PROFILE, slowdown_by_copies=2.0))
    assert (found.seconds, found.compute_seconds, found.hidden_copy_seconds) == (7.0, 7.0, 4.0)
    assert [span.end for span in found.spans] == [4.0, 7.0]


def test_waits_between_lanes_make_nodes_longer() -> None:
    """Where the copy takes longer than the node, compute waits for it, and then begins."""
    costly = replace(PROFILE, sync_seconds=0.25)
    row = (TWO, Wait(Lane.OUT, 0), Offload(0, 0), ONE, Wait(Lane.COMPUTE, 2), ONE)
    assert ends(*row, profile=costly) == [2.25, 2.25, 6.25, 3.25, 6.25, 7.5]
    row = (Offload(0, 1), Wait(Lane.COMPUTE, 0), Offload(0, 0), ONE)
    assert ends(*row, profile=costly) == [1.0, 1.0, 5.0, 2.25]
    assert ends(*row, profile=replace(costly, slowdown_by_copies=2.0)) == [1.0, 1.0, 5.0, 3.25]


TWO_COPIES = (Wait(Lane.OUT, 0), Offload(0, 0), Wait(Lane.IN, 0), Prefetch(0, 1))
FREED = (ONE, Free(0, 0), Wait(Lane.IN, 1), Prefetch(0, 1))


@pytest.mark.parametrize(
    ("row", "times"),
    [
        pytest.param((ONE, *TWO_COPIES, TWO), [1, 0], id="once for all copies that wait for a node"),
        pytest.param(
            (ONE, *TWO_COPIES, Wait(Lane.COMPUTE, 2), Wait(Lane.COMPUTE, 4), TWO, FIVE),
            [1, 1, 0],
            id="once for all copies that a node waits for",
        ),
        pytest.param(
            (*FREED, Wait(Lane.COMPUTE, 3), Recompute(0, 1, ())), [1, 1], id="the node before a free"
        ),
        pytest.param((Free(0, 0), Wait(Lane.IN, 0), Prefetch(0, 1), ONE), [0], id="no node before"),
        pytest.param((Offload(0, 0), Wait(Lane.IN, 0), Prefetch(0, 0), ONE), [0], id="between copies"),
        pytest.param(
            (Offload(0, 0), Wait(Lane.COMPUTE, 0), ONE, Wait(Lane.OUT, 2), Offload(0, 1), TWO),
            [2, 0],
            id="a node that waits and is waited for",
        ),
    ],
)
def test_how_often_a_node_takes_longer(row: tuple[Instruction, ...], times: list[int]) -> None:
    costly = replace(PROFILE, sync_seconds=100.0)
    before, after = (lane_times(Part(row, ()), [profile]) for profile in (PROFILE, costly))
    longer = [
        round((after.ends[at] - after.starts[at] - before.ends[at] + before.starts[at]) / 100)
        for at, item in enumerate(row)
        if isinstance(item, Compute | Recompute)
    ]
    assert longer == times


def random_part(seed: int, length: int) -> Part:
    rng = random.Random(seed)
    row: list[Instruction] = []
    for position in range(length):
        kind = rng.random()
        if kind < 0.45 or not position:
            row.append(Compute(0, rng.randrange(3)))
        elif kind < 0.85:
            row.append(rng.choice((Offload, Prefetch))(0, rng.randrange(2)))
        else:
            row.append(Wait(rng.choice(list(Lane)), rng.randrange(position)))
    return Part(tuple(row), ())


def union(intervals: list[tuple[float, float]]) -> float:
    total = reached = 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 60), st.sampled_from([1.0, 1.5]))
def test_what_holds_for_every_row(seed: int, length: int, slowdown: float) -> None:
    part = random_part(seed, length)
    profile = replace(PROFILE, slowdown_by_copies=slowdown)
    times = lane_times(part, [profile])
    busy: dict[Lane, list[tuple[float, float]]] = {lane: [] for lane in Lane}
    limits = {Compute: (1.0, slowdown), Offload: (1.0, 3.0), Prefetch: (1.0, 3.0)}
    copies_at = [
        (times.starts[at], times.ends[at])
        for at, item in enumerate(part.instructions)
        if isinstance(item, Offload | Prefetch)
    ]
    for at, item in enumerate(part.instructions):
        start, end = times.starts[at], times.ends[at]
        if isinstance(item, Wait):
            assert start >= times.ends[item.on]
            continue
        busy[lane_of(item)].append((start, end))
        if isinstance(item, Compute):
            alone = profile.nodes[item.node].seconds
            slowed = union([(max(a, start), min(b, end)) for a, b in copies_at if a < end and b > start])
            assert slowed / slowdown + (end - start - slowed) == pytest.approx(alone)
        else:
            tensor = profile.tensors[item.tensor]
            alone = tensor.swap_out_seconds if isinstance(item, Offload) else tensor.swap_in_seconds
        least, most = limits[type(item)]
        assert least * alone - 1e-9 <= end - start <= most * alone + 1e-9
    for own in busy.values():
        assert all(a[1] <= b[0] for a, b in pairwise(own)), "a lane does one thing at a time"
        assert times.seconds >= sum(end - start for start, end in own) - 1e-9
    assert times.seconds == max(times.ends, default=0.0)
    assert times.seconds == pytest.approx(times.compute_seconds + times.stall_seconds)
    assert times.copy_seconds == pytest.approx(union(copies_at))
    assert 0.0 <= times.hidden_copy_seconds <= min(times.copy_seconds, times.compute_seconds) + 1e-9
    bare = Part(tuple(item for item in part.instructions if isinstance(item, Compute)), ())
    assert lane_times(bare, [profile]).seconds <= times.seconds + 1e-9


def test_many_instructions_take_little_time() -> None:
    part = random_part(0, 20_000)
    begun = time.process_time()
    lane_times(part, [PROFILE])
    assert time.process_time() - begun < 1.0, "about 0.05 s where it was written"


PARAMETER, MAP, RESULT = ByteClass.PARAMETER, ByteClass.FEATURE_MAP, ByteClass.RESULT


CLASSES = [
    replace(PROFILE, tensors=tuple(ProfiledTensor(c.value, c, 1, 0.0, 0.0, 0.0, 0.0) for c in classes))
    for classes in ((PARAMETER, MAP), (MAP, RESULT))
]


def test_bytes_by_class_and_of_the_instruction_itself() -> None:
    part = Part(
        (Compute(0, 0), Compute(1, 0), Free(0, 1), Recompute(0, 0, ()), Compute(1, 0)),
        (
            Tenancy(0, 0, -1, 5, 0, 1000),  # a parameter, always there
            Tenancy(0, 1, 0, 2, 1000, 300),  # a feature map, from the first node to its free
            Tenancy(1, 0, 1, 5, 1300, 40),  # another, left behind
            Tenancy(0, -1, 0, 0, 1340, 7),  # a workspace of the first node
            Tenancy(0, 1, 3, 3, 1340, 300),  # what the recompute throws away
            Tenancy(0, -1, 3, 3, 1640, 2),  # and its workspace
            Tenancy(1, 1, 4, 5, 1000, 6),
        ),
    )
    assert timeline(part, CLASSES).memory == (
        MemoryPoint(0, ((PARAMETER, 1000), (MAP, 300)), 7),
        MemoryPoint(1, ((PARAMETER, 1000), (MAP, 340)), 0),
        MemoryPoint(2, ((PARAMETER, 1000), (MAP, 40)), 0),
        MemoryPoint(3, ((PARAMETER, 1000), (MAP, 40)), 302),
        MemoryPoint(4, ((PARAMETER, 1000), (MAP, 40), (RESULT, 6)), 0),
    )
    assert peak_live_bytes(part) == 1342
