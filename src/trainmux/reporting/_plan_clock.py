"""A timeline laid out for drawing: work on each lane, stalls with what they wait for, memory on the clock.

Times are whole nanoseconds here. Rounding keeps their order, so spans that do not overlap in seconds do not
overlap after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    Compute,
    Lane,
    MemoryPoint,
    Offload,
    Part,
    Prefetch,
    Recompute,
    Span,
    Timeline,
    Wait,
    lane_of,
)

LANES = (Lane.COMPUTE, Lane.OUT, Lane.IN)

Work = Compute | Recompute | Offload | Prefetch
"""Instructions that take time on a lane."""


@dataclass(frozen=True)
class WorkSpan:
    """A node or a copy on its lane; ``instruction`` is its position in the part."""

    lane: Lane
    instruction: int
    work: Work
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Stall:
    """Time in which the compute lane ran nothing.

    ``waits_for`` is the instruction it waited for: of all that it was told to wait for there, the one that
    ended last. -1: it was told to wait for none.
    """

    start_ns: int
    end_ns: int
    waits_for: int


@dataclass(frozen=True)
class MemoryStep:
    """Bytes in use from ``time_ns`` until the next step."""

    time_ns: int
    instruction: int
    bytes_by_class: tuple[tuple[ByteClass, int], ...]
    workspace_bytes: int


@dataclass(frozen=True)
class ClockedPart:
    """A part with one of its timelines, ready to be drawn.

    ``memory`` is empty where the timeline has none. ``work`` is in order of start, then of lane.
    """

    source: str
    duration_ns: int
    work: tuple[WorkSpan, ...]
    stalls: tuple[Stall, ...]
    memory: tuple[MemoryStep, ...]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def clocked(part: Part, timeline: Timeline) -> ClockedPart:
    """Lay ``timeline`` out. Refused with `PlanError`: a timeline that is not one of ``part``."""
    records: list[Span | MemoryPoint] = [*timeline.spans, *timeline.memory]
    for record in records:
        _check(part, record)
    work, duration_ns = _work(part, timeline), nanoseconds(timeline.seconds)
    stalls, memory = _stalls(part, work, duration_ns), _memory(part, timeline)
    return ClockedPart(timeline.source, duration_ns, work, stalls, memory)


def _check(part: Part, record: Span | MemoryPoint) -> None:
    position = record.instruction
    if not 0 <= position < len(part.instructions):
        problem = f"the part has {len(part.instructions)} instructions, but the timeline names {position}"
    elif isinstance(record, Span) and record.lane is not lane_of(part.instructions[position]):
        lane = lane_of(part.instructions[position]).value
        problem = f"instruction {position} runs on lane {lane!r}, but the timeline has {record.lane.value!r}"
    else:
        return
    raise PlanError(f"{problem}; pass a timeline of the same part")


def _work(part: Part, timeline: Timeline) -> tuple[WorkSpan, ...]:
    """Nodes and copies. Waits are not work, they show as gaps; a ``Free`` takes no time."""
    work = [
        WorkSpan(span.lane, span.instruction, found, nanoseconds(span.start), nanoseconds(span.end))
        for span in timeline.spans
        if isinstance(found := part.instructions[span.instruction], Compute | Recompute | Offload | Prefetch)
    ]
    return tuple(sorted(work, key=lambda span: (span.start_ns, LANES.index(span.lane), span.instruction)))


def _stalls(part: Part, work: tuple[WorkSpan, ...], duration_ns: int) -> tuple[Stall, ...]:
    end_of = {span.instruction: span.end_ns for span in work}

    def last_to_end(positions: list[int]) -> int:
        ended = [(end_of[position], position) for position in positions if position in end_of]
        return max(ended)[1] if ended else -1

    stalls = []
    previous_end, previous = 0, -1
    nodes = [span for span in work if span.lane is Lane.COMPUTE]
    for node in sorted(nodes, key=lambda span: span.instruction):
        if node.start_ns > previous_end:
            between = part.instructions[previous + 1 : node.instruction]
            waits = [one.on for one in between if isinstance(one, Wait) and one.lane is Lane.COMPUTE]
            stalls.append(Stall(previous_end, node.start_ns, last_to_end(waits)))
        previous_end, previous = max(previous_end, node.end_ns), node.instruction
    if duration_ns > previous_end:
        # All lanes join at the end of a part: there the compute lane waits for every copy.
        late = [at for at, end in end_of.items() if end > previous_end]
        stalls.append(Stall(previous_end, duration_ns, last_to_end(late)))
    return tuple(stalls)


def _memory(part: Part, timeline: Timeline) -> tuple[MemoryStep, ...]:
    """Memory follows the issue order; each instruction is put where the compute lane reaches it."""
    span_of = {span.instruction: span for span in timeline.spans}
    point_of = {point.instruction: point for point in timeline.memory}
    steps: list[MemoryStep] = []
    clock = 0
    for position, instruction in enumerate(part.instructions):
        span = span_of.get(position) if lane_of(instruction) is Lane.COMPUTE else None
        begin = max(clock, nanoseconds(span.start)) if span else clock
        end = max(begin, nanoseconds(span.end)) if span else begin
        if isinstance(instruction, Wait) and instruction.lane is Lane.COMPUTE and instruction.on in span_of:
            end = max(end, nanoseconds(span_of[instruction.on].end))
        if (point := point_of.get(position)) is not None:
            steps.append(MemoryStep(begin, position, point.bytes_by_class, point.workspace_bytes))
            if point.workspace_bytes and span:
                steps.append(MemoryStep(end, position, point.bytes_by_class, 0))
        clock = end
    return tuple(steps)
