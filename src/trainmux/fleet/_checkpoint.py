"""A fleet's state as tensors and a document, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import CheckpointError
from trainmux.fleet._checkpoint_files import read_checkpoint
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
        by_row = {name: values.tolist() for name, values in _numbers(group).items()}
        for row, slot in group.members:
            prefix = str(names.index(slot.name))
            tensors |= _rows(group, row, prefix)
            scheduler = slot.member.scheduler
            members[slot.name] = {
                "prefix": prefix,
                **{name: values[row] for name, values in by_row.items()},
                **{name: getattr(slot, name) for name in _COUNTED},
                "base_steps": list(slot.base_steps),
                **_description(group, slot),
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


class SavedFleet:
    """A checkpoint of a fleet: ``check`` refuses one that does not fit, ``load`` takes all of it over."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._tensors, self.document = read_checkpoint(path)

    def check(self, groups: Sequence[Group], names: Sequence[str], config: FleetConfig) -> None:
        """Refuse a checkpoint of another kind of fleet, or of other members."""
        document = self.document
        if document.get("kind") != _KIND:
            raise self._misfit("a checkpoint of a fleet", repr(document.get("kind")), "check the path")
        for setting in ("precision", "accumulate"):
            expected, got = (
                f"{setting}={value!r}" for value in (getattr(config, setting), document[setting])
            )
            if expected != got:
                raise self._misfit(expected, got, "make the fleet with the settings it was saved with")
        saved = document["members"]
        if set(saved) != set(names):
            missing, extra = sorted(set(names) - set(saved)), sorted(set(saved) - set(names))
            raise self._misfit(
                "the members of this fleet",
                f"others (missing {missing}, unknown {extra})",
                "make the fleet with the members it was saved with",
            )
        for group in groups:
            for row, slot in group.members:
                self._check_member(group, row, slot, saved[slot.name])

    def _check_member(self, group: Group, row: int, slot: Slot, record: Mapping[str, Any]) -> None:
        """Refuse a record of a member with another optimizer, schedule or architecture."""
        for name, expected in _description(group, slot).items():
            if record[name] != expected:
                what = f"{name.removesuffix('_class')} {expected} of member {slot.name!r}"
                raise self._misfit(what, record[name], "make the member as it was saved")
        for key, target in _rows(group, row, record["prefix"]).items():
            value = self._tensors.get(key)
            if value is None or value.shape != target.shape or value.dtype != target.dtype:
                raise self._misfit(
                    f"{key} of {tuple(target.shape)} {target.dtype} for member {slot.name!r}",
                    "nothing" if value is None else f"{tuple(value.shape)} {value.dtype}",
                    "make the member with the architecture it was saved with",
                )

    def _misfit(self, expected: str, got: Any, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: expected {expected}, got {got}; {remedy}")

    def has_other_constants(self, groups: Sequence[Group]) -> bool:
        """Whether a constant that members share has other values here: a plan has it in its own place."""
        return any(
            _differ(value.cpu(), *versions) for group in groups for value, versions in self._constants(group)
        )

    def _constants(self, group: Group) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Find each tensor that members share, with the saved values of it, one for each member."""
        prefixes = [self.document["members"][slot.name]["prefix"] for _, slot in group.members]
        for name, value in group.state.shared.items():
            yield value, [self._tensors[_key(group, prefix, name)] for prefix in prefixes]

    def load(self, groups: Sequence[Group]) -> int:
        """Take over what was saved and checked; returns the number of steps done."""
        with torch.no_grad():
            for group in groups:
                # Each member gets its own copy of a constant that is here in several versions.
                if group.members and any(_differ(*versions) for _, versions in self._constants(group)):
                    group.unshare()
                for row, slot in group.members:
                    self._load_member(group, row, slot, self.document["members"][slot.name])
                group.forget_fed()
        return int(self.document["num_steps"])

    def _load_member(self, group: Group, row: int, slot: Slot, record: Mapping[str, Any]) -> None:
        for key, target in _rows(group, row, record["prefix"]).items():
            target.copy_(self._tensors[key])
        for name, numbers in _numbers(group).items():
            numbers[row].fill_(record[name])
        slot.base_steps = tuple(record["base_steps"])
        counted = {"waits": False, **record}  # the first checkpoints knew of nobody who waits
        for name in _COUNTED:
            setattr(slot, name, counted[name])
        for item, settings in zip(slot.member.optimizer.param_groups, record["settings"], strict=True):
            item.update(settings)
        if record["scheduler"] is not None:
            slot.member.scheduler.load_state_dict(record["scheduler"])


def _differ(first: Tensor, *others: Tensor) -> bool:
    return any(not torch.equal(first, other) for other in others)


def _numbers(group: Group) -> dict[str, Tensor]:
    """Tensors that are saved as a number for each member."""
    return {"alive": group.state.alive, "updates": group.state.updates, "seed": group.state.seeds}


def _key(group: Group, prefix: str, name: str) -> str:
    """Name a parameter or buffer in a checkpoint."""
    return f"{prefix}/{group.kind_of(name)}/{name}"


def _rows(group: Group, row: int, prefix: str) -> dict[str, Tensor]:
    """Find every stored tensor of one member, by its name in the checkpoint."""
    state = group.state
    found = {_key(group, prefix, name): rows[row] for name, rows in state.tensors.items()}
    found |= {_key(group, prefix, name): value for name, value in state.shared.items()}
    found |= {f"{prefix}/state/{name}/{kind}": rows[row] for (name, kind), rows in state.states.items()}
    found |= {f"{prefix}/total/{name}": rows[row] for name, rows in state.totals.items()}
    return found


def _description(group: Group, slot: Slot) -> dict[str, Any]:
    """Describe a member's optimizer and schedule as far as a checkpoint must agree with them."""
    return {
        "optimizer": type(slot.member.optimizer).__name__,
        "scheduler_class": type(slot.member.scheduler).__name__,
        "structure": [[part.kind, dict(part.flags)] for part in group.key.structure.groups],
    }
