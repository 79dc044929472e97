"""Text on how a fleet was fused."""

from __future__ import annotations

from collections.abc import Sequence

from trainmux.ir import FreeNumber, FusionRecord, GroupSummary, MemoryUse
from trainmux.sizes import format_bytes

_MAX_NAMES = 6


def format_fusion(groups: Sequence[GroupSummary]) -> str:
    """One block per group: members, width, each operator with how it was fused, then what fell back.

    Steps that are not captured come first.
    """
    blocks = [_group(index, group) for index, group in enumerate(groups)]
    slow = [
        f"group {index} is not captured and runs node by node: {group.not_captured}"
        for index, group in enumerate(groups)
        if group.not_captured
    ]
    return "\n\n".join(["\n".join(slow), *blocks] if slow else blocks)


def _group(index: int, group: GroupSummary) -> str:
    shown = ", ".join(group.members[:_MAX_NAMES])
    more = len(group.members) - _MAX_NAMES
    names = f"{shown} and {more} more" if more > 0 else shown
    lines = [
        f"group {index}: {len(group.members)} of {group.width} slots taken ({names})",
        f"  optimizer {group.optimizer}; {group.num_nodes} nodes in the fused step",
    ]
    lines += [f"  {group.split_because}"] if group.split_because else []
    lines += [f"  {note}" for note in group.notes]
    lines += [f"  per member: {_number(number)}" for number in group.numbers]
    if group.memory is not None:
        lines.append(f"  {_memory(group.memory)}")
    if group.unfused_because:
        lines.append(f"  trains at width 1: {group.unfused_because}")
    if group.records:
        width = max(len(record.op) for record in group.records)
        how = max(len(record.how) for record in group.records)
        lines += [f"  {record.op:<{width}}  {record.how:<{how}}  x{record.count}" for record in group.records]
    fallbacks = [record for record in group.records if record.fallback]
    if fallbacks:
        lines.append("  fell back:")
        lines += [f"    {_fallback(record)}" for record in fallbacks]
    else:
        lines.append("  nothing fell back")
    return "\n".join(lines)


def _fallback(record: FusionRecord) -> str:
    where = f" at {'; '.join(record.locations)}" if record.locations else ""
    return f"{record.op} x{record.count}{where}: {record.how}, because {record.fallback}"


def _number(number: FreeNumber) -> str:
    shown = ", ".join(f"{value:.6g}" for value in dict.fromkeys(number.values[:_MAX_NAMES]))
    more = "" if len(number.locations) == 1 else f" and {len(number.locations) - 1} more places"
    return f"{number.locations[0]}{more} ({shown}{', …' if len(number.values) > _MAX_NAMES else ''})"


def _memory(use: MemoryUse) -> str:
    reserved = f"{format_bytes(use.reserved_bytes)} reserved on the device"
    if use.predicted_bytes is None:
        return f"{reserved}, not predicted: its allocations are being recorded by someone else"
    return f"{reserved}, {format_bytes(use.predicted_bytes)} predicted"
