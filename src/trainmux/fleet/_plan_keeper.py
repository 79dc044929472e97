"""The plan that a fleet trains by: wanted, in use, left, made anew."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from trainmux.engine import release_cached
from trainmux.errors import PlanError
from trainmux.fleet._batches import GroupFeed
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._evaluate import RowTraces, take_over
from trainmux.fleet._group import Group
from trainmux.fleet._plan import Plan
from trainmux.fleet._planned_groups import (
    PlannedGroups,
    join_groups,
    put_back,
    rejoined,
    split_groups,
)
from trainmux.fleet._planning import FleetPlanner, PlanRequest
from trainmux.fleet._whole_step import run_whole
from trainmux.ir import MemoryUse, Timeline
from trainmux.runtime import deferred_interrupts
from trainmux.sizes import exact_bytes
from trainmux.tracing import BatchSpec, TracedGraph
from trainmux.training import warn_user

_MAX_EMPTY_SHARE = 0.5
"""A fleet of which more than this share of slots is empty gets fewer of them at the next step."""

_MAX_TIGHTENINGS = 2
_SLACK_BYTES = 16 << 20
"""Left free beside what was found too much, so that the next plan is not over by a little again."""

ReadyStep = Callable[[Mapping[int, Sequence[Tensor]]], None]
"""Runs a step on each group's batch, by ``id(group)``."""

MakePlanner = Callable[[Sequence[Group]], FleetPlanner]


class PlanKeeper:
    """Knows which plan a fleet wants and puts it into use at the beginning of a step.

    A plan is for certain members in certain sub-arrays. Where members come for whom it has no slot, or most
    of them have gone, it is left, and one for the same budget by the same policy is made at the next step.
    """

    def __init__(self, config: FleetConfig, make_planner: MakePlanner) -> None:
        self._config = config
        self._make_planner = make_planner
        self._wanted: Plan | None = None
        self._request: PlanRequest | None = None
        self._active: PlannedGroups | None = None
        self._is_left = False
        self._is_over = False
        self._num_tightened = 0

    @property
    def plan(self) -> Plan | None:
        """The plan that the next step will run by."""
        if self._wanted is not None:
            return self._wanted
        return None if self._active is None else self._active.plan

    @property
    def is_active(self) -> bool:
        return self._active is not None

    @property
    def memory(self) -> MemoryUse | None:
        """What the device holds under the plan in use, once a step was captured."""
        return None if self._active is None else self._active.memory

    def want(self, plan: Plan, request: PlanRequest) -> None:
        """Use ``plan`` from the next step on, and plans like it after that."""
        self._wanted, self._request = plan, request
        self._num_tightened = 0

    def renounce(self, groups: Sequence[Group]) -> list[Group]:
        """Train without a plan from now on."""
        left = self.leave(groups)
        self._wanted = self._request = None
        self._back_to_device(left)
        self._is_left = False
        return left

    def stay_on_host(self) -> None:
        """The groups' state lies in the host's memory: the next step takes it to the device."""
        self._is_left = True

    def finish(self) -> None:
        """Run what is in flight to its end."""
        if self._active is not None:
            self._active.finish()

    def leave(self, groups: Sequence[Group]) -> list[Group]:
        """Members that the plan in use has no room for are about to come: groups as they are without it."""
        if self._active is None:
            return rejoined(groups) if self._is_left else list(groups)
        with deferred_interrupts():
            self._active.release()
            self._active = None
            self._is_left = True
            return join_groups(groups)

    def start_over(self, groups: Sequence[Group]) -> list[Group]:
        """Leave the plan in use, whose step has failed half-way; the next step uses it anew."""
        if self._active is None:
            return list(groups)
        self._wanted = self._wanted or self._active.plan
        return self.leave(groups)

    def whole(self, groups: Sequence[Group]) -> list[Group]:
        """Groups as they are without a plan, to look at: copies where a plan is in use."""
        return list(groups) if self._active is None else join_groups(groups)

    def watch(self, step: Callable[[], Any]) -> Timeline:
        """Run ``step``, a step of the fleet by its plan, and tell when each instruction ran."""
        if self._active is None:
            raise PlanError(
                "expected a fleet that trains by a plan, got one without; call plan() or use(), and step once"
            )
        active = self._active
        active.watch_next()
        try:
            step()
            return active.watched()
        finally:
            active.watch_no_more()  # a step that was refused must not leave the next one watched

    def hold_budget(self) -> None:
        """After a step: where the device holds more than the budget, plan anew with that much less.

        What nodes need beside the slab is measured one by one, before; what the allocator makes of it, and of
        what nobody knew, shows when a plan runs for the first time.
        """
        active, request = self._active, self._request
        if active is None or request is None:
            return
        excess = active.excess_bytes()
        if not excess or self._num_tightened == _MAX_TIGHTENINGS:
            return
        self._num_tightened += 1
        self._request = replace(request, reserve_bytes=request.reserve_bytes + excess + _SLACK_BYTES)
        self._is_over = True
        warn_user(
            f"a step by the plan holds {exact_bytes(excess)} more than its budget of "
            f"{exact_bytes(active.plan.budget_bytes)}; another plan is made at the next step"
        )

    def at_step(self, groups: Sequence[Group]) -> list[Group]:
        """The groups to train in: those of the plan that is wanted."""
        if self._active is not None and (self._is_over or _mostly_empty(self._active.groups)):
            groups = self.leave(groups)
        self._is_over = False
        if self._is_left or self._wanted is not None:
            groups = [group for group in self.leave(groups) if group.members]
        plan = self._plan_for(groups)
        if plan is not None:
            groups = self._apply(plan, groups)
            self._wanted = None
        elif self._is_left:
            self._back_to_device(groups)
        self._is_left = False
        return list(groups)

    def _plan_for(self, groups: Sequence[Group]) -> Plan | None:
        """The plan to switch to: the wanted one, or one like it if members came, left or changed since."""
        request = self._request
        if request is None or not (self._is_left or self._wanted is not None):
            return None
        planner = self._make_planner(groups)
        if self._wanted is not None:
            names = [slot.name for group in groups for _, slot in group.members]
            with suppress(PlanError):
                planner.check(self._wanted, names)
                return self._wanted
        return planner.plan(request)

    def _apply(self, plan: Plan, groups: Sequence[Group]) -> list[Group]:
        planner = self._make_planner(groups)
        own = planner.steps_of(plan)
        specs = [planner.example_spec(sub_array) for sub_array in plan.partition]
        split = split_groups(groups, plan)
        variant = _variant(split, specs, [group.stacked_batch for group in split], applies=True)
        slots = [list(group.slots) for group in groups]
        try:
            with deferred_interrupts():
                for group in groups:
                    group.vacate()
                release_cached(self._config.device)
                self._active = PlannedGroups(plan, split, variant, own, self._config)
        except BaseException:
            with deferred_interrupts():
                if self._active is not None:
                    self._active.release()
                    self._active = None
                self._is_left = True
                put_back(groups, slots, split)
            raise
        beside = ", members side by side" if plan.record.num_branches > 1 else ""
        for number, group in enumerate(split):
            group.annotate(
                f"sub-array {number + 1} of {len(split)} of a plan ({plan.policy}, "
                f"{plan.record.schedule.multiplexing.value}{beside})",
                *group.notes[1:],
            )
        return split

    def prepare(
        self,
        groups: Sequence[Group],
        traced: Sequence[TracedGraph],
        feeds: Sequence[GroupFeed],
        *,
        applies: bool,
    ) -> ReadyStep:
        """A step of all groups, by the plan if there is one, ready for batches like those of ``feeds``."""
        active = self._active
        if active is None:
            return _prepare_without(groups, traced, feeds, applies=applies)
        stacked = [feed.stacked for feed in feeds]
        variant = _variant(groups, [feed.example.spec for feed in feeds], stacked, applies=applies)
        if not active.knows(variant):
            planner = self._make_planner(groups)
            steps = planner.steps_beside(active.plan, traced, stacked, applies=applies)
            with deferred_interrupts():
                active.learn(variant, steps)
        return lambda batches: active.step(variant, batches)

    def evaluate(
        self,
        groups: Sequence[Group],
        traces: Sequence[RowTraces],
        feeds: Sequence[GroupFeed],
        batches: Mapping[int, Sequence[Tensor]],
    ) -> list[dict[str, Tensor]]:
        """Metrics of all groups on one batch, within the plan's budget.

        A planned program has one forward pass of each group. Where members of a group differ in evaluation,
        there are as many programs as the group with the most traces needs; others run their last one again.
        """
        active = self._active
        assert active is not None
        stacked = [feed.stacked for feed in feeds]
        merged: list[dict[str, Tensor]] = [{} for _ in groups]
        for number in range(max(len(found) for found in traces)):
            chosen = [found[min(number, len(found) - 1)] for found in traces]
            variant = (
                "evaluate",
                *(
                    (trace.key, feed.example.spec, feed.stacked)
                    for (trace, _), feed in zip(chosen, feeds, strict=True)
                ),
            )
            if not active.knows(variant):
                graphs = [trace.graph for trace, _ in chosen]
                forwards = self._make_planner(groups).forwards_beside(active.plan, graphs, stacked)
                with deferred_interrupts():
                    active.learn(variant, forwards)
            # State may move: it must not stop half-way.
            with deferred_interrupts():
                values = active.evaluate(variant, batches)
            for known, (_, rows), new in zip(merged, chosen, values, strict=True):
                take_over(known, new, rows)
        return merged

    def _back_to_device(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.restack(self._config.device)


def _prepare_without(
    groups: Sequence[Group], traced: Sequence[TracedGraph], feeds: Sequence[GroupFeed], *, applies: bool
) -> ReadyStep:
    """A step of all groups without a plan, ready to run on batches like those of ``feeds``."""
    jobs = [
        (group, group.prepare(graph, feed.example.spec, stacked_batch=feed.stacked, applies=applies))
        for group, graph, feed in zip(groups, traced, feeds, strict=True)
    ]

    return partial(run_whole, jobs)


def without_empty(groups: Sequence[Group]) -> list[Group]:
    """The groups that have members; one whose slots are mostly empty has fewer of them now."""
    found = [group for group in groups if group.members]
    for group in found:
        if group.width - len(group.members) > _MAX_EMPTY_SHARE * group.width:
            group.resize(len(group.members))
    return found


def request_like(plan: Plan) -> PlanRequest:
    """What would be asked for to get a plan like this one."""
    blank = PlanRequest(None, "auto", None, None, 0, None, None)
    return replace(blank, budget=plan.budget_bytes, policy=plan.policy)


def _variant(
    groups: Sequence[Group], specs: Sequence[BatchSpec], stacked: Sequence[bool], *, applies: bool
) -> Hashable:
    """What the program of a step depends on, besides the members."""
    rows = zip(groups, specs, stacked, strict=True)
    return tuple((group.variant(applies=applies), spec, is_stacked) for group, spec, is_stacked in rows)


def _mostly_empty(groups: Sequence[Group]) -> bool:
    num_slots = sum(group.width for group in groups)
    num_members = sum(len(group.members) for group in groups)
    return (
        any(not group.members for group in groups) or num_slots - num_members > _MAX_EMPTY_SHARE * num_slots
    )
