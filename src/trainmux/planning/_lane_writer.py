"""Instructions in issue order, each behind the waits that it takes.

A lane knows that its own earlier instructions have ended. A wait adds the instruction waited for, and all
that the lane of that instruction knew by then. A wait is written only for an end that its lane does not know.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainmux.ir import Compute, Free, Instruction, Offload, Prefetch, Recompute, Wait
from trainmux.planning._facts import Key
from trainmux.planning._timeline import COMPUTE, IN, LANES, OUT


class LaneWriter:
    """Writes instructions. A subclass that knows where bytes lie, or when things end, waits for less."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self._lane_of: list[int] = []
        # Per lane: the last position that is known to have ended on each lane; and the same as it stood
        # when each instruction ended, which is what a wait for the instruction teaches.
        self._known = [[-1, -1, -1] for _ in LANES]
        self._known_at: list[tuple[int, ...]] = []
        self._last_node = self._last_on_compute = -1
        self._offloads: dict[Key, int] = {}
        self._prefetches: dict[Key, int] = {}

    def _append(self, lane: int, instruction: Instruction) -> int:
        position = len(self.instructions)
        self._known[lane][lane] = position
        self._known_at.append(tuple(self._known[lane]))
        self._lane_of.append(lane)
        self.instructions.append(instruction)
        return position

    def _is_news(self, lane: int, on: int) -> bool:
        """Whether ``lane`` does not know that the instruction at ``on``, if there is one, has ended."""
        return on >= 0 and self._known[lane][self._lane_of[on]] < on

    def _wait(self, lane: int, on: int) -> None:
        """Let ``lane`` know that the instruction at ``on`` has ended, if there is one and it does not yet."""
        if self._is_news(lane, on):
            self._known[lane] = list(map(max, self._known[lane], self._known_at[on]))
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
            if max(awaited, default=-1) >= 0:
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
        back, out = self._prefetches.pop(key, -1), self._offloads.get(key, -1)
        if back >= 0 or out >= 0:
            self._wait_for_copies((back, out))
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
