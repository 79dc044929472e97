"""Members and a byte budget → the plan with the least predicted step time that fits, proved.

Every partition is tried in every way that the policy knows, beginning with the quickest that fits with
nothing decided. An arrangement is left out only where it is certain that it cannot be quicker than what was
found: by the time of its nodes, or by what its limit forces it to copy and recompute (`_bound`). Whatever is
left out so would not have been chosen, so the guarantee of `_candidates` holds: time never rises as the
budget rises (by more than the rounding of sums, one part in 10⁹). That is the time by which drafts are
compared; what it costs to meet copies is in a plan's predictions only. Of arrangements that take the same, as
all do that hide their copies, the one is chosen that loses the least if copies are slower than predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainmux.errors import BudgetError, ConfigError, PlanError
from trainmux.ir import Attempt, Multiplexing, PlanRecord, Profile, verify
from trainmux.planning._arrangement import ROUNDING, Arrangement, Candidate
from trainmux.planning._candidates import SAME, Candidates
from trainmux.planning._rewrite import rewrite
from trainmux.planning._timeline import timeline
from trainmux.planning.partition import MAX_PARTITIONS, Partition, PlannedGroup, find_partitions
from trainmux.planning.policies import policy_named
from trainmux.sizes import exact_bytes

BESIDE_AUTO = ("mutwo", "capuchin", "recompute_only", "swap_only")
"""Policies whose plans `auto` has to beat, or takes."""

_PROFILING = "profiling"
"""Stage name while profiles are collected."""

ProfileOf = Callable[[PlannedGroup, int], Profile]
"""The profile of a group's members fused to a width."""

BranchedOf = Callable[[PlannedGroup, int, int], Profile | None]
"""The profile of so many of a group's members side by side, on so many branches, where that is known."""

_MOST_UNUSED = 1 / 4
"""Places on branches that have no member, for each member: fewer than that, for they take memory."""


@dataclass(frozen=True)
class PlanProgress:
    """How far a stage of planning is: ``done`` of ``total``, and what comes next in words.

    Stages are ``compiling``, ``profiling`` (a profile for each width), ``measuring`` (the nodes of one of
    them) and ``scheduling by`` a policy (arrangements). Each ends with ``done`` equal to ``total``.
    """

    stage: str
    done: int
    total: int
    current: str


@dataclass(frozen=True)
class BudgetCost:
    """The cost of a budget: the best plan's predicted step time, and the bytes it reserves."""

    budget_bytes: int
    step_seconds: float
    peak_bytes: int


Progress = Callable[[PlanProgress], None]


class Planner:
    """Plans for several budgets, sharing profiles and everything that does not depend on the budget.

    ``profile_of`` is called once for each group and width; sub-arrays of about one width, all of which
    ``branched_of`` has a profile for, are tried that way too. ``fixed_bytes`` are reserved beside the slab,
    and what ``beside_of`` says for the profile that needs the most: nodes of all sub-arrays run one by one.
    ``host_bytes`` bound copies on the host (``None``: what the profiles' device allows). ``evaluations`` and
    ``seed`` are for policies that search. The same arguments give the same plans.

    Refused: an unknown policy or group (`ConfigError`), a budget that nothing fits (`BudgetError`, with one
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
        beside_of: Callable[[Profile], int] = lambda profile: 0,
        host_bytes: int | None = None,
        max_partitions: int = MAX_PARTITIONS,
        evaluations: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        known = policy_named(policy, seed=seed, evaluations=evaluations)
        if fixed_bytes < 0:
            raise ConfigError(f"fixed_bytes must be 0 or more, but got {fixed_bytes}; leave it out")
        names = [member for group in groups for member in group.members]
        if len(set(names)) < len(names):
            raise ConfigError("members must have names of their own, but one is used twice; rename it")
        self.policy = policy
        self.fixed_bytes = fixed_bytes
        self._progress = progress
        search = find_partitions([len(group.members) for group in groups], max_partitions=max_partitions)
        self._num_left_out = search.num_left_out
        profiles = self._profiles(groups, search.partitions, profile_of)
        if host_bytes is None:
            host_bytes = min(profile.device.host_bytes for profile in profiles.values())
        self._host_bytes = host_bytes
        arrangements = [
            arrangement
            for partition in search.partitions
            for ways in (profiles, _branched(groups, partition, branched_of))
            if ways
            for arrangement in _arrangements(
                groups, partition, ways, known.multiplexings(partition), beside_of
            )
        ]
        self._all: list[Candidates] = []
        self._all += [
            Candidates(each, known, self._host_bytes, partial(self._worth, each.beside_bytes))
            for each in arrangements
        ]
        if not self._all:
            raise ConfigError(
                f"expected partitions that policy {policy!r} knows how to share the device between, got none "
                f"among {len(search.partitions)}; raise max_partitions"
            )
        beside = [name for name in BESIDE_AUTO if policy == "auto" and _knows_one(name, search.partitions)]
        self._others = [
            Planner(
                groups,
                profile_of=lambda group, width: profiles[list(groups).index(group), width],
                branched_of=branched_of,
                policy=other,
                fixed_bytes=fixed_bytes,
                beside_of=beside_of,
                host_bytes=self._host_bytes,
                max_partitions=max_partitions,
                progress=None if progress is None else partial(_tell_unless_profiling, progress),
            )
            for other in beside
        ]
        narrowest = min(range(len(self._all)), key=lambda n: (max(arrangements[n].widths), n))
        self._narrowest = self._all[narrowest]

    def plan(self, budget_bytes: int) -> PlanRecord:
        """The quickest plan within ``budget_bytes``, which count ``fixed_bytes`` too."""
        found = self._quickest(budget_bytes, _Mark())
        if found is None:
            raise self._no_plan(budget_bytes)
        return found[0]

    def _quickest(self, budget_bytes: int, to_beat: _Mark) -> tuple[PlanRecord, _Mark] | None:
        """The best plan, if it beats ``to_beat``, and what there is to beat then."""
        available = budget_bytes - self.fixed_bytes
        search = _Search(self._all, available, to_beat)
        for done, number in enumerate(search.in_order):
            self._report(self._stage, done, len(self._all), self._all[number].arrangement.in_words)
            search.look_at(number)
        self._report(self._stage, len(self._all), len(self._all), "all looked at")
        smallest = self._smallest_if_quicker(search.to_beat.seconds, available)
        if smallest is not None and search.to_beat.is_beaten_by(smallest):
            search.take(self._all.index(self._narrowest), smallest)
        beside: PlanRecord | None = None
        for planner in self._others:
            found = planner._quickest(budget_bytes, search.to_beat)
            if found is not None:
                beside, search.to_beat = found
        if beside is not None:
            attempts = self._attempts(search.notes, search.to_beat.seconds, None)
            plan = replace(beside, policy=self.policy, attempts=(*beside.attempts, *attempts))
            return plan, search.to_beat
        if search.best is None:
            return None
        attempts = self._attempts(search.notes, search.best.seconds, search.chosen)
        chosen = self._all[search.chosen]
        best = chosen.with_slack(search.best, available - chosen.arrangement.beside_bytes)
        plan = self._emit(chosen, best, budget_bytes, attempts)
        return plan, search.to_beat

    def _worth(self, beside_bytes: int, limit_bytes: int) -> float:
        """Seconds of the quickest arrangement that needs no decision where another one has these bytes."""
        available = beside_bytes + limit_bytes
        fitting = (each.least_seconds for each in self._all if _plain_need(each) <= available)
        return min(fitting, default=math.inf)

    def _attempts(
        self, notes: dict[int, tuple[Candidate | None, str]], seconds: float, chosen: int | None
    ) -> tuple[Attempt, ...]:
        return tuple(self._attempt(number, note, seconds, number == chosen) for number, note in notes.items())

    def smallest_bytes(self) -> int:
        """A budget that works, as small as this search knows."""
        smallest = self._narrowest.smallest()
        if smallest is not None:
            return smallest.slab_bytes + self._fixed_bytes_of(self._narrowest.arrangement)
        lowest: int | None = None
        for candidates in self._all:
            beside = candidates.arrangement.beside_bytes
            plain = candidates.plain().slab_bytes + beside
            lowest = plain if lowest is None else min(lowest, plain)
            for limit in candidates.limits():
                if limit + beside >= lowest:
                    break
                if candidates.best(limit, math.inf) is not None:
                    lowest = limit + beside
        assert lowest is not None
        return lowest + self.fixed_bytes

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

    def _smallest_if_quicker(self, to_beat: float, available: int) -> Candidate | None:
        """The plan with the fewest bytes, where it fits and nothing quicker was found."""
        narrowest = self._narrowest
        available -= narrowest.arrangement.beside_bytes
        bound = narrowest.bound(available) if narrowest.has_decisions else narrowest.least_seconds
        if to_beat <= bound * (1 + ROUNDING):
            return None
        smallest = narrowest.smallest(to_beat)
        if smallest is None or smallest.slab_bytes > available:
            return None
        return smallest if smallest.seconds < to_beat else None

    def _no_plan(self, budget_bytes: int) -> BudgetError:
        smallest = self.smallest_bytes()
        hint = "" if self.policy == "auto" else ", or use policy 'auto'"
        if self._swappable_bytes() > self._host_bytes:
            hint += f"; swaps are held down by the host, which has {exact_bytes(self._host_bytes)} for them"
        return BudgetError(
            f"expected a budget that policy {self.policy!r} can keep to, but got "
            f"{exact_bytes(budget_bytes)}, "
            f"and the smallest that works is {exact_bytes(smallest)}; raise it to that{hint}",
            smallest_bytes=smallest,
        )

    def _swappable_bytes(self) -> int:
        """All that a policy could ever have on the host at once."""
        profiles = self._narrowest.arrangement.profiles
        return sum(tensor.size_bytes for profile in profiles for tensor in profile.tensors)

    def _attempt(
        self, number: int, note: tuple[Candidate | None, str], best_seconds: float, is_chosen: bool
    ) -> Attempt:
        arrangement = self._all[number].arrangement
        candidate, why = note
        if candidate is None:
            seconds = self._all[number].least_seconds if why.startswith("its nodes") else math.inf
            return Attempt(
                self.policy,
                arrangement.widths,
                arrangement.multiplexing,
                seconds,
                0,
                0.0,
                0.0,
                why,
                arrangement.num_branches,
            )
        times = timeline(candidate.program.body, arrangement.profiles, counts_meetings=False)
        if not is_chosen:
            why = f"takes {candidate.seconds / best_seconds:.3f} times as long"
        return Attempt(
            self.policy,
            arrangement.widths,
            arrangement.multiplexing,
            candidate.seconds,
            candidate.slab_bytes + self._fixed_bytes_of(arrangement),
            times.stall_seconds,
            times.recompute_seconds,
            why,
            arrangement.num_branches,
        )

    def _emit(
        self, candidates: Candidates, best: Candidate, budget_bytes: int, attempts: tuple[Attempt, ...]
    ) -> PlanRecord:
        arrangement = candidates.arrangement
        fixed_bytes = self._fixed_bytes_of(arrangement)
        program = rewrite(arrangement.profiles, best.schedule)
        verify(
            program,
            arrangement.profiles,
            budget_bytes=budget_bytes,
            fixed_bytes=fixed_bytes,
            host_bytes=self._host_bytes,
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
            attempts=attempts,
            plain_peak_bytes=candidates.plain_bytes + fixed_bytes,
            num_left_out=self._num_left_out,
            num_branches=arrangement.num_branches,
        )

    @property
    def _stage(self) -> str:
        return f"scheduling by {self.policy}"

    def _fixed_bytes_of(self, arrangement: Arrangement) -> int:
        return self.fixed_bytes + arrangement.beside_bytes

    def _profiles(
        self, groups: Sequence[PlannedGroup], partitions: Sequence[Partition], profile_of: ProfileOf
    ) -> dict[tuple[int, int], Profile]:
        """Each group's profile for each width that occurs."""
        wanted = dict.fromkeys(
            (number, width)
            for partition in partitions
            for number, widths in enumerate(partition.widths)
            for width in widths
        )
        profiles = {}
        for done, (number, width) in enumerate(wanted):
            self._report(_PROFILING, done, len(wanted), f"{groups[number].name} ×{width}")
            profile = profile_of(groups[number], width)
            if profile.width != width:
                raise PlanError(
                    f"profile_of must return a profile of width {width}, but got one of width "
                    f"{profile.width}; fuse the group to that width and profile it"
                )
            profiles[number, width] = profile
        self._report(_PROFILING, len(wanted), len(wanted), "all widths")
        return profiles

    def _report(self, stage: str, done: int, total: int, current: str) -> None:
        if self._progress is not None:
            self._progress(PlanProgress(stage, done, total, current))


@dataclass(frozen=True)
class _Mark:
    """What is to be beaten: seconds of a step, and what they are with slower copies."""

    seconds: float = math.inf
    strained_seconds: float = math.inf

    @property
    def seconds_to_be_under(self) -> float:
        """What takes as long or longer can beat nothing; as long is good enough where copies count."""
        is_calm = self.strained_seconds <= self.seconds * (1 + ROUNDING)
        return self.seconds if is_calm else self.seconds * (1 + 2 * ROUNDING)

    def is_beaten_by(self, candidate: Candidate) -> bool:
        if candidate.seconds < self.seconds * (1 - SAME):
            return True
        is_calmer = candidate.strained_seconds < self.strained_seconds * (1 - ROUNDING)
        return is_calmer and candidate.seconds <= self.seconds * (1 + SAME)

    def lowered_to(self, candidate: Candidate) -> _Mark:
        return _Mark(min(self.seconds, candidate.seconds), candidate.strained_seconds)


class _Search:
    """What was found so far within ``available`` bytes; ``to_beat`` is what counts from now on.

    What fits with nothing decided comes first, the quickest of it: that costs no search and spares others.
    The rest follows by the least time that it can take. The order decides how soon others can be ruled out,
    not what is found.
    """

    def __init__(self, everything: Sequence[Candidates], available: int, to_beat: _Mark) -> None:
        self.to_beat = to_beat
        self.best: Candidate | None = None
        self.chosen = -1
        self.notes: dict[int, tuple[Candidate | None, str]] = {}
        self._all = everything
        self._available = [available - candidates.arrangement.beside_bytes for candidates in everything]
        self._bounds = [
            candidates.bound(limit) for candidates, limit in zip(everything, self._available, strict=True)
        ]
        numbers = range(len(everything))
        fits = [_plain_need(candidates) <= available for candidates in everything]
        self.in_order = sorted(numbers, key=lambda n: (not fits[n], self._bounds[n], n))

    def look_at(self, number: int) -> None:
        """Take what an arrangement offers if it is quicker, or note why it is not taken."""
        candidates = self._all[number]
        to_be_under = self.to_beat.seconds_to_be_under
        for seconds, why in (
            (candidates.least_seconds, "its nodes alone take {:.6g} s"),
            (self._bounds[number], "within the budget it takes at least {:.6g} s"),
        ):
            if to_be_under <= seconds * (1 + ROUNDING) and seconds < math.inf:
                self.notes[number] = (None, why.format(seconds))
                return
        available = self._available[number]
        found = candidates.best(available, to_be_under)
        self.notes[number] = (found, "" if found is not None else _why_not(candidates, available))
        if found is not None and self.to_beat.is_beaten_by(found):
            self.take(number, found)

    def take(self, number: int, found: Candidate) -> None:
        """Make a candidate the one to beat."""
        self.best, self.chosen = found, number
        self.to_beat = self.to_beat.lowered_to(found)
        self.notes[number] = (found, "")


def _tell_unless_profiling(progress: Progress, step: PlanProgress) -> None:
    """Pass progress on; profiles that are there already are not worth a word."""
    if step.stage != _PROFILING:
        progress(step)


def _plain_need(candidates: Candidates) -> int:
    """What an arrangement needs with nothing decided, in the slab and beside it."""
    return candidates.plain_bytes + candidates.arrangement.beside_bytes


def _knows_one(policy: str, partitions: Sequence[Partition]) -> bool:
    """Whether a policy has something to say about any of the partitions."""
    known = policy_named(policy)
    return any(known.multiplexings(partition) for partition in partitions)


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
    beside_of: Callable[[Profile], int],
) -> list[Arrangement]:
    """A partition in each way its sub-arrays can share the device, closest iteration times side by side."""
    sub_arrays = [(members, profiles[number, len(members)]) for number, members in partition.members(groups)]
    sub_arrays.sort(key=lambda pair: -sum(node.seconds for node in pair[1].nodes))
    return [
        Arrangement(
            tuple(members for members, _ in sub_arrays),
            tuple(profile for _, profile in sub_arrays),
            multiplexing,
            max((beside_of(profile) for _, profile in sub_arrays), default=0),
        )
        for multiplexing in multiplexings
    ]


def _why_not(candidates: Candidates, available: int) -> str:
    """Why an arrangement has nothing that fits, in words."""
    if not candidates.has_decisions:
        return f"needs {candidates.plain_bytes - available} bytes more"
    need = candidates.least_need or candidates.least_bytes
    if need > available:
        return f"needs {need - available} bytes more"
    return "cannot be quicker within its limit, or does not fit"
