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
class PlanFacts:
    """A plan with its profiles, in the plan's order; finds nodes and tensors by (sub-array, position).

    Refused with `PlanError`: positions that the plan, a sub-array or its profile does not have.
    """

    plan: PlanRecord
    profiles: tuple[Profile, ...]

    @classmethod
    def of(cls, plan: PlanRecord, profiles: Sequence[Profile]) -> PlanFacts:
        """Find the plan's profiles among ``profiles`` by their fingerprints: any order, one per fingerprint
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

    # ---- in words ----------------------------------------------------------------------------------

    @property
    def how_it_trains(self) -> str:
        """ "8 members in 2 sub-arrays (4 + 4), as a ring"."""
        widths = [len(sub_array.members) for sub_array in self.plan.partition]
        text = f"{counted(sum(widths), 'member')} in {counted(len(widths), 'sub-array')}"
        if len(widths) > 1:
            is_ring = self.plan.schedule.multiplexing is Multiplexing.RING
            text += f" ({format_widths(widths)}), {'as a ring' if is_ring else 'in turns'}"
        return text + (", members of each side by side" if self.plan.num_branches > 1 else "")

    @property
    def per_member(self) -> str:
        num_members = sum(len(sub_array.members) for sub_array in self.plan.partition)
        seconds = self.plan.step_seconds / num_members if num_members else math.nan
        return f"{format_seconds(seconds)} a member"

    @property
    def of_budget(self) -> str:
        budget = self.plan.budget_bytes
        share = f" ({format_share(self.plan.peak_bytes / budget)})" if budget else ""
        return f"of the budget's {format_bytes(budget)}{share}"

    @property
    def over_limit(self) -> str:
        """Compare the peak with nothing swapped and nothing recomputed with the budget (§5.3)."""
        over = self.plan.peak_over_limit
        return f"{format_share(over)} over the budget" if over else "within the budget"

    @property
    def stalled(self) -> str:
        step = self.plan.step_seconds
        return f"{format_share(self.plan.stall_seconds / step) if step else NOTHING} of the step"

    @property
    def swapped(self) -> str:
        """Bytes that leave the device in a step and come back in it, and how much of their time is hidden."""
        size = sum(self.tensor(swap.sub_array, swap.tensor).size_bytes for swap in self.plan.swaps)
        overlap = format_share(self.plan.swap_overlap)
        return f"{format_bytes(size)} each way, {overlap} of the copy time overlaps compute"

    @property
    def recomputed(self) -> str:
        size = sum(self.tensor(one.sub_array, one.tensor).size_bytes for one in self.plan.recomputes)
        seconds, share = format_seconds(self.plan.recompute_seconds), format_share(self.plan.recompute_share)
        return f"{format_bytes(size)} in {seconds}, {share} of the compute time"

    @property
    def left_out(self) -> str:
        """ "; 127 more were left out", behind how many were tried; nothing where all were."""
        count = self.plan.num_left_out
        return f"; {count:,} more partitions were left out" if count else ""

    @property
    def attempts(self) -> list[Attempt]:
        """The one that was taken, then the others by predicted time; those without a time come last."""

        def order(attempt: Attempt) -> tuple[bool, float]:
            seconds = attempt.step_seconds
            return bool(attempt.lost_because), seconds if math.isfinite(seconds) else math.inf

        return sorted(self.plan.attempts, key=order)


def _at(items: Sequence[_Item], position: int, what: str) -> _Item:
    if not 0 <= position < len(items):
        raise PlanError(
            f"expected one of {len(items)} {what}, but got number {position}; "
            "pass the program and the profiles that belong to the plan"
        )
    return items[position]


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
    fitting = [seconds for _, seconds in sorted(curve) if math.isfinite(seconds)]
    if not fitting:
        return "no budget on the curve fits"
    fastest, tightest = min(fitting), fitting[0]
    if tightest <= fastest + _BUDGET_TOLERANCE_SECONDS:
        return f"every budget that fits takes {format_seconds(fastest)}"
    return (
        f"the tightest budget that fits takes {format_seconds(tightest)}, "
        f"{tightest / fastest:.2f} times the fastest step of {format_seconds(fastest)}"
    )
