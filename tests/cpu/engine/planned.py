"""Sub-arrays of small workloads under programs of every kind, beside the same sub-arrays without a plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from decided_plans import decided
from short_workloads import SHORT, member_of
from torch import Tensor

import trainmux as tm
from trainmux.fleet._group import Group
from trainmux.fleet._other_steps import PlannedPrograms, read_step
from trainmux.fleet._planned_runner import PlannedRunner
from trainmux.ir import Multiplexing, Program
from trainmux.profiling import DEVICES, analytic_profile, branch_width, side_by_side, used_branches

State = dict[str, Tensor]
"""Everything that steps of a sub-array leave behind, by name."""


class Case:
    """A workload's members in sub-arrays of given widths, with everything that is made once.

    With ``num_branches`` the members of each sub-array train side by side on so many of them, or on the first
    ones where they are fewer. A member's first moment is the gradient of its last step, for gradients to be
    compared too.
    """

    def __init__(
        self, name: str, widths: Sequence[int], kernels: str = "aten", num_branches: int = 1, **options: Any
    ) -> None:
        self._workload = SHORT[name]
        members = [
            member_of(self._workload, number, lr=1e-3 * (number + 1), betas=(0.0, 0.999))
            for number in range(sum(widths))
        ]
        example = self._workload.batch(0, torch.float32)
        self._widths = tuple(widths)
        self._branches = used_branches(widths, num_branches)
        self._fleet = tm.Fleet(members, self._workload.loss, example, deterministic=True, **options)
        self._group: Group = self._fleet._groups[0]
        of_branch = [branch_width(width, num_branches) for width in widths]
        built = {width: self._group.sub_array_program(width, kernels=kernels) for width in set(of_branch)}
        read = {width: read_step(step) for width, step in built.items()}
        self._steps = tuple(built[width] for width in of_branch)
        self.graphs = tuple(read[width] for width in of_branch)
        profiles = [
            analytic_profile(read[width], width, DEVICES["a100-40gb"], half=False) for width in of_branch
        ]
        self.profiles = tuple(map(side_by_side, profiles, [num_branches] * len(widths), widths))

    @functools.cache  # noqa: B019 - cases live as long as the tests
    def program(self, multiplexing: Multiplexing, **decisions: bool) -> Program:
        """One in which as much is decided on as there is."""
        return decided(self.profiles, multiplexing, **decisions)

    def groups(self, *, of_branches: bool = False) -> list[Group]:
        """One for each sub-array, or for each of its branches."""
        found, row = [], 0
        parts = self._branches if of_branches else [1] * len(self._widths)
        for width, count in zip(self._widths, parts, strict=True):
            for _ in range(count):
                rows = range(row, row + width // count)
                found.append(self._group.gathered([(self._group, each) for each in rows]))
                row += width // count
        for group in found:
            group.slots = [None if slot is None else replace(slot) for slot in group.slots]
            group.restack(self._fleet._config.device, {})
        return found

    def batch(self, number: int) -> list[Tensor]:
        flat = self._fleet._feed.for_groups(
            self._workload.batch(number, torch.float32), {}, self._fleet._groups, self._fleet.names
        )[0]
        return [leaf.to(self._fleet._config.device) for leaf in flat.leaves]

    def planned(self, program: Program, *, captured: bool = False, poisons: bool = False) -> PlannedRunner:
        """The sub-arrays under a program: enqueued instruction by instruction, or as CUDA graphs."""
        own = PlannedPrograms(self._steps, self.graphs, program, self._branches)
        config = replace(self._fleet._config, engine="cuda_graphs" if captured else "reference")
        groups = self.groups()
        return PlannedRunner(None, groups, "own", own, config, None, poisons=poisons)  # type: ignore[arg-type]

    @functools.cache  # noqa: B019
    def expected(self, num_steps: int) -> list[State]:
        """The sub-arrays without a plan, one by one, node by node; each branch for itself."""
        groups = self.groups(of_branches=True)
        steps = [step for step, count in zip(self._steps, self._branches, strict=True) for _ in range(count)]
        losses: list[list[Tensor]] = []
        for number in range(num_steps):
            for group, step in zip(groups, steps, strict=True):
                group.variant()
                group.push_numbers()
                arguments = group.arguments(step, self.batch(number))
                group.note(step, group.programs.engine.begin(step, arguments)())
                group.count(step)
            losses.append([group.last["loss"].cpu() for group in groups])
        states = state_of(groups, losses)
        return [
            {name: torch.cat([state[name] for state in states[end - count : end]]) for name in states[0]}
            for count, end in zip(self._branches, accumulate(self._branches), strict=True)
        ]


case_of = functools.cache(Case)


def state_of(groups: Sequence[Group], losses: Sequence[Sequence[Tensor]] = ()) -> list[State]:
    """Of each group, with its losses by step."""
    found = []
    for place, group in enumerate(groups):
        state: State = {f"loss of step {number}": row[place] for number, row in enumerate(losses)}
        for kind in (group.state.tensors, group.state.states):
            state.update({str(key): rows.detach().cpu().clone() for key, rows in kind.items()})
        state["alive"], state["updates"] = group.state.alive.cpu(), group.state.updates.cpu()
        state.update({f"last {key}": value.cpu() for key, value in group.last.items()})
        found.append(state)
    return found


def train_planned(case: Case, planned: PlannedRunner, num_steps: int) -> list[State]:
    losses: list[list[Tensor]] = []
    for number in range(num_steps):
        for group in planned.groups:
            group.variant()
        batch = case.batch(number)
        planned.step("own", [batch] * len(planned.groups))
        losses.append([group.last["loss"].cpu() for group in planned.groups])
    planned.finish()
    return state_of(planned.groups, losses)


def differences(found: Sequence[State], expected: Sequence[State]) -> list[str]:
    """Names of what is not bitwise the same."""
    return [
        f"{number}: {name}"
        for number, (a, b) in enumerate(zip(found, expected, strict=True))
        for name in b
        if not torch.equal(a[name], b[name])
    ]
