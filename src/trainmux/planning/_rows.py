"""A schedule as rows of actions, and where along them bytes are freed.

The row of the body is the order of the schedule with each decision at its place: in front of a node what is
released, fetched back and recomputed there, behind it what is copied out. Releases that lie beyond the end
of the pass happen at its end: all lanes join there, so that they cost nothing, and the pass that follows
finds the tensor on the host.

A ring's prologue and epilogue are the body with the other sub-arrays' nodes left out. Decisions keep their
order; one that stands in front of a node of another sub-array comes in front of the next node that is there,
or at the end. So at each node a prologue or epilogue holds no tensor that the body does not hold there too.

`Residency` walks a row and settles where tensors go: right after the last use before a tensor is made again,
or where its swap releases it, or never if what follows the row needs it. Reads by recomputations are uses. A
release needs a copy on the host that is still true; an offload is left out where the host has one already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Multiplexing, Recomputation, Schedule, Swap
from trainmux.planning._facts import Key
from trainmux.planning._views import (
    Recipe,
    StepView,
    check_values,
    describe_node,
    describe_recomputation,
    describe_swap,
    describe_tensor,
)


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


class Touch(Enum):
    """An effect of an action on a tensor."""

    MAKE = "make"
    READ = "read"
    CHANGE = "change"
    OUT = "out"
    RELEASE = "release"
    BACK = "back"


@dataclass(frozen=True)
class Settled:
    """``free_after`` lists, for each action, the tensors that go right after it, ``free_last`` those that go
    at the very end. ``needless`` are the offloads to leave out; ``stays`` those of swapped static tensors.
    """

    free_after: tuple[tuple[Key, ...], ...]
    free_last: tuple[Key, ...]
    needless: frozenset[int]
    stays: dict[Key, tuple[Stay, ...]]


@dataclass(slots=True)
class _OpenStay:
    begin: int
    last_touch: int
    started: Action | None
    copied_out: int | None = None
    uses: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)


class Residency:
    """Tensors on the device along the rows of one schedule. Static ones that no swap moves always are."""

    def __init__(self, views: Sequence[StepView], swaps: Iterable[Swap]) -> None:
        self._views = views
        self._swapped = frozenset((swap.sub_array, swap.tensor) for swap in swaps)

    @property
    def swapped(self) -> frozenset[Key]:
        return self._swapped

    def is_static(self, key: Key) -> bool:
        return self._views[key[0]].made_by[key[1]] == -1

    def touches(self, action: Action) -> Iterator[tuple[Key, Touch]]:
        """The tensors that move which an action touches, in the order that it does."""
        if isinstance(action, RunNode):
            sub_array = action.sub_array
            made_by = self._views[sub_array].made_by
            node = self._views[sub_array].profile.nodes[action.node]
            swapped = self._swapped
            for tensor in node.reads:
                if made_by[tensor] >= 0 or (sub_array, tensor) in swapped:
                    yield (sub_array, tensor), Touch.READ
            for tensor in node.changes:
                if made_by[tensor] >= 0 or (sub_array, tensor) in swapped:
                    yield (sub_array, tensor), Touch.CHANGE
            for tensor in node.creates:
                yield (sub_array, tensor), Touch.MAKE
        elif isinstance(action, RunAgain):
            sub_array = action.record.sub_array
            for step in action.recipe.steps:
                for tensor in step.sources:
                    key = (sub_array, tensor)
                    if not self.is_static(key) or key in self._swapped:
                        yield key, Touch.READ
            yield (sub_array, action.record.tensor), Touch.MAKE
        elif isinstance(action, CopyOut):
            yield action.key, Touch.OUT
        elif isinstance(action, Release):
            yield action.key, Touch.RELEASE
        elif isinstance(action, CopyIn):
            yield action.key, Touch.BACK
        else:
            for key in action.results:
                yield key, Touch.READ

    def at_the_beginning(self, body: Sequence[Action]) -> dict[Key, Action]:
        """Tensors that must be on the device as a pass through the body begins: used before they are made.

        Each with the action that needs it.
        """
        seen: set[Key] = set()
        needed: dict[Key, Action] = {}
        for action in body:
            for key, touch in self.touches(action):
                if key not in seen:
                    seen.add(key)
                    if touch not in (Touch.MAKE, Touch.BACK):
                        needed[key] = action
        return needed

    def check_recomputations(self, body: Sequence[Action], is_ring: bool) -> None:
        """Refuse recomputations whose values would not be those of the step (see `check_values`)."""
        num_run = [0] * len(self._views)
        if is_ring:
            num_run[0] = self._views[0].num_forward
        for action in body:
            if isinstance(action, RunNode):
                num_run[action.sub_array] = action.node + 1
            elif isinstance(action, RunAgain):
                check_values(action.record, action.recipe, self._views, num_run[action.record.sub_array])

    def settle_body(self, body: Sequence[Action], is_ring: bool) -> tuple[Settled, frozenset[Key]]:
        """The body, which follows itself; also what is on the device where it meets itself.

        Of what a step makes, only a ring's first forward pass leaves something for the pass that follows.
        """
        needed = self.at_the_beginning(body)
        around = frozenset(needed)
        walk = _Walk(self, self._views, body, around, is_body=True)
        for key, action in needed.items():
            is_left = is_ring and key[0] == 0 and self._views[0].made_by[key[1]] < self._views[0].num_forward
            if not self.is_static(key) and not is_left:
                walk.refuse_absent(action, key)
        return walk.settle(around), around

    def settle(self, row: Sequence[Action], begin: frozenset[Key], end: frozenset[Key]) -> Settled:
        """A prologue or epilogue that begins and ends with given tensors on the device."""
        return _Walk(self, self._views, row, begin, is_body=False).settle(end)


class _Walk:
    """One walk through a row."""

    def __init__(
        self,
        residency: Residency,
        views: Sequence[StepView],
        row: Sequence[Action],
        begin: frozenset[Key],
        *,
        is_body: bool,
    ) -> None:
        self._residency = residency
        self._views = views
        self._row = row
        self._is_body = is_body
        self._open = {key: _OpenStay(-1, -1, None) for key in sorted(begin)}
        self._at_first = dict(self._open)
        self._released_by: dict[Key, Swap] = {}
        # Whether the host has a true copy. One that was made in an earlier part is not relied on.
        self._on_host: dict[Key, bool] = dict.fromkeys(begin, False)
        self._fetched_first: list[Key] = []
        self._free_after: list[list[Key]] = [[] for _ in row]
        self._needless: set[int] = set()
        self._stays: dict[Key, list[Stay]] = {}

    def settle(self, end: frozenset[Key]) -> Settled:
        for position, action in enumerate(self._row):
            for key, touch in self._residency.touches(action):
                self._touch(position, action, key, touch)
        free_last = self._finish(end)
        return Settled(
            tuple(tuple(sorted(keys)) for keys in self._free_after),
            tuple(sorted(free_last)),
            frozenset(self._needless),
            {key: tuple(stays) for key, stays in self._stays.items()},
        )

    def _touch(self, position: int, action: Action, key: Key, touch: Touch) -> None:
        stay = self._open.get(key)
        if touch is Touch.MAKE:
            if stay is not None:
                self._drop(key, stay)
            if isinstance(action, RunNode):
                self._on_host[key] = False
            else:
                self._on_host.setdefault(key, False)
            self._open[key] = _OpenStay(position, position, action)
            return
        if touch is Touch.BACK:
            self._fetch(position, action, key, stay)
            return
        if stay is None:
            self.refuse_absent(action, key)
        stay.last_touch = position
        if touch is Touch.READ:
            stay.uses.append(position)
        elif touch is Touch.CHANGE:
            stay.uses.append(position)
            stay.changes.append(position)
            self._on_host[key] = False
        elif touch is Touch.OUT:
            if self._on_host[key]:
                self._needless.add(position)
            self._on_host[key] = True
            stay.copied_out = position
        else:
            self._release(position, action, key, stay)

    def _fetch(self, position: int, action: Action, key: Key, stay: _OpenStay | None) -> None:
        assert isinstance(action, CopyIn)
        if stay is not None and stay.begin == -1:
            self._released_by[key] = action.record  # at the end of the pass before
            self.refuse_absent(self._first_use(key), key)
        if stay is not None:
            raise PlanError(
                f"{describe_swap(action.record, self._views)}: it is on the device already where it is "
                "fetched back; make the swaps and recomputations of a tensor follow one another"
            )
        if key not in self._on_host:
            self._fetched_first.append(key)
        elif not self._on_host[key]:
            self._refuse_stale(action.record)
        self._on_host[key] = True
        self._open[key] = _OpenStay(position, position, action)

    def _release(self, position: int, action: Action, key: Key, stay: _OpenStay) -> None:
        assert isinstance(action, Release)
        if not self._on_host[key]:
            self._refuse_stale(action.record)
        self._close(key, stay, end=position, record=action.record)
        self._released_by[key] = action.record
        del self._open[key]

    def _drop(self, key: Key, stay: _OpenStay) -> None:
        assert stay.last_touch >= 0  # what is there at first is there because an action needs it
        self._free_after[stay.last_touch].append(key)
        self._close(key, stay, end=stay.last_touch)

    def _close(self, key: Key, stay: _OpenStay, end: int | None = None, record: Swap | None = None) -> None:
        """Note a stay that is over, or lasts to the row's end; refuse one that served nothing."""
        if not self._is_body:
            return
        if not stay.uses and isinstance(stay.started, CopyIn | RunAgain):
            follows = self._at_first.get(key) if end is None else None  # the next pass goes on with it
            if follows is None or not follows.uses:
                self._refuse_unused(stay.started)
        if not self._residency.is_static(key):
            return
        if record is None:
            assert isinstance(stay.started, CopyIn)
            record = stay.started.record
        self._stays.setdefault(key, []).append(
            Stay(record, stay.begin, end, stay.copied_out, tuple(stay.uses), tuple(stay.changes))
        )

    def _finish(self, end: frozenset[Key]) -> list[Key]:
        """Close what is open; returns the results, which go at the very end."""
        free_last = []
        for key, stay in self._open.items():
            byte_class = self._views[key[0]].profile.tensors[key[1]].byte_class
            if key in end:
                self._close(key, stay)
            elif byte_class is ByteClass.RESULT:
                free_last.append(key)
            elif self._residency.is_static(key):
                started = stay.started
                assert isinstance(started, CopyIn)
                raise PlanError(
                    f"{describe_swap(started.record, self._views)}: the body ends with it on the device and "
                    "begins with it on the host; release it once for each time it is fetched back"
                )
            else:
                self._drop(key, stay)
        for key in sorted(end - self._open.keys()):
            self.refuse_absent(self._first_use(key), key)
        for key in self._fetched_first:
            if self._is_body and not self._residency.is_static(key) and not self._on_host[key]:
                started = next(a for a in self._row if isinstance(a, CopyIn) and a.key == key)
                self._refuse_stale(started.record)
        return free_last

    def _first_use(self, key: Key) -> Action:
        return next(
            action for action in self._row for touched, _ in self._residency.touches(action) if touched == key
        )

    def refuse_absent(self, action: Action, key: Key) -> NoReturn:
        """Refuse an action that needs a tensor on the device while it is not there."""
        swap = self._released_by.get(key)
        where = (
            f"it is on the host from {swap.release_before[0]}/{swap.release_before[1]} to "
            f"{swap.prefetch_prompt[0]}/{swap.prefetch_prompt[1]}; fetch it back earlier"
            if swap is not None
            else "it is not made yet, or made only later; move what needs it behind that"
        )
        if isinstance(action, RunAgain):
            raise PlanError(
                f"{describe_recomputation(action.record, self._views)}: its source "
                f"{describe_tensor(key, self._views)} is not available, as {where}"
            )
        if isinstance(action, RunNode):
            user = f"{describe_node(action.sub_array, action.node, self._views)} uses it"
        elif isinstance(action, EndStep):
            user = "it is a result that lives to the end of the step"
        else:
            user = f"{describe_swap(action.record, self._views)} needs it on the device"
        who = describe_swap(swap, self._views) if swap is not None else describe_tensor(key, self._views)
        raise PlanError(f"{who}: {user}, but {where}")

    def _refuse_stale(self, record: Swap) -> NoReturn:
        raise PlanError(
            f"{describe_swap(record, self._views)}: the host's copy would not be the tensor as it is then: "
            "it is changed or made anew between offload and release; offload it after its last change"
        )

    def _refuse_unused(self, started: CopyIn | RunAgain) -> NoReturn:
        if isinstance(started, CopyIn):
            raise PlanError(
                f"{describe_swap(started.record, self._views)}: nothing uses it between the prefetch and the "
                "next time it is made or released; swap it around a use"
            )
        raise PlanError(
            f"{describe_recomputation(started.record, self._views)}: nothing uses it before it is made again "
            "or the step ends; leave the recomputation out, or place it before a use"
        )
