"""The plan that a fleet trains by, the runner of its steps, and its groups: one per sub-array, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace

from trainmux.engine import release_cached
from trainmux.errors import PlanError, warn_user
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._group import Group
from trainmux.fleet._plan import Plan
from trainmux.fleet._planned_runner import PlannedRunner
from trainmux.fleet._planning import FleetPlanner, PlanRequest
from trainmux.fleet._runner import PlainRunner
from trainmux.fleet._slots import Slot
from trainmux.runtime import deferred_interrupts
from trainmux.sizes import exact_bytes

_MAX_EMPTY_SHARE = 0.5
"""A plan of whose slots more than this share is empty is left, and another one is made at the next step."""

_MAX_TIGHTENINGS = 2
_SLACK_BYTES = 16 << 20
"""Left free in addition to the overshoot, so that the next plan is not over by a little again."""


class PlanKeeper:
    """Knows which plan a fleet wants and puts it into use at the beginning of a step.

    A plan is for certain members in certain sub-arrays. Where members come for whom it has no slot, or most
    of them have gone, it is left, and one for the same budget by the same policy is made at the next step.
    """

    def __init__(self, config: FleetConfig, make_planner: Callable[[Sequence[Group]], FleetPlanner]) -> None:
        self._config = config
        self._make_planner = make_planner
        self._wanted: Plan | None = None
        self._request: PlanRequest | None = None
        self._plain = PlainRunner()
        self._active: PlannedRunner | None = None
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
        """Have the next step move the groups' state from host memory to the device."""
        self._is_left = True

    @property
    def runner(self) -> PlainRunner | PlannedRunner:
        """Runs the fleet's steps as things are now; ``at_step`` may change it."""
        return self._plain if self._active is None else self._active

    def leave(self, groups: Sequence[Group]) -> list[Group]:
        """Stop using the plan, which has no room for members that will come; returns joined groups."""
        if self._active is None:
            return rejoined(groups) if self._is_left else list(groups)
        with deferred_interrupts():
            self._active.release()
            self._active = None
            self._is_left = True
            return join_groups(groups)

    def start_over(self, groups: Sequence[Group]) -> list[Group]:
        """Leave the plan in use, whose step has failed half-way; the next step uses it again."""
        if self._active is None:
            return list(groups)
        self._wanted = self._wanted or self._active.plan
        return self.leave(groups)

    def whole(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups as they would be without a plan; copies where one is in use."""
        return list(groups) if self._active is None else join_groups(groups)

    def hold_budget(self) -> None:
        """After a step that holds more than the budget, plan again with that much less.

        The scratch of each node is measured before; what the allocator makes of it, and scratch that was not
        accounted for, shows when a plan runs for the first time.
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
            if self._request is not None:
                groups = self._apply(self._plan_for(self._request, groups), groups)
                self._wanted = None
            else:
                self._back_to_device(groups)
        self._is_left = False
        return list(groups)

    def _plan_for(self, request: PlanRequest, groups: Sequence[Group]) -> Plan:
        """The plan to switch to: the wanted one, or one like it if members came, left or changed since."""
        planner = self._make_planner(groups)
        if self._wanted is not None:
            names = [slot.name for group in groups for _, slot in group.members]
            with suppress(PlanError):
                planner.check(self._wanted, names)
                return self._wanted
        return planner.plan(request)

    def _apply(self, plan: Plan, groups: Sequence[Group]) -> list[Group]:
        planner = self._make_planner(groups)  # another one: that which searched holds steps of all widths
        own = planner.steps_of(plan)
        specs = [planner.example_spec(sub_array) for sub_array in plan.partition]
        split = split_groups(groups, plan)
        variant = tuple(
            (group.variant(applies=True), spec, group.stacked_batch)
            for group, spec in zip(split, specs, strict=True)
        )
        slots = [list(group.slots) for group in groups]
        try:
            with deferred_interrupts():
                for group in groups:
                    group.vacate()
                release_cached(self._config.device)
                fit_others = planner.fit_others(plan)
                self._active = PlannedRunner(plan, split, variant, own, self._config, fit_others)
        except BaseException:
            with deferred_interrupts():
                if self._active is not None:
                    self._active.release()
                    self._active = None
                self._is_left = True
                put_back(groups, slots, split)
            raise
        parallel = ", members side by side" if plan.record.num_branches > 1 else ""
        for number, group in enumerate(split):
            group.notes = (
                f"sub-array {number + 1} of {len(split)} of a plan ({plan.policy}, "
                f"{plan.record.schedule.multiplexing.value}{parallel})",
                *group.notes[1:],
            )
        return split

    def _back_to_device(self, groups: Sequence[Group]) -> None:
        known = {key: value for group in groups for key, value in group.constants().items()}
        for group in groups:
            group.restack(self._config.device, known)


def without_empty(groups: Sequence[Group]) -> list[Group]:
    """The groups that have members; one whose slots have been mostly empty for long has fewer of them now."""
    found = [group for group in groups if group.members]
    for group in found:
        width = group.widths.narrower(group.width, len(group.members), group.programs.build_s)
        if width != group.width:
            group.resize(width)
    return found


def _mostly_empty(groups: Sequence[Group]) -> bool:
    num_slots = sum(group.width for group in groups)
    num_empty = num_slots - sum(len(group.members) for group in groups)
    return any(not group.members for group in groups) or num_empty > _MAX_EMPTY_SHARE * num_slots


def join_groups(groups: Sequence[Group]) -> list[Group]:
    """Join groups that share a graph, as far as they can be fused; their state goes to host memory."""
    found: dict[Hashable, list[Group]] = {}
    for number, group in enumerate(groups):
        key: Hashable = (group.key, number) if group.unfused_because else group.key
        found.setdefault(key, []).append(group)
    return [_joined(same) for same in found.values()]


def _joined(groups: Sequence[Group]) -> Group:
    """Make one group of all members of ``groups``, with copies of their state in host memory."""
    first, base = groups[0].state.shared, dict(groups[0].key.base)
    common = [
        name
        for name in first
        if name in base or all(group.has_constant(name, first[name]) for group in groups[1:])
    ]
    for group in groups:
        group.unshare([name for name in group.state.shared if name not in common])
    return groups[0].gathered([(group, row) for group in groups for row, _ in group.members])


def rejoined(groups: Sequence[Group]) -> list[Group]:
    """Join groups that are still apart as a plan had them."""
    keys = [group.key for group in groups if not group.unfused_because]
    return list(groups) if len(set(keys)) == len(keys) else join_groups(groups)


def split_groups(groups: Sequence[Group], plan: Plan) -> list[Group]:
    """Make one group per sub-array of ``plan``, in its order, with copies of state in host memory."""
    places = {slot.name: (group, row) for group in groups for row, slot in group.members}
    found = []
    for sub_array in plan.partition:
        rows = [places[name] for name in sub_array.members]
        found.append(rows[0][0].gathered(rows))
    return found


def put_back(groups: Sequence[Group], slots: Sequence[list[Slot | None]], split: Sequence[Group]) -> None:
    """Undo a split: give the groups the slots that they had, with their state in host memory."""
    places = {id(slot): (part, row) for part in split for row, slot in part.members}
    for group, held in zip(groups, slots, strict=True):
        found = [places[id(slot)] for slot in held if slot is not None]
        # An empty slot may hold any numbers: a member that comes into it brings its own.
        rows = [found[0] if slot is None else places[id(slot)] for slot in held]
        group.state = found[0][0].gathered(rows).state
        group.slots = list(held)
        group.forget_fed()
