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
from trainmux.ir import Program
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


def other_programs(
    plan: Plan, kernels: str, host_bytes: int, wanted: Sequence[Wanted], applies: bool | None
) -> PlannedPrograms:
    """Build other steps of all groups, or with ``applies=None`` forward passes, within the plan's budget.

    Batches of another shape run operator by operator: they are few, and compiling takes long. Where there is
    no room for optimizer state that a micro-batch or an evaluation does not touch, it waits on the host: that
    costs a copy there and back for each of them, offloading anything else some for each batch.
    """
    num_branches = plan.record.num_branches
    widths = [group.width for group, _, _ in wanted]

    def fit(*, carries_state: bool) -> PlannedPrograms:
        steps: list[StepProgram | ForwardProgram] = []
        graphs, profiles = [], []
        for group, traced, stacked in wanted:
            width = branch_width(group.width, num_branches)
            if applies is None:
                # What it does not touch is among its arguments, too, where it carries the optimizers' state.
                carried = group.usual if carries_state else None
                steps.append(group.builder(traced, stacked_batch=stacked).planned_forward(width, carried))
            else:
                made_of = kernels if traced is group.traced else "aten"
                options = {"stacked_batch": stacked, "applies": applies, "carries_state": carries_state}
                steps.append(group.sub_array_program(width, kernels=made_of, traced=traced, **options))
            graphs.append(read_step(steps[-1]))
            device, half = device_present(group.config.device), group.config.precision == "bf16"
            alone = analytic_profile(graphs[-1], width, device, half=half)
            profiles.append(side_by_side(alone, num_branches, group.width))
        available_bytes = plan.budget_bytes - plan.record.fixed_bytes
        plainly = applies is None and carries_state
        program = fit_program(profiles, available_bytes, host_bytes, plainly=plainly)
        return PlannedPrograms(tuple(steps), tuple(graphs), program, used_branches(widths, num_branches))

    refusal: BudgetError
    for carries_state in (True,) if applies else (True, False):
        try:
            return fit(carries_state=carries_state)
        except BudgetError as error:
            refusal = error
    if applies is not None:
        raise refusal
    raise BudgetError(
        f"expected an evaluation to fit into the plan's {plan.budget_bytes} bytes, but it does not; "
        "evaluate on smaller batches, or plan for a larger budget"
    ) from refusal
