"""Schedule to draft: every instruction and every wait (µ-TWO §3.2 (6), Algorithm H corrected).

What differs from the paper: recomputations run behind the waits for their sources, offloads have an end that
frees and prefetches wait for, backward passes free what they are done with, and prologue and epilogue are
made from the same decisions. Where a tensor has several swaps or recomputations, each begins where the one
before it ended. Static tensors that are swapped are on the host before a ring's prologue and after its
epilogue; in turns, where there is neither, they are where the body has them when it meets itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap

from trainmux.errors import PlanError
from trainmux.ir import Compute, Multiplexing, Part, Profile, Recompute, Schedule, Tenancy
from trainmux.planning._facts import SYNCS_PER_SWAP, Facts, Key, facts_of, remembered
from trainmux.planning._lane_writer import LaneWriter
from trainmux.planning._rows import (
    Action,
    Move,
    Residency,
    RunAgain,
    RunNode,
    Settled,
    Touch,
    body_row,
    epilogue_row,
    positions_in_body,
    prologue_row,
    recipe,
)
from trainmux.planning._timeline import lane_times


@dataclass(frozen=True)
class Draft:
    """A program of which every byte is known but not its offset (`UNPLACED`).

    What will be reserved is a little more than the live bytes and is known only from `rewrite`. ``seconds``
    is the time of the body, with as many cross-stream dependencies as a program made of it usually has: a
    draft has several times as many. ``parts`` makes prologue, body and epilogue, or refuses the schedule
    with `PlanError`: most drafts are only timed.
    """

    schedule: Schedule
    parts: Callable[[], tuple[Part, Part, Part]]
    resident: tuple[Key, ...]
    host_bytes: int
    seconds: float


@partial(remembered, max_remembered=4)
def draft(profiles: Sequence[Profile], schedule: Schedule) -> Draft:
    """Rewrite without placement, which takes most of the time: for planners that try many schedules.

    A policy times its schedules by drafts, and whoever it hands one to needs that draft again.
    """
    if not profiles:
        raise PlanError("a schedule needs at least one sub-array, but got no profiles; pass one for each")
    all_facts = [facts_of(profile) for profile in profiles]
    positions = positions_in_body(all_facts, schedule)
    recipes = [recipe(record, all_facts) for record in schedule.recomputes]
    is_ring = schedule.multiplexing is Multiplexing.RING

    row = body_row(all_facts, schedule, positions, recipes)
    residency = Residency(all_facts, schedule.swaps)
    residency.check_recomputations(row, is_ring)
    settled, around = residency.settle_body(row, is_ring)
    always = frozenset(
        (sub_array, tensor)
        for sub_array, facts in enumerate(all_facts)
        for tensor, maker in enumerate(facts.made_by)
        if maker == -1 and (sub_array, tensor) not in residency.swapped
    )
    body = _Issuer(all_facts, always | around).issue(row, settled)
    outside = frozenset[Key]() if is_ring else around

    def parts() -> tuple[Part, Part, Part]:
        before = prologue_row(row, all_facts, settled.stays) if is_ring else ()
        after = epilogue_row(row, all_facts, settled.stays) if is_ring else ()
        settled_before = residency.settle(before, outside, around)
        settled_after = residency.settle(after, around, outside)
        return (
            _Issuer(all_facts, always | outside).issue(before, settled_before).part(),
            body.part(),
            _Issuer(all_facts, always | around).issue(after, settled_after).part(),
        )

    host_bytes = sum(profiles[s].tensors[tensor].size_bytes for s, tensor in residency.swapped)
    seconds = lane_times(Part(tuple(body.instructions), ()), profiles, counts_sync=False).seconds
    sync_seconds = max(profile.sync_seconds for profile in profiles)
    seconds += SYNCS_PER_SWAP * len(schedule.swaps) * sync_seconds
    resident = tuple(sorted(always | outside))
    return Draft(schedule, parts, resident, host_bytes, seconds)


UNPLACED = -1
"""The offset of bytes that have no place yet."""


class _Issuer(LaneWriter):
    """The instructions of a row that begins with the tensors of ``begin`` on the device, `UNPLACED`."""

    def __init__(self, all_facts: Sequence[Facts], begin: Iterable[Key]) -> None:
        super().__init__()
        self._all_facts = all_facts
        self._tenancies: list[tuple[int, int, int, int, int, int]] = []
        self._live: dict[Key, int] = dict.fromkeys(sorted(begin), -1)

    def part(self) -> Part:
        return Part(tuple(self.instructions), tuple(starmap(Tenancy, self._tenancies)))

    def issue(self, row: Sequence[Action], settled: Settled) -> _Issuer:
        for position, action in enumerate(row):
            ending: Sequence[Key] = settled.free_after.get(position, ())
            if isinstance(action, RunNode):
                self._run(action)
            elif isinstance(action, RunAgain):
                ending = self._run_again(action, ending)
            elif isinstance(action, Move):
                if action.touch is Touch.RELEASE:
                    self._free(action.key)
                elif action.touch is Touch.BACK:
                    self._copy_back(action.key)
                elif position not in settled.needless:
                    self._copy_out(action.key)
            for key in ending:
                self._free(key)
        for key in settled.free_last:
            self._free(key)
        for key, taken_at in self._live.items():
            self._note(key, taken_at, len(self.instructions))
        return self

    def _run(self, action: RunNode) -> None:
        sub_array = action.sub_array
        node = self._all_facts[sub_array].nodes[action.node]
        position = self._compute(Compute(sub_array, action.node), node.reads, node.changes)
        for tensor in node.creates:
            self._live[sub_array, tensor] = position
        self._take_workspace(sub_array, node.workspace_bytes, position)

    def _run_again(self, action: RunAgain, ending: Sequence[Key]) -> list[Key]:
        """Carry out a recomputation; returns those of the tensors that end here which are not freed yet.

        A step is left out if what it makes is on the device anyway.
        """
        (sub_array, wanted), recipe = action.key, action.recipe
        left = list(ending)
        own: set[int] = set()
        last_read: dict[int, int] = {}
        for index, step in enumerate(recipe.steps):
            for tensor in step.sources:
                last_read[tensor] = index
        for index, step in enumerate(recipe.steps):
            keeps = tuple(tensor for tensor in step.products if (sub_array, tensor) not in self._live)
            if keeps:
                node = self._all_facts[sub_array].nodes[step.node]
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
        assert wanted in own  # where it was before, it was dropped after its last use
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
            self._tenancies.append((sub_array, -1, position, position, UNPLACED, size_bytes))

    def _note(self, key: Key, begin: int, end: int) -> None:
        sub_array, tensor = key
        size = self._all_facts[sub_array].tensors[tensor].memory_size
        self._tenancies.append((sub_array, tensor, begin, end, UNPLACED, size))
