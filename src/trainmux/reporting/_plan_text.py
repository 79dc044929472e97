"""A plan as text: what was chosen, what else was tried and why it lost, what is swapped and recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from trainmux.ir import PlanRecord, Profile, Recomputation, SubArray, Swap
from trainmux.reporting._plan_facts import (
    PlanLookup,
    attempt_cells,
    attempts_best_first,
    cheapest_seconds,
    curve_in_words,
    how_it_trains,
    left_out,
    over_limit,
    recomputed_bytes,
    seconds_per_member,
    swapped_bytes,
)
from trainmux.reporting._units import (
    NOTHING,
    counted,
    format_change,
    format_seconds,
    format_share,
    one_line,
)
from trainmux.sizes import format_bytes

_MAX_DECISIONS = 10
_MAX_NAMES = 8
_BAR_LENGTH = 40

_Decision = TypeVar("_Decision", Swap, Recomputation)


def plan_text(
    plan: PlanRecord,
    *,
    profiles: Sequence[Profile],
    budget_curve: Sequence[tuple[int, float]] = (),
) -> str:
    """The chosen plan, every partition tried, the largest swaps and recomputes, and what the budget costs.

    ``profiles`` are those that the plan was made from. ``budget_curve`` holds (budget in bytes, seconds a
    step); a time that is not finite stands for a budget that nothing fits. Refused with `PlanError`: profiles
    of another plan.
    """
    lookup = PlanLookup.of(plan, profiles)
    blocks = [
        _summary(plan, lookup),
        _partition(plan),
        _attempts(plan),
        _swaps(plan, lookup),
        _recomputes(plan, lookup),
        _curve(plan, budget_curve),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _summary(plan: PlanRecord, lookup: PlanLookup) -> list[str]:
    step = plan.step_seconds
    used = format_share(plan.peak_bytes / plan.budget_bytes) if plan.budget_bytes else NOTHING
    stalled = format_share(plan.stall_seconds / step) if step else NOTHING
    facts = [
        ("step", f"{format_seconds(step)}, {format_seconds(seconds_per_member(plan))} a member"),
        (
            "peak",
            f"{format_bytes(plan.peak_bytes)} of the budget's {format_bytes(plan.budget_bytes)} ({used}); "
            f"{format_bytes(plan.fixed_bytes)} of it for library workspaces and graphs",
        ),
        (
            "undecided",
            f"{format_bytes(plan.plain_peak_bytes)} with nothing swapped or recomputed, {over_limit(plan)}",
        ),
        ("host", f"{format_bytes(plan.host_bytes)} for what is swapped out"),
        ("stall", f"{format_seconds(plan.stall_seconds)} ({stalled} of the step)"),
        ("swaps", _swapped(plan, lookup)),
        ("recomputes", _recomputed(plan, lookup)),
    ]
    width = max(len(name) for name, _ in facts)
    return [f"plan by {one_line(plan.policy)}: {how_it_trains(plan)}"] + [
        f"  {name:<{width}}  {value}" for name, value in facts
    ]


def _swapped(plan: PlanRecord, lookup: PlanLookup) -> str:
    if not plan.swaps:
        return "none"
    size = f", {format_bytes(swapped_bytes(lookup))} each way"
    overlap = format_share(plan.swap_overlap)
    return f"{counted(len(plan.swaps), 'tensor')}{size}; {overlap} of the copy time overlaps compute"


def _recomputed(plan: PlanRecord, lookup: PlanLookup) -> str:
    if not plan.recomputes:
        return "none"
    size = f", {format_bytes(recomputed_bytes(lookup))}"
    return (
        f"{counted(len(plan.recomputes), 'tensor')}{size}; {format_seconds(plan.recompute_seconds)}, "
        f"{format_share(plan.recompute_share)} of the compute time"
    )


def _partition(plan: PlanRecord) -> list[str]:
    return ["sub-arrays"] + [_sub_array(position, found) for position, found in enumerate(plan.partition)]


def _sub_array(position: int, sub_array: SubArray) -> str:
    shown = ", ".join(one_line(name) for name in sub_array.members[:_MAX_NAMES])
    more = len(sub_array.members) - _MAX_NAMES
    names = f"{shown} and {more} more" if more > 0 else shown
    return f"  {position}  width {len(sub_array.members)}: {names}"


def _attempts(plan: PlanRecord) -> list[str]:
    if not plan.attempts:
        return []
    header = ("", "policy", "widths", "multiplexing", "step", "peak", "stall", "recompute", "outcome")
    rows = [
        ("" if attempt.lost_because else "*", *map(one_line, attempt_cells(attempt)))
        for attempt in attempts_best_first(plan)
    ]
    title = f"partitions tried: {len(plan.attempts)} (* is the one chosen){left_out(plan)}"
    return [title, *_table(header, rows, right={"step", "peak", "stall", "recompute"})]


def _swaps(plan: PlanRecord, lookup: PlanLookup) -> list[str]:
    def when(swap: Swap) -> str:
        out, back = _node(lookup, swap.offload_after), _node(lookup, swap.prefetch_prompt)
        return f"out after {out}, back before {back}"

    rows = [
        (*_tensor(lookup, swap.sub_array, swap.tensor), when(swap), one_line(swap.reason))
        for swap in _largest(plan.swaps, lookup)
    ]
    return _decisions("swaps", len(plan.swaps), rows)


def _recomputes(plan: PlanRecord, lookup: PlanLookup) -> list[str]:
    def when(again: Recomputation) -> str:
        seconds = sum(lookup.node(again.sub_array, rank).seconds for rank in again.nodes)
        nodes = f"{counted(len(again.nodes), 'node')} ({format_seconds(seconds)})"
        return f"by {nodes} before {_node(lookup, again.before)}"

    rows = [
        (*_tensor(lookup, again.sub_array, again.tensor), when(again), one_line(again.reason))
        for again in _largest(plan.recomputes, lookup)
    ]
    return _decisions("recomputes", len(plan.recomputes), rows)


def _decisions(noun: str, number: int, rows: list[tuple[str, str, str, str, str]]) -> list[str]:
    """Two lines each: what and when, then why."""
    if not rows:
        return []
    which = f"{noun}: {number}"
    if number > len(rows):
        which = f"largest {noun}: {len(rows)} of {number}"
    header = ("size", "sub-array", "tensor", "when (sub-array:node)")
    head, *lines = _table(header, [row[:4] for row in rows], right={"size", "sub-array"})
    indent = " " * head.index("tensor")
    block = [which, head]
    for line, (*_, reason) in zip(lines, rows, strict=True):
        block += [line, indent + reason] if reason else [line]
    return block


def _largest(decisions: Sequence[_Decision], lookup: PlanLookup) -> list[_Decision]:
    sizes = [lookup.tensor(one.sub_array, one.tensor).size_bytes for one in decisions]
    by_size = sorted(range(len(decisions)), key=lambda position: -sizes[position])
    return [decisions[position] for position in by_size[:_MAX_DECISIONS]]


def _tensor(lookup: PlanLookup, sub_array: int, position: int) -> tuple[str, str, str]:
    tensor = lookup.tensor(sub_array, position)
    return format_bytes(tensor.size_bytes), str(sub_array), one_line(tensor.name)


def _node(lookup: PlanLookup, at: tuple[int, int]) -> str:
    sub_array, rank = at
    return f"{sub_array}:{one_line(lookup.node(sub_array, rank).name)}"


def _curve(plan: PlanRecord, curve: Sequence[tuple[int, float]]) -> list[str]:
    if not curve:
        return []
    fastest = cheapest_seconds(curve)
    slowest = max((seconds for _, seconds in curve if math.isfinite(seconds)), default=math.nan)
    rows = []
    for budget, seconds in sorted(curve):
        fits = math.isfinite(seconds)
        rows.append(
            (
                "*" if budget == plan.budget_bytes else "",
                format_bytes(budget),
                format_seconds(seconds),
                format_change(seconds, fastest),
                "#" * max(1, round(_BAR_LENGTH * seconds / slowest)) if fits else "nothing fits",
            )
        )
    title = f"what the budget costs: {curve_in_words(curve)}"
    return [title, *_table(("", "budget", "step", "more", ""), rows, right={"budget", "step", "more"})]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[str]) -> list[str]:
    """Columns as wide as their widest cell; the last one is as long as it is."""
    to_the_right = set(right)
    lengths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(length) if name in to_the_right else cell.ljust(length)
            for name, cell, length in zip(header, cells, lengths, strict=True)
        ]
        return ("  " + "  ".join(padded)).rstrip()

    return [line(header), *(line(row) for row in rows)]
