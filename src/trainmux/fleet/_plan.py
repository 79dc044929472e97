"""A plan as its user sees it: numbers to read, text, a page, a trace, a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trainmux.ir import (
    Attempt,
    PlanRecord,
    Profile,
    Program,
    Recomputation,
    SubArray,
    Swap,
    Timeline,
    file_format,
    load,
    to_bytes,
    verify,
    write_file,
)
from trainmux.planning import BudgetCost, rewrite, timeline
from trainmux.reporting import chrome_trace, plan_page, plan_text
from trainmux.sizes import exact_bytes


class Plan:
    """A schedule for a fleet within a budget: ``fleet.plan(...)`` makes one, ``save`` and ``load`` keep it.

    All numbers are predictions for one step of every member. ``curve`` says what other budgets would cost,
    where that was asked for.
    """

    def __init__(
        self, record: PlanRecord, profiles: Sequence[Profile], curve: Sequence[BudgetCost] = ()
    ) -> None:
        self.record = record
        self.profiles = tuple(profiles)
        self.curve = tuple(curve)

    # ---- numbers -----------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """The policy that made it, by the name that `Fleet.plan` takes."""
        return self.record.policy

    @property
    def budget_bytes(self) -> int:
        """The bytes that it had to stay within."""
        return self.record.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes that will be reserved on the device."""
        return self.record.peak_bytes

    @property
    def step_seconds(self) -> float:
        """One step of all members."""
        return self.record.step_seconds

    @property
    def bound_seconds(self) -> float:
        """A step time that no plan of the partitions tried goes below, by a linear relaxation (``auto``)."""
        return self.record.bound_seconds

    @property
    def gap(self) -> float:
        """By how much the predicted step time is above the bound: 0.03 is 3%."""
        return self.record.gap

    @property
    def partition(self) -> tuple[SubArray, ...]:
        """The sub-arrays and their members."""
        return self.record.partition

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """The tensors that are offloaded to the host, and when."""
        return self.record.swaps

    @property
    def recomputes(self) -> tuple[Recomputation, ...]:
        """The tensors that are freed and computed again, and when."""
        return self.record.recomputes

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every arrangement that was looked at, and why it lost."""
        return self.record.attempts

    @cached_property
    def program(self) -> Program:
        """The plan as instructions, every byte placed, proved."""
        profiles = self._profile_of_each()
        program = rewrite(profiles, self.record.schedule)
        verify(program, profiles, budget_bytes=self.record.budget_bytes, fixed_bytes=self.record.fixed_bytes)
        return program

    @cached_property
    def timeline(self) -> Timeline:
        """One step on the clock, as predicted."""
        return timeline(self.program.body, self._profile_of_each())

    def _profile_of_each(self) -> list[Profile]:
        return [self.profiles[sub_array.profile] for sub_array in self.record.partition]

    # ---- showing it --------------------------------------------------------------------------------

    def explain(self) -> str:
        """The plan in words: what was chosen, what was tried, what is swapped and recomputed, and why."""
        return plan_text(self.record, profiles=self.profiles, budget_curve=self._curve())

    def report(self, path: str | os.PathLike[str], *, measured: Timeline | None = None) -> None:
        """Write one page that opens offline: memory, lanes, tensors, partitions."""
        page = plan_page(
            self.record,
            self.program,
            self.profiles,
            self.timeline,
            measured=measured,
            prologue=timeline(self.program.prologue, self._profile_of_each()),
            epilogue=timeline(self.program.epilogue, self._profile_of_each()),
            budget_curve=self._curve(),
        )
        write_file(path, page)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto and chrome://tracing open."""
        write_file(path, chrome_trace(self.record, self.program, self.profiles, self.timeline))

    def _curve(self) -> list[tuple[int, float]]:
        return [(cost.budget_bytes, cost.step_seconds) for cost in self.curve]

    def __repr__(self) -> str:
        record = self.record
        return (
            f"<Plan {record.policy}: {len(record.partition)} sub-arrays, {record.step_seconds * 1e3:.3g} ms "
            f"a step, {exact_bytes(record.peak_bytes)} of {exact_bytes(record.budget_bytes)}>"
        )

    # ---- files -------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan with the profiles it was made from; ``load`` reads it."""
        write_file(path, plan_bytes(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan; ``PlanError`` where the file is damaged, edited or something else."""
        saved = load(path, _SavedPlan)
        return cls(saved.plan, saved.profiles, saved.curve)


@file_format("plan", version=3, remedy="plan again and save it")
@dataclass(frozen=True)
class _SavedPlan:
    """The file of a plan: with it, nothing has to be measured again."""

    plan: PlanRecord
    profiles: tuple[Profile, ...]
    curve: tuple[BudgetCost, ...]

    def __post_init__(self) -> None:
        if tuple(profile.fingerprint for profile in self.profiles) != self.plan.profiles:
            raise ValueError("must have the profiles that the plan was made from and has others")


def plan_bytes(plan: Plan) -> bytes:
    """The contents of the file that ``plan.save`` writes."""
    return to_bytes(_SavedPlan(plan.record, plan.profiles, plan.curve))
