"""Groups as records, for people to read about."""

from __future__ import annotations

from collections.abc import Sequence

from trainmux.fleet._group import Group
from trainmux.ir import GroupSummary, MemoryUse


def summarise(groups: Sequence[Group], planned: MemoryUse | None) -> tuple[GroupSummary, ...]:
    """One record per group; ``planned`` is the memory of all of them together, under a plan."""
    return tuple(
        GroupSummary(
            tuple(slot.name for _, slot in group.members),
            group.width,
            ", ".join(dict.fromkeys(part.kind for part in group.key.structure.groups)),
            group.num_nodes,
            group.records,
            group.unfused_because,
            group.notes,
            planned or group.memory,
        )
        for group in groups
    )
