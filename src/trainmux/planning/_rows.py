"""A schedule as rows of actions: what happens in which order, before bytes, waits and frees are settled.

The row of the body is the order of the schedule with each decision at its place: in front of a node what is
released, fetched back and recomputed there, behind it what is copied out. Releases that lie beyond the end
of the pass happen at its end: all lanes join there, so that they cost nothing, and the pass that follows
finds the tensor on the host.

A ring's prologue and epilogue are the body with the other sub-arrays' nodes left out. Decisions keep their
order; one that stands in front of a node of another sub-array comes in front of the next node that is there,
or at the end. So at each node a prologue or epilogue holds no tensor that the body does not hold there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Multiplexing, Recomputation, Schedule, Swap
from trainmux.planning._recipes import Recipe
from trainmux.planning._views import Key, StepView, describe_recomputation, describe_swap


@dataclass(frozen=True, slots=True)
class RunNode:
    """Run a node, as every step does once."""

    sub_array: int
    node: int


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Carry out a recomputation."""

    record: Recomputation
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy a tensor to the host."""

    key: Key
    record: Swap


@dataclass(frozen=True, slots=True)
class Release:
    """Give the bytes of a tensor back that the host has a copy of."""

    key: Key
    record: Swap


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Take bytes for a tensor and copy it from the host."""

    key: Key
    record: Swap


@dataclass(frozen=True, slots=True)
class EndStep:
    """The step of a sub-array ends here, inside the body: ``results`` of its forward pass may go."""

    results: tuple[Key, ...]


Action = RunNode | RunAgain | CopyOut | Release | CopyIn | EndStep


@dataclass(frozen=True)
class Stay:
    """A time that a swapped static tensor spends on the device in one pass through the body.

    Positions are those of actions in the body's row: ``begin`` -1 if it is there when the pass begins,
    ``end`` ``None`` if it is still there when the pass ends. ``copied_out`` is the offload before the
    release, ``uses`` and ``changes`` the actions that touch it, the latter among the former.
    """

    record: Swap
    begin: int
    end: int | None
    copied_out: int | None
    uses: tuple[int, ...]
    changes: tuple[int, ...]


def body_row(
    views: Sequence[StepView],
    schedule: Schedule,
    positions: Sequence[Sequence[int]],
    recipes: Sequence[Recipe],
) -> tuple[Action, ...]:
    """The actions of one pass through the body. Refused with `PlanError`: swaps that cannot be meant so."""
    num_nodes = len(schedule.order)
    before: list[list[Action]] = [[] for _ in range(num_nodes + 1)]
    after: list[list[Action]] = [[] for _ in range(num_nodes)]
    swaps = [(swap, *_swap_positions(swap, views, positions, num_nodes)) for swap in schedule.swaps]
    for swap, out, _, _ in sorted(swaps, key=lambda s: (s[2] - s[1] - 1) % num_nodes):
        after[out].append(CopyOut((swap.sub_array, swap.tensor), swap))
    # What was offloaded last is released first: one wait serves all.
    for swap, out, release, _ in sorted(swaps, key=lambda s: -s[1]):
        before[release if release > out else num_nodes].append(Release((swap.sub_array, swap.tensor), swap))
    next_uses = _NextUses(views, positions, num_nodes)
    for swap, _, _, back in sorted(
        swaps, key=lambda s: next_uses.distance(s[0].sub_array, s[0].tensor, s[3])
    ):
        before[back].append(CopyIn((swap.sub_array, swap.tensor), swap))
    # What is made earlier in a step cannot depend on what is made later: recompute it first.
    for record, recipe in sorted(
        zip(schedule.recomputes, recipes, strict=True),
        key=lambda pair: (pair[0].sub_array, views[pair[0].sub_array].made_by[pair[0].tensor]),
    ):
        before[positions[record.before[0]][record.before[1]]].append(RunAgain(record, recipe))
    if schedule.multiplexing is Multiplexing.RING and views[0].num_forward < views[0].num_nodes:
        results = _forward_results(views[0])
        if results:
            after[positions[0][-1]].append(EndStep(results))
    row: list[Action] = []
    for position, (sub_array, node) in enumerate(schedule.order):
        row += before[position]
        row.append(RunNode(sub_array, node))
        row += after[position]
    return (*row, *before[num_nodes])


def _forward_results(view: StepView) -> tuple[Key, ...]:
    return tuple(
        (0, tensor)
        for tensor, facts in enumerate(view.profile.tensors)
        if facts.byte_class is ByteClass.RESULT and 0 <= view.made_by[tensor] < view.num_forward
    )


def _swap_positions(
    swap: Swap, views: Sequence[StepView], positions: Sequence[Sequence[int]], num_nodes: int
) -> tuple[int, int, int]:
    """The positions of a swap's three nodes in the body, checked to follow one another around the body."""
    anchors = (swap.offload_after, swap.release_before, swap.prefetch_prompt)
    if not _is_tensor((swap.sub_array, swap.tensor), views):
        raise PlanError(
            f"{describe_swap(swap, views)}: there is no such tensor; plan for the profiles that are passed"
        )
    if _is_result((swap.sub_array, swap.tensor), views):
        raise PlanError(f"{describe_swap(swap, views)}: {_RESULT}")
    for sub_array, rank in anchors:
        if not (0 <= sub_array < len(positions) and 0 <= rank < len(positions[sub_array])):
            raise PlanError(
                f"{describe_swap(swap, views)}: there is no node {rank} in sub-array {sub_array}; plan for "
                "the profiles that are passed"
            )
    out, release, back = (positions[sub_array][rank] for sub_array, rank in anchors)
    if (release - out - 1) % num_nodes > (back - out - 1) % num_nodes:
        raise PlanError(
            f"{describe_swap(swap, views)}: from the offload on, the release must come before the prefetch, "
            f"but they stand at positions {out}, {release} and {back} of the body"
        )
    return out, release, back


def check_recomputation(
    record: Recomputation, views: Sequence[StepView], positions: Sequence[Sequence[int]]
) -> None:
    """Refuse, with `PlanError`, a record that names a tensor or node that does not exist."""
    if not _is_tensor((record.sub_array, record.tensor), views):
        raise PlanError(
            f"{describe_recomputation(record, views)}: there is no such tensor; plan for the profiles that "
            "are passed"
        )
    if _is_result((record.sub_array, record.tensor), views):
        raise PlanError(f"{describe_recomputation(record, views)}: {_RESULT}")
    for sub_array, rank in (record.before, *((record.sub_array, rank) for rank in record.nodes)):
        if not (0 <= sub_array < len(positions) and 0 <= rank < len(positions[sub_array])):
            raise PlanError(
                f"{describe_recomputation(record, views)}: there is no node {rank} in sub-array {sub_array}; "
                "plan for the profiles that are passed"
            )


_RESULT = "it is a result, which stays on the device to the end of its step; leave it there"


def _is_result(key: Key, views: Sequence[StepView]) -> bool:
    return views[key[0]].profile.tensors[key[1]].byte_class is ByteClass.RESULT


def _is_tensor(key: Key, views: Sequence[StepView]) -> bool:
    return 0 <= key[0] < len(views) and 0 <= key[1] < len(views[key[0]].profile.tensors)


class _NextUses:
    """How far it is, around the body, from a position to the next node that uses a tensor."""

    def __init__(self, views: Sequence[StepView], positions: Sequence[Sequence[int]], num_nodes: int) -> None:
        self._views = views
        self._positions = positions
        self._num_nodes = num_nodes
        self._uses: dict[int, list[list[int]]] = {}

    def distance(self, sub_array: int, tensor: int, position: int) -> int:
        if sub_array not in self._uses:
            profile = self._views[sub_array].profile
            uses: list[list[int]] = [[] for _ in profile.tensors]
            for rank, node in enumerate(profile.nodes):
                for used in (*node.reads, *node.changes):
                    uses[used].append(self._positions[sub_array][rank])
            self._uses[sub_array] = uses
        own = self._uses[sub_array][tensor]
        return min(((use - position) % self._num_nodes for use in own), default=self._num_nodes)


def prologue_row(
    body: Sequence[Action], views: Sequence[StepView], stays: Mapping[Key, Sequence[Stay]]
) -> tuple[Action, ...]:
    """A ring's prologue: the forward pass of the first sub-array, with swapped static tensors on the host.

    A static tensor comes to the device where the body would first have it there, if a node of the prologue
    uses it then or the body begins with it.
    """
    made_at, num_forward = _forward_makers(body, views), views[0].num_forward
    entries: list[_Entry] = []
    for position, action in enumerate(body):
        if isinstance(action, RunNode):
            if action.sub_array == 0 and action.node < num_forward:
                entries.append((position, 0, action))
        elif _moves_first(action, views) and position > made_at.get(_key(action), len(body)):
            entries.append((position, 0, action))
    there = {position for position, _, _ in entries}
    for key, own in stays.items():
        for stay in own:
            first_use = next((use for use in stay.uses if use in there), len(body))
            if first_use == len(body) and stay.end is not None:
                continue
            entries.append((stay.begin, first_use, CopyIn(key, stay.record)))
            if stay.end is not None:
                if stay.copied_out is not None and any(change in there for change in stay.changes):
                    entries.append((stay.copied_out, 0, CopyOut(key, stay.record)))
                entries.append((stay.end, 0, Release(key, stay.record)))
    return _in_order(entries)


def epilogue_row(
    body: Sequence[Action], views: Sequence[StepView], stays: Mapping[Key, Sequence[Stay]]
) -> tuple[Action, ...]:
    """A ring's epilogue: the backward pass and update of the first sub-array that are left in flight.

    Swapped static tensors are on the host at its end. What the body leaves on the device is copied out at
    the beginning, or as soon as its last change is done.
    """
    made_at, num_forward = _forward_makers(body, views), views[0].num_forward
    entries: list[_Entry] = []
    for position, action in enumerate(body):
        if isinstance(action, RunNode):
            if action.sub_array == 0 and action.node >= num_forward:
                entries.append((position, 0, action))
        elif isinstance(action, EndStep) or (
            _moves_first(action, views) and position < made_at.get(_key(action), len(body))
        ):
            entries.append((position, 0, action))
    there = {position for position, _, _ in entries}
    for key, own in stays.items():
        for stay in own:
            if stay.begin != -1 and not any(use in there for use in stay.uses):
                continue
            if stay.begin != -1:
                entries.append((stay.begin, 0, CopyIn(key, stay.record)))
            changes = [change for change in stay.changes if change in there]
            if changes or stay.begin == -1:
                entries.append((max([stay.begin, *changes]), 1, CopyOut(key, stay.record)))
            entries.append((len(body) if stay.end is None else stay.end, 0, Release(key, stay.record)))
    return _in_order(entries)


_Entry = tuple[int, int, Action]
"""An action of a prologue or epilogue: its position in the body, what decides between equal ones, itself."""


def _in_order(entries: Iterable[_Entry]) -> tuple[Action, ...]:
    return tuple(action for _, _, action in sorted(entries, key=lambda entry: entry[:2]))


def _key(action: RunAgain | CopyOut | Release | CopyIn | EndStep) -> Key:
    if isinstance(action, RunAgain):
        return (action.record.sub_array, action.record.tensor)
    assert not isinstance(action, EndStep)
    return action.key


def _moves_first(action: RunAgain | CopyOut | Release | CopyIn | EndStep, views: Sequence[StepView]) -> bool:
    """Whether an action moves a tensor that the first sub-array makes anew in each step."""
    if isinstance(action, EndStep):
        return False
    sub_array, tensor = _key(action)
    return sub_array == 0 and views[0].made_by[tensor] >= 0


def _forward_makers(body: Sequence[Action], views: Sequence[StepView]) -> dict[Key, int]:
    """Positions in the body's row at which the first sub-array's forward pass makes its tensors."""
    return {
        (0, tensor): position
        for position, action in enumerate(body)
        if isinstance(action, RunNode) and action.sub_array == 0 and action.node < views[0].num_forward
        for tensor in views[0].profile.nodes[action.node].creates
    }
