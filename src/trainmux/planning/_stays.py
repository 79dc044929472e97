"""Residency of tensors: walks a row of actions and settles where bytes are freed.

The rule is one for all: a tensor goes right after its last use before it is made again, or where its swap
releases it, or never if what follows the row needs it. Reads by recomputations are uses. A release needs a
copy on the host that is still true; an offload of which the host has a true copy already is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Swap
from trainmux.planning._recipes import check_values
from trainmux.planning._rows import Action, CopyIn, CopyOut, EndStep, Release, RunAgain, RunNode, Stay
from trainmux.planning._views import (
    Key,
    StepView,
    describe_node,
    describe_recomputation,
    describe_swap,
    describe_tensor,
)


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
