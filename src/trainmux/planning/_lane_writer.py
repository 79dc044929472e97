"""Instructions in issue order, each behind the waits that it takes.

A lane knows that its own earlier instructions have ended. A wait adds the instruction waited for, and all
that the lane of that instruction knew by then. A wait is written only for an end that its lane does not know.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainmux.ir import Compute, Free, Instruction, Offload, Prefetch, Recompute, Wait
from trainmux.planning._facts import Key
from trainmux.planning._lanes import COMPUTE, IN, LANES, OUT


class LaneKnowledge:
    """Which instructions, named by their positions, each lane knows to have ended."""

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
        """The lane of the instruction at ``position``."""
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


class LaneWriter:
    """Writes instructions. A subclass that knows where bytes lie, or when things end, waits for less."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self._known = LaneKnowledge()
        self._last_node = self._last_on_compute = -1
        self._offloads: dict[Key, int] = {}
        self._prefetches: dict[Key, int] = {}

    def _append(self, lane: int, instruction: Instruction) -> int:
        self._instructions.append(instruction)
        return self._known.append(lane)

    def _wait(self, lane: int, on: int) -> None:
        """Let ``lane`` know that the instruction at ``on`` has ended, if there is one and it does not yet."""
        if on < 0 or self._known.has_ended(lane, on):
            return
        self._known.learn(lane, on)
        self._append(lane, Wait(LANES[lane], on))

    def _compute(
        self, instruction: Compute | Recompute, reads: Iterable[int], changes: Iterable[int] = ()
    ) -> int:
        """A node, once what it reads is there, and what it changes is on the host if it must be.

        The latest copy is waited for first: it makes the others of its lane needless.
        """
        if self._prefetches or self._offloads:
            sub_array = instruction.sub_array
            awaited = [self._prefetches.get((sub_array, tensor), -1) for tensor in (*reads, *changes)]
            awaited += [self._offloads.get((sub_array, tensor), -1) for tensor in changes]
            self._wait_for_copies(sorted(awaited, reverse=True))
        position = self._append(COMPUTE, instruction)
        self._last_node = self._last_on_compute = position
        return position

    def _copy_out(self, key: Key) -> int:
        """Take a tensor to the host."""
        self._wait_for_maker(key)
        self._wait(OUT, self._prefetches.get(key, -1))
        position = self._offloads[key] = self._append(OUT, Offload(*key))
        return position

    def _copy_back(self, key: Key) -> int:
        """Fetch a tensor, when compute is done with whoever had the bytes and the host has the copy."""
        self._wait_for_bytes()
        self._wait(IN, self._offloads.get(key, -1))
        position = self._prefetches[key] = self._append(IN, Prefetch(*key))
        return position

    def _free(self, key: Key) -> int:
        """Give a tensor's bytes back, once no copy needs them."""
        self._wait_for_copies((self._prefetches.pop(key, -1), self._offloads.get(key, -1)))
        position = self._last_on_compute = self._append(COMPUTE, Free(*key))
        return position

    def _wait_for_copies(self, needed: Iterable[int]) -> None:
        """Let compute know that copies have ended."""
        for on in needed:
            self._wait(COMPUTE, on)

    def _wait_for_maker(self, key: Key) -> None:
        """Let copies to the host know that the tensor is there."""
        self._wait(OUT, self._last_node)

    def _wait_for_bytes(self) -> None:
        """Let copies to the device know that whoever had the bytes is done."""
        self._wait(IN, self._last_on_compute)
