"""A settled row of actions as instructions in issue order, with every wait that is needed and no other.

Waits are those of `_lane_writer`, which knows nothing of where bytes will lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainmux.ir import (
    Compute,
    Part,
    Recompute,
    Tenancy,
)
from trainmux.planning._lane_writer import LaneWriter
from trainmux.planning._rows import Action, CopyIn, CopyOut, EndStep, Release, RunAgain, RunNode
from trainmux.planning._stays import Settled
from trainmux.planning._views import Key, StepView

UNPLACED = -1
"""The offset of bytes that have no place yet."""


def issue(row: Sequence[Action], settled: Settled, begin: Iterable[Key], views: Sequence[StepView]) -> Part:
    """The instructions of a row that begins with the tensors of ``begin`` on the device, `UNPLACED`."""
    return _Issuer(views, begin).issue(row, settled)


class _Issuer(LaneWriter):
    def __init__(self, views: Sequence[StepView], begin: Iterable[Key]) -> None:
        super().__init__()
        self._views = views
        self._tenancies: list[Tenancy] = []
        self._live: dict[Key, int] = dict.fromkeys(sorted(begin), -1)

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
            elif isinstance(action, CopyIn):
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

    def _run(self, action: RunNode) -> None:
        sub_array = action.sub_array
        node = self._views[sub_array].profile.nodes[action.node]
        position = self._compute(Compute(sub_array, action.node), node.reads, node.changes)
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
                node = self._views[sub_array].profile.nodes[step.node]
                recompute = Recompute(sub_array, step.node, keeps)
                position = self._compute(recompute, (*step.sources, *step.own))
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

    def _copy_back(self, key: Key) -> int:
        position = self._live[key] = super()._copy_back(key)
        return position

    def _free(self, key: Key) -> int:
        position = super()._free(key)
        self._note(key, self._live.pop(key), position)
        return position

    def _take_workspace(self, sub_array: int, size_bytes: int, position: int) -> None:
        if size_bytes:
            self._tenancies.append(Tenancy(sub_array, -1, position, position, UNPLACED, size_bytes))

    def _note(self, key: Key, begin: int, end: int) -> None:
        sub_array, tensor = key
        size = self._views[sub_array].profile.tensors[tensor].size_bytes
        self._tenancies.append(Tenancy(sub_array, tensor, begin, end, UNPLACED, size))
