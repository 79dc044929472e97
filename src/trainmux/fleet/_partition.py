"""Groups as a plan needs them, one per sub-array, and back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from trainmux.fleet._group import Group
from trainmux.fleet._plan import Plan
from trainmux.fleet._slots import Slot, StackedState


def join_groups(groups: Sequence[Group]) -> list[Group]:
    """Join groups that share a graph, as far as they can be fused; their state goes to host memory."""
    found: dict[Hashable, list[Group]] = {}
    for number, group in enumerate(groups):
        key: Hashable = (group.key, number) if group.unfused_because else group.key
        found.setdefault(key, []).append(group)
    return [_joined(same) for same in found.values()]


def _joined(groups: Sequence[Group]) -> Group:
    """Make one group of all members of ``groups``, with copies of their state in host memory."""
    first = groups[0].state.shared
    if not all(_same_constants(group.state.shared, first) for group in groups[1:]):
        for group in groups:
            group.unshare()
    parts = [group.taken([row for row, _ in group.members]) for group in groups if group.members]
    if len(parts) < 2:
        return parts[0] if parts else groups[0].taken([])
    whole = Group(parts[0].key, parts[0].traced, parts[0].config, sum(part.width for part in parts))
    whole.slots = [slot for part in parts for slot in part.slots]
    whole.state = StackedState.joined([part.state for part in parts])
    whole.traces, whole.stacked_batch = parts[0].traces, parts[0].stacked_batch
    whole.notes = parts[0].notes
    return whole


def _same_constants(shared: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return shared.keys() == other.keys() and all(
        torch.equal(value.cpu(), other[name].cpu()) for name, value in shared.items()
    )


def rejoined(groups: Sequence[Group]) -> list[Group]:
    """Join groups that are still apart as a plan had them."""
    keys = [group.key for group in groups if not group.unfused_because]
    return list(groups) if len(set(keys)) == len(keys) else join_groups(groups)


def split_groups(groups: Sequence[Group], plan: Plan) -> list[Group]:
    """Make one group per sub-array of ``plan``, in its order, with copies of state in host memory."""
    places = {slot.name: (group, row) for group in groups for row, slot in group.members}
    found = []
    for sub_array in plan.partition:
        owner, _ = places[sub_array.members[0]]
        found.append(owner.taken([places[name][1] for name in sub_array.members]))
    return found


def put_back(groups: Sequence[Group], slots: Sequence[list[Slot | None]], split: Sequence[Group]) -> None:
    """Undo a split: give the groups the slots that they had, with their state in host memory."""
    for group, held in zip(groups, slots, strict=True):
        own = {id(slot) for slot in held if slot is not None}
        parts = [part for part in split if any(id(slot) in own for slot in part.slots)]
        if not parts:
            continue
        found = [id(slot) for part in parts for slot in part.slots]
        # An empty slot may hold any numbers: a member that comes into it brings its own.
        rows = [0 if slot is None else found.index(id(slot)) for slot in held]
        group.state = StackedState.joined([part.state for part in parts]).resized(
            len(held), rows, torch.device("cpu")
        )
        group.slots = list(held)
        group.forget_fed()
