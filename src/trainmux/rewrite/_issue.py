"""A settled row of actions as instructions in issue order, with every wait that is needed and no other.

What each lane knows to have ended on the three lanes is carried along (`_known`). A wait is issued only for
what its lane does not know yet, be it from an earlier wait, from its own order, or from what another lane
that it waited for knew in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainmux.ir import (
    Compute,
    Free,
    Instruction,
    Offload,
    Part,
    Prefetch,
    Recompute,
    Tenancy,
    Wait,
)
from trainmux.rewrite._known import COMPUTE, IN, LANES, OUT, Known
from trainmux.rewrite._rows import Action, CopyBack, CopyOut, EndStep, Release, RunAgain, RunNode
from trainmux.rewrite._stays import Settled
from trainmux.rewrite._views import Key, StepView

UNPLACED = -1
"""The offset of bytes that have no place yet."""


def issue(row: Sequence[Action], settled: Settled, begin: Iterable[Key], views: Sequence[StepView]) -> Part:
    """The instructions of a row that begins with the tensors of ``begin`` on the device, `UNPLACED`."""
    return _Issuer(views, begin).issue(row, settled)


class _Issuer:
    def __init__(self, views: Sequence[StepView], begin: Iterable[Key]) -> None:
        self._views = views
        self._instructions: list[Instruction] = []
        self._tenancies: list[Tenancy] = []
        self._live: dict[Key, int] = dict.fromkeys(sorted(begin), -1)
        self._known = Known()
        self._last_node = self._last_on_compute = -1
        self._offloads: dict[Key, int] = {}
        self._prefetches: dict[Key, int] = {}

    def issue(self, row: Sequence[Action], settled: Settled) -> Part:
        for position, action in enumerate(row):
            ending: Sequence[Key] = settled.free_after[position]
            if isinstance(action, RunNode):
                self._run(action)
            elif isinstance(action, RunAgain):
                ending = self._run_again(action, ending)
            elif isinstance(action, CopyOut):
                if position not in settled.needless:
                    self._copy_out(action.key)
            elif isinstance(action, Release):
                self._free(action.key)
            elif isinstance(action, CopyBack):
                self._copy_back(action.key)
            else:
                assert isinstance(action, EndStep)
            for key in ending:
                self._free(key)
        for key in settled.free_last:
            self._free(key)
        for key, taken_at in self._live.items():
            self._note(key, taken_at, len(self._instructions))
        return Part(tuple(self._instructions), tuple(self._tenancies))

    def _append(self, lane: int, instruction: Instruction) -> int:
        self._instructions.append(instruction)
        return self._known.append(lane)

    def _wait(self, lane: int, on: int | None) -> None:
        """Let ``lane`` know that the instruction at ``on`` has ended, if there is one and it does not yet."""
        if on is None or on < 0 or self._known.has_ended(lane, on):
            return
        self._known.learn(lane, on)
        self._append(lane, Wait(LANES[lane], on))

    def _wait_for_inputs(self, sub_array: int, reads: Iterable[int], changes: Iterable[int] = ()) -> None:
        """Let compute wait until what it reads is there, and what it changes is on the host if it must be.

        The latest is waited for first: it makes the others of its lane needless.
        """
        if not self._prefetches and not self._offloads:
            return
        awaited = [self._prefetches.get((sub_array, tensor), -1) for tensor in (*reads, *changes)]
        awaited += [self._offloads.get((sub_array, tensor), -1) for tensor in changes]
        for on in sorted(awaited, reverse=True):
            self._wait(COMPUTE, on)

    def _run(self, action: RunNode) -> None:
        sub_array = action.sub_array
        node = self._views[sub_array].profile.nodes[action.node]
        self._wait_for_inputs(sub_array, node.reads, node.changes)
        position = self._on_compute(Compute(sub_array, action.node))
        for tensor in node.creates:
            self._live[sub_array, tensor] = position
        self._take_workspace(sub_array, node.workspace_bytes, position)

    def _run_again(self, action: RunAgain, ending: Sequence[Key]) -> list[Key]:
        """Carry out a recomputation; returns those of the tensors that end here which are not freed yet.

        A step is left out if what it makes is on the device anyway.
        """
        record, recipe = action.record, action.recipe
        sub_array = record.sub_array
        left = list(ending)
        own: set[int] = set()
        last_read: dict[int, int] = {}
        for index, step in enumerate(recipe.steps):
            for tensor in step.sources:
                last_read[tensor] = index
        for index, step in enumerate(recipe.steps):
            keeps = tuple(tensor for tensor in step.products if (sub_array, tensor) not in self._live)
            if keeps:
                self._wait_for_inputs(sub_array, (*step.sources, *step.own))
                node = self._views[sub_array].profile.nodes[step.node]
                position = self._on_compute(Recompute(sub_array, step.node, keeps))
                for tensor in node.creates:
                    if tensor in keeps:
                        self._live[sub_array, tensor] = position
                    else:
                        self._note((sub_array, tensor), position, position)
                self._take_workspace(sub_array, node.workspace_bytes, position)
                own.update(keeps)
            for tensor in sorted(own):
                if recipe.needed_until[tensor] <= index:
                    own.remove(tensor)
                    self._free((sub_array, tensor))
            for key in [key for key in left if key[0] == sub_array and last_read.get(key[1]) == index]:
                left.remove(key)
                self._free(key)
        assert record.tensor in own  # where it was before, it was dropped after its last use
        return left

    def _copy_out(self, key: Key) -> None:
        self._wait(OUT, self._last_node)
        self._wait(OUT, self._prefetches.get(key))
        self._offloads[key] = self._append(OUT, Offload(*key))

    def _copy_back(self, key: Key) -> None:
        """Fetch a tensor, when compute is done with whoever had the bytes and the host has the copy."""
        self._wait(IN, self._last_on_compute)
        self._wait(IN, self._offloads.get(key))
        position = self._append(IN, Prefetch(*key))
        self._prefetches[key] = position
        self._live[key] = position

    def _free(self, key: Key) -> None:
        self._wait(COMPUTE, self._prefetches.pop(key, None))
        self._wait(COMPUTE, self._offloads.get(key))
        position = self._append(COMPUTE, Free(*key))
        self._last_on_compute = position
        self._note(key, self._live.pop(key), position)

    def _on_compute(self, instruction: Compute | Recompute) -> int:
        position = self._append(COMPUTE, instruction)
        self._last_node = self._last_on_compute = position
        return position

    def _take_workspace(self, sub_array: int, size_bytes: int, position: int) -> None:
        if size_bytes:
            self._tenancies.append(Tenancy(sub_array, -1, position, position, UNPLACED, size_bytes))

    def _note(self, key: Key, begin: int, end: int) -> None:
        sub_array, tensor = key
        size = self._views[sub_array].profile.tensors[tensor].size_bytes
        self._tenancies.append(Tenancy(sub_array, tensor, begin, end, UNPLACED, size))
