"""A plan as text: what was chosen, what else was tried and why it lost, what is swapped and recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from trainmux.ir import PlanRecord, Profile, Recomputation, Swap
from trainmux.reporting._plan_facts import PlanFacts, attempt_cells, cheapest_seconds, curve_in_words
from trainmux.reporting._units import counted, format_change, format_seconds, one_line
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
    facts = PlanFacts.of(plan, profiles)
    blocks = [
        _summary(facts),
        _partition(plan),
        _attempts(facts),
        _swaps(facts),
        _recomputes(facts),
        _curve(plan, budget_curve),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _summary(facts: PlanFacts) -> list[str]:
    plan = facts.plan
    fixed, plain = format_bytes(plan.fixed_bytes), format_bytes(plan.plain_peak_bytes)
    swaps, recomputes = counted(len(plan.swaps), "tensor"), counted(len(plan.recomputes), "tensor")
    rows = {
        "step": f"{format_seconds(plan.step_seconds)}, {facts.per_member}{_gap(plan)}",
        "peak": f"{format_bytes(plan.peak_bytes)} {facts.of_budget}; {fixed} of it for library workspaces "
        "and graphs",
        "undecided": f"{plain} with nothing swapped or recomputed, {facts.over_limit}",
        "host": f"{format_bytes(plan.host_bytes)} for what is swapped out",
        "stall": f"{format_seconds(plan.stall_seconds)} ({facts.stalled})",
        "swaps": f"{swaps}, {facts.swapped}" if plan.swaps else "none",
        "recomputes": f"{recomputes}, {facts.recomputed}" if plan.recomputes else "none",
    }
    width = max(map(len, rows))
    title = f"plan by {one_line(plan.policy)}: {facts.how_it_trains}"
    return [title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]


def _gap(plan: PlanRecord) -> str:
    """The gap between the step and the bound, where one is known."""
    if not plan.bound_seconds:
        return ""
    return f"; {plan.gap:.1%} above the lower bound of {format_seconds(plan.bound_seconds)}"


def _partition(plan: PlanRecord) -> list[str]:
    lines = ["sub-arrays"]
    for position, sub_array in enumerate(plan.partition):
        names = ", ".join(one_line(name) for name in sub_array.members[:_MAX_NAMES])
        more = len(sub_array.members) - _MAX_NAMES
        names += f" and {more} more" if more > 0 else ""
        lines.append(f"  {position}  width {len(sub_array.members)}: {names}")
    return lines


def _attempts(facts: PlanFacts) -> list[str]:
    if not facts.attempts:
        return []
    header = ("", "policy", "widths", "multiplexing", "step", "peak", "stall", "recompute", "outcome")
    rows = [
        ("" if attempt.lost_because else "*", *map(one_line, attempt_cells(attempt)))
        for attempt in facts.attempts
    ]
    title = f"partitions tried: {len(rows)} (* is the one chosen){facts.left_out}"
    return [title, *_table(header, rows, right={"step", "peak", "stall", "recompute"})]


def _swaps(facts: PlanFacts) -> list[str]:
    def when(swap: Swap) -> str:
        out, back = _node(facts, swap.offload_after), _node(facts, swap.prefetch_prompt)
        return f"out after {out}, back before {back}"

    largest = _largest(facts.plan.swaps, facts)
    return _decisions(facts, "swaps", len(facts.plan.swaps), [(swap, when(swap)) for swap in largest])


def _recomputes(facts: PlanFacts) -> list[str]:
    def when(again: Recomputation) -> str:
        seconds = sum(facts.node(again.sub_array, rank).seconds for rank in again.nodes)
        nodes = f"{counted(len(again.nodes), 'node')} ({format_seconds(seconds)})"
        return f"by {nodes} before {_node(facts, again.before)}"

    largest = _largest(facts.plan.recomputes, facts)
    rows = [(again, when(again)) for again in largest]
    return _decisions(facts, "recomputes", len(facts.plan.recomputes), rows)


def _decisions(
    facts: PlanFacts, noun: str, number: int, decisions: Sequence[tuple[Swap | Recomputation, str]]
) -> list[str]:
    """Two lines each: what and when, then why."""
    if not decisions:
        return []
    shown = len(decisions)
    title = f"{noun}: {number}" if number == shown else f"largest {noun}: {shown} of {number}"
    rows = []
    for one, when in decisions:
        tensor = facts.tensor(one.sub_array, one.tensor)
        rows.append((format_bytes(tensor.size_bytes), str(one.sub_array), one_line(tensor.name), when))
    header = ("size", "sub-array", "tensor", "when (sub-array:node)")
    head, *lines = _table(header, rows, right={"size", "sub-array"})
    block = [title, head]
    for line, (one, _) in zip(lines, decisions, strict=True):
        block += [line, " " * head.index("tensor") + one_line(one.reason)] if one.reason else [line]
    return block


def _largest(decisions: Sequence[_Decision], facts: PlanFacts) -> list[_Decision]:
    def size(one: _Decision) -> int:
        return facts.tensor(one.sub_array, one.tensor).size_bytes

    return sorted(decisions, key=size, reverse=True)[:_MAX_DECISIONS]


def _node(facts: PlanFacts, at: tuple[int, int]) -> str:
    sub_array, rank = at
    return f"{sub_array}:{one_line(facts.node(sub_array, rank).name)}"


def _curve(plan: PlanRecord, curve: Sequence[tuple[int, float]]) -> list[str]:
    if not curve:
        return []
    fastest = cheapest_seconds(curve)
    slowest = max((seconds for _, seconds in curve if math.isfinite(seconds)), default=math.nan)
    rows = []
    for budget, seconds in sorted(curve):
        fits = math.isfinite(seconds)
        bar = "#" * max(1, round(_BAR_LENGTH * seconds / slowest)) if fits else "nothing fits"
        mark = "*" if budget == plan.budget_bytes else ""
        more = format_change(seconds, fastest)
        rows.append((mark, format_bytes(budget), format_seconds(seconds), more, bar))
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
