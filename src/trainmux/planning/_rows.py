"""A schedule, checked against the facts of its profiles, as rows of actions; and where bytes are freed.

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

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NoReturn

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Multiplexing, Recomputation, Schedule, Swap
from trainmux.planning._facts import Facts, Key


def refuse(key: Key, all_facts: Sequence[Facts], why: str) -> NoReturn:
    """Refuse the decisions about a tensor, which need not exist."""
    tensors = all_facts[key[0]].profile.tensors if 0 <= key[0] < len(all_facts) else ()
    name = f" {tensors[key[1]].name!r}" if 0 <= key[1] < len(tensors) else ""
    raise PlanError(f"the schedule must not move tensor {key[1]}{name} of sub-array {key[0]} so: {why}")


def positions_in_body(all_facts: Sequence[Facts], schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """For each sub-array, by rank, the position of the node in the body; refused: an order that is not one.

    Each node runs once, each sub-array's nodes run in rank order (in a ring the first one's forward pass
    comes behind its backward pass and update), and stages follow one another.
    """
    positions = [[-1] * len(facts.nodes) for facts in all_facts]
    waiting = [deque(range(len(facts.nodes))) for facts in all_facts]
    is_ring = schedule.multiplexing is Multiplexing.RING
    if is_ring:
        waiting[0].rotate(-all_facts[0].num_forward)
    stage = 0
    for position, (sub_array, rank) in enumerate(schedule.order):
        own_stage = -1
        if 0 <= sub_array < len(waiting) and waiting[sub_array] and waiting[sub_array][0] == rank:
            positions[sub_array][waiting[sub_array].popleft()] = position
            is_ahead = is_ring and rank < all_facts[sub_array].num_forward
            own_stage = (sub_array - 1) % len(all_facts) if is_ahead else sub_array
        if own_stage < stage:
            raise PlanError(
                "the nodes of each sub-array must run once each in rank order, a ring's first sub-array from "
                "the backward pass on, and stages must follow one another, but position "
                f"{position} of the order has node {rank} of sub-array {sub_array}"
            )
        stage = own_stage
    if any(waiting):
        raise PlanError(f"the order must name every node once, but it lacks {list(map(list, waiting))}")
    return tuple(tuple(row) for row in positions)


def check_names(key: Key, nodes: Iterable[tuple[int, int]], all_facts: Sequence[Facts]) -> None:
    """Refuse decisions about a result, or that name a tensor or nodes that do not exist."""
    tensors = all_facts[key[0]].tensors if 0 <= key[0] < len(all_facts) else ()
    if not 0 <= key[1] < len(tensors):
        refuse(key, all_facts, "there is no such tensor; plan for the profiles that are passed")
    if tensors[key[1]].byte_class is ByteClass.RESULT:
        refuse(key, all_facts, "it is a result, which stays to the end of its step; leave it there")
    for sub_array, rank in nodes:
        if not (0 <= sub_array < len(all_facts) and 0 <= rank < len(all_facts[sub_array].nodes)):
            refuse(key, all_facts, f"there is no node {rank} in sub-array {sub_array}; plan for the profiles")


@dataclass(frozen=True)
class RecipeStep:
    """One node that runs again. ``sources`` it reads from outside, ``own`` are made by earlier steps.

    ``products`` are those of its outputs that a later step or the recomputation itself is for.
    """

    node: int
    sources: tuple[int, ...]
    own: tuple[int, ...]
    products: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """The steps in order, and for each product the last step that reads it (the tensor wanted: past all)."""

    steps: tuple[RecipeStep, ...]
    needed_until: dict[int, int]


def recipe(record: Recomputation, all_facts: Sequence[Facts]) -> Recipe:
    """The nodes that carry out ``record``. Refused with `PlanError`: nodes that cannot make it again."""
    key = (record.sub_array, record.tensor)
    check_names(key, [record.before, *((record.sub_array, rank) for rank in record.nodes)], all_facts)
    facts = all_facts[record.sub_array]
    if list(record.nodes) != sorted(set(record.nodes)) or facts.made_by[record.tensor] not in record.nodes:
        refuse(key, all_facts, f"nodes {record.nodes} must rise and create it; correct them, or swap it")
    made_in = {tensor for rank in record.nodes for tensor in facts.nodes[rank].creates}
    needed_until = {record.tensor: len(record.nodes)}
    steps = []
    for index, rank in reversed(list(enumerate(record.nodes))):
        node = facts.nodes[rank]
        products = tuple(tensor for tensor in node.creates if tensor in needed_until)
        if not products or not node.is_repeatable or node.changes:
            refuse(key, all_facts, f"node {rank} may not run twice, or makes nothing needed; leave it out")
        reads = dict.fromkeys(node.reads)
        own = tuple(tensor for tensor in reads if tensor in made_in)
        for tensor in own:
            needed_until.setdefault(tensor, index)
        sources = tuple(tensor for tensor in reads if tensor not in made_in)
        steps.append(RecipeStep(rank, sources, own, products))
    return Recipe(tuple(reversed(steps)), needed_until)


def check_values(key: Key, made: Recipe, all_facts: Sequence[Facts], num_run: int) -> None:
    """Refuse a recomputation that would not make the value the step had when ``num_run`` nodes have run."""
    if made.steps[-1].node >= num_run:
        refuse(key, all_facts, f"node {made.steps[-1].node} has not run yet; recompute behind it")
    used = [(key[1], 0)]
    for step in made.steps:
        used += [(tensor, step.node) for tensor in step.sources]
        used += [(tensor, 0) for tensor in step.own]
    tensors = all_facts[key[0]].tensors
    for tensor, since in used:
        if any(since <= rank < num_run for rank in tensors[tensor].changed_at):
            name = all_facts[key[0]].profile.tensors[tensor].name
            refuse(key, all_facts, f"{name!r} has changed by then; recompute before that, or swap it")


class Touch(Enum):
    """An effect of an action on a tensor."""

    MAKE = "make"
    READ = "read"
    CHANGE = "change"
    OUT = "out"
    RELEASE = "release"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class RunNode:
    """Run a node, as every step does once."""

    sub_array: int
    node: int


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Carry out a recomputation."""

    key: Key
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a tensor to the host (`Touch.OUT`), give its bytes back (``RELEASE``), or fetch it (``BACK``)."""

    key: Key
    touch: Touch


@dataclass(frozen=True, slots=True)
class EndStep:
    """The step of a sub-array ends here, inside the body: ``results`` of its forward pass may go."""

    results: tuple[Key, ...]


Action = RunNode | RunAgain | Move | EndStep
Touched = tuple[tuple[Key, Touch], ...]


@lru_cache
def _touched_by_nodes(facts: Facts, sub_array: int) -> list[tuple[Touched, Touched, frozenset[Key]]]:
    """By rank, what the node touches, in the order that it does: all, all but static tensors, and those."""
    found = []
    for node in facts.nodes:
        touches = ((Touch.READ, node.reads), (Touch.CHANGE, node.changes), (Touch.MAKE, node.creates))
        touched = tuple(((sub_array, tensor), touch) for touch, tensors in touches for tensor in tensors)
        moving = tuple(each for each in touched if facts.made_by[each[0][1]] >= 0)
        found.append((touched, moving, frozenset(key for key, _ in {*touched} - {*moving})))
    return found


@dataclass(slots=True)
class Stay:
    """A time that a tensor spends on the device in one pass through a row.

    Positions are those of actions in the row: ``begin`` -1 if it is there when the pass begins, ``end``
    ``None`` if it is still there when the pass ends. ``copied_out`` is the offload before the release,
    ``uses`` and ``changes`` the actions that touch it, the latter among the former. ``is_decided`` if a
    swap or recomputation brought it, not a node that makes it.
    """

    begin: int
    last_touch: int
    is_decided: bool = False
    end: int | None = None
    copied_out: int | None = None
    uses: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)


def body_row(
    all_facts: Sequence[Facts],
    schedule: Schedule,
    positions: Sequence[Sequence[int]],
    recipes: Sequence[Recipe],
) -> tuple[Action, ...]:
    """The actions of one pass through the body. Refused with `PlanError`: swaps that cannot be meant so."""
    num_nodes = len(schedule.order)
    before: list[list[Action]] = [[] for _ in range(num_nodes + 1)]
    after: list[list[Action]] = [[] for _ in range(num_nodes)]
    swaps = [_swap_positions(swap, all_facts, positions, num_nodes) for swap in schedule.swaps]

    def distance(key: Key, position: int) -> int:
        """The distance, around the body, from a position to the next node that uses a tensor."""
        facts, places = all_facts[key[0]], positions[key[0]]
        ranks = [rank for rank in facts.tensors[key[1]].accesses if rank != facts.made_by[key[1]]]
        return min(((places[rank] - position) % num_nodes for rank in ranks), default=num_nodes)

    for key, out, _, _ in sorted(swaps, key=lambda s: (s[2] - s[1] - 1) % num_nodes):
        after[out].append(Move(key, Touch.OUT))
    # What was offloaded last is released first: one wait serves all.
    for key, out, release, _ in sorted(swaps, key=lambda s: -s[1]):
        before[release if release > out else num_nodes].append(Move(key, Touch.RELEASE))
    for key, _, _, back in sorted(swaps, key=lambda s: distance(s[0], s[3])):
        before[back].append(Move(key, Touch.BACK))
    # What is made earlier in a step cannot depend on what is made later: recompute it first.
    for record, recipe in sorted(
        zip(schedule.recomputes, recipes, strict=True),
        key=lambda pair: (pair[0].sub_array, all_facts[pair[0].sub_array].made_by[pair[0].tensor]),
    ):
        again = RunAgain((record.sub_array, record.tensor), recipe)
        before[positions[record.before[0]][record.before[1]]].append(again)
    first = all_facts[0]
    if schedule.multiplexing is Multiplexing.RING and first.num_forward < len(first.nodes):
        results = tuple(
            (0, facts.tensor)
            for facts in first.tensors
            if facts.byte_class is ByteClass.RESULT and 0 <= first.made_by[facts.tensor] < first.num_forward
        )
        if results:
            after[positions[0][-1]].append(EndStep(results))
    row: list[Action] = []
    for position, (sub_array, node) in enumerate(schedule.order):
        row += before[position]
        row.append(RunNode(sub_array, node))
        row += after[position]
    return (*row, *before[num_nodes])


def _swap_positions(
    swap: Swap, all_facts: Sequence[Facts], positions: Sequence[Sequence[int]], num_nodes: int
) -> tuple[Key, int, int, int]:
    """The positions of a swap's three nodes in the body, checked to follow one another around the body."""
    key, nodes = (
        (swap.sub_array, swap.tensor),
        (swap.offload_after, swap.release_before, swap.prefetch_prompt),
    )
    check_names(key, nodes, all_facts)
    out, release, back = (positions[sub_array][rank] for sub_array, rank in nodes)
    if (release - out - 1) % num_nodes > (back - out - 1) % num_nodes:
        refuse(key, all_facts, f"from the offload on, the release must come before the prefetch; got {nodes}")
    return key, out, release, back


def prologue_row(
    body: Sequence[Action], all_facts: Sequence[Facts], stays: Mapping[Key, Sequence[Stay]]
) -> tuple[Action, ...]:
    """A ring's prologue: the forward pass of the first sub-array, with swapped static tensors on the host.

    A static tensor comes to the device where the body would first have it there, if a node of the prologue
    uses it then or the body begins with it.
    """
    entries = _of_first(body, all_facts[0], is_forward=True)
    there = {position for position, _, _ in entries}
    for key, own in stays.items():
        for stay in own:
            first_use = next((use for use in stay.uses if use in there), len(body))
            if first_use == len(body) and stay.end is not None:
                continue
            entries.append((stay.begin, first_use, Move(key, Touch.BACK)))
            if stay.end is not None:
                if stay.copied_out is not None and any(change in there for change in stay.changes):
                    entries.append((stay.copied_out, 0, Move(key, Touch.OUT)))
                entries.append((stay.end, 0, Move(key, Touch.RELEASE)))
    return _in_order(entries)


def epilogue_row(
    body: Sequence[Action], all_facts: Sequence[Facts], stays: Mapping[Key, Sequence[Stay]]
) -> tuple[Action, ...]:
    """A ring's epilogue: the backward pass and update of the first sub-array that are left in flight.

    Swapped static tensors are on the host at its end. What the body leaves on the device is copied out at
    the beginning, or as soon as its last change is done.
    """
    entries = _of_first(body, all_facts[0], is_forward=False)
    there = {position for position, _, _ in entries}
    for key, own in stays.items():
        for stay in own:
            if stay.begin != -1 and not any(use in there for use in stay.uses):
                continue
            if stay.begin != -1:
                entries.append((stay.begin, 0, Move(key, Touch.BACK)))
            changes = [change for change in stay.changes if change in there]
            if changes or stay.begin == -1:
                entries.append((max([stay.begin, *changes]), 1, Move(key, Touch.OUT)))
            entries.append((len(body) if stay.end is None else stay.end, 0, Move(key, Touch.RELEASE)))
    return _in_order(entries)


_Entry = tuple[int, int, Action]
"""An action of a prologue or epilogue: its position in the body, what decides between equal ones, itself."""


def _in_order(entries: Iterable[_Entry]) -> tuple[Action, ...]:
    return tuple(action for _, _, action in sorted(entries, key=lambda entry: entry[:2]))


def _of_first(body: Sequence[Action], facts: Facts, *, is_forward: bool) -> list[_Entry]:
    """The body's actions for the first sub-array's forward pass, or for the rest of its step.

    Those that move a tensor belong to the forward pass from where that makes it.
    """
    entries: list[_Entry] = []
    made: set[Key] = set()
    for position, action in enumerate(body):
        if isinstance(action, RunNode):
            is_in_forward = action.node < facts.num_forward
            is_first = action.sub_array == 0
            if is_first and is_in_forward:
                made.update((0, tensor) for tensor in facts.nodes[action.node].creates)
        elif isinstance(action, EndStep):
            is_first, is_in_forward = True, False
        else:
            is_first = action.key[0] == 0 and facts.made_by[action.key[1]] >= 0
            is_in_forward = action.key in made
        if is_first and is_in_forward == is_forward:
            entries.append((position, 0, action))
    return entries


@dataclass(frozen=True)
class Settled:
    """``free_after`` lists, by action, the tensors that go right after it, ``free_last`` those that go
    at the very end. ``needless`` are the offloads to leave out; ``stays`` those of swapped static tensors.
    """

    free_after: dict[int, list[Key]]
    free_last: tuple[Key, ...]
    needless: frozenset[int]
    stays: dict[Key, list[Stay]]


class Residency:
    """Tensors on the device along the rows of one schedule. Static ones that no swap moves always are."""

    def __init__(self, all_facts: Sequence[Facts], swaps: Iterable[Swap]) -> None:
        self.all_facts = all_facts
        self.swapped = frozenset((swap.sub_array, swap.tensor) for swap in swaps)
        self._by_nodes = [_touched_by_nodes(facts, number) for number, facts in enumerate(all_facts)]

    def is_static(self, key: Key) -> bool:
        return self.all_facts[key[0]].made_by[key[1]] == -1

    def touches(self, action: Action) -> Touched:
        """The tensors that move which an action touches, in the order that it does."""
        if isinstance(action, RunNode):
            touched, moving, static = self._by_nodes[action.sub_array][action.node]
            if static.isdisjoint(self.swapped):
                return moving
            return tuple([each for each in touched if each[0] not in static or each[0] in self.swapped])
        if isinstance(action, RunAgain):
            read = [(action.key[0], tensor) for step in action.recipe.steps for tensor in step.sources]
            moved = [key for key in read if not self.is_static(key) or key in self.swapped]
            return (*((key, Touch.READ) for key in moved), (action.key, Touch.MAKE))
        if isinstance(action, Move):
            return ((action.key, action.touch),)
        return tuple((key, Touch.READ) for key in action.results)

    def check_recomputations(self, body: Sequence[Action], is_ring: bool) -> None:
        """Refuse recomputations whose values would not be those of the step (see `check_values`)."""
        num_run = [0] * len(self.all_facts)
        if is_ring:
            num_run[0] = self.all_facts[0].num_forward
        for action in body:
            if isinstance(action, RunNode):
                num_run[action.sub_array] = action.node + 1
            elif isinstance(action, RunAgain):
                check_values(action.key, action.recipe, self.all_facts, num_run[action.key[0]])

    def settle_body(self, body: Sequence[Action], is_ring: bool) -> tuple[Settled, frozenset[Key]]:
        """The body, which follows itself; also what is on the device where it meets itself.

        That is what is used before it is made. Of what a step makes, only a ring's first forward pass leaves
        something for the pass that follows.
        """
        touched = [self.touches(action) for action in body]
        first = dict(each for touches in reversed(touched) for each in reversed(touches))
        around = frozenset(key for key, touch in first.items() if touch not in (Touch.MAKE, Touch.BACK))
        num_left = self.all_facts[0].num_forward if is_ring else 0
        for key in around:
            if self.all_facts[key[0]].made_by[key[1]] >= (0 if key[0] else num_left):
                refuse(
                    key, self.all_facts, "it is not made yet where it is needed first; move that behind it"
                )
        return _Walk(self, body, around, is_body=True).settle(touched, around), around

    def settle(self, row: Sequence[Action], begin: frozenset[Key], end: frozenset[Key]) -> Settled:
        """A prologue or epilogue that begins and ends with given tensors on the device."""
        return _Walk(self, row, begin, is_body=False).settle(map(self.touches, row), end)


class _Walk:
    """One walk through a row."""

    def __init__(
        self, residency: Residency, row: Sequence[Action], begin: frozenset[Key], *, is_body: bool
    ) -> None:
        self._residency = residency
        self._row = row
        self._is_body = is_body
        self._open = {key: Stay(-1, -1) for key in sorted(begin)}
        self._at_first = dict(self._open)
        # Whether the host has a true copy. One that was made in an earlier part is not relied on.
        self._on_host: dict[Key, bool] = dict.fromkeys(begin, False)
        self._fetched_first: list[Key] = []
        self._free_after: dict[int, list[Key]] = {}
        self._needless: set[int] = set()
        self._stays: dict[Key, list[Stay]] = {}

    def settle(self, touched: Iterable[Touched], end: frozenset[Key]) -> Settled:
        """Walk; ``touched`` has what each action touches."""
        for position, (action, touches) in enumerate(zip(self._row, touched, strict=True)):
            for key, touch in touches:
                stay = self._open.get(key)
                if touch is Touch.READ and stay is not None:  # most of all touches
                    stay.last_touch = position
                    stay.uses.append(position)
                else:
                    self._touch(position, action, key, touch, stay)
        free_last = self._finish(end)
        for keys in self._free_after.values():
            keys.sort()
        return Settled(self._free_after, tuple(sorted(free_last)), frozenset(self._needless), self._stays)

    def _touch(self, position: int, action: Action, key: Key, touch: Touch, stay: Stay | None) -> None:
        if touch is Touch.MAKE:
            if stay is not None:
                self._drop(key, stay)
            is_again = isinstance(action, RunAgain)
            if not is_again or key not in self._on_host:
                self._on_host[key] = False
            self._open[key] = Stay(position, position, is_again)
            return
        if touch is Touch.BACK:
            if stay is not None:
                self._refuse(key, "it is on the device where it is fetched back; let its moves take turns")
            if key not in self._on_host:
                self._fetched_first.append(key)
            elif not self._on_host[key]:
                self._refuse_stale(key)
            self._on_host[key] = True
            self._open[key] = Stay(position, position, is_decided=True)
            return
        if stay is None:
            user = f"node {action.node} of its step" if isinstance(action, RunNode) else "a decision"
            self._refuse(key, f"{user} needs it while it is not on the device; fetch or make it before that")
        stay.last_touch = position
        if touch is Touch.CHANGE:
            stay.uses.append(position)
            stay.changes.append(position)
            self._on_host[key] = False
        elif touch is Touch.OUT:
            if self._on_host[key]:
                self._needless.add(position)
            self._on_host[key] = True
            stay.copied_out = position
        else:
            if not self._on_host[key]:
                self._refuse_stale(key)
            self._close(key, stay, position)
            del self._open[key]

    def _drop(self, key: Key, stay: Stay) -> None:
        assert stay.last_touch >= 0  # what is there at first is there because an action needs it
        self._free_after.setdefault(stay.last_touch, []).append(key)
        self._close(key, stay, stay.last_touch)

    def _close(self, key: Key, stay: Stay, end: int | None) -> None:
        """Note a stay that is over, or lasts to the row's end; refuse one that served nothing."""
        if not self._is_body:
            return
        if not stay.uses and stay.is_decided:
            follows = self._at_first.get(key) if end is None else None  # the next pass goes on with it
            if follows is None or not follows.uses:
                self._refuse(key, "nothing uses it before it goes or is made again; bring it back for a use")
        if self._residency.is_static(key):
            stay.end = end
            self._stays.setdefault(key, []).append(stay)

    def _finish(self, end: frozenset[Key]) -> list[Key]:
        """Close what is open; returns the results, which go at the very end."""
        free_last = []
        for key, stay in self._open.items():
            byte_class = self._residency.all_facts[key[0]].tensors[key[1]].byte_class
            if key in end:
                self._close(key, stay, None)
            elif byte_class is ByteClass.RESULT:
                free_last.append(key)
            elif byte_class.is_static:
                self._refuse(key, "it is on the device at the end and on the host at first; release it again")
            else:
                self._drop(key, stay)
        for key in sorted(end - self._open.keys()):
            self._refuse(key, "it is not on the device at the end, but needed at first; fetch it back before")
        for key in self._fetched_first:
            if self._is_body and not self._residency.is_static(key) and not self._on_host[key]:
                self._refuse_stale(key)
        return free_last

    def _refuse(self, key: Key, why: str) -> NoReturn:
        refuse(key, self._residency.all_facts, why)

    def _refuse_stale(self, key: Key) -> NoReturn:
        self._refuse(key, "the host's copy is out of date by then; offload it after its last change")
