"""A program's part on the clock, predicted or measured: spans on three lanes, stalls, hidden copies (D6).

The lanes are nodes, copies to the host and copies from it. Each runs its operations in the order they were
issued and meets the others only at waits. A copy that has the link for itself takes its ``alone`` seconds;
while a copy in the other direction runs too, it takes its ``duplex`` seconds. A copy that overlaps another
for a while progresses at either speed in turn: this is summed piece by piece, not estimated. A node, too,
takes longer while a copy runs in either direction.

Memory is not estimated either (µ-TWO Algorithm G corrected): it follows the issue order alone, so tenancies
say exactly what is in use when, copies in flight, workspaces and what a recompute throws away included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Lane,
    MemoryPoint,
    Offload,
    Part,
    Profile,
    Recompute,
    Span,
    Timeline,
    Wait,
    lane_of,
)

LANES = (Lane.COMPUTE, Lane.OUT, Lane.IN)
COMPUTE, OUT, IN = range(3)
"""The lanes as numbers: flat lists of numbers are quick to run through."""
LANE_NUMBERS = {lane: number for number, lane in enumerate(LANES)}
NO_WAIT = -1
"""Stands for the operation waited for, where an operation is no wait."""


@dataclass(frozen=True)
class LaneTimes:
    """When everything has ended, and where the time went; the words are those of `ir.Timeline`.

    ``starts`` and ``ends`` are those of each operation, in issue order. For a wait both are the moment it let
    its lane go on.
    """

    seconds: float
    compute_seconds: float
    stall_seconds: float
    copy_seconds: float
    hidden_copy_seconds: float
    starts: Sequence[float]
    ends: Sequence[float]


def run_lanes(
    lanes: Sequence[int], alone: Sequence[float], duplex: Sequence[float], waits: Sequence[int]
) -> LaneTimes:
    """Run operations given as flat lists: lane, seconds alone and slowed, position waited for.

    A copy is slowed by copies in the other direction, a node by any copy. A wait names an earlier operation.
    """
    queues: tuple[list[int], list[int], list[int]] = ([], [], [])
    for position, lane in enumerate(lanes):
        queues[lane].append(position)
    starts, ends = [0.0] * len(lanes), [0.0] * len(lanes)
    ended = bytearray(len(lanes))
    issued = [0, 0, 0]
    running = [-1, -1, -1]  # positions of what the lanes are at, -1 for nothing
    # Progress: the share that was left at a moment, the seconds that the whole takes since, and its end.
    left, since, pace, due = ([0.0, 0.0, 0.0] for _ in range(4))
    was_slowed = (False, False, False)
    now = compute_seconds = stall_seconds = copy_seconds = hidden_copy_seconds = 0.0

    while True:
        # Start whatever can start now. What takes no time may let another lane go on, hence the repetition.
        begins = [False, False, False]
        moved = True
        while moved:
            moved = False
            for lane, queue in enumerate(queues):
                while running[lane] < 0 and issued[lane] < len(queue):
                    position = queue[issued[lane]]
                    on = waits[position]
                    if on >= 0 and not ended[on]:
                        break
                    issued[lane] += 1
                    starts[position] = now
                    if alone[position] > 0.0:
                        running[lane] = position
                        begins[lane] = True
                    else:
                        ends[position] = now
                        ended[position] = moved = True

        # What starts, and what is slowed now or no longer, gets the end it has at the present pace.
        goes_out, comes_in = running[OUT] >= 0, running[IN] >= 0
        slowed = (goes_out or comes_in, goes_out and comes_in, goes_out and comes_in)
        then = inf
        for lane, position in enumerate(running):
            if position < 0:
                continue
            if begins[lane] or slowed[lane] != was_slowed[lane]:
                left[lane] = 1.0 if begins[lane] else _left(left[lane], pace[lane], now - since[lane])
                since[lane] = now
                pace[lane] = duplex[position] if slowed[lane] else alone[position]
                due[lane] = now + left[lane] * pace[lane]
            then = min(then, due[lane])
        was_slowed = slowed

        # On to the next moment at which something ends.
        if then == inf:
            break
        if goes_out or comes_in:
            copy_seconds += then - now
            if running[COMPUTE] >= 0:
                hidden_copy_seconds += then - now
            else:
                stall_seconds += then - now
        for lane, position in enumerate(running):
            if position >= 0 and due[lane] <= then:
                if lane == COMPUTE:
                    compute_seconds += pace[lane] if left[lane] == 1.0 else then - starts[position]
                ends[position] = then
                ended[position] = True
                running[lane] = -1
        now = then

    return LaneTimes(now, compute_seconds, stall_seconds, copy_seconds, hidden_copy_seconds, starts, ends)


def _left(share: float, pace: float, seconds: float) -> float:
    """The share left after ``seconds`` of work, if the whole takes ``pace`` seconds."""
    return max(0.0, share - seconds / pace) if seconds > 0.0 else share


_CLASSES = tuple(ByteClass)
_POSITION = {byte_class: position for position, byte_class in enumerate(_CLASSES)}


def memory(part: Part, profiles: Sequence[Profile]) -> tuple[MemoryPoint, ...]:
    """One point per instruction; classes without bytes are left out, the others stand in `ByteClass` order.

    ``profiles`` has one profile per sub-array.
    """
    num_instructions = len(part.instructions)
    changes: list[list[tuple[int, int]]] = [[] for _ in range(num_instructions + 1)]
    own = [0] * num_instructions
    totals = [0] * len(_CLASSES)
    classes = [[_POSITION[tensor.byte_class] for tensor in profile.tensors] for profile in profiles]
    for tenancy in part.tenancies:
        begin, end, size = tenancy.begin, tenancy.end, tenancy.size_bytes
        if begin == end:
            own[begin] += size
            continue
        byte_class = classes[tenancy.sub_array][tenancy.tensor]
        if begin == -1:
            totals[byte_class] += size
        else:
            changes[begin].append((byte_class, size))
        changes[end].append((byte_class, -size))
    points = []
    pairs = [
        (byte_class, total) if total else None for byte_class, total in zip(_CLASSES, totals, strict=True)
    ]
    by_class = tuple(pair for pair in pairs if pair is not None)
    for position in range(num_instructions):
        if changes[position]:
            for number, amount in changes[position]:
                total = totals[number] = totals[number] + amount
                pairs[number] = (_CLASSES[number], total) if total else None
            by_class = tuple([pair for pair in pairs if pair is not None])
        points.append(MemoryPoint(position, by_class, own[position]))
    return tuple(points)


def timeline(part: Part, profiles: Sequence[Profile], *, counts_sync: bool = True) -> Timeline:
    """One pass through ``part``: every node and copy with its start and end, and the memory meanwhile.

    ``profiles`` has one profile per sub-array. A draft has several times as many waits as the program made of
    it, so their sync cost is left out for drafts (``counts_sync`` false).
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
    for instruction in part.instructions:
        on = NO_WAIT
        slow = seconds = 0.0
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
        else:
            lane = IN
            tensor = tensors[instruction.sub_array][instruction.tensor]
            seconds = slow_copies * tensor.swap_in_seconds
            slow = slow_copies * tensor.swap_in_duplex_seconds
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
