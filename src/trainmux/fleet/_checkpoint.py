"""A fleet's state as tensors and a document, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import CheckpointError
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._group import Group
from trainmux.fleet._slots import Slot

_KIND = "trainmux fleet"
_COUNTED = ("counter", "num_updates", "active", "waits", "reason")
"""Attributes of a slot that are saved as they are."""


def fleet_document(
    groups: Sequence[Group], names: Sequence[str], num_steps: int, config: FleetConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Collect the tensors and the document that ``save`` writes."""
    tensors: dict[str, Tensor] = {}
    members: dict[str, dict[str, Any]] = {}
    for group in groups:
        state = group.state
        numbers = zip(state.alive.tolist(), state.updates.tolist(), state.seeds.tolist(), strict=True)
        by_row = list(numbers)
        for row, slot in group.members:
            prefix = str(names.index(slot.name))
            tensors |= _rows(group, row, prefix)
            alive, updates, seed = by_row[row]
            scheduler = slot.member.scheduler
            members[slot.name] = {
                "prefix": prefix,
                "alive": alive,
                "updates": updates,
                "seed": seed,
                **{name: getattr(slot, name) for name in _COUNTED},
                "base_steps": list(slot.base_steps),
                **_description(slot),
                "settings": [
                    {name: value for name, value in item.items() if name != "params"}
                    for item in slot.member.optimizer.param_groups
                ],
                "scheduler": None if scheduler is None else scheduler.state_dict(),
            }
    document = {
        "kind": _KIND,
        "num_steps": num_steps,
        "precision": config.precision,
        "accumulate": config.accumulate,
        "members": {name: members[name] for name in names},
    }
    return tensors, document


def restore_fleet(
    groups: Sequence[Group],
    names: Sequence[str],
    config: FleetConfig,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    path: str | os.PathLike[str],
) -> int:
    """Check that the checkpoint fits, then take all of it over; returns the number of steps done."""
    if document.get("kind") != _KIND:
        raise CheckpointError(f"{path}: expected a checkpoint of a fleet, got {document.get('kind')!r}")
    for setting in ("precision", "accumulate"):
        if document[setting] != getattr(config, setting):
            raise CheckpointError(
                f"{path}: expected {setting}={getattr(config, setting)!r} as in this fleet, got "
                f"{document[setting]!r}; make the fleet with the settings it was saved with"
            )
    saved = document["members"]
    if set(saved) != set(names):
        missing, extra = sorted(set(names) - set(saved)), sorted(set(saved) - set(names))
        raise CheckpointError(
            f"{path}: expected the members of this fleet, got others (missing {missing}, unknown {extra}); "
            "make the fleet with the members it was saved with"
        )
    places = [(group, row, slot, saved[slot.name]) for group in groups for row, slot in group.members]
    for group, row, slot, record in places:
        _check(group, row, slot, record, tensors, path)
    with torch.no_grad():
        for group in groups:
            _unshare_what_differs(group, saved, tensors)
        for group, row, slot, record in places:
            for key, target in _rows(group, row, record["prefix"]).items():
                target.copy_(tensors[key])
            group.state.alive[row].fill_(record["alive"])
            group.state.updates[row].fill_(record["updates"])
            group.state.seeds[row].fill_(record["seed"])
            slot.base_steps = tuple(record["base_steps"])
            counted = {"waits": False, **record}  # the first checkpoints knew of nobody who waits
            for name in _COUNTED:
                setattr(slot, name, counted[name])
            for item, settings in zip(slot.member.optimizer.param_groups, record["settings"], strict=True):
                item.update(settings)
            if record["scheduler"] is not None:
                slot.member.scheduler.load_state_dict(record["scheduler"])
    for group in groups:
        group.forget_fed()
    return int(document["num_steps"])


def has_other_constants(
    groups: Sequence[Group], tensors: Mapping[str, Tensor], document: Mapping[str, Any]
) -> bool:
    """Whether a constant that members share has other values in the checkpoint.

    A planned program has constants in places of its own. What does not fit is for `restore_fleet` to refuse.
    """
    saved = document.get("members", {})
    for group in groups:
        for name, value in group.state.shared.items():
            for _, slot in group.members:
                prefix = saved.get(slot.name, {}).get("prefix", "")
                other = tensors.get(f"{prefix}/{group.kind_of(name)}/{name}")
                if other is not None and not torch.equal(value.cpu(), other):
                    return True
    return False


def _rows(group: Group, row: int, prefix: str) -> dict[str, Tensor]:
    """Find every stored tensor of one member, by its name in the checkpoint."""
    state = group.state
    found = {f"{prefix}/parameter/{name}": rows[row] for name, rows in state.parameters.items()}
    found |= {f"{prefix}/buffer/{name}": rows[row] for name, rows in state.buffers.items()}
    found |= {f"{prefix}/{group.kind_of(name)}/{name}": value for name, value in state.shared.items()}
    found |= {f"{prefix}/state/{name}/{kind}": rows[row] for (name, kind), rows in state.states.items()}
    found |= {f"{prefix}/total/{name}": rows[row] for name, rows in state.totals.items()}
    return found


def _description(slot: Slot) -> dict[str, Any]:
    """Describe a member's optimizer and schedule as far as a checkpoint must agree with them."""
    return {
        "optimizer": type(slot.member.optimizer).__name__,
        "scheduler_class": type(slot.member.scheduler).__name__,
        "structure": [[part.kind, dict(part.flags)] for part in slot.structure.groups],
    }


def _check(
    group: Group,
    row: int,
    slot: Slot,
    record: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
) -> None:
    """Refuse a record of a member with another optimizer, schedule or architecture."""
    for name, expected in _description(slot).items():
        if record[name] != expected:
            raise CheckpointError(
                f"{path}: member {slot.name!r}: expected {name.removesuffix('_class')} {expected}, got "
                f"{record[name]}; make the member as it was saved"
            )
    for key, target in _rows(group, row, record["prefix"]).items():
        value = tensors.get(key)
        if value is None or value.shape != target.shape or value.dtype != target.dtype:
            got = "nothing" if value is None else f"{tuple(value.shape)} {value.dtype}"
            raise CheckpointError(
                f"{path}: member {slot.name!r}: expected {key} of {tuple(target.shape)} {target.dtype}, got "
                f"{got}; make the member with the architecture it was saved with"
            )


def _unshare_what_differs(
    group: Group, saved: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> None:
    """Give each member its own copy of a constant that the checkpoint has in several versions."""
    for name in list(group.state.shared):
        versions = [
            tensors[f"{saved[slot.name]['prefix']}/{group.kind_of(name)}/{name}"] for _, slot in group.members
        ]
        if any(not torch.equal(versions[0], other) for other in versions[1:]):
            group.unshare()
            return
