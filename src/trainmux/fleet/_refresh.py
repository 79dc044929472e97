"""Take over what a user changed about a member that is in the fleet, without losing what was trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainmux.fleet._group import Group
from trainmux.fleet._member import Member
from trainmux.fleet._newcomer import Newcomer
from trainmux.fleet._slots import named_tensors
from trainmux.fleet._watch import Edits


@contextmanager
def kept_edits(member: Member, edits: Edits) -> Iterator[None]:
    """Put edited values back afterwards, when the fleet has written its own over them."""
    tensors, state = named_tensors(member), member.optimizer.state
    values = {name: tensors[name].detach().clone() for name in edits.tensors}
    states = {
        name: copy.copy(state[tensors[name]]) if tensors[name] in state else None for name in edits.states
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value)
        for name, entry in states.items():
            if entry is None:
                state.pop(tensors[name], None)
            else:
                state[tensors[name]] = entry


def take_edits(group: Group, row: int, plan: Newcomer, edits: Edits) -> None:
    """Load a member's edited values into the row that it has."""
    slot = group.slot(row)
    tensors, state = named_tensors(plan.member), group.state
    with torch.no_grad():
        for name in edits.tensors:
            if name in state.shared:
                group.unshare()
            place = state.parameters.get(name, state.buffers.get(name))
            assert place is not None
            place[row].copy_(tensors[name])
        for key, value in plan.optimizer.states.items():
            if key[0] in edits.states:
                place = state.states[key][row]
                place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
    done = int(state.updates[row])
    slot.base_steps = tuple(steps - done for steps in plan.optimizer.steps)
    slot.num_updates = done
    slot.watch = plan.watch
    group.forget_fed()


def carry_over(old: Group, old_row: int, new: Group, new_row: int, edits: Edits) -> None:
    """Copy what was trained from the row that a member leaves to the one it was just loaded into.

    Its own objects have it too, but perhaps in another precision, and without the gradients of an update that
    is not complete.
    """
    before, after = old.state, new.state
    rows: dict[str, Tensor] = {
        name: rows[old_row] for name, rows in {**before.parameters, **before.buffers}.items()
    }
    places = {
        name: rows[new_row] for name, rows in {**after.parameters, **after.buffers}.items()
    } | after.shared
    with torch.no_grad():
        for name, place in places.items():
            if name in rows and name not in edits.tensors:
                place.copy_(rows[name])
        for key, states in after.states.items():
            if key in before.states and key[0] not in edits.states:
                states[new_row].copy_(before.states[key][old_row])
        for name, total in after.totals.items():
            if name in before.totals:
                total[new_row].copy_(before.totals[name][old_row])
        after.alive[new_row].copy_(before.alive[old_row])
    was, now = old.slot(old_row), new.slot(new_row)
    now.active, now.waits, now.reason = was.active, was.waits, was.reason
    new.forget_fed()
