"""A program's part on the clock, predicted or measured: spans on three lanes, stalls, hidden copies (D6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainmux.errors import PlanError
from trainmux.ir import (
    Compute,
    Free,
    Lane,
    Offload,
    Part,
    Prefetch,
    Profile,
    Recompute,
    Span,
    Timeline,
    Wait,
    lane_of,
)
from trainmux.planning._lanes import COMPUTE, IN, LANE_NUMBERS, NO_WAIT, OUT, LaneTimes, run_lanes
from trainmux.planning._memory import memory


def timeline(part: Part, profiles: Sequence[Profile], *, counts_sync: bool = True) -> Timeline:
    """One pass through ``part``: every node and copy with its start and end, and the memory meanwhile.

    ``profiles`` has one profile per sub-array. A draft has several times as many waits as the program made of
    it, so their sync cost is left out for drafts (``counts_sync`` false). Refused with `PlanError`:
    instructions that name nothing in the profiles, and waits for what is not issued before them.
    """
    times = lane_times(part, profiles, counts_sync=counts_sync)
    recompute_seconds = 0.0
    spans = []
    for position, instruction in enumerate(part.instructions):
        if isinstance(instruction, Wait | Free):
            continue
        if isinstance(instruction, Recompute):
            recompute_seconds += profiles[instruction.sub_array].nodes[instruction.node].seconds
        spans.append(Span(lane_of(instruction), position, times.starts[position], times.ends[position]))
    return Timeline(
        source="predicted",
        seconds=times.seconds,
        compute_seconds=times.compute_seconds,
        recompute_seconds=recompute_seconds,
        stall_seconds=times.stall_seconds,
        copy_seconds=times.copy_seconds,
        hidden_copy_seconds=times.hidden_copy_seconds,
        spans=tuple(spans),
        memory=memory(part, profiles),
    )


def lane_times(
    part: Part, profiles: Sequence[Profile], slow_copies: float = 1.0, *, counts_sync: bool = True
) -> LaneTimes:
    """The times of `timeline` without spans and memory, for planners that try many parts.

    With ``slow_copies``, copies take so many times what the profiles say.
    """
    lanes: list[int] = []
    alone: list[float] = []
    duplex: list[float] = []
    waits: list[int] = []
    nodes = [[node.seconds for node in profile.nodes] for profile in profiles]
    slowdowns = [profile.slowdown_by_copies for profile in profiles]
    tensors = [profile.tensors for profile in profiles]
    for position, instruction in enumerate(part.instructions):
        on = NO_WAIT
        slow = seconds = 0.0
        try:
            if isinstance(instruction, (Compute, Recompute)):
                lane = COMPUTE
                seconds = nodes[instruction.sub_array][instruction.node]
                slow = seconds * slowdowns[instruction.sub_array]
            elif isinstance(instruction, Wait):
                lane = LANE_NUMBERS[instruction.lane]
                on = instruction.on
            elif isinstance(instruction, Free):
                lane = COMPUTE
            elif isinstance(instruction, Offload):
                lane = OUT
                tensor = tensors[instruction.sub_array][instruction.tensor]
                seconds = slow_copies * tensor.swap_out_seconds
                slow = slow_copies * tensor.swap_out_duplex_seconds
            elif isinstance(instruction, Prefetch):
                lane = IN
                tensor = tensors[instruction.sub_array][instruction.tensor]
                seconds = slow_copies * tensor.swap_in_seconds
                slow = slow_copies * tensor.swap_in_duplex_seconds
        except IndexError:
            raise PlanError(
                f"instruction {position} must name a sub-array, node and tensor of the profiles, but got "
                f"{instruction}; pass the profiles that the program was made for, one per sub-array"
            ) from None
        lanes.append(lane)
        alone.append(seconds)
        duplex.append(slow)
        waits.append(on)
    if counts_sync and any(profile.sync_seconds for profile in profiles):
        for position, sub_array in _dependencies(part, lanes, waits):
            alone[position] += profiles[sub_array].sync_seconds
            duplex[position] += profiles[sub_array].sync_seconds
    return run_lanes(lanes, alone, duplex, waits)


def _dependencies(part: Part, lanes: Sequence[int], waits: Sequence[int]) -> list[tuple[int, int]]:
    """Cross-stream dependencies: positions and sub-arrays of nodes that wait for copies, and of those that
    copies wait for; a node that is both is listed twice."""
    waiting: list[tuple[int, int]] = []
    waited_for: set[tuple[int, int]] = set()
    latest: list[tuple[int, int] | None] = []
    node: tuple[int, int] | None = None
    waits_for_copies = False
    for position, instruction in enumerate(part.instructions):
        on = waits[position]
        if isinstance(instruction, Compute | Recompute):
            node = (position, instruction.sub_array)
            if waits_for_copies:
                waiting.append(node)
                waits_for_copies = False
        elif 0 <= on < position and (lanes[position] == COMPUTE) != (lanes[on] == COMPUTE):
            before = latest[on]
            if lanes[position] == COMPUTE:
                waits_for_copies = True
            elif before is not None:
                waited_for.add(before)
        latest.append(node)
    return [*waiting, *waited_for]


Interval = tuple[float, float]


def measured_timeline(
    part: Part, profiles: Sequence[Profile], spans: Sequence[Span], seconds: float
) -> Timeline:
    """Summarise ``spans``, measured since the part began; ``seconds`` is the time of the whole part."""
    compute = _union((span.start, span.end) for span in spans if span.lane is Lane.COMPUTE)
    copies = _union((span.start, span.end) for span in spans if span.lane is not Lane.COMPUTE)
    busy = _length(compute)
    return Timeline(
        source="measured",
        seconds=seconds,
        compute_seconds=busy,
        recompute_seconds=sum(
            span.end - span.start
            for span in spans
            if isinstance(part.instructions[span.instruction], Recompute)
        ),
        stall_seconds=max(0.0, seconds - busy),
        copy_seconds=_length(copies),
        hidden_copy_seconds=_length(_common(compute, copies)),
        spans=tuple(sorted(spans, key=lambda span: span.instruction)),
        memory=memory(part, profiles),
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that at least one of the intervals covers, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The time that both of two rows of disjoint intervals cover."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
