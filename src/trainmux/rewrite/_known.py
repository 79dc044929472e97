"""What each lane knows to have ended on the three lanes, instruction by instruction in issue order.

A lane knows of its own instructions, and what a wait teaches: the instruction that was waited for has ended,
and so has all that its lane knew of then.
"""

from __future__ import annotations

from trainmux.ir import Lane

LANES = (Lane.COMPUTE, Lane.OUT, Lane.IN)
COMPUTE, OUT, IN = range(3)
"""The lanes as numbers: lists are quicker than dictionaries, and drafts are made by the hundred."""


class Known:
    """Instructions are named by their positions."""

    def __init__(self) -> None:
        # Per lane: the last position that is known to have ended on each lane; and the same as it stood
        # when each instruction ended, which is what a wait for the instruction teaches.
        self._last = [[-1, -1, -1] for _ in LANES]
        self._last_at: list[tuple[int, int, int]] = []
        self._lane_of: list[int] = []

    def append(self, lane: int) -> int:
        """The next instruction runs on ``lane``; returns its position."""
        position = len(self._lane_of)
        last = self._last[lane]
        last[lane] = position
        self._last_at.append((last[0], last[1], last[2]))
        self._lane_of.append(lane)
        return position

    def lane_of(self, position: int) -> int:
        """Where the instruction at ``position`` runs."""
        return self._lane_of[position]

    def has_ended(self, lane: int, on: int) -> bool:
        """Whether ``lane`` knows that the instruction at ``on`` has ended."""
        return self._last[lane][self._lane_of[on]] >= on

    def learn(self, lane: int, on: int) -> None:
        """``lane`` waits for the instruction at ``on``."""
        last = self._last[lane]
        for other, position in enumerate(self._last_at[on]):
            if position > last[other]:
                last[other] = position
