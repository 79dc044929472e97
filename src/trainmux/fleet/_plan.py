"""A plan as its user sees it: numbers to read, text, a page, a trace, a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from trainmux.errors import PlanError, first_line
from trainmux.ir import (
    Attempt,
    Profile,
    Program,
    Recomputation,
    SubArray,
    Swap,
    Timeline,
    from_json,
    to_json,
    verify,
)
from trainmux.ir import Plan as PlanRecord
from trainmux.reporting import chrome_trace, plan_page, plan_text
from trainmux.rewrite import rewrite
from trainmux.scheduling import BudgetCost, bound_seconds, in_words
from trainmux.simulate import timeline

_KIND = "trainmux plan"
_REMEDY = "plan again and save it"


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
        return self.record.policy

    @property
    def budget_bytes(self) -> int:
        return self.record.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes that will be reserved on the device."""
        return self.record.peak_bytes

    @property
    def step_seconds(self) -> float:
        return self.record.step_seconds

    @cached_property
    def bound_seconds(self) -> float:
        """No schedule of these sub-arrays within the budget takes less: compute, needed recompute, link."""
        available = self.record.budget_bytes - self.record.fixed_bytes
        return bound_seconds(self._profile_of_each(), self.record.schedule.multiplexing, available)

    @property
    def partition(self) -> tuple[SubArray, ...]:
        """The sub-arrays and their members."""
        return self.record.partition

    @property
    def swaps(self) -> tuple[Swap, ...]:
        return self.record.swaps

    @property
    def recomputes(self) -> tuple[Recomputation, ...]:
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
        _write(path, page)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto and chrome://tracing open."""
        _write(path, chrome_trace(self.record, self.program, self.profiles, self.timeline))

    def _curve(self) -> list[tuple[int, float]]:
        return [(cost.budget_bytes, cost.step_seconds) for cost in self.curve]

    def __repr__(self) -> str:
        record = self.record
        return (
            f"<Plan {record.policy}: {len(record.partition)} sub-arrays, {record.step_seconds * 1e3:.3g} ms "
            f"a step, {in_words(record.peak_bytes)} of {in_words(record.budget_bytes)}>"
        )

    # ---- files -------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan with the profiles it was made from; ``load`` reads it."""
        document = {
            "kind": _KIND,
            "plan": to_json(self.record),
            "profiles": [to_json(profile) for profile in self.profiles],
            "curve": [[cost.budget_bytes, cost.step_seconds, cost.peak_bytes] for cost in self.curve],
        }
        _write(path, json.dumps({**document, "sha256": _checksum(document)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan; ``PlanError`` where the file is damaged, edited or something else."""
        try:
            document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise PlanError(f"expected a saved plan at {path}, got {error}; {_REMEDY}") from error
        if not isinstance(document, dict) or document.get("kind") != _KIND:
            raise PlanError(f"expected a saved plan at {path}, got something else; {_REMEDY}")
        if document.pop("sha256", None) != _checksum(document):
            raise PlanError(
                f"expected the plan at {path} as it was saved, got one that was edited since; {_REMEDY}"
            )
        try:
            record = from_json(document["plan"], PlanRecord)
            profiles = [from_json(text, Profile) for text in document["profiles"]]
            curve = [BudgetCost(int(size), float(s), int(peak)) for size, s, peak in document["curve"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"expected a whole plan at {path}, got a damaged one ({error}); {_REMEDY}"
            ) from error
        if tuple(profile.fingerprint for profile in profiles) != record.profiles:
            raise PlanError(
                f"expected the profiles that the plan at {path} was made from, got others; {_REMEDY}"
            )
        return cls(record, profiles, curve)


def require_plan(plan: object) -> None:
    """Refuse what is no plan."""
    if not isinstance(plan, Plan):
        raise PlanError(
            f"expected a plan of fleet.plan() or Plan.load(), got {type(plan).__name__}; make or load one"
        )


def _checksum(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _write(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file as a whole: who reads it never sees a part."""
    try:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.part")
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, target)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise PlanError(
            f"expected a file that can be written at {path!r}, got {first_line(error)}; choose another path"
        ) from error
