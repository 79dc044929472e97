"""Three lanes on the clock: nodes, copies to the host, copies from it (D6).

Each lane runs its operations in the order they were issued and meets the others only at waits. A copy that
has the link for itself takes its ``alone`` seconds; while a copy in the other direction runs too, it takes
its ``duplex`` seconds. A copy that overlaps another for a while progresses at either speed in turn: this is
summed piece by piece, not estimated. A node, too, takes longer while a copy runs in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from trainmux.errors import PlanError
from trainmux.ir import Lane

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

    A copy is slowed by copies in the other direction, a node by any copy.

    Refused with `PlanError`: a wait for an operation that is not issued before it.
    """
    queues: tuple[list[int], list[int], list[int]] = ([], [], [])
    for position, lane in enumerate(lanes):
        queues[lane].append(position)
        if waits[position] != NO_WAIT and not 0 <= waits[position] < position:
            raise PlanError(
                f"a wait must name an operation issued before it, but the wait at {position} names "
                f"{waits[position]}; issue what is waited for first"
            )
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
