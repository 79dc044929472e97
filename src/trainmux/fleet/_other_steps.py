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
from trainmux.planning import fit_program
from trainmux.profiling import (
    KernelGraph,
    analytic_profile,
    branch_width,
    device_present,
    read_kernels,
    side_by_side,
    used_branches,
)
from trainmux.tracing import TracedGraph


@dataclass(frozen=True)
class PlannedPrograms:
    """Steps, or forward passes, of all sub-arrays, their kernels, and the program that runs them.

    Where members train on parallel branches, steps and kernels are those of one branch; ``branches`` counts
    the branches of each sub-array.
    """

    steps: tuple[StepProgram | ForwardProgram, ...]
    graphs: tuple[KernelGraph, ...]
    program: Program
    branches: tuple[int, ...]


Wanted = tuple[Group, TracedGraph, bool]
"""A group that is one of the plan's sub-arrays, its graph, and whether each member has its own batch."""


def read_step(step: StepProgram | ForwardProgram) -> KernelGraph:
    """Read the kernels of a step or of a forward pass."""
    assert isinstance(step.module, torch.fx.GraphModule)
    return read_kernels(step.module, step.byte_classes())


def other_steps(
    plan: Plan, wanted: Sequence[Wanted], kernels: str, host_bytes: int, *, applies: bool
) -> PlannedPrograms:
    """Build other steps of all groups within the plan's budget.

    Batches of another shape run operator by operator: they are few, and compiling takes long. Where a
    micro-batch without an update has no room for optimizer state, which it does not touch, that waits on the
    host, at the cost of a copy there and back for every update.
    """

    def build(*, carries_state: bool) -> PlannedPrograms:
        num_branches = plan.record.num_branches
        steps = tuple(
            group.sub_array_program(
                branch_width(group.width, num_branches),
                kernels=kernels if traced is group.traced else "aten",
                traced=traced,
                stacked_batch=stacked,
                applies=applies,
                carries_state=carries_state,
            )
            for group, traced, stacked in wanted
        )
        return _fit(plan, wanted, steps, host_bytes)

    try:
        return build(carries_state=True)
    except BudgetError:
        if applies:
            raise
    return build(carries_state=False)


def other_forwards(plan: Plan, wanted: Sequence[Wanted], host_bytes: int) -> PlannedPrograms:
    """Build forward passes of all groups within the plan's budget.

    Where there is room, optimizer state stays where it is. Where there is not, it waits on the host: that
    costs a copy there and back for an evaluation, offloading costs some for each of its batches.
    """

    def build(*, carries_state: bool) -> PlannedPrograms:
        num_branches = plan.record.num_branches
        forwards = tuple(
            group.planned_forward(
                traced,
                branch_width(group.width, num_branches),
                stacked_batch=stacked,
                carries_state=carries_state,
            )
            for group, traced, stacked in wanted
        )
        return _fit(plan, wanted, forwards, host_bytes, plainly=carries_state)

    try:
        return build(carries_state=True)
    except BudgetError:
        pass
    try:
        return build(carries_state=False)
    except BudgetError as error:
        raise BudgetError(
            f"expected an evaluation to fit into the plan's {plan.budget_bytes} bytes, but it does not; "
            "evaluate on smaller batches, or plan for a larger budget"
        ) from error


def _fit(
    plan: Plan,
    wanted: Sequence[Wanted],
    steps: tuple[StepProgram | ForwardProgram, ...],
    host_bytes: int,
    *,
    plainly: bool = False,
) -> PlannedPrograms:
    """Fit steps into the plan's budget, by estimated times; refused with `BudgetError`."""
    num_branches = plan.record.num_branches
    groups = [group for group, _, _ in wanted]
    graphs = tuple(map(read_step, steps))
    profiles = [_roughly(graph, group, num_branches) for graph, group in zip(graphs, groups, strict=True)]
    available_bytes = plan.budget_bytes - plan.record.fixed_bytes
    program = fit_program(profiles, available_bytes, host_bytes, plainly=plainly)
    branches = used_branches([group.width for group in groups], num_branches)
    return PlannedPrograms(steps, graphs, program, branches)


def _roughly(graph: KernelGraph, group: Group, num_branches: int) -> Profile:
    half = group.config.precision == "bf16"
    width = branch_width(group.width, num_branches)
    profile = analytic_profile(graph, width, device_present(group.config.device), half=half)
    return side_by_side(profile, num_branches, group.width)
