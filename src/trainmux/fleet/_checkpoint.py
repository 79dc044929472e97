"""State of a fleet, or of one member, as tensors and a document, and back."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import CheckpointError
from trainmux.fleet._checkpoint_files import read_checkpoint
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._group import Group, changing_names
from trainmux.fleet._shared import view_key
from trainmux.fleet._slots import Slot

_FLEET, _MEMBER = "trainmux fleet", "trainmux member"
_COUNTED = ("counter", "num_updates", "active", "waits", "reason")
"""Attributes of a slot that are saved as they are."""

_AS_SAVED = "make the member as it was saved"


def fleet_document(
    groups: Sequence[Group], names: Sequence[str], num_steps: int, config: FleetConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Collect the tensors and the document that ``save`` writes: a constant that members share once."""
    tensors: dict[str, Tensor] = {}
    members: dict[str, dict[str, Any]] = {}
    known: dict[Hashable, str] = {}
    for group in groups:
        homes, shared = group.homes, {}
        for name, value in group.state.shared.items():
            same = (view_key(homes[name]), value.dtype) if name in homes else id(value)
            shared[name] = known.setdefault(same, f"shared/{len(known)}")
            tensors.setdefault(shared[name], value)
        for row, slot in group.members:
            record = _record(group, row, str(names.index(slot.name)), shared)
            members[slot.name] = record
            tensors |= {key: value for _, key, value in _rows(group, row, record)}
    document = {
        "kind": _FLEET,
        "num_steps": num_steps,
        "precision": config.precision,
        "accumulate": config.accumulate,
        "members": {name: members[name] for name in names},
    }
    return tensors, document


def member_document(group: Group, row: int, config: FleetConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Collect what ``save_member`` writes: all that is the member's own, and checksums of its base."""
    base = dict(group.key.base)
    shared = {name: f"shared/{name}" for name in group.state.shared if name not in base}
    record = _record(group, row, "member", shared)
    tensors = {key: value for _, key, value in _rows(group, row, record, totals=False)}
    tensors |= {key: group.state.shared[name] for name, key in shared.items()}
    sums = group.slot(row).watch.checksums(base)
    document = {"kind": _MEMBER, "precision": config.precision, "member": record, "base": sums}
    return tensors, document


def _record(group: Group, row: int, prefix: str, shared: Mapping[str, str]) -> dict[str, Any]:
    """Describe and count a member; ``shared`` has the names of constants among the saved tensors."""
    slot = group.slot(row)
    scheduler = slot.member.scheduler
    return {
        "prefix": prefix,
        "shared": dict(shared),
        **{name: values[row].item() for name, values in _numbers(group).items()},
        **{name: getattr(slot, name) for name in _COUNTED},
        "base_steps": list(slot.base_steps),
        **_description(group, slot),
        "settings": [
            {name: value for name, value in item.items() if name != "params"}
            for item in slot.member.optimizer.param_groups
        ],
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }


class _Saved:
    """A checkpoint that was read; all of it is checked before any of it is taken over."""

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self._path = path
        self._tensors, self.document = read_checkpoint(path)
        if self.document.get("kind") != kind:
            expected = f"a checkpoint of a {kind.removeprefix('trainmux ')}"
            raise self._misfit(expected, repr(self.document.get("kind")), "check the path")

    def _check_settings(self, config: FleetConfig, *settings: str) -> None:
        for setting in settings:
            expected, got = (
                f"{setting}={value!r}" for value in (getattr(config, setting), self.document[setting])
            )
            if expected != got:
                raise self._misfit(expected, got, "make the fleet with the settings it was saved with")

    def _check_description(self, group: Group, slot: Slot, record: Mapping[str, Any]) -> None:
        """Refuse a record of a member with another optimizer or schedule."""
        for name, expected in _description(group, slot).items():
            if record[name] != expected:
                what = f"{name.removesuffix('_class')} {expected} of member {slot.name!r}"
                raise self._misfit(what, record[name], _AS_SAVED)

    def _check_tensor(self, slot: Slot, label: str, key: str, target: Tensor) -> None:
        """Refuse a tensor that is not there, or has another shape or type."""
        value = self._tensors.get(key)
        if value is None or value.shape != target.shape or value.dtype != target.dtype:
            raise self._misfit(
                f"{label} of {tuple(target.shape)} {target.dtype} for member {slot.name!r}",
                "nothing" if value is None else f"{tuple(value.shape)} {value.dtype}",
                "make the member with the architecture it was saved with",
            )

    def _misfit(self, expected: str, got: Any, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: expected {expected}, got {got}; {remedy}")

    def _load_member(self, group: Group, row: int, slot: Slot, record: Mapping[str, Any]) -> None:
        for _, key, target in _rows(group, row, record):
            if key in self._tensors:
                target.copy_(self._tensors[key])
        for name, numbers in _numbers(group).items():
            numbers[row].fill_(record[name])
        slot.base_steps = tuple(record["base_steps"])
        for name in _COUNTED:
            setattr(slot, name, record[name])
        for item, settings in zip(slot.member.optimizer.param_groups, record["settings"], strict=True):
            item.update(settings)
        if record["scheduler"] is not None:
            slot.member.scheduler.load_state_dict(record["scheduler"])


class SavedFleet(_Saved):
    """A checkpoint of a fleet: ``check`` refuses one that does not fit, ``load`` takes all of it over."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, _FLEET)

    def check(self, groups: Sequence[Group], names: Sequence[str], config: FleetConfig) -> None:
        """Refuse a checkpoint of another kind of fleet, or of other members."""
        self._check_settings(config, "precision", "accumulate")
        saved = self.document["members"]
        if set(saved) != set(names):
            missing, extra = sorted(set(names) - set(saved)), sorted(set(saved) - set(names))
            raise self._misfit(
                "the members of this fleet",
                f"others (missing {missing}, unknown {extra})",
                "make the fleet with the members it was saved with",
            )
        for group in groups:
            for row, slot in group.members:
                record = saved[slot.name]
                self._check_description(group, slot, record)
                for label, key, target in _rows(group, row, record):
                    self._check_tensor(slot, label, key, target)
                for name, value in group.state.shared.items():
                    self._check_tensor(slot, name, _key(group, record, name), value)
        self._check_bases(groups)

    def _check_bases(self, groups: Sequence[Group]) -> None:
        """Refuse several values of a constant that members have in common in memory."""
        found: dict[Hashable, dict[str, Tensor]] = {}
        for group in groups:
            base = dict(group.key.base)
            for name, versions in self._versions(group):
                if name in base:
                    known = found.setdefault(base[name], {})
                    known |= versions
                    if _differ(*known.values()):
                        raise self._misfit(
                            f"one value of {name}, which members have in common",
                            "several",
                            "make each member over the base that it was saved with",
                        )

    def _versions(self, group: Group) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Find the saved tensors, by their names in the file, of each constant that members share."""
        records = [self.document["members"][slot.name] for _, slot in group.members]
        for name in group.state.shared if records else ():
            keys = dict.fromkeys(_key(group, record, name) for record in records)
            yield name, {key: self._tensors[key] for key in keys}

    def has_other_constants(self, groups: Sequence[Group]) -> bool:
        """Whether a constant that members share has other values here: a plan has it in its own place."""
        return any(
            not group.has_constant(name, value)
            for group in groups
            for name, versions in self._versions(group)
            for value in versions.values()
        )

    def load(self, groups: Sequence[Group]) -> int:
        """Take over what was saved and checked; returns the number of steps done."""
        with torch.no_grad():
            others = []
            for group in groups:
                versions = {name: list(found.values()) for name, found in self._versions(group)}
                # Each member gets its own copy of a constant that is here in several versions.
                group.unshare([name for name, found in versions.items() if _differ(*found)])
                shared = {name: value.cpu() for name, value in group.state.shared.items() if versions}
                others.append(
                    {n: versions[n][0] for n, value in shared.items() if _differ(value, versions[n][0])}
                )
            for group, values in zip(groups, others, strict=True):
                group.set_constants(values)
                for row, slot in group.members:
                    self._load_member(group, row, slot, self.document["members"][slot.name])
                group.forget_fed()
        return int(self.document["num_steps"])


class SavedMember(_Saved):
    """A checkpoint of one member: ``check`` refuses one that does not fit, ``load`` takes it over."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, _MEMBER)
        self._record: dict[str, Any] = self.document["member"]

    def check(self, group: Group, row: int, config: FleetConfig) -> None:
        """Refuse a member of another kind, or that was trained on another base."""
        self._check_settings(config, "precision")
        slot, changing = group.slot(row), changing_names(group.traced)
        self._check_description(group, slot, self._record)
        base, saved_base = dict(group.key.base), self.document["base"]
        for label, key, target in _rows(group, row, self._record, totals=False):
            if label in changing or label not in saved_base:
                self._check_tensor(slot, label, key, target)
        for name, value in group.state.shared.items():
            if name not in saved_base:
                self._check_tensor(slot, name, _key(group, self._record, name), value)
        others = [name for name in self.other_constants(group) if name in base]
        sums = slot.watch.checksums(saved_base)
        others += [name for name, expected in saved_base.items() if sums.get(name) != expected]
        if others:
            raise self._misfit(
                f"a member that was trained on the base of {slot.name!r}",
                f"other values of {others[0]}",
                "load it into a member over the base that it was saved with",
            )

    def other_constants(self, group: Group) -> list[str]:
        """Names of constants that members share, of which the file has other values."""
        saved = {name: self._tensors.get(_key(group, self._record, name)) for name in group.state.shared}
        return [
            name for name, value in saved.items() if value is not None and not group.has_constant(name, value)
        ]

    def load(self, group: Group, row: int) -> None:
        """Take over what was saved and checked; gradients of a whole update come first."""
        with torch.no_grad():
            group.unshare(self.other_constants(group))
            for total in group.state.totals.values():
                total[row].zero_()
            slot = group.slot(row)
            self._load_member(group, row, slot, self._record)
            if slot.waits:  # for an update of the fleet that it was saved from
                slot.waits, slot.active = False, True
            group.forget_fed()


def _differ(first: Tensor, *others: Tensor) -> bool:
    return any(not torch.equal(first, other) for other in others)


def _numbers(group: Group) -> dict[str, Tensor]:
    """Tensors that are saved as a number for each member."""
    return {"alive": group.state.alive, "updates": group.state.updates, "seed": group.state.seeds}


def _key(group: Group, record: Mapping[str, Any], name: str) -> str:
    """Name a member's parameter or buffer in a checkpoint."""
    return str(record["shared"].get(name, f"{record['prefix']}/{group.kind_of(name)}/{name}"))


def _rows(
    group: Group, row: int, record: Mapping[str, Any], *, totals: bool = True
) -> Iterator[tuple[str, str, Tensor]]:
    """Find every stored tensor of one member alone, with its own name and its name in a checkpoint."""
    state, prefix, slot = group.state, record["prefix"], group.slot(row)
    for name, rows in state.tensors.items():
        yield name, _key(group, record, name), slot.cut(name, rows[row])
    for (name, kind), rows in state.states.items():
        yield f"{name}.{kind}", f"{prefix}/state/{name}/{kind}", slot.cut(name, rows[row])
    for name, rows in state.totals.items() if totals else ():
        yield f"{name}.grad", f"{prefix}/total/{name}", slot.cut(name, rows[row])


def _description(group: Group, slot: Slot) -> dict[str, Any]:
    """Describe a member's optimizer and schedule as far as a checkpoint must agree with them."""
    return {
        "optimizer": type(slot.member.optimizer).__name__,
        "scheduler_class": type(slot.member.scheduler).__name__,
        "structure": [[part.kind, dict(part.flags)] for part in group.key.structure.groups],
    }
