"""What every policy's plans hold to: proved, within the budget, the same again, no slower with more."""

from __future__ import annotations

import sys
from functools import cache
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.random_steps import random_profile
from tests.symbolic_machine import fault

from trainmux.errors import BudgetError, ConfigError
from trainmux.ir import Multiplexing, Plan, Profile, find_violations, verify
from trainmux.planning import POLICY_NAMES, Group, Planner, PlanProgress, rewrite, timeline

sys.path.insert(0, str(Path(__file__).parents[1] / "ir"))
from mutants import ALWAYS_WRONG, WRONG_UNLESS_REDUNDANT

POLICIES = sorted(POLICY_NAMES)
EVALUATIONS = 10


@cache
def profile(seed: int, width: int) -> Profile:
    return random_profile(seed, width)


def group(num_members: int) -> Group:
    return Group("g", tuple(f"m{number}" for number in range(num_members)))


def beside_bytes(seed: int, width: int) -> int:
    """What nodes of a sub-array need beside the slab: nothing for some seeds."""
    return seed % 3 * 64 * width


def planner(seed: int, num_members: int, policy: str) -> Planner:
    return Planner(
        [group(num_members)],
        profile_of=lambda _, width: profile(seed, width),
        beside_of=lambda profile: beside_bytes(seed, profile.width),
        policy=policy,
        evaluations=EVALUATIONS if policy == "auto" else None,
    )


def prove(plan: Plan, seed: int) -> None:
    profiles = [profile(seed, len(sub_array.members)) for sub_array in plan.partition]
    program = rewrite(profiles, plan.schedule)
    verify(program, profiles, budget_bytes=plan.budget_bytes, fixed_bytes=plan.fixed_bytes)
    assert plan.fixed_bytes == max(beside_bytes(seed, len(sub_array.members)) for sub_array in plan.partition)
    assert plan.peak_bytes == program.slab_bytes + plan.fixed_bytes <= plan.budget_bytes
    assert plan.host_bytes == program.host_bytes
    assert plan.step_seconds == pytest.approx(timeline(program.body, profiles).seconds)
    names = [name for sub_array in plan.partition for name in sub_array.members]
    assert sorted(names) == sorted(set(names))
    assert [attempt for attempt in plan.attempts if not attempt.lost_because]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(seed=st.integers(0, 40), num_members=st.integers(1, 4), share=st.floats(0.0, 1.1))
def test_a_plan_is_proved_or_a_budget_is_named_that_works(
    policy: str, seed: int, num_members: int, share: float
) -> None:
    search = planner(seed, num_members, policy)
    plain = search.plan(1 << 40)
    assert not plain.swaps
    assert not plain.recomputes
    prove(plain, seed)
    budget = max(1, int(plain.peak_bytes * share))
    try:
        plan = search.plan(budget)
    except BudgetError as error:
        smallest = error.smallest_bytes
    else:
        smallest = None
        prove(plan, seed)
        assert plan.step_seconds >= plain.step_seconds * (1 - 1e-9)
    if smallest is not None:
        assert smallest > budget
        prove(search.plan(smallest), seed)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_budget_is_never_slower(policy: str) -> None:
    for seed in (1, 2) if policy != "auto" else (1,):
        search = planner(seed, 3, policy)
        low, high = search.smallest_bytes(), search.plan(1 << 40).peak_bytes
        times = [search.plan(low + (high - low) * step // 6).step_seconds for step in range(7)]
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(seed=st.integers(0, 10**6), num_members=st.integers(1, 4), shares=st.tuples(*[st.floats(0, 1)] * 2))
def test_of_two_budgets_the_larger_is_not_slower(
    policy: str, seed: int, num_members: int, shares: tuple[float, float]
) -> None:
    """Each budget asked of a planner of its own: what one has worked on before must not matter."""
    search = planner(seed, num_members, policy)
    low, high = search.smallest_bytes(), search.plan(1 << 40).peak_bytes
    budgets = sorted(int(low + share * (high - low)) for share in shares)
    plans = [planner(seed, num_members, policy).plan(budget) for budget in budgets]
    assert plans[1].step_seconds <= plans[0].step_seconds * (1 + 1e-9)
    assert plans == [search.plan(budget) for budget in budgets]


def test_auto_is_at_least_as_quick_as_the_others() -> None:
    for seed in (3, 5):
        high = planner(seed, 4, "auto").plan(1 << 40).peak_bytes
        low = planner(seed, 4, "auto").smallest_bytes()
        for share in (0.35, 0.7):
            budget = int(low + share * (high - low))
            best = planner(seed, 4, "auto").plan(budget).step_seconds
            for policy in sorted(set(POLICIES) - {"auto"}):
                try:
                    other = planner(seed, 4, policy).plan(budget).step_seconds
                except BudgetError:
                    continue
                assert best <= other * (1 + 1e-9), (seed, share, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_question_gets_the_same_plan(policy: str) -> None:
    budget = int(planner(7, 3, policy).smallest_bytes() * 1.1)
    assert planner(7, 3, policy).plan(budget) == planner(7, 3, policy).plan(budget)


def test_auto_works_below_static_memory() -> None:
    seed, num_members = 11, 4
    static = sum(t.size_bytes for t in profile(seed, 1).tensors if t.byte_class.is_static) * num_members
    search = planner(seed, num_members, "auto")
    smallest = search.smallest_bytes()
    assert smallest < static
    prove(search.plan(smallest), seed)


@pytest.mark.parametrize("policy", ["mutwo", "capuchin", "auto"])
def test_mutants_of_planned_programs_are_killed(policy: str) -> None:
    """Each for its own reason; a wait or a copy that is dropped, wherever it was not redundant."""
    seed, num_members = 6, 2
    search = planner(seed, num_members, policy)
    plan = search.plan(int(search.smallest_bytes() * 1.02))
    assert plan.swaps
    assert plan.recomputes
    profiles = [profile(seed, len(sub_array.members)) for sub_array in plan.partition]
    program = rewrite(profiles, plan.schedule)
    budget = program.slab_bytes
    assert not find_violations(program, profiles, budget_bytes=budget)
    killed: set[str] = set()
    for mutate in ALWAYS_WRONG:
        for mutant in mutate(program, profiles):
            checked = budget if mutant.budget_bytes is None else mutant.budget_bytes
            found = find_violations(mutant.program, profiles, budget_bytes=checked)
            assert mutant.kinds & {each.kind for each in found}, (mutate.__name__, mutant.name)
            killed.add(mutate.__name__)
    assert len(killed) >= len(ALWAYS_WRONG) - 2  # not every program has a recomputation, or a source for it
    for mutate in WRONG_UNLESS_REDUNDANT:
        for mutant in islice(mutate(program, profiles), 30):
            found = find_violations(mutant.program, profiles, budget_bytes=budget)
            assert bool(found) == bool(fault(mutant.program, profiles)), (mutate.__name__, mutant.name)


def test_pairs_are_rings_and_capuchin_is_one_array() -> None:
    plan = planner(2, 4, "mutwo").plan(1 << 40)
    assert plan.schedule.multiplexing is Multiplexing.RING
    assert {attempt.multiplexing for attempt in plan.attempts} == {Multiplexing.RING}
    assert {attempt.widths for attempt in plan.attempts} == {(2, 2), (1, 1, 1, 1)}
    assert [len(sub_array.members) for sub_array in planner(2, 4, "capuchin").plan(1 << 40).partition] == [4]


def test_nothing_is_decided_by_none_and_one_kind_of_thing_by_its_neighbours() -> None:
    """As many members as fit are fused, the rest runs in turns, and nothing leaves or is made again."""
    seen = {"none": set(), "swap_only": set(), "recompute_only": set()}
    for policy, kinds in seen.items():
        search = planner(5, 4, policy)
        low, high = search.smallest_bytes(), search.plan(1 << 40).peak_bytes
        for share in (0.0, 0.3, 0.6):
            plan = search.plan(int(low + share * (high - low)))
            assert plan.schedule.multiplexing is Multiplexing.TURNS
            kinds |= {type(record).__name__ for record in (*plan.swaps, *plan.recomputes)}
    assert seen == {"none": set(), "swap_only": {"Swap"}, "recompute_only": {"Recomputation"}}


def test_a_plan_says_how_far_its_plain_peak_is_over_the_limit() -> None:
    search = planner(6, 4, "capuchin")
    roomy = search.plan(1 << 40)
    assert roomy.peak_over_limit == 0
    assert roomy.plain_peak_bytes <= roomy.peak_bytes
    tight = search.plan(search.smallest_bytes())
    assert tight.plain_peak_bytes == roomy.plain_peak_bytes
    assert tight.peak_over_limit == pytest.approx(tight.plain_peak_bytes / tight.budget_bytes - 1)
    assert tight.peak_over_limit > 0
    # Sub-arrays have less in use at a time than all members fused: §5.3 (d).
    narrow = planner(6, 4, "mutwo").plan(tight.budget_bytes)
    assert narrow.peak_over_limit < tight.peak_over_limit


def test_what_the_bound_on_partitions_left_out_is_counted() -> None:
    def left_out(max_partitions: int) -> int:
        search = Planner(
            [group(6)],
            profile_of=lambda _, width: profile(3, width),
            policy="none",
            max_partitions=max_partitions,
        )
        return search.plan(1 << 40).num_left_out

    everything = left_out(1000)
    assert everything == 0
    assert left_out(3) - left_out(4) == 1


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_every_stage_of_the_search_is_told_from_beginning_to_end(policy: str) -> None:
    told: list[PlanProgress] = []
    search = Planner(
        [group(3)],
        profile_of=lambda _, width: profile(4, width),
        policy=policy,
        evaluations=EVALUATIONS if policy == "auto" else None,
        progress=told.append,
    )
    search.plan(int(search.smallest_bytes() * 1.05))
    by_stage: dict[str, list[PlanProgress]] = {}
    for each in told:
        by_stage.setdefault(each.stage, []).append(each)
    others = ["mutwo", "capuchin", "recompute_only", "swap_only"] if policy == "auto" else []
    assert list(by_stage) == ["profiling", *(f"scheduling by {name}" for name in (policy, *others))]
    for stages in by_stage.values():
        assert [each.done for each in stages] == list(range(stages[0].total + 1))
        assert all(each.current for each in stages)


def test_what_the_budget_costs_falls() -> None:
    costs = Planner([group(2)], profile_of=lambda _, width: profile(3, width), policy="mutwo").curve(6)
    times = [cost.step_seconds for cost in costs]
    assert times == sorted(times, reverse=True)
    assert all(cost.peak_bytes <= cost.budget_bytes for cost in costs)


def test_unknown_policies_and_names_used_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="mutwo"):
        Planner([group(2)], profile_of=lambda _, width: profile(0, width), policy="best")
    with pytest.raises(ConfigError, match="twice"):
        Planner([Group("g", ("a", "a"))], profile_of=lambda _, width: profile(0, width))


def test_few_partitions_of_an_odd_number_have_no_pairs() -> None:
    def plan(policy: str) -> Plan:
        search = Planner(
            [group(5)],
            profile_of=lambda _, width: profile(3, width),
            policy=policy,
            max_partitions=2,
            evaluations=EVALUATIONS if policy == "auto" else None,
        )
        return search.plan(1 << 40)

    with pytest.raises(ConfigError, match="raise max_partitions"):
        plan("mutwo")
    prove(plan("auto"), 3)
