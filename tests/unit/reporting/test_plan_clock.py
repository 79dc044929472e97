"""Timelines laid out for drawing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from sample_plans import ring_sample

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Instruction,
    Lane,
    MemoryPoint,
    Offload,
    Part,
    Prefetch,
    Recompute,
    Span,
    Timeline,
    Wait,
)
from trainmux.reporting._plan_clock import Stall, clocked, nanoseconds

# offload x, run a node beside it, wait for it, free x, fetch y, wait for it, use it
INSTRUCTIONS: tuple[Instruction, ...] = (
    Compute(0, 0),
    Wait(Lane.OUT, 0),
    Offload(0, 0),
    Compute(0, 1),
    Wait(Lane.COMPUTE, 2),
    Free(0, 0),
    Wait(Lane.IN, 3),
    Prefetch(0, 1),
    Wait(Lane.COMPUTE, 7),
    Compute(0, 2),
)
WORK = {0: (0.0, 1.0), 2: (1.0, 3.0), 3: (1.0, 2.0), 7: (3.0, 4.5), 9: (4.5, 5.0)}
LANE = {0: Lane.COMPUTE, 2: Lane.OUT, 3: Lane.COMPUTE, 7: Lane.IN, 9: Lane.COMPUTE}


def timeline(
    work: dict[int, tuple[float, float]] = WORK,
    *,
    seconds: float = 5.0,
    memory: tuple[MemoryPoint, ...] = (),
    extra: tuple[Span, ...] = (),
) -> Timeline:
    spans = tuple(Span(LANE[position], position, *times) for position, times in work.items())
    return Timeline("predicted", seconds, 2.5, 0.0, 2.5, 3.5, 1.0, spans + extra, memory)


def part(instructions: tuple[Instruction, ...] = INSTRUCTIONS) -> Part:
    return Part(instructions, ())


def test_work_is_what_takes_time_on_a_lane_in_order_of_start() -> None:
    extra = (Span(Lane.COMPUTE, 4, 2.0, 3.0), Span(Lane.COMPUTE, 5, 3.0, 3.0))
    found = clocked(part(), timeline(dict(reversed(WORK.items())), extra=extra)).work
    assert [span.instruction for span in found] == [0, 3, 2, 7, 9]
    assert [(span.start_ns, span.end_ns) for span in found][2] == (1_000_000_000, 3_000_000_000)
    assert found[3].work == Prefetch(0, 1)


def test_a_stall_names_what_it_waited_for() -> None:
    second = 1_000_000_000
    assert clocked(part(), timeline()).stalls == (Stall(2 * second, int(4.5 * second), 7),)


def test_of_several_waits_the_one_that_ended_last_is_blamed() -> None:
    late_offload = WORK | {2: (1.0, 4.6), 9: (4.6, 5.0)}
    assert clocked(part(), timeline(late_offload)).stalls[0].waits_for == 2


def test_a_gap_without_a_wait_has_no_cause() -> None:
    gap = WORK | {3: (1.25, 2.0)}
    first, second = clocked(part(), timeline(gap)).stalls
    assert first == Stall(1_000_000_000, 1_250_000_000, -1)
    assert second.waits_for == 7


def test_at_the_end_compute_waits_for_the_copy_that_ends_last() -> None:
    instructions = (*INSTRUCTIONS, Wait(Lane.OUT, 9), Offload(0, 2))
    spans = (*timeline().spans, Span(Lane.OUT, 11, 5.0, 6.0))
    found = clocked(part(instructions), replace(timeline(), seconds=6.0, spans=spans))
    assert found.stalls[-1] == Stall(5_000_000_000, 6_000_000_000, 11)


def test_a_timeline_that_is_longer_than_its_work_ends_idle() -> None:
    assert clocked(part(), timeline(seconds=5.5)).stalls[-1] == Stall(5_000_000_000, 5_500_000_000, -1)


def test_memory_follows_the_issue_order_on_the_compute_lane() -> None:
    memory = tuple(
        MemoryPoint(position, ((ByteClass.FEATURE_MAP, 100 + position),), 0) for position in range(10)
    )
    steps = clocked(part(), timeline(memory=memory)).memory
    seconds = [step.time_ns / 1e9 for step in steps]
    # The free takes place when the offload has ended, the prefetch takes its bytes right after it.
    assert seconds == [0, 1, 1, 1, 2, 3, 3, 3, 3, 4.5]
    assert [step.instruction for step in steps] == list(range(10))
    assert steps[5].total_bytes == 105


def test_a_workspace_is_given_back_when_its_node_has_run() -> None:
    memory = (
        MemoryPoint(0, ((ByteClass.PARAMETER, 10),), 7),
        MemoryPoint(9, ((ByteClass.PARAMETER, 10),), 3),
    )
    steps = clocked(part(), timeline(memory=memory)).memory
    assert [(step.time_ns / 1e9, step.total_bytes) for step in steps] == [
        (0, 17),
        (1, 10),
        (4.5, 13),
        (5, 10),
    ]


def test_memory_points_need_not_be_complete_or_in_order() -> None:
    memory = (MemoryPoint(9, (), 1), MemoryPoint(5, (), 0), MemoryPoint(0, (), 2))
    steps = clocked(part(), timeline(memory=memory)).memory
    assert [step.instruction for step in steps] == [0, 0, 5, 9, 9]
    assert clocked(part(), timeline()).memory == ()


def test_a_recompute_is_work_of_the_compute_lane() -> None:
    only = (Recompute(0, 3, (1,)),)
    spans = (Span(Lane.COMPUTE, 0, 0.0, 1.0),)
    found = clocked(part(only), replace(timeline(), seconds=1.0, spans=spans))
    assert found.work[0].work == only[0]
    assert found.stalls == ()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Span(Lane.COMPUTE, 10, 0.0, 1.0), "has 10 instructions, but the timeline names number 10"),
        (Span(Lane.COMPUTE, -1, 0.0, 1.0), "has 10 instructions, but the timeline names number -1"),
        (Span(Lane.IN, 2, 0.0, 1.0), "'device to host', but the timeline has it on 'host to device'"),
    ],
)
def test_a_timeline_of_another_program_is_refused(bad: Span, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        clocked(part(), timeline(extra=(bad,)))


def test_a_memory_point_of_another_program_is_refused() -> None:
    with pytest.raises(PlanError, match="names number 12; pass a timeline of the same part"):
        clocked(part(), timeline(memory=(MemoryPoint(12, (), 0),)))


def test_work_and_stalls_fill_the_compute_lane_without_overlap() -> None:
    sample = ring_sample(num_layers=20)
    for line in (sample.predicted, sample.measured):
        found = clocked(sample.program.body, line)
        pieces = [(span.start_ns, span.end_ns) for span in found.work if span.lane is Lane.COMPUTE]
        pieces += [(stall.start_ns, stall.end_ns) for stall in found.stalls]
        pieces.sort()
        assert pieces[0][0] == 0
        assert pieces[-1][1] == found.duration_ns == nanoseconds(line.seconds)
        assert all(end == start for (_, end), (start, _) in pairwise(pieces))
        idle = sum(stall.end_ns - stall.start_ns for stall in found.stalls)
        assert idle == pytest.approx(line.stall_seconds * 1e9, abs=len(pieces))
        times = [step.time_ns for step in found.memory]
        assert times == sorted(times)
