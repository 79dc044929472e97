"""Three lanes on the clock: nodes, copies to the host, copies from it (D6).

Each lane runs its operations in the order they were issued and meets the others only at waits. A copy that
has the link for itself takes its ``alone`` seconds; while a copy in the other direction runs too, it takes
its ``duplex`` seconds. A copy that overlaps another for a while progresses at either speed in turn: this is
summed piece by piece, not estimated. A node, too, takes longer while a copy runs in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    compute_queue, out_queue, in_queue = queues
    num_compute, num_out, num_in = len(compute_queue), len(out_queue), len(in_queue)
    next_compute = next_out = next_in = 0
    starts, ends = [0.0] * len(lanes), [0.0] * len(lanes)
    ended = bytearray(len(lanes))

    now = compute_end = out_end = in_end = 0.0
    running = going_out = coming_in = -1  # positions of what the lanes are at, -1 for nothing
    # Progress: the share that was left at a moment, and the seconds that the whole takes since.
    out_left = in_left = out_since = in_since = out_pace = in_pace = 0.0
    compute_left = compute_since = compute_pace = 0.0
    is_duplex = has_copies = False
    compute_seconds = stall_seconds = copy_seconds = hidden_copy_seconds = 0.0

    while True:
        # Start whatever can start now. What takes no time may let another lane go on, hence the repetition.
        out_starts = in_starts = compute_starts = False
        moved = True
        while moved:
            moved = False
            while running < 0 and next_compute < num_compute:
                position = compute_queue[next_compute]
                on = waits[position]
                if on >= 0 and not ended[on]:
                    break
                next_compute += 1
                starts[position] = now
                if alone[position] > 0.0:
                    running = position
                    compute_starts = True
                else:
                    ends[position] = now
                    ended[position] = moved = True
            while going_out < 0 and next_out < num_out:
                position = out_queue[next_out]
                on = waits[position]
                if on >= 0 and not ended[on]:
                    break
                next_out += 1
                starts[position] = now
                if alone[position] > 0.0:
                    going_out = position
                    out_starts = True
                else:
                    ends[position] = now
                    ended[position] = moved = True
            while coming_in < 0 and next_in < num_in:
                position = in_queue[next_in]
                on = waits[position]
                if on >= 0 and not ended[on]:
                    break
                next_in += 1
                starts[position] = now
                if alone[position] > 0.0:
                    coming_in = position
                    in_starts = True
                else:
                    ends[position] = now
                    ended[position] = moved = True

        # A copy that starts, and one whose company came or went, gets the end it has at the present pace.
        changes_pace = (going_out >= 0 and coming_in >= 0) != is_duplex
        if changes_pace:
            is_duplex = not is_duplex
        if going_out >= 0 and (out_starts or changes_pace):
            out_left = 1.0 if out_starts else _left(out_left, out_pace, now - out_since)
            out_since = now
            out_pace = duplex[going_out] if is_duplex else alone[going_out]
            out_end = now + out_left * out_pace
        if coming_in >= 0 and (in_starts or changes_pace):
            in_left = 1.0 if in_starts else _left(in_left, in_pace, now - in_since)
            in_since = now
            in_pace = duplex[coming_in] if is_duplex else alone[coming_in]
            in_end = now + in_left * in_pace

        changes_pace = (going_out >= 0 or coming_in >= 0) != has_copies
        if changes_pace:
            has_copies = not has_copies
        if running >= 0 and (compute_starts or (changes_pace and alone[running] != duplex[running])):
            compute_left = 1.0 if compute_starts else _left(compute_left, compute_pace, now - compute_since)
            compute_since = now
            compute_pace = duplex[running] if has_copies else alone[running]
            compute_end = now + compute_left * compute_pace

        # On to the next moment at which something ends.
        if going_out < 0 and coming_in < 0:
            if running < 0:
                break
            then = compute_end
        else:
            then = out_end if coming_in < 0 or (going_out >= 0 and out_end < in_end) else in_end
            if running >= 0:
                if compute_end < then:
                    then = compute_end
                hidden_copy_seconds += then - now
            else:
                stall_seconds += then - now
            copy_seconds += then - now
            if going_out >= 0 and out_end <= then:
                ends[going_out] = then
                ended[going_out] = True
                going_out = -1
            if coming_in >= 0 and in_end <= then:
                ends[coming_in] = then
                ended[coming_in] = True
                coming_in = -1
        if running >= 0 and compute_end <= then:
            compute_seconds += compute_pace if compute_left == 1.0 else then - starts[running]
            ends[running] = then
            ended[running] = True
            running = -1
        now = then

    return LaneTimes(now, compute_seconds, stall_seconds, copy_seconds, hidden_copy_seconds, starts, ends)


def _left(share: float, pace: float, seconds: float) -> float:
    """The share left after ``seconds`` of work, if the whole takes ``pace`` seconds."""
    return max(0.0, share - seconds / pace) if seconds > 0.0 else share
