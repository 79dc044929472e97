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

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.bytes_by_class) + self.workspace_bytes


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
    work = _work(part, timeline)
    return ClockedPart(
        source=timeline.source,
        duration_ns=nanoseconds(timeline.seconds),
        work=work,
        stalls=_stalls(part, work, nanoseconds(timeline.seconds)),
        memory=_memory(part, timeline),
    )


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
    nodes = sorted((span for span in work if span.lane is Lane.COMPUTE), key=lambda span: span.instruction)
    stalls = []
    previous_end, previous_instruction = 0, -1
    for node in nodes:
        if node.start_ns > previous_end:
            told = _told_to_wait_for(part, previous_instruction, node.instruction)
            stalls.append(Stall(previous_end, node.start_ns, _last_to_end(told, end_of)))
        previous_end, previous_instruction = max(previous_end, node.end_ns), node.instruction
    if duration_ns > previous_end:
        # All lanes join at the end of a part: there the compute lane waits for every copy.
        copies = [span.instruction for span in work if span.lane is not Lane.COMPUTE]
        late = [position for position in copies if end_of[position] > previous_end]
        stalls.append(Stall(previous_end, duration_ns, _last_to_end(late, end_of)))
    return tuple(stalls)


def _told_to_wait_for(part: Part, after: int, before: int) -> list[int]:
    between = part.instructions[after + 1 : before]
    return [found.on for found in between if isinstance(found, Wait) and found.lane is Lane.COMPUTE]


def _last_to_end(positions: list[int], end_of: dict[int, int]) -> int:
    ended = [(end_of[position], position) for position in positions if position in end_of]
    return max(ended)[1] if ended else -1


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
