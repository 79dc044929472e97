"""Three lanes on the clock: worked examples with exact numbers, and what must hold for every row."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    Compute,
    DeviceFacts,
    Free,
    Instruction,
    Lane,
    Offload,
    Part,
    Phase,
    Prefetch,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Recompute,
    Tenancy,
    Wait,
)
from trainmux.planning import LaneClock, LaneTimes, lane_times, timeline

# Tensor 0: 4 seconds out, 2 back; in company 8 and 4. Tensor 1: 1 second either way, 3 in company.
PROFILE = Profile(
    "two tensors",
    "analytic",
    1,
    DeviceFacts("a test's device", 1 << 30, 1 << 30),
    (
        ProfiledTensor("big", ByteClass.FEATURE_MAP, 100, 4.0, 2.0, 8.0, 4.0),
        ProfiledTensor("small", ByteClass.FEATURE_MAP, 10, 1.0, 1.0, 3.0, 3.0),
    ),
    tuple(
        ProfiledNode(f"{seconds} seconds", Phase.FORWARD, (), (), (), seconds) for seconds in (1.0, 2.0, 5.0)
    ),
)
ONE, TWO, FIVE = Compute(0, 0), Compute(0, 1), Compute(0, 2)


def run(*instructions: Instruction) -> LaneTimes:
    return lane_times(Part(instructions, ()), [PROFILE])


def spans(*instructions: Instruction) -> dict[int, tuple[float, float]]:
    found = timeline(Part(instructions, ()), [PROFILE]).spans
    return {span.instruction: (span.start, span.end) for span in found}


def test_nodes_alone_take_their_sum() -> None:
    times = run(ONE, TWO, Free(0, 0), FIVE)
    assert (times.seconds, times.compute_seconds, times.stall_seconds) == (8.0, 8.0, 0.0)
    assert (times.copy_seconds, times.hidden_copy_seconds) == (0.0, 0.0)


def test_an_offload_runs_beside_the_next_node() -> None:
    instructions = (ONE, Wait(Lane.OUT, 0), Offload(0, 0), FIVE)
    assert spans(*instructions) == {0: (0.0, 1.0), 2: (1.0, 5.0), 3: (1.0, 6.0)}
    times = run(*instructions)
    assert (times.seconds, times.stall_seconds) == (6.0, 0.0)
    assert (times.copy_seconds, times.hidden_copy_seconds) == (4.0, 4.0)


def test_compute_stalls_before_a_free_until_the_offload_has_ended() -> None:
    times = run(ONE, Wait(Lane.OUT, 0), Offload(0, 0), TWO, Wait(Lane.COMPUTE, 2), Free(0, 0), ONE)
    # Node to 1, offload from 1 to 5, node to 3, a stall of 2, the last node from 5 to 6.
    assert (times.seconds, times.stall_seconds) == (6.0, 2.0)
    assert (times.copy_seconds, times.hidden_copy_seconds) == (4.0, 2.0)
    assert (times.starts[5], times.starts[6]) == (5.0, 5.0)


def test_a_prefetch_waits_for_compute_and_compute_for_the_prefetch() -> None:
    times = run(TWO, Wait(Lane.IN, 0), Prefetch(0, 0), ONE, Wait(Lane.COMPUTE, 2), FIVE)
    # Node to 2, fetched from 2 to 4, node to 3, a stall of 1, the last node from 4 to 9.
    assert (times.seconds, times.stall_seconds) == (9.0, 1.0)
    assert (times.starts[2], times.ends[2], times.starts[5]) == (2.0, 4.0, 4.0)


def test_a_prefetch_waits_for_the_offload() -> None:
    times = run(Offload(0, 0), Wait(Lane.IN, 0), Prefetch(0, 0), FIVE)
    assert (times.starts[2], times.ends[2]) == (4.0, 6.0)
    # The copy is all that runs in the last second: compute waits for the join of the lanes.
    assert (times.seconds, times.stall_seconds, times.hidden_copy_seconds) == (6.0, 1.0, 5.0)


def test_copies_of_one_direction_queue() -> None:
    found = spans(Offload(0, 0), Offload(0, 1), TWO)
    assert found == {0: (0.0, 4.0), 1: (4.0, 5.0), 2: (0.0, 2.0)}
    assert run(Offload(0, 0), Offload(0, 1), TWO).stall_seconds == 3.0


def test_copies_slow_each_other_from_the_beginning() -> None:
    # Both at once: the prefetch takes 4 seconds instead of 2. Until then half of the offload is done, and
    # the rest takes half of its 4 seconds alone.
    assert spans(Offload(0, 0), Prefetch(0, 0)) == {0: (0.0, 6.0), 1: (0.0, 4.0)}


def test_a_copy_meets_another_half_way() -> None:
    # Out alone from 1 to 3: half is done. From then on both run, and the other half takes half of 8 seconds,
    # as the prefetch takes its 4: both end at 7.
    found = spans(ONE, Wait(Lane.OUT, 0), Offload(0, 0), TWO, Wait(Lane.IN, 3), Prefetch(0, 0))
    assert found == {0: (0.0, 1.0), 2: (1.0, 7.0), 3: (1.0, 3.0), 5: (3.0, 7.0)}
    times = run(ONE, Wait(Lane.OUT, 0), Offload(0, 0), TWO, Wait(Lane.IN, 3), Prefetch(0, 0))
    assert (times.seconds, times.stall_seconds) == (7.0, 4.0)
    assert (times.copy_seconds, times.hidden_copy_seconds) == (6.0, 2.0)


def test_a_copy_has_company_in_the_middle_only() -> None:
    # Out alone for 1 second (a quarter done), with the small prefetch for 3 seconds (three eighths more),
    # alone again for the last three eighths: 1.5 seconds.
    found = spans(Offload(0, 0), ONE, Wait(Lane.IN, 1), Prefetch(0, 1))
    assert found == {0: (0.0, 5.5), 1: (0.0, 1.0), 3: (1.0, 4.0)}


def test_a_lane_waits_only_where_it_is_told_to() -> None:
    # IN waits for the first offload; OUT goes on with its second and needs 3 seconds beside the prefetch, of
    # which three quarters are done by then. The last quarter runs alone.
    found = spans(Offload(0, 1), Wait(Lane.IN, 0), Prefetch(0, 0), Offload(0, 1), ONE)
    assert found == {0: (0.0, 1.0), 2: (1.0, 4.5), 3: (1.0, 4.0), 4: (0.0, 1.0)}


def test_waits_for_waits_and_frees() -> None:
    instructions = (
        ONE,
        Wait(Lane.OUT, 0),
        Offload(0, 1),
        Wait(Lane.COMPUTE, 2),
        Free(0, 1),
        Wait(Lane.IN, 4),
    )
    assert run(*instructions, Prefetch(0, 1)).starts[6] == 2.0
    assert run(*instructions[:3], Wait(Lane.IN, 1), Prefetch(0, 1)).starts[4] == 1.0


def test_recomputed_seconds_are_counted_apart() -> None:
    found = timeline(Part((ONE, Recompute(0, 1, ()), Recompute(0, 2, ())), ()), [PROFILE])
    assert (found.recompute_seconds, found.compute_seconds, found.seconds) == (7.0, 8.0, 8.0)
    assert found.source == "predicted"
    assert timeline(Part((), ()), [PROFILE], source="measured").source == "measured"


def test_a_timeline_comes_with_its_memory() -> None:
    part = Part((ONE, Free(0, 0)), (Tenancy(0, 0, -1, 1, 0, 100),))
    found = timeline(part, [PROFILE])
    assert [point.bytes_by_class for point in found.memory] == [((ByteClass.FEATURE_MAP, 100),), ()]
    assert [(span.lane, span.instruction) for span in found.spans] == [(Lane.COMPUTE, 0)]


def test_nothing_takes_no_time() -> None:
    times = run()
    assert (times.seconds, times.stall_seconds) == (0.0, 0.0)


@pytest.mark.parametrize("on", [1, 2, 7, -2])
def test_a_wait_for_what_is_not_issued_is_refused(on: int) -> None:
    with pytest.raises(PlanError, match="issued before it"):
        run(ONE, Wait(Lane.OUT, on), Offload(0, 0))


@pytest.mark.parametrize("stray", [Compute(0, 9), Compute(1, 0), Offload(0, 2), Prefetch(3, 0)])
def test_instructions_that_name_nothing_are_refused(stray: Instruction) -> None:
    with pytest.raises(PlanError, match="instruction 1 must name"):
        run(ONE, stray)


def random_clock(
    seed: int, num_operations: int, scale: float = 1.0, *, copies: bool = True, slows: bool = False
) -> LaneClock:
    """Nodes, copies and waits at random; ``copies`` false leaves out all but the nodes.

    With ``slows``, nodes take longer beside copies.
    """
    rng = random.Random(seed)
    clock = LaneClock()
    positions = []
    for _ in range(num_operations):
        kind, seconds, slower = rng.random(), rng.choice([0.0, 0.25, 1.0, 3.0]), rng.choice([1.0, 1.25, 2.0])
        lane, on = rng.choice(list(Lane)), rng.random()
        if kind < 0.45:
            positions.append(clock.node(seconds * scale, seconds * (slower if slows else 1.0) * scale))
        elif not copies:
            continue
        elif kind < 0.65:
            positions.append(clock.offload(seconds * scale, seconds * slower * scale))
        elif kind < 0.85:
            positions.append(clock.prefetch(seconds * scale, seconds * slower * scale))
        elif positions:
            clock.wait(lane, positions[int(on * len(positions))])
    return clock


def busy(clock: LaneClock, times: LaneTimes, lane: int) -> list[tuple[float, float]]:
    return [
        (start, end)
        for number, on, start, end in zip(clock._lanes, clock._waits, times.starts, times.ends, strict=True)
        if number == lane and on < 0
    ]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 60), st.booleans())
def test_what_holds_for_every_row(seed: int, num_operations: int, slows: bool) -> None:
    clock = random_clock(seed, num_operations, slows=slows)
    times = clock.run()
    for lane in range(3):
        own = busy(clock, times, lane)
        assert all(a[1] <= b[0] for a, b in pairwise(own)), "a lane does one thing at a time"
        assert times.seconds >= sum(end - start for start, end in own) - 1e-9
    for position, on in enumerate(clock._waits):
        length = times.ends[position] - times.starts[position]
        if on >= 0:
            assert times.starts[position] >= times.ends[on]
        else:
            assert clock._alone[position] - 1e-9 <= length <= clock._duplex[position] + 1e-9
    assert times.seconds == max(times.ends, default=0.0)
    assert times.seconds == pytest.approx(times.compute_seconds + times.stall_seconds)
    assert 0.0 <= times.hidden_copy_seconds <= min(times.copy_seconds, times.compute_seconds) + 1e-9
    assert times.copy_seconds == pytest.approx(_union(busy(clock, times, 1) + busy(clock, times, 2)))


def _union(intervals: list[tuple[float, float]]) -> float:
    total = reached = 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_twice_as_slow_takes_twice_as_long(seed: int) -> None:
    once, twice = random_clock(seed, 50).run(), random_clock(seed, 50, scale=2.0).run()
    assert twice.ends == [2.0 * end for end in once.ends]
    assert (twice.seconds, twice.stall_seconds) == (2.0 * once.seconds, 2.0 * once.stall_seconds)
    assert twice.hidden_copy_seconds == 2.0 * once.hidden_copy_seconds


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 60))
def test_a_node_is_slowed_down_for_as_long_as_a_copy_runs(seed: int, num_operations: int) -> None:
    clock = random_clock(seed, num_operations, slows=True)
    times = clock.run()
    copies = busy(clock, times, 1) + busy(clock, times, 2)
    for position, (lane, on) in enumerate(zip(clock._lanes, clock._waits, strict=True)):
        alone, beside = clock._alone[position], clock._duplex[position]
        if lane != 0 or on >= 0 or alone == 0:
            continue
        start, end = times.starts[position], times.ends[position]
        shared = _union([(max(a, start), min(b, end)) for a, b in copies if a < end and b > start])
        assert shared / beside + (end - start - shared) / alone == pytest.approx(1.0)


def test_half_of_a_node_beside_a_copy() -> None:
    """Five seconds, twice as long beside copies; the copy takes four, in which two are done."""
    slowed = replace(PROFILE, slowdown_by_copies=2.0)
    times = lane_times(Part((Offload(0, 0), FIVE), ()), [slowed])
    assert times.ends == [4.0, 7.0]
    assert (times.seconds, times.compute_seconds, times.hidden_copy_seconds) == (7.0, 7.0, 4.0)
    assert lane_times(Part((Offload(0, 0), FIVE), ()), [PROFILE]).ends == [4.0, 5.0]


def test_nodes_that_meet_copies_take_longer() -> None:
    """A copy waits for the first node, the last one for the copy; both are a quarter of a second longer,
    beside copies too."""
    met = replace(PROFILE, meeting_seconds=0.25)
    instructions = (TWO, Wait(Lane.OUT, 0), Offload(0, 1), FIVE, Wait(Lane.COMPUTE, 2), ONE)
    assert lane_times(Part(instructions, ()), [PROFILE]).ends == [2.0, 2.0, 3.0, 7.0, 7.0, 8.0]
    assert lane_times(Part(instructions, ()), [met]).ends == [2.25, 2.25, 3.25, 7.25, 7.25, 8.5]
    # Where the copy takes longer than what runs beside it, compute waits for it, and then begins.
    instructions = (TWO, Wait(Lane.OUT, 0), Offload(0, 0), ONE, Wait(Lane.COMPUTE, 2), ONE)
    assert lane_times(Part(instructions, ()), [met]).ends == [2.25, 2.25, 6.25, 3.25, 6.25, 7.5]
    instructions = (Offload(0, 1), Wait(Lane.COMPUTE, 0), Offload(0, 0), ONE)
    slowed = replace(met, slowdown_by_copies=2.0)
    assert lane_times(Part(instructions, ()), [met]).ends == [1.0, 1.0, 5.0, 2.25]
    assert lane_times(Part(instructions, ()), [slowed]).ends == [1.0, 1.0, 5.0, 3.25]


def test_where_lanes_meet() -> None:
    """Once for all copies that wait for a node, for the node before where they wait for bytes given back, and
    once for all copies that a node waits for; not where nothing of the other lane is waited for."""

    def longer(*instructions: Instruction) -> list[int]:
        """By node: how many times a meeting's seconds it takes longer."""
        met = replace(PROFILE, meeting_seconds=100.0)
        part = Part(instructions, ())
        before, after = (lane_times(part, [profile]) for profile in (PROFILE, met))
        return [
            round((after.ends[at] - after.starts[at] - before.ends[at] + before.starts[at]) / 100)
            for at, item in enumerate(instructions)
            if isinstance(item, Compute | Recompute)
        ]

    two_copies = (Wait(Lane.OUT, 0), Offload(0, 0), Wait(Lane.IN, 0), Prefetch(0, 1))
    assert longer(ONE, *two_copies, TWO) == [1, 0]
    assert longer(ONE, *two_copies, Wait(Lane.COMPUTE, 2), Wait(Lane.COMPUTE, 4), TWO, FIVE) == [1, 1, 0]
    freed = (ONE, Free(0, 0), Wait(Lane.IN, 1), Prefetch(0, 1))
    assert longer(*freed, Wait(Lane.COMPUTE, 3), Recompute(0, 1, ())) == [1, 1]
    assert longer(Free(0, 0), Wait(Lane.IN, 0), Prefetch(0, 1), ONE) == [0]
    assert longer(Offload(0, 0), Wait(Lane.IN, 0), Prefetch(0, 0), ONE) == [0]
    both = (Offload(0, 0), Wait(Lane.COMPUTE, 0), ONE, Wait(Lane.OUT, 2), Offload(0, 1), TWO)
    assert longer(*both) == [2, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_without_copies_only_the_nodes_are_left(seed: int) -> None:
    times, bare = random_clock(seed, 50).run(), random_clock(seed, 50, copies=False).run()
    assert bare.seconds == bare.compute_seconds == times.compute_seconds
    assert bare.stall_seconds == bare.copy_seconds == 0.0
    assert times.seconds >= bare.seconds


def test_more_operations_may_follow_a_run() -> None:
    clock = LaneClock()
    first = clock.node(1.0)
    assert clock.run().seconds == 1.0
    clock.wait(Lane.IN, first)
    clock.prefetch(2.0, 2.0)
    assert clock.run().seconds == 3.0
    assert len(clock) == 3


def test_many_operations_take_little_time() -> None:
    clock = random_clock(0, 20_000)
    begun = time.process_time()
    clock.run()
    assert time.process_time() - begun < 1.0, "about 0.03 s where it was written"
