"""Notice what users change about members that are in a fleet.

A fleet trains a graph and tensors of its own. What it reads anew with every step (learning rates and other
numbers of optimizers, clipping limits, schedules) may change at any time. A change of anything else that
decides the graph or the optimizer's structure, and an edit of weights or optimizer state, would be ignored:
it is found here and reported, and ``Fleet.refresh`` takes it over.

A thorough look takes longer than a step. A quick one compares the objects that containers hold with those
they held before, in one pass over flat lists. Only where these differ, signatures are compared, and only
where those differ, graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainmux.errors import MemberChangedError, OptimizerError, TrainmuxError, warn_user
from trainmux.fleet._member import Member
from trainmux.fleet._slots import Slot, named_tensors
from trainmux.fusion.optimizers import OptimizerStructure, describe
from trainmux.tracing import Holder, Items, LossFunction, Reach, same_items, unique_parameters

if TYPE_CHECKING:
    from trainmux.fleet._group import Group

EVERY_STEPS = 100
"""A change is noticed after this many steps at the latest."""

FIRST_STEPS = 16
"""Every step is looked at, this many after the members were in the user's hands: then people edit."""

_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module that stay the same objects: what they hold is looked at by itself."""

_MARKS = (attrgetter("_version"), attrgetter("requires_grad"))
"""Version of a tensor's data, and whether it learns."""

_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))
"""Empty or ``None`` for a tensor without hooks."""

_STEP_HOOKS = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_PARTS = ("model", "optimizer", "loss", "example_batch")
_parts = attrgetter(*_PARTS)
_containers = attrgetter("state", "param_groups")

Places = Iterable[tuple["Group", Slot]]
"""Members with the groups that they are in."""


@dataclass(eq=False)
class _Snapshot:
    """Objects found in places where a change would matter, and those places; of one member, or of many."""

    alike: dict[tuple[Any, ...], tuple[list[dict[Any, Any]], list[Any]]] = field(default_factory=dict)
    """Dicts with the same keys, by those that matter, and what each has under them."""
    sizes: tuple[list[Any], list[int]] = field(default_factory=lambda: ([], []))
    empty: list[dict[Any, Any]] = field(default_factory=list)
    sets: list[set[Any]] = field(default_factory=list)
    elements: list[set[Any]] = field(default_factory=list)
    others: dict[Any, tuple[Holder, Items]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    unhooked: list[Tensor] = field(default_factory=list)
    marks: tuple[list[Any], ...] = field(default_factory=lambda: tuple([] for _ in _MARKS))
    members: tuple[list[Member], list[Any]] = field(default_factory=lambda: ([], []))
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    """State and param groups of each optimizer: two may be equal and yet not the same."""
    next_hook: int = field(default_factory=lambda: RemovableHandle.next_id)
    """Torch numbers hooks: as long as no more were made, none needs to be looked for."""

    def add_containers(self, reach: Reach) -> None:
        """Remember what the containers of a walk hold."""
        for holder, items in zip(reach.holders, reach.contents, strict=True):
            if not holder.can_change:
                continue
            if holder.mapping is not None:
                self._add_dict(holder.mapping, is_module=isinstance(holder.value, nn.Module))
            elif type(holder.value) is set:
                self.sets.append(holder.value)
                self.elements.append(set(holder.value))
            else:
                # Names of a class or module are held one by one: each is looked at.
                self.others[id(holder.value), holder.label, tuple(items)] = (holder, items)
        own = {id(tensor) for tensor in reach.own}
        held = (value for items in reach.contents for value in items.values() if isinstance(value, Tensor))
        self.add_tensors({id(value): value for value in held if id(value) not in own}.values())

    def _add_dict(self, entries: dict[Any, Any], *, is_module: bool) -> None:
        if not entries:
            self.empty.append(entries)
            return
        self._add_size(entries)
        self._add_entries(entries, tuple(key for key in entries if not (is_module and key in _REGISTRIES)))

    def _add_size(self, container: Any) -> None:
        self.sizes[0].append(container)
        self.sizes[1].append(len(container))

    def _add_entries(self, entries: dict[Any, Any], keys: tuple[Any, ...]) -> None:
        if keys:
            dicts, values = self.alike.setdefault(keys, ([], []))
            dicts.append(entries)
            values.append(itemgetter(*keys)(entries))

    def add_member(self, member: Member) -> None:
        """Remember a member's objects, and its optimizer's groups: all settings that are no numbers."""
        optimizer = member.optimizer
        self.members[0].append(member)
        self.members[1].append(_parts(member))
        self.optimizers.append(optimizer)
        self.containers.append(_containers(optimizer))
        self._add_size(optimizer.state)
        self._add_size(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._add_size(group["params"])
            switches = [key for key, value in group.items() if value is None or isinstance(value, bool)]
            self._add_entries(group, ("params", *switches))

    def add_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Remember how tensors are marked."""
        found = list(tensors)
        self.tensors += found
        self.unhooked += [tensor for tensor in found if not any(hooks(tensor) for hooks in _HOOKS)]
        for known, mark in zip(self.marks, _MARKS, strict=True):
            known += map(mark, found)

    def is_current(self) -> bool:
        """Whether all of it is as it was; false where that cannot be told at once."""
        try:
            return (
                list(map(len, self.sizes[0])) == self.sizes[1]
                and all(
                    list(map(itemgetter(*keys), dicts)) == values
                    for keys, (dicts, values) in self.alike.items()
                )
                and not any(self.empty)
                and self.sets == self.elements
                and all(
                    list(map(mark, self.tensors)) == known
                    for known, mark in zip(self.marks, _MARKS, strict=True)
                )
                and list(map(_parts, self.members[0])) == self.members[1]
                and all(
                    found[0] is kept[0] and found[1] is kept[1]
                    for found, kept in zip(map(_containers, self.optimizers), self.containers, strict=True)
                )
                and (self.next_hook == RemovableHandle.next_id or self._has_no_more_hooks())
                and all(same_items(holder.read(), items) for holder, items in self.others.values())
            )
        except Exception:  # arrays and tensors have no plain answer: signatures have
            return False

    def _has_no_more_hooks(self) -> bool:
        on_tensors = any(any(map(hooks, self.unhooked)) for hooks in _HOOKS)
        if on_tensors or any(any(hooks) for hooks in map(_STEP_HOOKS, self.optimizers)):
            return False
        self.next_hook = RemovableHandle.next_id
        return True

    @staticmethod
    def merged(parts: Sequence[_Snapshot]) -> _Snapshot:
        """One snapshot of all parts; what members share is in it once."""
        whole = _Snapshot()
        for part in parts:
            for name in ("empty", "sets", "elements", "tensors", "unhooked", "optimizers", "containers"):
                getattr(whole, name).extend(getattr(part, name))
            for keys, (dicts, values) in part.alike.items():
                known_dicts, known_values = whole.alike.setdefault(keys, ([], []))
                known_dicts += dicts
                known_values += values
            for name in ("sizes", "members", "marks"):
                for known, more in zip(getattr(whole, name), getattr(part, name), strict=True):
                    known += more
            whole.next_hook = min(whole.next_hook, part.next_hook)
            whole.others.update(part.others)
        return whole


@dataclass(frozen=True)
class Edits:
    """Names of a member's own tensors, and of those whose optimizer state, somebody else has written to."""

    tensors: tuple[str, ...]
    states: tuple[str, ...]


class MemberWatch:
    """One member as it was when the fleet last took over, or wrote back, its state."""

    snapshot: _Snapshot
    """For a quick look."""

    def __init__(
        self, member: Member, name: str, loss: LossFunction, structure: OptimizerStructure, reach: Reach
    ) -> None:
        self._member, self._name, self._loss, self._structure = member, name, loss, structure
        self._parts = _parts(member)
        self._take(reach)
        self.settle()

    def _take(self, reach: Reach) -> None:
        self._signature = reach.signature
        self._containers = _Snapshot()
        self._containers.add_containers(reach)

    def settle(self) -> None:
        """Take the member's own tensors and optimizer state for unedited, as they are now."""
        self._own = named_tensors(self._member)
        self._sums = {name: _checksum(tensor) for name, tensor in self._own.items()}
        self._states = {name: _state_of(self._member, tensor) for name, tensor in self._own.items()}
        self._mark()

    def _mark(self) -> None:
        marked = _Snapshot()
        marked.add_member(self._member)
        marked.add_tensors(self._own.values())
        self.snapshot = _Snapshot.merged([self._containers, marked])

    def changes(self, computes_alike: Callable[[], bool], *, ignores_mode: bool = False) -> Iterator[str]:
        """Describe changes that the fleet does not follow; nothing where they make no difference.

        ``computes_alike`` traces the member as it is now and tells whether its graph is the one it trains by.
        With ``ignores_mode`` modules may be in another mode (``train()``, ``eval()``).
        """
        member = self._member
        for name, new, old in zip(_PARTS, _parts(member), self._parts, strict=True):
            if new is not old:
                yield f"member.{name}, which is another object"
                return
        try:
            parameters = [item.tensor for item in unique_parameters(member.model)]
            structure = describe(member.optimizer, parameters, member=self._name)
        except OptimizerError as error:
            yield f"the optimizer ({error})"
            return
        if structure != self._structure:
            yield _structural_change(self._structure, structure)
        reach = Reach(member.model, self._loss)
        found: list[tuple[Any, str]] = []
        if reach.signature != self._signature:
            found = list(reach.differences(self._signature)) or [(None, "its code")]
        if found and not (ignores_mode and all(key == "training" for key, _ in found)):
            try:
                alike = computes_alike()
            except TrainmuxError as error:
                yield f"{found[0][1]} ({error})"
                return
            if not alike:
                yield found[0][1]
            else:
                self._take(reach)  # of no consequence for the graph
        edited = list(self.edited_texts())
        if not edited:
            self._mark()  # written to and put back, or of no consequence
        yield from edited

    def edited_texts(self) -> Iterator[str]:
        """Edits in words."""
        edits = self.edits()
        if edits.tensors:
            yield f"the values of {_listed(edits.tensors)} (edited, loaded, or written by another fleet)"
        if edits.states:
            yield f"the optimizer's state of {_listed(edits.states)}"

    def edits(self) -> Edits:
        """Find the tensors and states that somebody else has written to."""
        tensors = {name: tensor for name, tensor in named_tensors(self._member).items() if name in self._own}
        states = {name: _state_of(self._member, tensor) for name, tensor in tensors.items()}
        return Edits(
            tuple(
                name
                for name, tensor in tensors.items()
                if not torch.equal(self._sums[name], _checksum(tensor))
            ),
            tuple(name for name, state in states.items() if not _same_state(state, self._states[name])),
        )


def _structural_change(old: OptimizerStructure, new: OptimizerStructure) -> str:
    if len(old.groups) != len(new.groups):
        return f"the optimizer's param groups (there were {len(old.groups)}, there are {len(new.groups)})"
    for number, (was, now) in enumerate(zip(old.groups, new.groups, strict=True)):
        for (flag, before), (_, after) in zip(was.flags, now.flags, strict=False):
            if before != after:
                return f"{flag} of the optimizer's param group {number} (used: {before}, now {after})"
        if was.params != now.params:
            return f"the parameters of the optimizer's param group {number}"
    return "the optimizer's class"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: Tensor) -> Tensor:
    """A number that an edit of any element changes; it is not waited for."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


_State = list[tuple[str, Any, int]]


def _state_of(member: Member, tensor: Tensor) -> _State:
    """Entries of a parameter's optimizer state, with the number of times each was written to."""
    entries = member.optimizer.state.get(tensor, {})
    return [
        (name, value, value._version if isinstance(value, Tensor) else 0) for name, value in entries.items()
    ]


def _same_state(one: _State, other: _State) -> bool:
    return len(one) == len(other) and all(
        a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in zip(one, other, strict=True)
    )


class FleetWatch:
    """Looks at all members of a fleet: often after they were in the user's hands, then rarely.

    ``computes_alike(group, slot)`` traces a member as it is now and tells whether its graph is its group's.
    """

    def __init__(self, computes_alike: Callable[[Group, Slot], bool]) -> None:
        self._computes_alike = computes_alike
        self._num_steps = 0
        self._parts: list[_Snapshot] = []
        self._whole = _Snapshot()

    def handed_out(self) -> None:
        """Expect changes: members are in the user's hands now."""
        self._num_steps = 0

    def at_step(self, groups: Sequence[Group]) -> None:
        """Refuse a step of members that have changed, where it is time to look."""
        self._num_steps += 1
        if self._num_steps > FIRST_STEPS and self._num_steps % EVERY_STEPS:
            return
        places = [(group, slot) for group in groups for _, slot in group.members]
        parts = [slot.watch.snapshot for _, slot in places]
        if parts != self._parts:
            self._parts, self._whole = parts, _Snapshot.merged(parts)
        if not self._whole.is_current():
            self._refuse((place for place in places if not place[1].watch.snapshot.is_current()), False)

    def check(self, places: Places, *, ignores_mode: bool = False) -> None:
        """Refuse to go on with members that have changed, edits of values included."""
        self._refuse(places, ignores_mode)
        self.handed_out()

    def warn(self, places: Places, what: str) -> None:
        """Say of members that have changed that ``what`` happens all the same."""
        for name, text in self._changes(places, ignores_mode=False):
            warn_user(
                f"member {name!r}: a change of {text}; {what}. Call fleet.refresh({name!r}) to take a change "
                "over"
            )
        self.handed_out()

    def _refuse(self, places: Places, ignores_mode: bool) -> None:
        for name, text in self._changes(places, ignores_mode=ignores_mode):
            raise MemberChangedError(
                f"member {name!r}: expected it as the fleet took it over, got a change of {text}; the fleet "
                "follows numbers of the optimizer, clipping and schedules by itself: call "
                f"fleet.refresh({name!r}) to take anything else over, or undo it"
            )

    def _changes(self, places: Places, *, ignores_mode: bool) -> Iterator[tuple[str, str]]:
        for group, slot in places:
            if slot.watch.snapshot.is_current():
                found = slot.watch.edited_texts()
            else:
                alike = functools.partial(self._computes_alike, group, slot)
                found = slot.watch.changes(alike, ignores_mode=ignores_mode)
            for text in found:
                yield slot.name, text
