"""Programs of a plan's sub-arrays for other steps than the planned one, in the same memory.

These are steps on batches of another shape, micro-batches without an update, and evaluations. Their times are
only estimated. Members that train on parallel branches do so here too: state stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainmux.engine import ForwardProgram, StepProgram
from trainmux.errors import BudgetError
from trainmux.fleet._group import Group
from trainmux.fleet._plan import Plan
from trainmux.ir import Profile, Program
from trainmux.profiling import (
    DEVICES,
    KernelGraph,
    analytic_profile,
    branch_width,
    read_kernels,
    side_by_side,
    used_branches,
)
from trainmux.scheduling import fit_program
from trainmux.tracing import TracedGraph


@dataclass(frozen=True)
class PlannedSteps:
    """The steps of all sub-arrays, their kernels, and the program that runs them.

    Where members train on parallel branches, steps and kernels are those of one branch; ``branches`` counts
    the branches of each sub-array.
    """

    steps: tuple[StepProgram, ...]
    graphs: tuple[KernelGraph, ...]
    program: Program
    branches: tuple[int, ...]


@dataclass(frozen=True)
class PlannedForwards:
    """Forward passes of all sub-arrays, their kernels, and the program that runs them."""

    steps: tuple[ForwardProgram, ...]
    graphs: tuple[KernelGraph, ...]
    program: Program
    branches: tuple[int, ...]


Planned = PlannedSteps | PlannedForwards

Wanted = tuple[Group, TracedGraph, bool]
"""A group that is one of the plan's sub-arrays, its graph, and whether each member has its own batch."""

_ROUGHLY = "h200-141gb"
"""The device whose speed is assumed for estimates."""


def read_step(step: StepProgram | ForwardProgram) -> KernelGraph:
    """Read the kernels of a step or of a forward pass."""
    assert isinstance(step.module, torch.fx.GraphModule)
    return read_kernels(step.module, step.byte_classes())


def other_steps(
    plan: Plan, wanted: Sequence[Wanted], kernels: str, host_bytes: int, *, applies: bool
) -> PlannedSteps:
    """Build other steps of all groups within the plan's budget.

    Batches of another shape run operator by operator: they are few, and compiling takes long. Where a
    micro-batch without an update has no room for optimizer state, which it does not touch, that waits on the
    host, at the cost of a copy there and back for every update.
    """
    try:
        return _steps(plan, wanted, kernels, host_bytes, applies=applies, carries_state=True)
    except BudgetError:
        if applies:
            raise
    return _steps(plan, wanted, kernels, host_bytes, applies=False, carries_state=False)


def _steps(
    plan: Plan, wanted: Sequence[Wanted], kernels: str, host_bytes: int, *, applies: bool, carries_state: bool
) -> PlannedSteps:
    num_branches = plan.record.num_branches
    steps, graphs, profiles = [], [], []
    for group, traced, stacked in wanted:
        step = group.sub_array_program(
            branch_width(group.width, num_branches),
            kernels=kernels if traced is group.traced else "aten",
            traced=traced,
            stacked_batch=stacked,
            applies=applies,
            carries_state=carries_state,
        )
        steps.append(step)
        graphs.append(read_step(step))
        profiles.append(_roughly(graphs[-1], group, num_branches))
    program = fit_program(profiles, _available_bytes(plan), host_bytes)
    return PlannedSteps(tuple(steps), tuple(graphs), program, _used(wanted, num_branches))


def other_forwards(plan: Plan, wanted: Sequence[Wanted], host_bytes: int) -> PlannedForwards:
    """Build forward passes of all groups within the plan's budget.

    Where there is room, optimizer state stays where it is. Where there is not, it waits on the host: that
    costs a copy there and back for an evaluation, swaps cost some for each of its batches.
    """
    try:
        return _forwards(plan, wanted, host_bytes, carries_state=True)
    except BudgetError:
        pass
    try:
        return _forwards(plan, wanted, host_bytes, carries_state=False)
    except BudgetError as error:
        raise BudgetError(
            f"expected an evaluation to fit into the plan's {plan.budget_bytes} bytes, but it does not; "
            "evaluate on smaller batches, or plan for a larger budget"
        ) from error


def _forwards(
    plan: Plan, wanted: Sequence[Wanted], host_bytes: int, *, carries_state: bool
) -> PlannedForwards:
    num_branches = plan.record.num_branches
    forwards, graphs, profiles = [], [], []
    for group, traced, stacked in wanted:
        width = branch_width(group.width, num_branches)
        forward = group.planned_forward(traced, width, stacked_batch=stacked, carries_state=carries_state)
        forwards.append(forward)
        graphs.append(read_step(forward))
        profiles.append(_roughly(graphs[-1], group, num_branches))
    program = fit_program(profiles, _available_bytes(plan), host_bytes, plainly=carries_state)
    return PlannedForwards(tuple(forwards), tuple(graphs), program, _used(wanted, num_branches))


def _used(wanted: Sequence[Wanted], num_branches: int) -> tuple[int, ...]:
    return used_branches([group.width for group, _, _ in wanted], num_branches)


def _roughly(graph: KernelGraph, group: Group, num_branches: int) -> Profile:
    half = group.config.precision == "bf16"
    width = branch_width(group.width, num_branches)
    profile = analytic_profile(graph, width, DEVICES[_ROUGHLY], half=half)
    return side_by_side(profile, num_branches, group.width)


def _available_bytes(plan: Plan) -> int:
    return plan.budget_bytes - plan.record.fixed_bytes
