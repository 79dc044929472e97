"""Why members that could have trained as one form several groups."""

from __future__ import annotations

from collections.abc import Sequence

from trainmux.fleet._group import Group
from trainmux.ir import InputKind
from trainmux.tracing import TracedGraph, first_difference

_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.BATCH: "batch"}


def split_reasons(groups: Sequence[Group]) -> list[str]:
    """For each group, its first difference from the earlier group most like it; "" for the first."""
    found = []
    for number, group in enumerate(groups):
        reasons = [(_difference(other, group), index) for index, other in enumerate(groups[:number])]
        if not reasons:
            found.append("")
            continue
        (_, text), index = max(reasons, key=lambda reason: reason[0][0])
        found.append(f"not in group {index}: {text}")
    return found


def _difference(first: Group, second: Group) -> tuple[int, str]:
    """How much two groups have in common before they differ, and how they do."""
    if first.key == second.key:
        return 4, first.unfused_because or second.unfused_because or "it trains by itself"
    graphs = first.traced, second.traced
    if first.key.graph != second.key.graph:
        return _graph_difference(*graphs)
    if first.key.structure != second.key.structure:
        kinds = [
            ", ".join(f"{part.kind}{dict(part.flags) or ''}" for part in group.key.structure.groups)
            for group in (first, second)
        ]
        told = "the parameters of its param groups" if kinds[0] == kinds[1] else f"{kinds[1]}, not {kinds[0]}"
        return 3, f"optimizer: {told}"
    return 3, "a batch of its own"


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
    return 2, first_difference(first, second) or "constants of its graph"
