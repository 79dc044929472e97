"""Facts about a plan that both the text and the page tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainmux.ir import Attempt, Multiplexing, Plan
from trainmux.reporting._plan_lookup import PlanLookup
from trainmux.reporting._units import counted, format_seconds, format_share, format_widths

_BUDGET_TOLERANCE_SECONDS = 1e-9


def num_members(plan: Plan) -> int:
    return sum(len(sub_array.members) for sub_array in plan.partition)


def widths(plan: Plan) -> tuple[int, ...]:
    return tuple(len(sub_array.members) for sub_array in plan.partition)


def how_it_trains(plan: Plan) -> str:
    """ "8 members in 2 sub-arrays (4 + 4), as a ring"."""
    members = counted(num_members(plan), "member")
    sub_arrays = counted(len(plan.partition), "sub-array")
    beside = ", members of each side by side" if plan.num_branches > 1 else ""
    if len(plan.partition) == 1:
        return f"{members} in {sub_arrays}{beside}"
    how = "as a ring" if plan.schedule.multiplexing is Multiplexing.RING else "in turns"
    return f"{members} in {sub_arrays} ({format_widths(widths(plan))}), {how}{beside}"


def seconds_per_member(plan: Plan) -> float:
    return plan.step_seconds / num_members(plan) if num_members(plan) else math.nan


def swapped_bytes(plan: Plan, lookup: PlanLookup) -> int:
    """Bytes that leave the device in a step; they come back in it too."""
    return sum(lookup.tensor(swap.sub_array, swap.tensor).size_bytes for swap in plan.swaps)


def recomputed_bytes(plan: Plan, lookup: PlanLookup) -> int:
    return sum(lookup.tensor(again.sub_array, again.tensor).size_bytes for again in plan.recomputes)


def attempts_best_first(plan: Plan) -> list[Attempt]:
    """The one that was taken, then the others by predicted time; those without a time come last."""

    def order(attempt: Attempt) -> tuple[bool, float]:
        seconds = attempt.step_seconds
        return bool(attempt.lost_because), seconds if math.isfinite(seconds) else math.inf

    return sorted(plan.attempts, key=order)


def left_out(plan: Plan) -> str:
    """ "; 127 more were left out", behind how many were tried; nothing where all were."""
    return f"; {plan.num_left_out:,} more partitions were left out" if plan.num_left_out else ""


def over_limit(plan: Plan) -> str:
    """How the peak with nothing swapped and nothing recomputed compares with the budget (§5.3)."""
    over = plan.peak_over_limit
    return f"{format_share(over)} over the budget" if over else "within the budget"


def outcome(attempt: Attempt) -> str:
    return attempt.lost_because or "chosen"


def curve_by_budget(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """What each budget costs, smallest budget first; a time that is not finite means that nothing fits."""
    return sorted(curve)


def cheapest_seconds(curve: Sequence[tuple[int, float]]) -> float:
    """The least time on the curve, which no budget improves."""
    return min((seconds for _, seconds in curve if math.isfinite(seconds)), default=math.nan)


def curve_in_words(curve: Sequence[tuple[int, float]]) -> str:
    """From the tightest budget that works to the fastest step, in one sentence."""
    fitting = [(budget, seconds) for budget, seconds in curve_by_budget(curve) if math.isfinite(seconds)]
    if not fitting:
        return "no budget on the curve fits"
    fastest = cheapest_seconds(fitting)
    tightest = fitting[0][1]
    if tightest <= fastest + _BUDGET_TOLERANCE_SECONDS:
        return f"every budget that fits takes {format_seconds(fastest)}"
    return (
        f"the tightest budget that fits takes {format_seconds(tightest)}, "
        f"{tightest / fastest:.2f} times the fastest step of {format_seconds(fastest)}"
    )
