"""From a fleet and a budget to a plan: sub-arrays are built and profiled as the search asks for them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmux.engine import StepProgram, first_rows
from trainmux.errors import BudgetError, ConfigError, PlanError
from trainmux.fleet._config import FleetConfig
from trainmux.fleet._group import Group
from trainmux.fleet._plan import Plan
from trainmux.ir import DeviceFacts, Profile
from trainmux.profiling import (
    Device,
    KernelGraph,
    ProfileCache,
    analytic_profile,
    find_device,
    measure_profile,
    read_kernels,
)
from trainmux.scheduling import BudgetCost, Planner, PlanProgress, parse_budget
from trainmux.scheduling import Group as PlannedGroup

FIXED_BYTES = 64 << 20
"""On a CUDA device, beside all tensors: the matrix libraries' workspaces and the graphs themselves."""

Progress = Callable[[PlanProgress], None]


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for; ``device`` ``None`` is the fleet's own, measured."""

    budget: int | str | None
    policy: str
    device: str | Device | None
    num_members: int | None
    num_budgets: int
    max_partitions: int | None
    progress: Progress | None


class FleetPlanner:
    """Profiles the sub-arrays of a fleet's groups and plans over them."""

    def __init__(
        self,
        groups: Sequence[Group],
        examples: Sequence[Sequence[Tensor]],
        config: FleetConfig,
        device: str | Device | None,
    ) -> None:
        self._groups = list(groups)
        self._examples = list(examples)
        self._config = config
        self._device = find_device(device) if isinstance(device, str) else device
        self._cache = ProfileCache()
        self._profiles: dict[tuple[int, int], Profile] = {}

    def plan(self, request: PlanRequest) -> Plan:
        """The quickest plan within the budget; see ``Fleet.plan``."""
        facts = self._facts()
        budget = self._budget(request.budget, facts)
        planned = self._planned_groups(request.num_members)
        bound = {} if request.max_partitions is None else {"max_partitions": request.max_partitions}
        on_gpu = self._device is not None or self._config.device.type == "cuda"
        planner = Planner(
            planned,
            profile_of=lambda group, width: self.profile(int(group.name), width),
            policy=request.policy,
            fixed_bytes=FIXED_BYTES if on_gpu else 0,
            host_bytes=facts.host_bytes,
            progress=request.progress,
            **bound,
        )
        record = planner.plan(budget)
        by_name = {profile.fingerprint: profile for profile in self._profiles.values()}
        curve: tuple[BudgetCost, ...] = planner.curve(request.num_budgets) if request.num_budgets else ()
        return Plan(record, [by_name[fingerprint] for fingerprint in record.profiles], curve)

    def profile(self, index: int, width: int) -> Profile:
        """The profile of a group's members at a width: worked out, from disk, or measured now."""
        known = self._profiles.get((index, width))
        if known is None:
            known = self._profiles[index, width] = self._make_profile(index, width)
        return known

    def check(self, plan: Plan, names: Sequence[str]) -> None:
        """Refuse a plan of another fleet, or one that has become stale."""
        members = [name for sub_array in plan.partition for name in sub_array.members]
        if sorted(members) != sorted(names):
            raise PlanError(
                f"expected a plan for the members {', '.join(names)}, got one for {', '.join(members)}; "
                "plan for this fleet"
            )
        of_member = {
            slot.name: index for index, group in enumerate(self._groups) for _, slot in group.members
        }
        for sub_array in plan.partition:
            owners = {of_member[name] for name in sub_array.members}
            profile = plan.profiles[sub_array.profile]
            graph, _ = self._kernels(owners.pop(), len(sub_array.members))
            expected = self._fingerprint(graph, len(sub_array.members), profile.device)
            if owners or profile.fingerprint not in (expected, self._analytic_fingerprint(graph, profile)):
                raise PlanError(
                    f"expected a plan made for this fleet's step (sub-array {', '.join(sub_array.members)}), "
                    "got one of another model, batch, device or version; plan again"
                )

    # ---- profiles ----------------------------------------------------------------------------------

    def _make_profile(self, index: int, width: int) -> Profile:
        graph, program = self._kernels(index, width)
        if self._device is not None:
            return analytic_profile(graph, width, self._device, half=self._config.precision == "bf16")
        group = self._groups[index]
        if width > group.width:
            raise ConfigError(
                f"num_members: expected at most the {group.width} members that the fleet has where steps are "
                f"measured, got sub-arrays of {width}; name a device to plan for"
            )
        facts = self._facts()
        fingerprint = self._fingerprint(graph, width, facts)
        found = self._cache.get(fingerprint)
        if found is None:
            arguments = self._arguments(index, program, width)
            found = measure_profile(graph, arguments, width=width, fingerprint=fingerprint, facts=facts)
            self._cache.put(found)
        return found

    def _kernels(self, index: int, width: int) -> tuple[KernelGraph, StepProgram]:
        group = self._groups[index]
        measures = self._device is None and self._config.device.type == "cuda"
        program = group.sub_array_program(width, compiles=measures and self._config.lowering != "aten")
        module = program.module
        assert isinstance(module, torch.fx.GraphModule)
        return read_kernels(module, program.byte_classes()), program

    def _arguments(self, index: int, program: StepProgram, width: int) -> list[Tensor]:
        """Arguments for the first members of a group, none of them active: a step changes nothing."""
        group = self._groups[index]
        batch = [tensor.to(self._config.device) for tensor in self._examples[index]]
        if group.stacked_batch:
            batch = [tensor.expand(group.width, *tensor.shape) for tensor in batch]
        arguments = first_rows(program, group.arguments_of(program, batch), width)
        active = program.position_of("active")
        arguments[active] = torch.zeros_like(arguments[active])
        return [
            argument.contiguous() if position in program.fed_positions() else argument
            for position, argument in enumerate(arguments)
        ]

    def _fingerprint(self, graph: KernelGraph, width: int, facts: DeviceFacts) -> str:
        text = repr((graph.fingerprint(), width, facts.name, torch.__version__, "measured"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _analytic_fingerprint(self, graph: KernelGraph, profile: Profile) -> str:
        if profile.source != "analytic":
            return ""
        try:
            device = self._device or find_device(profile.device.name)
        except ConfigError:
            return ""
        half = self._config.precision == "bf16"
        return analytic_profile(graph, profile.width, device, half=half).fingerprint

    # ---- the machine -------------------------------------------------------------------------------

    def _facts(self) -> DeviceFacts:
        if self._device is not None:
            return self._device.facts
        device = self._config.device
        if device.type == "cuda":
            count = torch.cuda.device_count()
            total = torch.cuda.get_device_properties(device).total_memory
            return DeviceFacts(torch.cuda.get_device_name(device), total, _host_bytes() // count)
        return DeviceFacts("cpu", _host_bytes(), _host_bytes())

    def _budget(self, budget: int | str | None, facts: DeviceFacts) -> int:
        if budget is not None:
            return parse_budget(budget, device_bytes=facts.memory_bytes)
        device = self._config.device
        if self._device is None and device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return free + torch.cuda.memory_reserved(device)
        return facts.memory_bytes

    def _planned_groups(self, num_members: int | None) -> list[PlannedGroup]:
        """The groups by number; with ``num_members``, as if the only group had so many."""
        groups = [
            PlannedGroup(str(index), tuple(slot.name for _, slot in group.members))
            for index, group in enumerate(self._groups)
        ]
        if num_members is None:
            return groups
        if isinstance(num_members, bool) or not isinstance(num_members, int) or num_members < 1:
            raise ConfigError(f"num_members: expected a whole number of at least 1, got {num_members!r}")
        if len(groups) != 1:
            raise ConfigError(
                f"num_members: expected a fleet of one architecture, got {len(groups)}; leave it out"
            )
        names = list(groups[0].members[:num_members])
        names += [f"member {number}" for number in range(len(names), num_members)]
        return [PlannedGroup("0", tuple(names))]


def _host_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        raise BudgetError(
            "expected to learn the host's memory from the system, got nothing; name the budget in bytes"
        ) from None
