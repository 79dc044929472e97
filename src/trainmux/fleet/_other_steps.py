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

_AnyProgram = StepProgram | ForwardProgram


@dataclass(frozen=True)
class PlannedPrograms:
    """Steps, or forward passes, of all sub-arrays, their kernels, and the program that runs them.

    Where members train on parallel branches, steps and kernels are those of one branch; ``branches`` counts
    the branches of each sub-array.
    """

    steps: tuple[_AnyProgram, ...]
    graphs: tuple[KernelGraph, ...]
    program: Program
    branches: tuple[int, ...]


Wanted = tuple[Group, TracedGraph, bool]
"""A group that is one of the plan's sub-arrays, its graph, and whether each member has its own batch."""


def read_step(step: _AnyProgram) -> KernelGraph:
    """Read the kernels of a step or of a forward pass."""
    assert isinstance(step.module, torch.fx.GraphModule)
    return read_kernels(step.module, step.byte_classes())


def other_programs(
    plan: Plan, wanted: Sequence[Wanted], kernels: str, host_bytes: int, *, applies: bool | None
) -> PlannedPrograms:
    """Build other steps of all groups, or with ``applies=None`` forward passes, within the plan's budget.

    Batches of another shape run operator by operator: they are few, and compiling takes long. Where there is
    no room for optimizer state that a micro-batch or an evaluation does not touch, it waits on the host: that
    costs a copy there and back for each of them, offloading anything else some for each batch.
    """
    num_branches = plan.record.num_branches
    groups = [group for group, _, _ in wanted]

    def build(group: Group, traced: TracedGraph, stacked: bool, carries_state: bool) -> _AnyProgram:
        width = branch_width(group.width, num_branches)
        if applies is None:
            return group.planned_forward(traced, width, stacked_batch=stacked, carries_state=carries_state)
        return group.sub_array_program(
            width,
            kernels=kernels if traced is group.traced else "aten",
            traced=traced,
            stacked_batch=stacked,
            applies=applies,
            carries_state=carries_state,
        )

    def fit(*, carries_state: bool) -> PlannedPrograms:
        steps = tuple(build(*each, carries_state) for each in wanted)
        graphs = tuple(map(read_step, steps))
        profiles = [_roughly(graph, group, num_branches) for graph, group in zip(graphs, groups, strict=True)]
        available_bytes = plan.budget_bytes - plan.record.fixed_bytes
        plainly = applies is None and carries_state
        program = fit_program(profiles, available_bytes, host_bytes, plainly=plainly)
        branches = used_branches([group.width for group in groups], num_branches)
        return PlannedPrograms(steps, graphs, program, branches)

    try:
        return fit(carries_state=True)
    except BudgetError:
        if applies:
            raise
    try:
        return fit(carries_state=False)
    except BudgetError as error:
        if applies is not None:
            raise
        raise BudgetError(
            f"expected an evaluation to fit into the plan's {plan.budget_bytes} bytes, but it does not; "
            "evaluate on smaller batches, or plan for a larger budget"
        ) from error


def _roughly(graph: KernelGraph, group: Group, num_branches: int) -> Profile:
    """Estimate the profile of a group on its branches."""
    half = group.config.precision == "bf16"
    width = branch_width(group.width, num_branches)
    profile = analytic_profile(graph, width, device_present(group.config.device), half=half)
    return side_by_side(profile, num_branches, group.width)
