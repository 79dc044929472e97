"""Notice what users change about members that are in a fleet.

A fleet trains a graph and tensors of its own. What it reads anew with every step (learning rates and other
numbers of optimizers, clipping limits, schedules) may change at any time. A change of anything else that
decides the graph or the optimizer's structure, and an edit of weights or optimizer state, would be ignored:
it is found here and reported, and ``Fleet.refresh`` takes it over.

A thorough look takes longer than a step. A quick one compares the objects that containers hold, and marks of
tensors and optimizers, with those they had before. Only where these differ, signatures are compared, and only
where those differ, graphs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainmux.errors import MemberChangedError, OptimizerError, TrainmuxError, warn_user
from trainmux.fleet._member import Member
from trainmux.fleet._shared import view_key
from trainmux.fleet._slots import Slot, named_tensors
from trainmux.fusion.optimizers import OptimizerStructure, describe
from trainmux.tracing import Identity, LossFunction, Reach, same_items

if TYPE_CHECKING:
    from trainmux.fleet._group import Group

EVERY_STEPS = 100
"""A change is noticed after this many steps at the latest."""

FIRST_STEPS = 16
"""Every step is looked at, this many after the members were in the user's hands: then people edit."""

_PARTS = ("model", "optimizer", "loss", "example_batch")
_parts = attrgetter(*_PARTS)
_containers = attrgetter("state", "param_groups")
_tensor_marks = attrgetter("_version", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_values = methodcaller("values")
_step_hooks = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Places = Collection[tuple["Group", Slot]]
"""Members with the groups that they are in."""


@dataclass(frozen=True)
class Edits:
    """Names of a member's own tensors, and of those whose optimizer state, somebody else has written to."""

    tensors: tuple[str, ...]
    states: tuple[str, ...]


class QuickLook:
    """Objects that code could reach at some time, to be compared by identity; not what is written into them.

    ``constants`` are the tensors among them that are not the model's own.
    """

    def __init__(self, reach: Reach) -> None:
        found = zip(reach.holders, reach.contents, strict=True)
        held = [(holder, items) for holder, items in found if holder.can_change]
        self._held = [(holder, items) for holder, items in held if holder.mapping is None]
        # Thousands of dicts, which are compared by a few calls.
        self._dicts = [holder.mapping for holder, _ in held if holder.mapping is not None]
        before = [items for holder, items in held if holder.mapping is not None]
        self._sizes = list(map(len, before))
        self._keys = list(chain.from_iterable(before))
        self._values = list(chain.from_iterable(map(_values, before)))
        own = {id(tensor) for tensor in reach.own}
        values = {id(value): value for items in reach.contents for value in items.values()}
        self.constants = [
            value for key, value in values.items() if isinstance(value, Tensor) and key not in own
        ]
        arrays = any(isinstance(value, (np.ndarray, np.generic)) for value in values.values())
        self.is_enough = not self.constants and not arrays
        """Whether nothing that counts can have changed while all objects are the same."""

    def is_current(self) -> bool:
        """Whether code reaches the same objects now."""
        return (
            list(map(len, self._dicts)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(self._dicts), self._keys))
            and all(map(operator.is_, chain.from_iterable(map(_values, self._dicts)), self._values))
            and all(same_items(holder.read(), items) for holder, items in self._held)
        )


class MemberWatch:
    """One member as it was when the fleet last took over, or wrote back, its state."""

    def __init__(
        self,
        member: Member,
        name: str,
        loss: LossFunction,
        structure: OptimizerStructure,
        reach: Reach,
        sums: Checksums,
    ) -> None:
        self._member, self._name, self._loss, self._structure = member, name, loss, structure
        self._parts = _parts(member)
        self.looks = FIRST_STEPS
        """Steps to come at which the member is looked at, because it was in the user's hands."""
        self._take(reach)
        self._sums = {name: sums.of(tensor) for name, tensor in named_tensors(member).items()}
        self.settle()

    def _take(self, reach: Reach) -> None:
        """Remember what code can reach, and the tensors among it that are not the model's own."""
        self._signature = reach.signature
        self._reached = QuickLook(reach)

    def settle(self, *, written: Iterable[str] = ()) -> None:
        """Take optimizer state, and the tensors ``written`` by the fleet, for unedited as they are now."""
        self.own = named_tensors(self._member)
        """The member's own tensors, by name."""
        self._sums |= {name: _checksum(self.own[name]) for name in written}
        self._states = {name: _state_of(self._member, tensor) for name, tensor in self.own.items()}
        self._mark()

    def _mark(self) -> None:
        optimizer = self._member.optimizer
        self._containers = _containers(optimizer)
        self._switches = [
            [key for key, value in group.items() if value is None or isinstance(value, bool)]
            for group in optimizer.param_groups
        ]
        self._marks = self._read_marks()

    def _read_marks(self) -> tuple[Any, ...]:
        """Marks of tensors, and of the optimizer: its size, hooks, and settings that were no numbers."""
        optimizer = self._member.optimizer
        switches = [
            [group[key] for key in keys]
            for group, keys in zip(optimizer.param_groups, self._switches, strict=True)
        ]
        return (
            [_tensor_marks(tensor) for tensor in (*self.own.values(), *self._reached.constants)],
            len(optimizer.state),
            [len(hooks) for hooks in _step_hooks(optimizer)],
            switches,
            [list(group["params"]) for group in optimizer.param_groups],
        )

    def is_current(self) -> bool:
        """Whether all is as it was, by a quick look; false where that cannot be told at once."""
        member = self._member
        try:
            return (
                all(map(operator.is_, _parts(member), self._parts))
                and all(map(operator.is_, _containers(member.optimizer), self._containers))
                and self._read_marks() == self._marks
                and self._reached.is_current()
            )
        except Exception:  # arrays and tensors have no plain answer: signatures have
            return False

    def changes(
        self, computes_alike: Callable[[], bool], sums: Checksums, *, ignores_mode: bool = False
    ) -> Iterator[str]:
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
            structure = describe(member.optimizer, list(member.model.parameters()), member=self._name)
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
        edited = list(self.edited_texts(sums))
        if not edited:
            self._mark()  # written to and put back, or of no consequence
        yield from edited

    def edited_texts(self, sums: Checksums, *, is_current: bool = False) -> Iterator[str]:
        """Edits in words; where all is ``current``, its tensors are not looked for again."""
        edits = self.edits(sums, is_current=is_current)
        if edits.tensors:
            yield f"the values of {_listed(edits.tensors)} (edited, loaded, or written by another fleet)"
        if edits.states:
            yield f"the optimizer's state of {_listed(edits.states)}"

    def checksums(self, names: Iterable[str]) -> dict[str, int]:
        """Checksums of the member's own tensors as the fleet took them over, or wrote them back."""
        return {name: int(self._sums[name]) for name in names if name in self._sums}

    def edited(self, names: Iterable[str], sums: Checksums) -> list[str]:
        """Find those of the member's own tensors that somebody else has written to."""
        found = named_tensors(self._member)
        return [name for name in names if not torch.equal(self._sums[name], sums.of(found[name]))]

    def edits(self, sums: Checksums, *, is_current: bool = False) -> Edits:
        """Find the tensors and states that somebody else has written to; ``is_current`` is as above.

        All tensors of another model, and all states of another optimizer, count as edited.
        """
        found = self.own if is_current else named_tensors(self._member)
        tensors = {name: tensor for name, tensor in found.items() if name in self.own}
        states = {name: _state_of(self._member, tensor) for name, tensor in tensors.items()}
        model, optimizer, *_ = self._parts
        return Edits(
            tuple(
                name
                for name, tensor in tensors.items()
                if self._member.model is not model or not torch.equal(self._sums[name], sums.of(tensor))
            ),
            tuple(
                name
                for name, state in states.items()
                if self._member.optimizer is not optimizer or state != self._states[name]
            ),
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


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _checksum(tensor: Tensor) -> Tensor:
    """A number that an edit of any element changes; it is not waited for."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    begin = int(flat.storage_offset()) * flat.element_size()
    # By the widest words there are: 30 times as fast as by those of half precision.
    word = next(word for word in _WORDS if not (flat.nbytes | begin) % word.itemsize)
    return flat.view(word).sum(dtype=torch.int64)


class Checksums:
    """Checksums of tensors, each memory read once; for as long as nobody writes to any of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """A number that an edit of any element changes."""
        key = view_key(tensor)
        if key is None:
            return _checksum(tensor)
        if key not in self._known:
            self._known[key] = _checksum(tensor)
        return self._known[key]


def _state_of(member: Member, tensor: Tensor) -> list[tuple[str, Identity, int]]:
    """Entries of a parameter's optimizer state, with the number of times each was written to."""
    entries = member.optimizer.state.get(tensor, {})
    return [(name, Identity(value), getattr(value, "_version", 0)) for name, value in entries.items()]


class FleetWatch:
    """Looks at all members of a fleet: often after they were in the user's hands, then rarely.

    ``computes_alike(group, slot)`` traces a member as it is now and tells whether its graph is its group's.
    """

    def __init__(self, computes_alike: Callable[[Group, Slot], bool]) -> None:
        self._computes_alike = computes_alike
        self._num_steps = 0

    def handed_out(self, places: Places) -> None:
        """Expect changes: these members are in the user's hands now."""
        for _, slot in places:
            slot.watch.looks = FIRST_STEPS

    def at_step(self, places: Places) -> None:
        """Refuse a step of members that have changed, where it is time to look."""
        self._num_steps += 1
        due = places
        if self._num_steps % EVERY_STEPS:
            due = [place for place in places if place[1].watch.looks]
        for _, slot in due:
            slot.watch.looks = max(0, slot.watch.looks - 1)
        self._refuse([place for place in due if not place[1].watch.is_current()])

    def check(self, places: Places, *, ignores_mode: bool = False) -> None:
        """Refuse to go on with members that have changed, edits included; the next step looks, too."""
        self._refuse(places, ignores_mode)
        for _, slot in places:
            slot.watch.looks = max(slot.watch.looks, 1)

    def warn(self, places: Places, what: str, sums: Checksums) -> None:
        """Say of members that have changed that ``what`` happens all the same."""
        for name, text in self._changes(places, sums):
            warn_user(
                f"member {name!r}: a change of {text}; {what}. Call fleet.refresh({name!r}) to take a change "
                "over"
            )
        self.handed_out(places)

    def _refuse(self, places: Places, ignores_mode: bool = False) -> None:
        for name, text in self._changes(places, Checksums(), ignores_mode):
            raise MemberChangedError(
                f"member {name!r}: expected it as the fleet took it over, got a change of {text}; the fleet "
                "follows numbers of the optimizer, clipping and schedules by itself: call "
                f"fleet.refresh({name!r}) to take anything else over, or undo it"
            )

    def _changes(
        self, places: Places, sums: Checksums, ignores_mode: bool = False
    ) -> Iterator[tuple[str, str]]:
        for group, slot in places:
            if slot.watch.is_current():
                found = slot.watch.edited_texts(sums, is_current=True)
            else:
                alike = functools.partial(self._computes_alike, group, slot)
                found = slot.watch.changes(alike, sums, ignores_mode=ignores_mode)
            for text in found:
                yield slot.name, text
