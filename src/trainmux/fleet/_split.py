"""Why members that could have trained as one form several groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.errors import warn_user
from trainmux.fleet._group import Group
from trainmux.ir import InputKind
from trainmux.tracing import TracedGraph, first_difference

_CODE = 2
_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.BATCH: "batch"}


@dataclass(frozen=True)
class Split:
    """The difference of a group from the earlier group most like it, in words; "" for the first group.

    ``is_small`` where the parameters and batches of both are alike, and only something in the code differs.
    """

    text: str = ""
    is_small: bool = False


def splits(groups: Sequence[Group]) -> list[Split]:
    """Find the first difference of each group from the earlier group most like it."""
    found = []
    for number, group in enumerate(groups):
        reasons = [(_difference(other, group), index) for index, other in enumerate(groups[:number])]
        if not reasons:
            found.append(Split())
            continue
        (level, text), index = max(reasons, key=lambda reason: reason[0][0])
        found.append(Split(f"not in group {index}: {text}", level == _CODE))
    return found


def warn_of_small_splits(groups: Sequence[Group]) -> None:
    """Warn where members with alike parameters and batches form several groups because of their code."""
    small = [(group, split) for group, split in zip(groups, splits(groups), strict=True) if split.is_small]
    if not small:
        return
    (group, split), names = small[0], [slot.name for group, _ in small for _, slot in group.members]
    more = " and others" if len(names) > 3 else ""
    warn_user(
        f"{', '.join(names[:3])}{more} have parameters and batches like other members, but train apart: "
        f"group {groups.index(group)} is {split.text}. A probability or weight of 0 may make torch take "
        "another path; explain() has all reasons"
    )


def _difference(first: Group, second: Group) -> tuple[int, str]:
    """The length of what two groups have in common, and their first difference in words."""
    if first.key == second.key:
        return 4, first.unfused_because or second.unfused_because or "it trains by itself"
    if first.key.graph != second.key.graph:
        level, text = _graph_difference(first.member_graph, second.member_graph)
        has_own_loss = level == _CODE and _loss_code(first) is not _loss_code(second)
        return (1, "another loss function") if has_own_loss else (level, text)
    if first.key.structure != second.key.structure:
        kinds = [
            ", ".join(f"{part.kind}{dict(part.flags) or ''}" for part in group.key.structure.groups)
            for group in (first, second)
        ]
        told = "the parameters of its param groups" if kinds[0] == kinds[1] else f"{kinds[1]}, not {kinds[0]}"
        return 3, f"optimizer: {told}"
    return 3, "a batch of its own"


def _loss_code(group: Group) -> object:
    """The code of a group's own loss function, whatever its closure holds; ``None`` for the fleet's."""
    loss = group.members[0][1].member.loss if group.members else None
    return getattr(loss, "__code__", loss)


def _graph_difference(first: TracedGraph, second: TracedGraph) -> tuple[int, str]:
    names = [{(item.kind, item.name): item for item in graph.inputs} for graph in (first, second)]
    for key, item in names[1].items():
        if key[0] not in _KINDS:
            continue
        other = names[0].get(key)
        what = f"{_KINDS[key[0]]} {item.name}"
        if other is None:
            return 0, f"{what} {list(item.shape)} is in its members alone"
        if (other.shape, other.dtype) != (item.shape, item.dtype):
            told = (list(item.shape), list(other.shape))
            told = told if told[0] != told[1] else (item.dtype, other.dtype)  # type: ignore[assignment]
            return 1, f"{what} is {told[0]}, not {told[1]}"
    return _CODE, first_difference(first, second) or "constants of its graph"
