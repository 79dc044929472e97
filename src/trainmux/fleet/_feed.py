"""From what the user passes to ``step`` to what each group is fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainmux.engine import HostLeaf, Landing
from trainmux.errors import BatchError, ConfigError
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._group import Group
from trainmux.fleet._index_batches import PartialBatch
from trainmux.fleet._member import Member
from trainmux.tracing import FlatBatch, Text, check_batch, flatten_batch


@dataclass(frozen=True)
class GroupFeed:
    """One group's share of a step's data.

    ``example`` is a single member's batch, which decides the graph; ``leaves`` are the tensors to feed, in
    the dtype in which they are held: shared as they are, or with one row per member of the fleet (or of the
    group, where each member has a batch of its own).
    """

    example: FlatBatch
    leaves: tuple[HostLeaf, ...]
    stacked: bool
    rows_are_slots: bool = False

    def leaves_for(self, group: Group, names: Sequence[str]) -> tuple[HostLeaf, ...]:
        """The leaves with one row per slot where they are stacked."""
        if self.stacked and not self.rows_are_slots:
            position = {name: index for index, name in enumerate(names)}
            rows = [0 if slot is None else position[slot.name] for slot in group.slots]
            if rows != list(range(len(names))):
                return tuple(_with_rows(leaf, rows) for leaf in self.leaves)
        return self.leaves


def _with_rows(leaf: HostLeaf, rows: Sequence[int]) -> HostLeaf:
    (tensor,) = leaf.parts
    return replace(leaf, parts=(tensor[torch.tensor(rows, device=tensor.device)],))


class BatchFeed:
    """Knows the example batch and hands each group its part of a batch like it."""

    def __init__(self, config: FleetConfig, example_batch: Any, num_members: int) -> None:
        self._config = config
        self._landing = Landing(config.device) if config.device.type == "cuda" else None
        self._text = Text()
        self._example_batch = (
            example_batch.batch if isinstance(example_batch, PartialBatch) else example_batch
        )
        self._flat_examples: dict[bool, FlatBatch] = {}
        if self._example is not None and config.data == "per_member":
            _check_rows(self._example, num_members)

    @property
    def _example(self) -> FlatBatch | None:
        """The example batch; once its text was read, that is a part of it."""
        if self._example_batch is None:
            return None
        is_read = self._text.is_read
        if is_read not in self._flat_examples:
            self._flat_examples[is_read] = self._flat(self._example_batch)
        return self._flat_examples[is_read]

    def _flat(self, batch: Any) -> FlatBatch:
        return flatten_batch(batch, self._text)

    def stacks(self, member: Member) -> bool:
        """Whether a member's group is fed one batch per member."""
        return self._config.data == "per_member" or member.example_batch is not None

    def example_for(self, member: Member) -> FlatBatch:
        """The example batch of one member, without a member axis."""
        if member.example_batch is not None:
            return self._flat(member.example_batch)
        if self._example is None:
            raise BatchError(
                f"expected an example batch for member {member.name!r}, got none; give "
                "Fleet(example_batch=...) or Member(example_batch=...)"
            )
        if self._config.data == "shared":
            return self._example
        return _member_rows(self._example, 0)  # as good as any other's: its values decide nothing

    def attendance(self, batch: Any, names: Sequence[str]) -> tuple[Any, frozenset[str]]:
        """A batch without what says whom it is for, and the names of those whom it is not for."""
        if not isinstance(batch, PartialBatch):
            return batch, frozenset()
        there = set(batch.members)
        if not there or not there <= set(range(len(names))):
            raise BatchError(
                f"expected a PartialBatch for some of {len(names)} members, got positions {batch.members}; "
                "count them in the order of fleet.names"
            )
        if self._config.data != "per_member":
            raise ConfigError(
                f"expected data='per_member' for a PartialBatch, got data={self._config.data!r}; give "
                "Fleet(data='per_member')"
            )
        return batch.batch, frozenset(name for i, name in enumerate(names) if i not in there)

    def for_groups(
        self, batch: Any, overrides: Mapping[str, Any], groups: Sequence[Group], names: Sequence[str]
    ) -> list[GroupFeed]:
        """Make the feed of each group; refuses a batch that does not look like the example."""
        if overrides:
            _check_overrides(overrides, groups)
        is_common = any(not group.key.own_batch for group in groups)
        common = [self._common(batch, len(names))] if is_common else []
        return [self._own(group, overrides) if group.key.own_batch else common[0] for group in groups]

    def tensors(
        self, feeds: Sequence[GroupFeed], groups: Sequence[Group], names: Sequence[str]
    ) -> list[list[Tensor]]:
        """Move the leaves of each group to the device; those of several groups are moved once.

        They may be read by work that is enqueued before the next call.
        """
        wanted = [feed.leaves_for(group, names) for feed, group in zip(feeds, groups, strict=True)]
        distinct = {id(leaf): leaf for leaves in wanted for leaf in leaves}
        if self._landing is None:
            moved = [leaf.to(self._config.device) for leaf in distinct.values()]
        else:
            moved = self._landing.land(list(distinct.values()))
        found = dict(zip(distinct, moved, strict=True))
        return [[found[id(leaf)] for leaf in leaves] for leaves in wanted]

    def for_evaluation(self, batch: Any, groups: Sequence[Group], names: Sequence[str]) -> list[GroupFeed]:
        """Make the feed of each group for a batch that every member is evaluated on.

        In a fleet with ``data="per_member"`` the leaves may come with or without the member axis.
        """
        flat = self._flat(batch)
        leaves = self._leaves(flat)
        feeds = []
        for group in groups:
            own = group.members[0][1].member.example_batch
            expected = self._flat(own) if own is not None else self._example
            assert expected is not None
            stacked = self._config.data == "per_member" and own is None
            if stacked and _num_dims(flat) != _num_dims(expected):
                expected, stacked = _member_rows(expected, 0), False
            check_batch(expected.spec, flat.spec)
            if stacked:
                _check_rows(flat, len(names))
            feeds.append(GroupFeed(_member_rows(flat, 0) if stacked else flat, leaves, stacked))
        return feeds

    def _common(self, batch: Any, num_members: int) -> GroupFeed:
        if batch is None:
            raise BatchError("expected a batch, got None; pass what the loader yields")
        assert self._example is not None
        flat = self._flat(batch)
        check_batch(self._example.spec, flat.spec)
        if self._config.data == "shared":
            return GroupFeed(flat, self._leaves(flat), stacked=False)
        _check_rows(flat, num_members)
        return GroupFeed(_member_rows(flat, 0), self._leaves(flat), stacked=True)

    def _leaves(self, flat: FlatBatch) -> tuple[HostLeaf, ...]:
        return tuple(HostLeaf((tensor,), self._config.held_dtype(tensor.dtype)) for tensor in flat.tensors)

    def _own(self, group: Group, overrides: Mapping[str, Any]) -> GroupFeed:
        flats: dict[int, FlatBatch] = {}
        for row, slot in group.members:
            if slot.name not in overrides:
                raise BatchError(
                    f"overrides: expected a batch for member {slot.name!r}, which has an example_batch of "
                    f"its own, got none; call step(batch, overrides={{{slot.name!r}: ...}})"
                )
            flats[row] = self._flat(overrides[slot.name])
            check_batch(self._flat(slot.member.example_batch).spec, flats[row].spec)
        first = next(iter(flats.values()))
        for row, flat in flats.items():
            if flat.spec != first.spec:
                raise BatchError(
                    f"overrides: expected batches of one shape for the members of a group, got {flat.spec} "
                    f"for {group.slots[row].name!r} and {first.spec}"  # type: ignore[union-attr]
                )
        rows = [flats.get(row, first) for row in range(group.width)]
        leaves = tuple(
            HostLeaf(parts, self._config.held_dtype(parts[0].dtype), stacked=True)
            for parts in zip(*(flat.tensors for flat in rows), strict=True)
        )
        return GroupFeed(first, leaves, stacked=True, rows_are_slots=True)


def _check_overrides(overrides: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Refuse batches for members that are given the common one, or that are not there."""
    own = {
        slot.name for group in groups for _, slot in group.members if slot.member.example_batch is not None
    }
    unknown = sorted(set(overrides) - own)
    if unknown:
        raise BatchError(
            f"overrides: expected names of members with an example_batch of their own, got {unknown}; "
            "give those members Member(example_batch=...)"
        )


def _num_dims(flat: FlatBatch) -> list[int]:
    return [len(leaf.shape) for leaf in flat.spec.leaves]


def _check_rows(flat: FlatBatch, num_members: int) -> None:
    for leaf, tensor in zip(flat.spec.leaves, flat.tensors, strict=True):
        if tensor.dim() == 0 or tensor.shape[0] != num_members:
            raise BatchError(
                f"{leaf.path}: expected a leading axis of {num_members} members (data='per_member'), got "
                f"shape {leaf.shape}; stack one batch per member in the order of fleet.names"
            )


def _member_rows(flat: FlatBatch, row: int) -> FlatBatch:
    """One member's part of a batch with a member axis."""
    leaves = tuple(replace(leaf, shape=leaf.shape[1:]) for leaf in flat.spec.leaves)
    tensors = tuple(tensor[row] for tensor in flat.tensors)
    return replace(flat, tensors=tensors, spec=replace(flat.spec, leaves=leaves))
