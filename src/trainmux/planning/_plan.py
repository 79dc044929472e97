"""Members and a byte budget → the plan with the least predicted step time that is found in time, proved.

Each partition is an arrangement of sub-arrays for each way that the policy lets them share the device. What
fits with nothing decided comes first. Of the others, those whose lower bound (`_relax`) is below the best
plan get a first schedule each, and the quickest is placed; then all are improved in turn. The search ends
when nothing is left to try, when the best plan is within 2% of the bound, or when its time is up.

A planner keeps what it finds, and a plan for one budget serves every larger one: asked for one budget after
another, predicted time does not rise with the budget. What cross-stream dependencies cost is in a plan's
predictions and in the price of copies to `auto`, not in the times by which schedules are compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from trainmux.errors import BudgetError, ConfigError
from trainmux.ir import Attempt, Multiplexing, PlanRecord, Profile, verify
from trainmux.planning._body import Infeasible
from trainmux.planning._placed import (
    ROUNDING,
    Arrangement,
    PlacedSchedule,
    ScheduleSearch,
    place_plainly,
    place_schedule,
)
from trainmux.planning._rewrite import rewrite
from trainmux.planning._timeline import timeline
from trainmux.planning.partition import (
    MAX_PARTITIONS,
    NUM_ALWAYS,
    Partition,
    PartitionSearch,
    PlannedGroup,
)
from trainmux.planning.policies._known import partitions_to_try, policy_named
from trainmux.planning.policies.auto import Auto
from trainmux.sizes import exact_bytes

TIME_LIMIT_SECONDS = 60.0
_CLOSE = 1.02
"""A plan that takes no longer than this many times the bound is not improved any more."""
_USUAL_GAP = 1.05
"""How many times its bound the first schedule of an arrangement may be expected to take."""
_BEHIND = 1.1
"""An arrangement whose schedules take so many times the best plan's time is improved less often."""
_SEARCH_SHARE = 0.7
"""The part of the time limit in which new plans are sought; the rest is to place and prove the best."""
_NUM_BISECTIONS = 8
_MOST_UNUSED = 1 / 4
"""Places on branches that have no member, for each member: fewer than that, for they take memory."""
_PROFILING, _SCHEDULING, _IMPROVING = "profiling", "scheduling by {}", "improving"

ProfileOf = Callable[[PlannedGroup, int], Profile]
"""The profile of a group's members fused to a width."""

BranchedOf = Callable[[PlannedGroup, int, int], Profile | None]
"""The profile of so many of a group's members side by side, on so many branches, where that is known."""


@dataclass(frozen=True)
class PlanProgress:
    """The progress of a stage of planning: ``done`` of ``total``, and what comes next in words.

    Stages are ``compiling``, ``profiling`` (a profile for each width), ``measuring`` (the nodes of one of
    them), ``scheduling by`` a policy (arrangements) and ``improving`` (schedules of the best ones). Each ends
    with ``done`` equal to ``total``. Once a plan is found, ``best_seconds`` is its step time; no plan of the
    arrangements takes less than ``bound_seconds``.
    """

    stage: str
    done: int
    total: int
    current: str
    best_seconds: float = math.inf
    bound_seconds: float = 0.0


@dataclass(frozen=True)
class BudgetCost:
    """The cost of a budget: the best plan's predicted step time, and the bytes it reserves."""

    budget_bytes: int
    step_seconds: float
    peak_bytes: int


Progress = Callable[[PlanProgress], None]


def checked_time_limit(time_limit: object) -> float:
    """Seconds, 0 or more; anything else is refused with `ConfigError`."""
    if isinstance(time_limit, int | float) and not isinstance(time_limit, bool) and time_limit >= 0:
        return time_limit
    raise ConfigError(f"time_limit must be 0 seconds or more, but got {time_limit!r}; leave it out")


class Planner:
    """Plans for several budgets, sharing profiles, bounds and the plans that were found.

    ``profile_of`` is called once for each group and width, after ``profile_seconds`` only for the first
    two partitions: others are then left out. Sub-arrays of about one width, all of which
    ``branched_of`` has a profile for, are tried that way too. ``fixed_bytes`` are reserved in addition to the
    slab, and what ``scratch_of`` says for the profile that needs the most: nodes of all sub-arrays run one by
    one. ``host_bytes`` bound copies on the host (``None``: what the profiles' device allows). ``time_limit``
    are seconds for one budget; the first plan that is found is returned in any case, and Ctrl-C returns the
    best so far. ``evaluations`` bounds and ``seed`` varies the improvement by ``auto``.

    Refused: an unknown policy (`ConfigError`), a budget that nothing fits (`BudgetError`, with one
    that works in ``smallest_bytes``).
    """

    def __init__(
        self,
        groups: Sequence[PlannedGroup],
        *,
        profile_of: ProfileOf,
        branched_of: BranchedOf = lambda group, num_members, num_branches: None,
        policy: str = "auto",
        fixed_bytes: int = 0,
        scratch_of: Callable[[Profile], int] = lambda profile: 0,
        host_bytes: int | None = None,
        max_partitions: int = MAX_PARTITIONS,
        profile_seconds: float = math.inf,
        time_limit: float = TIME_LIMIT_SECONDS,
        evaluations: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        known = policy_named(policy, seed=seed, evaluations=evaluations)
        self.policy = policy
        self.fixed_bytes = fixed_bytes
        self.time_limit = checked_time_limit(time_limit)
        self.by = known.policy
        self.progress = progress
        search = partitions_to_try(policy, groups, max_partitions)
        partitions, profiles = self._profiled(groups, search, profile_of, profile_seconds)
        if host_bytes is None:
            host_bytes = min(profile.device.host_bytes for profile in profiles.values())
        self.host_bytes = host_bytes
        self.arrangements: list[Arrangement] = []
        self._num_left_out = search.num_left_out + len(search.partitions) - len(partitions)
        for partition in partitions:
            fused = search.fuses or max(map(max, partition.widths)) == 1
            ways = [profiles if fused else {}, _branched(groups, partition, branched_of)]
            self._num_left_out += not any(ways)
            for found in filter(None, ways):
                multiplexings = known.multiplexings(partition)
                self.arrangements += _arrangements(groups, partition, found, multiplexings, scratch_of)
        self.found: list[PlacedSchedule] = []
        """Plans for any budget."""
        self._smallest: PlacedSchedule | None = None

    def plan(self, budget_bytes: int) -> PlanRecord:
        """The quickest plan within ``budget_bytes``, which count ``fixed_bytes`` too."""
        search = _BudgetSearch(self, budget_bytes - self.fixed_bytes)
        try:
            search.run()
        except KeyboardInterrupt:
            if search.best is None:
                raise
        if search.best is None:
            smallest = self.smallest()
            if smallest.reserved_bytes > search.available:
                raise self._no_plan(budget_bytes)
            search.take(smallest)
        assert search.best is not None
        return self._record(search.best, budget_bytes, search)

    def smallest_bytes(self) -> int:
        """A budget that works, as small as this search knows."""
        return self.smallest().reserved_bytes + self.fixed_bytes

    def curve(self, num_budgets: int) -> tuple[BudgetCost, ...]:
        """Step time at ``num_budgets`` budgets, evenly from the smallest to one that constrains nothing."""
        if num_budgets < 2:
            raise ConfigError(f"a curve needs at least 2 budgets, but got {num_budgets}; both ends are shown")
        low = self.smallest_bytes()
        high = max(low, self.plan(1 << 62).peak_bytes)
        budgets = [low + (high - low) * step // (num_budgets - 1) for step in range(num_budgets)]
        costs = []
        for budget in dict.fromkeys(budgets):
            plan = self.plan(budget)
            costs.append(BudgetCost(budget, plan.step_seconds, plan.peak_bytes))
        return tuple(costs)

    def bound_seconds(self, arrangement: Arrangement, limit_bytes: int) -> float:
        """A time that the policy's schedules do not go below; infinite where nothing fits."""
        if isinstance(self.by, Auto) and arrangement.plain_bytes > limit_bytes:
            return self.by.bound_seconds(arrangement.task(limit_bytes, self.host_bytes))
        return arrangement.compute_seconds

    def smallest(self) -> PlacedSchedule:
        """The candidate that reserves the fewest bytes, of the arrangement with the narrowest sub-arrays."""
        if self._smallest is None:
            narrowest = min(self.arrangements, key=lambda each: max(each.widths))
            plain = min(self.arrangements, key=lambda each: each.plain_bytes + each.scratch_bytes)
            found = (place_plainly(plain), self._smallest_of(narrowest))
            self._smallest = min(found, key=lambda each: each.reserved_bytes)
            self.found.append(self._smallest)
        return self._smallest

    def _smallest_of(self, arrangement: Arrangement) -> PlacedSchedule:
        """The policy's schedule for the fewest bytes, or the last that it finds at lower and lower limits."""
        if isinstance(self.by, Auto):
            with suppress(Infeasible):
                task = arrangement.task(0, self.host_bytes)
                return place_schedule(arrangement, self.by.smallest(task))
        best = place_plainly(arrangement)
        low, high = 0, best.slab_bytes
        for _ in range(_NUM_BISECTIONS):
            limit = (low + high) // 2
            found = ScheduleSearch(arrangement, self.by, limit, self.host_bytes).first()
            if found is None:
                low = limit
            else:
                best, high = found, min(limit, found.slab_bytes)
        return best

    def _no_plan(self, budget_bytes: int) -> BudgetError:
        smallest = self.smallest_bytes()
        hint = "" if self.policy == "auto" else ", or use policy 'auto'"
        profiles = self.smallest().arrangement.profiles
        if sum(tensor.size_bytes for each in profiles for tensor in each.tensors) > self.host_bytes:
            hint += f"; swaps are held down by the host, which has {exact_bytes(self.host_bytes)} for them"
        return BudgetError(
            f"expected a budget that policy {self.policy!r} can keep to, but got "
            f"{exact_bytes(budget_bytes)}, and the smallest that works is {exact_bytes(smallest)}; raise it "
            f"to that{hint}",
            smallest_bytes=smallest,
        )

    def _record(self, best: PlacedSchedule, budget_bytes: int, search: _BudgetSearch) -> PlanRecord:
        arrangement = best.arrangement
        fixed_bytes = self.fixed_bytes + arrangement.scratch_bytes
        program = rewrite(arrangement.profiles, best.schedule)
        verify(
            program,
            arrangement.profiles,
            budget_bytes=budget_bytes,
            fixed_bytes=fixed_bytes,
            host_bytes=self.host_bytes,
        )
        times = timeline(program.body, arrangement.profiles)
        return PlanRecord(
            policy=self.policy,
            budget_bytes=budget_bytes,
            fixed_bytes=fixed_bytes,
            profiles=arrangement.fingerprints(),
            partition=arrangement.partition(),
            schedule=best.schedule,
            peak_bytes=program.slab_bytes + fixed_bytes,
            host_bytes=program.host_bytes,
            step_seconds=times.seconds,
            stall_seconds=times.stall_seconds,
            recompute_seconds=times.recompute_seconds,
            swap_overlap=times.hidden_copy_seconds / times.copy_seconds if times.copy_seconds else 1.0,
            recompute_share=times.recompute_seconds / times.compute_seconds if times.compute_seconds else 0.0,
            attempts=tuple(self._attempt(option, best) for option in search.options),
            plain_peak_bytes=arrangement.plain_bytes + fixed_bytes,
            num_left_out=self._num_left_out,
            num_branches=arrangement.num_branches,
            bound_seconds=search.bound_seconds,
        )

    def _attempt(self, option: _Option, best: PlacedSchedule) -> Attempt:
        arrangement, found, why = option.arrangement, option.best, ""
        seconds = stall = recompute = 0.0
        peak = 0
        if arrangement is best.arrangement:
            found = best
        elif found is None:
            why = option.why(best.seconds)
            seconds = option.bound_seconds
        else:
            why = f"takes {found.seconds / best.seconds:.3f} times as long"
        if found is not None:
            times = timeline(found.program.body, arrangement.profiles, counts_sync=False)
            seconds, stall, recompute = found.seconds, times.stall_seconds, times.recompute_seconds
            peak = found.reserved_bytes + self.fixed_bytes
        return Attempt(
            self.policy,
            arrangement.widths,
            arrangement.multiplexing,
            seconds,
            peak,
            stall,
            recompute,
            why,
            arrangement.num_branches,
        )

    def _profiled(
        self,
        groups: Sequence[PlannedGroup],
        search: PartitionSearch,
        profile_of: ProfileOf,
        seconds: float,
    ) -> tuple[list[Partition], dict[tuple[int, int], Profile]]:
        """The partitions that are profiled in time, and the profile of each of their groups and widths."""
        ends_at = monotonic() + seconds
        widths_of = {partition: search.profiled_widths(partition) for partition in search.partitions}
        total = len({key for keys in widths_of.values() for key in keys})
        kept: list[Partition] = []
        profiles: dict[tuple[int, int], Profile] = {}
        for partition, keys in widths_of.items():
            missing = [key for key in keys if key not in profiles]
            if missing and len(kept) >= NUM_ALWAYS and monotonic() >= ends_at:
                continue
            kept.append(partition)
            for number, width in missing:
                self.report(_PROFILING, len(profiles), total, f"{groups[number].name} ×{width}")
                profiles[number, width] = profile_of(groups[number], width)
        self.report(_PROFILING, total, total, "all widths")
        return kept, profiles

    def report(
        self, stage: str, done: int, total: int, current: str, best: float = math.inf, bound: float = 0.0
    ) -> None:
        if self.progress is not None:
            self.progress(PlanProgress(stage, done, total, current, best, bound))


@dataclass
class _Option:
    """An arrangement within a limit: the best of it so far, a bound, and the search that goes on."""

    arrangement: Arrangement
    limit_bytes: int
    bound_seconds: float = 0.0
    best: PlacedSchedule | None = None
    search: ScheduleSearch | None = None

    @property
    def fits_plainly(self) -> bool:
        return self.arrangement.plain_bytes <= self.limit_bytes

    @property
    def expected_seconds(self) -> float:
        """The time of the schedule that is drawn; somewhat more than the bound where there is none."""
        if self.search is None or self.search.drawn is None:
            return _USUAL_GAP * self.bound_seconds
        return self.search.drawn.seconds

    @property
    def quickest_seconds(self) -> float:
        """The time of the quickest schedule that was drawn; infinite where there is none."""
        return math.inf if self.search is None else self.search.seconds

    def why(self, best_seconds: float) -> str:
        """Why it has no plan, in words."""
        if self.bound_seconds < math.inf and self.search is None:
            return f"within the budget it takes at least {self.bound_seconds:.6g} s"
        if self.search is not None and self.search.lacking_bytes:
            return f"needs {self.search.lacking_bytes} bytes more"
        if self.quickest_seconds < math.inf:
            return f"takes {self.quickest_seconds / best_seconds:.3f} times as long"
        return "does not fit"


class _BudgetSearch:
    """The search within ``available`` bytes, fixed ones aside."""

    def __init__(self, planner: Planner, available: int) -> None:
        self.available = available
        self.best: PlacedSchedule | None = None
        self._planner = planner
        self._ends_at = monotonic() + _SEARCH_SHARE * planner.time_limit
        self.options = [_Option(each, available - each.scratch_bytes) for each in planner.arrangements]

    @property
    def seconds(self) -> float:
        """The time to beat."""
        return math.inf if self.best is None else self.best.seconds

    @property
    def bound_seconds(self) -> float:
        """A time that no arrangement that was tried goes below."""
        return min(self.seconds, *(option.bound_seconds for option in self.options))

    def run(self) -> None:
        planner = self._planner
        for found in planner.found:
            if found.reserved_bytes <= self.available:
                self.take(found)
        self._take_plain()
        for option in self.options:
            # What cannot win by its nodes alone needs no better bound.
            option.bound_seconds = option.arrangement.compute_seconds
            if not self._is_beaten(option):
                option.bound_seconds = planner.bound_seconds(option.arrangement, option.limit_bytes)
        self._place_best_first()
        self._improve()

    def _place_best_first(self) -> None:
        """Draw a schedule of each arrangement that may win, and place the quickest until one fits."""
        stage, num_options = _SCHEDULING.format(self._planner.policy), len(self.options)
        open_ones = list(self.options)
        while open_ones and (self.best is None or not self._is_late()):
            option = min(open_ones, key=lambda each: each.expected_seconds)
            search = option.search
            has_no_more = search is not None and search.drawn is None and (search.is_over or option.best)
            is_slower = search is not None and option.expected_seconds >= self.seconds
            if has_no_more or is_slower or self._is_beaten(option):
                open_ones.remove(option)
                continue
            self._report(stage, num_options - len(open_ones), num_options, option)
            if search is not None and search.drawn is not None:
                self._place(option)
            else:
                option.search = search or ScheduleSearch(
                    option.arrangement, self._planner.by, option.limit_bytes, self._planner.host_bytes
                )
                option.search.draw()
        self._report(stage, num_options, num_options)

    def take(self, found: PlacedSchedule) -> None:
        """Note a plan, and make it the best if it is."""
        for option in self.options:
            if option.arrangement is found.arrangement and found.is_better_than(option.best):
                option.best = found
        if found.is_better_than(self.best):
            self.best = found

    def _take_plain(self) -> None:
        """Take what fits with nothing decided, the quickest first; the rest of it cannot be quicker."""
        fitting = [option for option in self.options if option.fits_plainly]
        for option in sorted(fitting, key=lambda option: option.arrangement.compute_seconds):
            if option.arrangement.compute_seconds < self.seconds * (1 - ROUNDING):
                found = place_plainly(option.arrangement)
                if found.slab_bytes <= option.limit_bytes:
                    self.take(found)

    def _improve(self) -> None:
        """Draw further schedules of all arrangements in turn, until nothing is left or time is up.

        Of those that are far behind the best plan only one has its turn in each round.
        """
        num_drawn = 0
        in_turn = deque(self.options)
        while self.seconds > self.bound_seconds * _CLOSE and not self._is_late():
            in_turn.rotate(-1)
            open_ones = [
                option
                for option in in_turn
                if option.search is not None and not option.search.is_over and not self._is_beaten(option)
            ]
            if not open_ones:
                break
            far_behind = [each for each in open_ones if each.quickest_seconds > _BEHIND * self.seconds]
            close = [each for each in open_ones if each not in far_behind]
            for option in (*close, *far_behind[:1]):
                self._report(_IMPROVING, num_drawn, num_drawn + 1, option)
                num_drawn += 1
                self._draw(option)
                if self._is_late():
                    break
        if num_drawn:
            self._report(_IMPROVING, num_drawn, num_drawn)

    def _draw(self, option: _Option) -> None:
        """Draw one schedule more, and place it if it is quicker than the best plan."""
        assert option.search is not None
        option.search.draw()
        while option.search.drawn is not None and option.search.drawn.seconds < self.seconds:
            self._place(option)

    def _place(self, option: _Option) -> None:
        assert option.search is not None
        found = option.search.place()
        if found is not None:
            self._planner.found.append(found)
            self.take(found)

    def _is_beaten(self, option: _Option) -> bool:
        return option.bound_seconds * (1 + ROUNDING) >= self.seconds or option.bound_seconds == math.inf

    def _is_late(self) -> bool:
        return monotonic() >= self._ends_at

    def _report(self, stage: str, done: int, total: int, option: _Option | None = None) -> None:
        current = option.arrangement.in_words if option is not None else "all looked at"
        self._planner.report(stage, done, total, current, self.seconds, self.bound_seconds)


def _branched(
    groups: Sequence[PlannedGroup], partition: Partition, branched_of: BranchedOf
) -> dict[tuple[int, int], Profile]:
    """Profiles of the partition's sub-arrays with their members side by side; none where one is not known.

    All sub-arrays have the same number of branches, which share the slab's memory between them: as many as
    the widest has members. Narrower ones leave some of it unused, so there may be few of those, and none
    where members can be shared out evenly: what is in between was not found to gain for the time it takes.
    """
    widths = [width for of_group in partition.widths for width in of_group]
    num_branches = max(widths)
    num_unused = sum(num_branches - width for width in widths)
    if num_branches == 1 or num_unused >= _MOST_UNUSED * sum(widths):
        return {}
    if num_unused and sum(widths) % 2 == 0:
        return {}
    found = {
        (number, width): branched_of(group, width, num_branches)
        for number, (group, of_group) in enumerate(zip(groups, partition.widths, strict=True))
        for width in of_group
    }
    known = {key: profile for key, profile in found.items() if profile is not None}
    return known if len(known) == len(found) else {}


def _arrangements(
    groups: Sequence[PlannedGroup],
    partition: Partition,
    profiles: dict[tuple[int, int], Profile],
    multiplexings: Sequence[Multiplexing],
    scratch_of: Callable[[Profile], int],
) -> list[Arrangement]:
    """A partition in each way its sub-arrays can share the device, closest iteration times side by side."""
    sub_arrays = [(members, profiles[number, len(members)]) for number, members in partition.members(groups)]
    sub_arrays.sort(key=lambda pair: -sum(node.seconds for node in pair[1].nodes))
    return [
        Arrangement(
            tuple(members for members, _ in sub_arrays),
            tuple(profile for _, profile in sub_arrays),
            multiplexing,
            max((scratch_of(profile) for _, profile in sub_arrays), default=0),
        )
        for multiplexing in multiplexings
    ]
