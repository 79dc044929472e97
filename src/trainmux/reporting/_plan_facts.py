"""Facts about a plan that text, page and trace tell, and what the positions in a plan stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainmux.errors import PlanError
from trainmux.ir import Attempt, Multiplexing, PlanRecord, Profile, ProfiledNode, ProfiledTensor
from trainmux.reporting._units import NOTHING, counted, format_seconds, format_share, format_widths
from trainmux.sizes import format_bytes

_BUDGET_TOLERANCE_SECONDS = 1e-9

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class PlanLookup:
    """Nodes and tensors by (sub-array, position); ``profiles`` are in the plan's order.

    Refused with `PlanError`: positions that the plan, a sub-array or its profile does not have.
    """

    plan: PlanRecord
    profiles: tuple[Profile, ...]

    @classmethod
    def of(cls, plan: PlanRecord, profiles: Sequence[Profile]) -> PlanLookup:
        """Finds the plan's profiles among ``profiles`` by their fingerprints: any order, one per fingerprint
        or one per sub-array. Refused with `PlanError`: a profile too few, or one of another plan."""
        given = {profile.fingerprint: profile for profile in profiles}
        if set(given) != set(plan.profiles):
            raise PlanError(
                f"the plan was made from profiles {sorted(set(plan.profiles))}, but got {sorted(given)}; "
                "pass the profiles it was made from"
            )
        for sub_array in plan.partition:
            _at(plan.profiles, sub_array.profile, "profiles of the plan")
        return cls(plan, tuple(given[fingerprint] for fingerprint in plan.profiles))

    def profile(self, sub_array: int) -> Profile:
        found = _at(self.plan.partition, sub_array, "sub-arrays of the plan")
        return self.profiles[found.profile]

    def node(self, sub_array: int, rank: int) -> ProfiledNode:
        return _at(self.profile(sub_array).nodes, rank, f"nodes of sub-array {sub_array}")

    def tensor(self, sub_array: int, position: int) -> ProfiledTensor:
        return _at(self.profile(sub_array).tensors, position, f"tensors of sub-array {sub_array}")


def _at(items: Sequence[_Item], position: int, what: str) -> _Item:
    if not 0 <= position < len(items):
        raise PlanError(
            f"expected one of {len(items)} {what}, but got number {position}; "
            "pass the program and the profiles that belong to the plan"
        )
    return items[position]


def num_members(plan: PlanRecord) -> int:
    return sum(len(sub_array.members) for sub_array in plan.partition)


def widths(plan: PlanRecord) -> tuple[int, ...]:
    return tuple(len(sub_array.members) for sub_array in plan.partition)


def how_it_trains(plan: PlanRecord) -> str:
    """ "8 members in 2 sub-arrays (4 + 4), as a ring"."""
    members = counted(num_members(plan), "member")
    sub_arrays = counted(len(plan.partition), "sub-array")
    beside = ", members of each side by side" if plan.num_branches > 1 else ""
    if len(plan.partition) == 1:
        return f"{members} in {sub_arrays}{beside}"
    how = "as a ring" if plan.schedule.multiplexing is Multiplexing.RING else "in turns"
    return f"{members} in {sub_arrays} ({format_widths(widths(plan))}), {how}{beside}"


def seconds_per_member(plan: PlanRecord) -> float:
    return plan.step_seconds / num_members(plan) if num_members(plan) else math.nan


def swapped_bytes(lookup: PlanLookup) -> int:
    """Bytes that leave the device in a step; they come back in it too."""
    return sum(lookup.tensor(swap.sub_array, swap.tensor).size_bytes for swap in lookup.plan.swaps)


def recomputed_bytes(lookup: PlanLookup) -> int:
    return sum(lookup.tensor(one.sub_array, one.tensor).size_bytes for one in lookup.plan.recomputes)


def attempts_best_first(plan: PlanRecord) -> list[Attempt]:
    """The one that was taken, then the others by predicted time; those without a time come last."""

    def order(attempt: Attempt) -> tuple[bool, float]:
        seconds = attempt.step_seconds
        return bool(attempt.lost_because), seconds if math.isfinite(seconds) else math.inf

    return sorted(plan.attempts, key=order)


def left_out(plan: PlanRecord) -> str:
    """ "; 127 more were left out", behind how many were tried; nothing where all were."""
    return f"; {plan.num_left_out:,} more partitions were left out" if plan.num_left_out else ""


def over_limit(plan: PlanRecord) -> str:
    """Compare the peak with nothing swapped and nothing recomputed with the budget (§5.3)."""
    over = plan.peak_over_limit
    return f"{format_share(over)} over the budget" if over else "within the budget"


def attempt_cells(attempt: Attempt) -> tuple[str, ...]:
    """A row of the table of attempts: policy, widths, multiplexing, step, peak, stall, recompute, outcome."""
    return (
        attempt.policy,
        format_widths(attempt.widths, attempt.num_branches),
        attempt.multiplexing.value,
        format_seconds(attempt.step_seconds),
        format_bytes(attempt.peak_bytes) if attempt.peak_bytes else NOTHING,
        format_seconds(attempt.stall_seconds),
        format_seconds(attempt.recompute_seconds),
        attempt.lost_because or "chosen",
    )


def cheapest_seconds(curve: Sequence[tuple[int, float]]) -> float:
    """The least time on the curve, which no budget improves."""
    return min((seconds for _, seconds in curve if math.isfinite(seconds)), default=math.nan)


def curve_in_words(curve: Sequence[tuple[int, float]]) -> str:
    """From the tightest budget that works to the fastest step, in one sentence."""
    fitting = [(budget, seconds) for budget, seconds in sorted(curve) if math.isfinite(seconds)]
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
