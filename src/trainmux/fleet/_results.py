"""Per-member results of several groups, and records of groups for people to read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.fleet._group import Group
from trainmux.ir import GroupSummary, MemoryUse


class Gather:
    """Puts per-member values into the order of names; replaced when membership changes."""

    def __init__(self, names: Sequence[str], groups: Sequence[Group]) -> None:
        place: dict[str, tuple[int, int]] = {}
        offsets = []
        total = 0
        for index, group in enumerate(groups):
            offsets.append(total)
            for row, slot in group.members:
                place[slot.name] = (index, row)
            total += group.width
        self._places = [place[name] for name in names]
        rows = [offsets[index] + row for index, row in self._places]
        self._identity = rows == list(range(total))
        device = groups[0].config.device if groups else torch.device("cpu")
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)

    def __call__(self, values: Sequence[Tensor | None], groups: Sequence[Group]) -> Any:
        """One tensor with a row per member; a list, with ``None`` for members that have no such value,
        where the shapes differ between groups."""
        present = [value for value in values if value is not None]
        shapes = {value.shape[1:] for value in present}
        if len(shapes) == 1 and len(present) < len(values) and present[0].dim() == 1:
            floating = [value.dtype for value in present if value.dtype.is_floating_point]
            filler = functools.reduce(torch.promote_types, floating) if floating else torch.float32
            values = [
                value
                if value is not None
                else torch.full((group.width,), float("nan"), dtype=filler, device=present[0].device)
                for value, group in zip(values, groups, strict=True)
            ]
            present = [value for value in values if value is not None]
        if len(shapes) == 1 and len(present) == len(values):
            joined = present[0] if len(present) == 1 else torch.cat(present)
            return joined if self._identity else joined.index_select(0, self._rows)
        return [
            None if values[index] is None else values[index][row]  # type: ignore[index]
            for index, row in self._places
        ]


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
