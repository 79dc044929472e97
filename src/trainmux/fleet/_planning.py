"""From a fleet and a budget to a plan: sub-arrays are built and profiled as the search asks for them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import monotonic

import torch
from torch import Tensor

from trainmux.engine import (
    NUM_LANDINGS,
    StepProgram,
    first_rows,
    handed_over,
    kernel_settings,
    measured_scratch_bytes,
    run_into,
)
from trainmux.errors import BudgetError, ConfigError, PlanError, first_line
from trainmux.fleet._build import fuses_well
from trainmux.fleet._config import FleetConfig, whole_number
from trainmux.fleet._group import Group
from trainmux.fleet._other_steps import PlannedPrograms, Wanted, other_programs, read_step
from trainmux.fleet._plan import Plan
from trainmux.fleet._plan_cache import PlanCache, plan_key
from trainmux.fleet._programs import with_batch
from trainmux.ir import DeviceFacts, Profile, SubArray
from trainmux.planning import (
    NUM_ALWAYS,
    TIME_LIMIT_SECONDS,
    BudgetCost,
    PartitionSearch,
    PlannedGroup,
    Planner,
    PlanProgress,
    checked_time_limit,
    partitions_to_try,
)
from trainmux.profiling import (
    MEASUREMENT_VERSION,
    Device,
    KernelGraph,
    Measurements,
    ProfileCache,
    WidthProfiles,
    analytic_profile,
    branch_width,
    branches_to_measure,
    concurrent_fingerprint,
    find_device,
    fits,
    known_branches,
    measure_profile,
    same_but_for_origin,
    side_by_side,
    used_branches,
)
from trainmux.runtime import MATRIX_LIBRARIES_BYTES, bytes_outside_torch, no_collections, workspaces_bytes
from trainmux.sizes import parse_budget
from trainmux.tracing import BatchSpec, FlatBatch

_DRIVER_BYTES = 288 << 20
"""Code of kernels and handles of libraries where the driver does not tell: eight GPT-2 on an H200."""

_GRAPH_BYTES = 32 << 20
"""Memory of the driver for the CUDA graphs of a plan: 2 to 19 MiB for plans of GPT-2, more only where
thousands of nodes and copies are captured."""

_FEW_PARTITIONS = 5
"""Partitions tried by default where each takes long: its widths are compiled to be
measured, or a member's graph is large."""

_SEARCH_SECONDS = 20.0
"""Left for a search where profiles took nearly all of its time limit."""

_PROFILE_SHARE = 1 / 2
"""The part of the time limit in which profiles of further widths are begun."""

_LARGE_GRAPH = 1000
"""Nodes of a member's traced graph from which on it is large."""

Progress = Callable[[PlanProgress], None]


@dataclass(frozen=True)
class PlanRequest:
    """Arguments of ``Fleet.plan``.

    ``reserve_bytes`` of the budget are left free: a plan like it needed that much more than predicted.
    """

    budget: int | str | None
    policy: str
    num_members: int | None = None
    num_budgets: int = 0
    max_partitions: int | None = None
    time_limit: float = TIME_LIMIT_SECONDS
    progress: Progress | None = None
    reserve_bytes: int = 0


class FleetPlanner:
    """Profiles the sub-arrays of a fleet's groups and plans over them."""

    def __init__(
        self,
        groups: Sequence[Group],
        examples: Sequence[FlatBatch],
        config: FleetConfig,
        device: str | Device | None,
    ) -> None:
        self._groups = list(groups)
        self._examples = list(examples)
        self._config = config
        self._device = find_device(device) if isinstance(device, str) else device
        self._cache = ProfileCache()
        self._measurements = Measurements(config.device)
        self._plans = PlanCache()
        self._by_width: dict[int, WidthProfiles] = {}
        self._profiles: dict[tuple[int, int, int], Profile] = {}  # by group, members and branches
        self._scratch: dict[str, int] = {}
        self._read: dict[tuple[int, int, str], tuple[KernelGraph, StepProgram]] = {}
        self._progress: Progress | None = None

    def plan(self, request: PlanRequest) -> Plan:
        """The quickest plan within the budget; see ``Fleet.plan``."""
        self._progress = request.progress
        checked_time_limit(request.time_limit)
        budget = self._budget(request.budget)
        planned = self._planned_groups(request.num_members)
        num_partitions = request.max_partitions
        num_nodes = max(len(group.traced.module.graph.nodes) for group in self._groups)
        if num_partitions is None and (self.kernels == "compiled" or num_nodes >= _LARGE_GRAPH):
            num_partitions = _FEW_PARTITIONS
        bound = {} if num_partitions is None else {"max_partitions": num_partitions}
        asked = (
            request.policy,
            request.num_budgets,
            budget,
            tuple(planned),
            bound,
            request.reserve_bytes,
            request.time_limit,
        )
        key = plan_key(self._groups, asked, self._facts, self._device, self.kernels, self._switches())
        plan = self._plans.get(key, self._cache)
        if plan is not None:
            self._tell(f"scheduling by {request.policy}", 1, 1, "a plan that was kept")
            return plan
        search = partitions_to_try(request.policy, planned, **bound)
        if self.kernels == "compiled":
            self._compile_ahead(search)
        plan = self._search(request, budget, planned, search)
        self._plans.put(key, plan)
        return plan

    def _fixed_bytes(self) -> int:
        """Estimate what the budget must hold in addition to tensors and the scratch of nodes.

        That includes places for batches in flight and for the next one of a ring, workspaces of the matrix
        libraries, graphs, and what the driver holds for this process or held when it ran these kernels.
        """
        device = self._config.device
        if self._device is None and device.type != "cuda":
            return 0
        batches = sum(
            sum(tensor.nbytes for tensor in example.tensors) * (group.width if group.stacked_batch else 1)
            for group, example in zip(self._groups, self._examples, strict=True)
        )
        fixed = MATRIX_LIBRARIES_BYTES + _GRAPH_BYTES + (NUM_LANDINGS + 1) * batches
        if self._device is not None:
            return fixed + _DRIVER_BYTES
        now = bytes_outside_torch(device)
        seen = max((profile.driver_bytes for profile in self._profiles.values()), default=0)
        driver = _DRIVER_BYTES if now is None else max(now, seen)
        return fixed + driver + sum(workspaces_bytes(device)[1:])

    def _search(
        self,
        request: PlanRequest,
        budget: int,
        planned: Sequence[PlannedGroup],
        search: PartitionSearch,
    ) -> Plan:
        """Plan over profiles, some of them worked out, until those of the plan are of real kernels."""
        begin = monotonic()
        on_gpu = self._device is not None or self._config.device.type == "cuda"
        if self._device is None:
            # Measuring may take streams with their workspaces, which are part of the fixed bytes.
            for index in range(len(planned)):
                for width in sorted(_widths(search, index, NUM_ALWAYS)):
                    self.profile(index, width)
        planner = Planner(
            planned,
            profile_of=lambda group, width: self.profile(int(group.name), width),
            branched_of=lambda group, *numbers: self._side_by_side(int(group.name), *numbers),
            policy=request.policy,
            fixed_bytes=request.reserve_bytes + self._fixed_bytes(),
            scratch_of=lambda profile: self._scratch.get(profile.fingerprint, 0) if on_gpu else 0,
            host_bytes=self._facts.host_bytes,
            profile_seconds=_PROFILE_SHARE * request.time_limit - (monotonic() - begin),
            time_limit=request.time_limit,
            progress=request.progress,
            max_partitions=max(NUM_ALWAYS, len(search.partitions)),
        )
        left = request.time_limit - (monotonic() - begin)
        planner.time_limit = max(left, min(request.time_limit, _SEARCH_SECONDS))
        record = planner.plan(budget)
        by_name = {profile.fingerprint: profile for profile in self._profiles.values()}
        lowered = self._lowered({fingerprint: by_name[fingerprint] for fingerprint in record.profiles})
        if not all(same_but_for_origin(by_name[name], profile) for name, profile in lowered.items()):
            return self._search(request, budget, planned, search)
        record = replace(record, profiles=tuple(profile.fingerprint for profile in lowered.values()))
        curve: tuple[BudgetCost, ...] = planner.curve(request.num_budgets) if request.num_budgets else ()
        return Plan(record, list(lowered.values()), curve)

    def _lowered(self, used: Mapping[str, Profile]) -> dict[str, Profile]:
        """The profiles that a plan uses, of real kernels each."""
        found = {}
        for key, profile in list(self._profiles.items()):
            index, width, num_branches = key
            if num_branches == 1 and profile.fingerprint in used and index in self._by_width:
                self._profiles[key] = self._by_width[index].confirmed(width)
            found[profile.fingerprint] = self._profiles[key]
        return {name: found[name] for name in used}

    def profile(self, index: int, width: int) -> Profile:
        """The profile of a group's members at a width: worked out, from disk, or measured now."""
        key = (index, width, 1)
        if key not in self._profiles:
            self._profiles[key] = self._make_profile(index, width)
        return self._profiles[key]

    def _side_by_side(self, index: int, num_members: int, num_branches: int) -> Profile | None:
        """The profile of so many of a group's members side by side, where one alone was measured beside
        others; each branch needs its own scratch, and workspaces of the matrix libraries."""
        key, alone = (index, num_members, num_branches), self.profile(index, 1)
        if key in self._profiles:
            return self._profiles[key]
        if num_members not in (1, *known_branches(alone)):
            return None
        found = self._profiles[key] = side_by_side(alone, num_branches, num_members)
        device = self._config.device
        counted = sum(workspaces_bytes(device)[1:]) if device.type == "cuda" else 0
        workspaces = max(0, (num_branches - 1) * MATRIX_LIBRARIES_BYTES - counted)
        scratch = self._scratch.get(alone.fingerprint, 0)
        self._scratch[found.fingerprint] = num_members * scratch + workspaces
        return found

    def check(self, plan: object, names: Sequence[str]) -> None:
        """Refuse a plan of another fleet, or one that has become stale."""
        if not isinstance(plan, Plan):
            raise PlanError(
                f"expected a plan of fleet.plan() or Plan.load(), got {type(plan).__name__}; make or load one"
            )
        members = [name for sub_array in plan.partition for name in sub_array.members]
        if sorted(members) != sorted(names):
            raise PlanError(
                f"expected a plan for the members {', '.join(names)}, got one for {', '.join(members)}; "
                "plan for this fleet"
            )
        self.steps_of(plan)

    def steps_of(self, plan: Plan) -> PlannedPrograms:
        """The steps of the plan's sub-arrays and their kernels, ready to run.

        Refuses a plan over other kernels than those that the fleet has now.
        """
        found, widths = [], [len(sub_array.members) for sub_array in plan.partition]
        for sub_array, num_members in zip(plan.partition, widths, strict=True):
            profile = plan.profiles[sub_array.profile]
            _check_branches(plan, num_members, profile)
            width = branch_width(num_members, profile.num_branches)
            graph, step = self._kernels(self._owner_of(sub_array), width, self._kernels_of(plan))
            expected = self._fingerprint(graph, width, profile.device)
            expected = concurrent_fingerprint(expected, profile.num_branches, profile.width)
            if profile.fingerprint not in (expected, self._analytic_fingerprint(graph, profile)):
                self._plans.forget(plan)
                raise PlanError(
                    f"expected a plan made for this fleet's step (sub-array {', '.join(sub_array.members)}), "
                    "got one of another model, batch, device or version; plan again"
                )
            found.append((step, graph))
        steps, graphs = zip(*found, strict=True)
        return PlannedPrograms(steps, graphs, plan.program, used_branches(widths, plan.record.num_branches))

    @property
    def kernels(self) -> str:
        """Kind of kernels: the fleet's own where they are measured, lowered regions elsewhere."""
        if self._device is not None:
            return "lowered"
        return "compiled" if self._config.compiles_plans else "aten"

    def example_spec(self, sub_array: SubArray) -> BatchSpec:
        """Of the batch that a sub-array's members were planned with."""
        return self._examples[self._owner_of(sub_array)].spec

    def fit_others(self, plan: Plan) -> Callable[[Sequence[Wanted], bool | None], PlannedPrograms]:
        """Return what fits other steps of the plan's sub-arrays into its budget; see `other_programs`."""
        return partial(other_programs, plan, self._kernels_of(plan), self._facts.host_bytes)

    def _kernels_of(self, plan: Plan) -> str:
        """Of what the plan's steps are made: analytic ones are made for regions."""
        is_analytic = any(profile.source == "analytic" for profile in plan.profiles)
        return "lowered" if is_analytic and self.kernels == "aten" else self.kernels

    def _owner_of(self, sub_array: SubArray) -> int:
        names = set(sub_array.members)
        for index, group in enumerate(self._groups):
            if names <= {slot.name for _, slot in group.members}:
                return index
        raise PlanError(
            f"expected sub-arrays of members that can be fused, got {', '.join(sub_array.members)}; plan "
            "again"
        )

    def _compile_ahead(self, search: PartitionSearch) -> None:
        """Compile the kernels of every width that will be needed, in parallel."""
        for index, group in enumerate(self._groups):
            widths = _widths(search, index)
            self._tell("compiling", index, len(self._groups), f"{len(widths)} widths side by side")
            builder = group.builder(group.traced, stacked_batch=group.stacked_batch)
            lower = partial(builder.lowered_step, settings=group.settings(), for_plan=True)
            builder.compile(lower(width) for width in sorted(widths, reverse=True))
        self._tell("compiling", len(self._groups), len(self._groups), "all kernels")

    # ---- profiles ----------------------------------------------------------------------------------

    def _make_profile(self, index: int, width: int) -> Profile:
        if self._device is not None:
            if index not in self._by_width:
                half = self._config.precision == "bf16"
                self._by_width[index] = WidthProfiles(
                    lambda width: self._kernels(index, width)[0], self._device, half=half
                )
            return self._by_width[index].profile(width)
        graph, _ = self._kernels(index, width)
        group = self._groups[index]
        if width > group.width:
            raise ConfigError(
                f"num_members: expected at most the {group.width} members that the fleet has where steps are "
                f"measured, got sub-arrays of {width}; name a device to plan for"
            )
        fingerprint = self._fingerprint(graph, width, self._facts)
        found = self._cache.get(fingerprint)
        branches = branches_to_measure(group.width) if width == 1 else ()
        if found is None or self._lacks_branches(found, branches, graph):
            found = self._measured(index, width, fingerprint, branches)
            self._cache.put(found)
        workspaces = [node.workspace_bytes for node in found.nodes]
        self._scratch[found.fingerprint] = measured_scratch_bytes(graph, workspaces)
        # Workspaces are not in the slab: one scratch pool serves them all in turn.
        return replace(found, nodes=tuple(replace(node, workspace_bytes=0) for node in found.nodes))

    def _lacks_branches(self, found: Profile, branches: Sequence[int], graph: KernelGraph) -> bool:
        """Whether there was no room to measure so many members side by side, and there is now."""
        device = self._config.device
        missing = set(branches) - set(known_branches(found))
        return device.type == "cuda" and bool(missing) and fits(graph, device, min(missing))

    def _measured(self, index: int, width: int, fingerprint: str, branches: Sequence[int]) -> Profile:
        """Measure a step; where the device has too little for one node of it, that is refused in words.

        The refusal is raised when the error is gone, whose traceback would hold the step's tensors.
        """
        what = f"width {width}, node by node"
        graph, program = self._kernels(index, width)
        arguments = self._arguments(index, program, width)
        try:
            with kernel_settings(deterministic=self._config.deterministic):
                found = measure_profile(
                    graph,
                    arguments,
                    model=index,
                    width=width,
                    fingerprint=fingerprint,
                    facts=self._facts,
                    into=run_into,
                    handed_over=handed_over(graph),
                    known=self._measurements,
                    branches=branches,
                    tell=lambda done, total: self._tell("measuring", done, total, what),
                )
                device = self._config.device
                driver = bytes_outside_torch(device) if device.type == "cuda" else None
                return replace(found, driver_bytes=driver or 0)
        except torch.OutOfMemoryError as error:
            reason = first_line(error)
        raise BudgetError(
            f"expected to measure a step of {width} members node by node, but the device has too little free "
            f"memory for it ({reason}); leave the device to this process, or plan for smaller batches"
        )

    def _tell(self, stage: str, done: int, total: int, current: str) -> None:
        if self._progress is not None:
            self._progress(PlanProgress(stage, done, total, current))

    def _kernels(self, index: int, width: int, kernels: str | None = None) -> tuple[KernelGraph, StepProgram]:
        key = (index, width, kernels or self.kernels)
        if key not in self._read:
            with no_collections():  # millions of objects that live on: a fifth of the time
                program = self._groups[index].sub_array_program(width, kernels=key[2])
                self._read[key] = (read_step(program), program)
        return self._read[key]

    def _arguments(self, index: int, program: StepProgram, width: int) -> list[Tensor]:
        """Arguments for the first members of a group, none of them active: a step changes nothing."""
        group, device = self._groups[index], self._config.device
        batch = [tensor.to(device) for tensor in self._examples[index].tensors]
        if group.stacked_batch:
            batch = [tensor.expand(group.width, *tensor.shape) for tensor in batch]
        held = group.held_arguments(program, group.state_on(device, width))
        arguments = [argument.to(device) for argument in first_rows(program, with_batch(held, batch), width)]
        active = program.position_of("active")
        arguments[active] = torch.zeros_like(arguments[active])
        for position in program.accumulator_positions():  # they change even where nobody is active
            own = arguments[position]  # whose rows may be padded: a clone would lie otherwise
            arguments[position] = torch.empty_strided(
                own.shape, own.stride(), dtype=own.dtype, device=own.device
            ).copy_(own)
        return [
            argument.contiguous() if position in program.fed_positions else argument
            for position, argument in enumerate(arguments)
        ]

    def _fingerprint(self, graph: KernelGraph, width: int, facts: DeviceFacts) -> str:
        measured = ("measured", MEASUREMENT_VERSION, torch.__version__, self._switches())
        text = repr((graph.fingerprint(layouts=True), width, facts.name, *measured))
        return hashlib.sha256(text.encode()).hexdigest()

    def _switches(self) -> tuple[bool, ...]:
        """Torch's switches that decide which kernels a step calls."""
        if self._config.device.type != "cuda":
            return (self._config.deterministic,)
        tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return (self._config.deterministic, *tf32)

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

    @cached_property
    def _facts(self) -> DeviceFacts:
        if self._device is not None:
            return self._device.facts
        device = self._config.device
        if device.type == "cuda":
            count = torch.cuda.device_count()
            total = torch.cuda.get_device_properties(device).total_memory
            return DeviceFacts(torch.cuda.get_device_name(device), total, _host_bytes() // count)
        return DeviceFacts("cpu", _host_bytes(), _host_bytes())

    def _budget(self, budget: int | str | None) -> int:
        if budget is not None:
            return parse_budget(budget, device_bytes=self._facts.memory_bytes)
        device = self._config.device
        if self._device is None and device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return free + torch.cuda.memory_reserved(device)
        return self._facts.memory_bytes

    def _planned_groups(self, num_members: int | None) -> list[PlannedGroup]:
        """The groups by number; with ``num_members``, as if the only group had so many."""
        groups = [
            PlannedGroup(
                str(index),
                tuple(slot.name for _, slot in group.members),
                self._device is not None or fuses_well(group.traced, self._config),
            )
            for index, group in enumerate(self._groups)
        ]
        if num_members is None:
            return groups
        num_members = whole_number("num_members", num_members)
        if len(groups) != 1:
            raise ConfigError(
                f"num_members: expected a fleet of one architecture, got {len(groups)}; leave it out"
            )
        names = list(groups[0].members[:num_members])
        names += [f"member {number}" for number in range(len(names), num_members)]
        return [replace(groups[0], members=tuple(names))]


def _widths(search: PartitionSearch, index: int, num_partitions: int | None = None) -> set[int]:
    """The widths of a group that the first partitions, or all, are profiled with."""
    tried = search.partitions[:num_partitions]
    return {width for each in tried for number, width in search.profiled_widths(each) if number == index}


def _check_branches(plan: Plan, width: int, profile: Profile) -> None:
    """Refuse a plan whose records do not agree on which members train side by side."""
    number = plan.record.num_branches
    if profile.num_branches != number or profile.width != width or 1 < number < width:
        raise PlanError(
            f"expected {number} branches with one member each, or members that are fused, got a profile of "
            f"{profile.width} on {profile.num_branches} for {width}; plan again"
        )


def _host_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        raise BudgetError(
            "expected to learn the host's memory from the system, got nothing; name the budget in bytes"
        ) from None
