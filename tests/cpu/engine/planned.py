"""Sub-arrays of small workloads under schedules of every kind, beside the same sub-arrays without a plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from benchmarks.workloads import SMALL, Workload
from torch import Tensor

import trainmux as tm
from trainmux.fleet._group import Group
from trainmux.fleet._other_steps import PlannedPrograms, read_step
from trainmux.fleet._planned_runner import PlannedRunner
from trainmux.ir import Multiplexing, Profile, Program
from trainmux.planning._candidates import Arrangement, Candidate, Candidates
from trainmux.planning.policies import policy_named
from trainmux.profiling import DEVICES, analytic_profile, branch_width, side_by_side, used_branches

HOST_BYTES = 1 << 34


def make_fleet(workload: Workload, num_members: int, **options: Any) -> tm.Fleet:
    """Members whose first moment is the gradient of their last step, for gradients to be compared too."""
    members = []
    for number in range(num_members):
        model = workload.build(number).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (number + 1), betas=(0.0, 0.999))
        members.append(tm.Member(model, optimizer, name=f"m{number}", seed=number))
    example = workload.batch(0, torch.float32)
    return tm.Fleet(members, workload.loss, example, deterministic=True, **options)


class Case:
    """A workload's members in sub-arrays of given widths, with everything that is made once.

    With ``num_branches`` the members of each sub-array train side by side on so many of them, or on the first
    ones where they are fewer. ``workload`` is the one to train where it is not the registry's own of this
    name.
    """

    def __init__(
        self,
        name: str,
        widths: Sequence[int],
        kernels: str = "aten",
        num_branches: int = 1,
        workload: Workload | None = None,
        **options: Any,
    ) -> None:
        self._workload = workload or SMALL[name]
        self.widths = tuple(widths)
        self.branches = used_branches(widths, num_branches)
        self.fleet = make_fleet(self._workload, sum(widths), **options)
        self._group: Group = self.fleet._groups[0]
        of_branch = [branch_width(width, num_branches) for width in widths]
        built = {width: self._group.sub_array_program(width, kernels=kernels) for width in set(of_branch)}
        read = {width: read_step(step) for width, step in built.items()}
        self.steps = tuple(built[width] for width in of_branch)
        self.graphs = tuple(read[width] for width in of_branch)
        profiles = [
            analytic_profile(read[width], width, DEVICES["a100-40gb"], half=False) for width in of_branch
        ]
        self.profiles: tuple[Profile, ...] = tuple(
            side_by_side(profile, num_branches, width)
            for profile, width in zip(profiles, widths, strict=True)
        )

    def candidates(self, policy: str, multiplexing: Multiplexing) -> Candidates:
        names = tuple((str(number),) * width for number, width in enumerate(self.widths))
        arrangement = Arrangement(names, self.profiles, multiplexing)
        return Candidates(arrangement, policy_named(policy), HOST_BYTES)

    def groups(self, *, of_branches: bool = False) -> list[Group]:
        """One for each sub-array, or for each of its branches."""
        found, row = [], 0
        parts = self.branches if of_branches else [1] * len(self.widths)
        for width, count in zip(self.widths, parts, strict=True):
            for _ in range(count):
                found.append(self._group.taken(list(range(row, row + width // count))))
                row += width // count
        device = self.fleet._config.device
        for group in found:
            group.slots = [None if slot is None else replace(slot) for slot in group.slots]
            group.restack(device)
        return found

    def batch(self, number: int) -> list[Tensor]:
        flat = self.fleet._feed.for_groups(
            self._workload.batch(number, torch.float32), {}, self.fleet._groups, self.fleet.names
        )[0]
        return [leaf.to(self.fleet._config.device) for leaf in flat.leaves]

    def planned(self, program: Program, **options: Any) -> PlannedRunner:
        own = PlannedPrograms(self.steps, self.graphs, program, self.branches)
        config = self.fleet._config
        return PlannedRunner(None, self.groups(), "own", own, config, None, **options)  # type: ignore[arg-type]


def tightest(candidates: Candidates, share: float) -> Candidate:
    """A policy's candidate for a share of the slab, or for the next larger one that it can keep to."""
    way = candidates.plain().slab_bytes - candidates.least_bytes
    for step in range(20):
        limit = candidates.least_bytes + int(min(1.0, share + step * 0.05) * way)
        found = candidates.best(limit, math.inf)
        if found is not None:
            return found
    raise AssertionError("expected a limit that the policy can keep to")


State = dict[str, Tensor]


def state_of(groups: Sequence[Group]) -> list[State]:
    """Everything that a step leaves behind, by name."""
    found = []
    for group in groups:
        state: State = {}
        for kind in (group.state.tensors, group.state.states):
            state.update({str(key): rows.detach().cpu().clone() for key, rows in kind.items()})
        state["alive"], state["updates"] = group.state.alive.cpu(), group.state.updates.cpu()
        state.update({f"last {key}": value.cpu() for key, value in group.last.items()})
        found.append(state)
    return found


def with_losses(states: list[State], losses: Sequence[Sequence[Tensor]]) -> list[State]:
    """The states with the losses that each step returned."""
    for number, row in enumerate(losses):
        for state, loss in zip(states, row, strict=True):
            state[f"loss of step {number}"] = loss
    return states


def train_planned(case: Case, planned: PlannedRunner, num_steps: int) -> list[State]:
    losses: list[list[Tensor]] = []
    for number in range(num_steps):
        for group in planned.groups:
            group.variant()
        batch = case.batch(number)
        planned.step("own", [batch] * len(planned.groups))
        losses.append([group.last["loss"].cpu() for group in planned.groups])
    planned.finish()
    return with_losses(state_of(planned.groups), losses)


def train_plain(case: Case, num_steps: int) -> list[State]:
    """Train the sub-arrays without a plan, one by one, node by node; each branch for itself."""
    groups = case.groups(of_branches=True)
    steps = [step for step, count in zip(case.steps, case.branches, strict=True) for _ in range(count)]
    losses: list[list[Tensor]] = []
    for number in range(num_steps):
        for group, step in zip(groups, steps, strict=True):
            group.variant()
            group.push_numbers()
            arguments = group.arguments(step, case.batch(number))
            group.note(step, group.programs.engine.begin(step, arguments)())
            group.count(step)
        losses.append([group.last["loss"].cpu() for group in groups])
    return joined(with_losses(state_of(groups), losses), case.branches)


def joined(states: Sequence[State], counts: Sequence[int]) -> list[State]:
    """States of so many sub-arrays, one behind another, as that of one which has all of their members."""
    return [
        {name: torch.cat([state[name] for state in states[end - count : end]]) for name in states[end - 1]}
        for count, end in zip(counts, accumulate(counts), strict=True)
    ]


def differences(found: Sequence[State], expected: Sequence[State]) -> list[str]:
    """Names of what is not bitwise the same."""
    return [
        f"{number}: {name}"
        for number, (a, b) in enumerate(zip(found, expected, strict=True))
        for name in b
        if not torch.equal(a[name], b[name])
    ]


@functools.cache
def small_case(
    name: str, widths: tuple[int, ...], kernels: str = "aten", workload: Workload | None = None
) -> Case:
    return Case(name, widths, kernels, workload=workload)


@functools.cache
def expected_of(
    name: str,
    widths: tuple[int, ...],
    num_steps: int,
    kernels: str = "aten",
    workload: Workload | None = None,
) -> list[State]:
    return train_plain(small_case(name, widths, kernels, workload), num_steps)
