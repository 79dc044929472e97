"""Groups as records, for people to read about."""

from __future__ import annotations

from collections.abc import Sequence

from trainmux.fleet._group import Group
from trainmux.ir import GroupSummary, MemoryUse


def reasons_stopped(groups: Sequence[Group]) -> dict[str, str]:
    """Members that train no more and why; waits for the device."""
    found: dict[str, str] = {}
    for group in groups:
        alive, updates = group.state.alive.tolist(), group.state.updates.tolist()
        for row, slot in group.members:
            if not alive[row]:
                slot.reason = f"not finite at step {max(slot.base_steps, default=0) + updates[row] + 1}"
            if slot.reason is not None:
                found[slot.name] = slot.reason
    return found


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
            planned or group.programs.engine.memory,
        )
        for group in groups
    )
