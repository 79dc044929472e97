"""Plans for a budget, by every policy: proved, within the budget, the same again, no slower with more."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import PLENTY, Builder, bound_seconds, static_bytes
from tests.random_steps import KIB, Shape, random_profile
from tests.symbolic_machine import fault

from trainmux.errors import BudgetError, ConfigError
from trainmux.ir import ByteClass, Multiplexing, Phase, PlanRecord, Profile, verify
from trainmux.planning import (
    POLICY_NAMES,
    PlannedGroup,
    Planner,
    PlanProgress,
    fit_program,
    lane_times,
    rewrite,
    timeline,
)
from trainmux.profiling import side_by_side

ROUNDING = 1 + 1e-9


@cache
def profile(seed: int, width: int) -> Profile:
    return random_profile(seed, width, Shape(num_layers=3))


def group(num_members: int) -> PlannedGroup:
    return PlannedGroup("g", tuple(f"m{number}" for number in range(num_members)))


def fixed_bytes(seed: int, width: int) -> int:
    """What nodes of a sub-array need outside of the slab: nothing for some seeds."""
    return seed % 3 * 64 * width


def planner(seed: int, num_members: int, policy: str = "auto", **settings: object) -> Planner:
    return Planner(
        [group(num_members)],
        profile_of=lambda _, width: profile(seed, width),
        scratch_of=lambda profile: fixed_bytes(seed, profile.width),
        policy=policy,
        **{"evaluations": 6 if policy == "auto" else None, "max_partitions": 6, **settings},
    )


def between(search: Planner, share: float) -> int:
    """A budget between the smallest and what the step takes without decisions."""
    low, high = search.smallest_bytes(), search.plan(PLENTY).peak_bytes
    return int(low + share * (high - low))


def prove(plan: PlanRecord, seed: int) -> None:
    """By the verifier and by symbolic values; time and peak are the machine's, and not below the bound."""
    widths = [len(sub_array.members) for sub_array in plan.partition]
    profiles = [profile(seed, width) for width in widths]
    program = rewrite(profiles, plan.schedule)
    verify(program, profiles, budget_bytes=plan.budget_bytes, fixed_bytes=plan.fixed_bytes)
    assert fault(program, profiles) == ""
    assert plan.fixed_bytes == max(fixed_bytes(seed, width) for width in widths)
    assert plan.peak_bytes == program.slab_bytes + plan.fixed_bytes <= plan.budget_bytes
    assert plan.host_bytes == program.host_bytes
    assert plan.step_seconds == pytest.approx(timeline(program.body, profiles).seconds)
    limit = plan.budget_bytes - plan.fixed_bytes
    assert bound_seconds(profiles, plan.schedule.multiplexing, limit) <= plan.step_seconds * ROUNDING
    names = [name for sub_array in plan.partition for name in sub_array.members]
    assert sorted(names) == sorted(set(names))
    assert [attempt for attempt in plan.attempts if not attempt.lost_because]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(seed=st.integers(0, 40), num_members=st.integers(1, 4), share=st.floats(0.0, 1.1))
def test_a_plan_is_proved_or_a_budget_is_named_that_works(
    policy: str, seed: int, num_members: int, share: float
) -> None:
    search = planner(seed, num_members, policy)
    plain = search.plan(PLENTY)
    assert not plain.swaps
    assert not plain.recomputes
    prove(plain, seed)
    asked = budget = max(1, int(plain.peak_bytes * share))
    try:
        plan = search.plan(budget)
    except BudgetError as error:
        budget = error.smallest_bytes or 0
        plan = search.plan(budget)
    assert asked <= budget == plan.budget_bytes
    prove(plan, seed)
    assert plan.step_seconds >= plain.step_seconds / ROUNDING


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(seed=st.integers(0, 10**6), num_members=st.integers(1, 3))
def test_a_plan_serves_every_larger_budget(policy: str, seed: int, num_members: int) -> None:
    search = planner(seed, num_members, policy)
    ends = [between(search, share) for share in (0, 1)]
    costs = search.curve(4)
    assert [cost.budget_bytes for cost in (costs[0], costs[-1])] == ends
    assert all(cost.peak_bytes <= cost.budget_bytes for cost in costs)
    assert all(later.step_seconds <= earlier.step_seconds * ROUNDING for earlier, later in pairwise(costs))


def test_auto_is_at_least_as_quick_as_the_others() -> None:
    for seed in (3, 5):
        auto = planner(seed, 4)
        for share in (0.35, 0.7):
            budget = between(auto, share)
            best = auto.plan(budget).step_seconds
            for policy in sorted(set(POLICY_NAMES) - {"auto"}):
                try:
                    other = planner(seed, 4, policy).plan(budget).step_seconds
                except BudgetError:
                    continue
                assert best <= other * ROUNDING, (seed, share, policy)


def test_policies_share_the_device_in_their_own_way() -> None:
    """Pairs are rings, Capuchin has one array; the others run in turns and decide one kind of thing."""
    plan = planner(2, 4, "mutwo", max_partitions=16).plan(PLENTY)
    assert {attempt.multiplexing for attempt in plan.attempts} == {Multiplexing.RING}
    assert {attempt.widths for attempt in plan.attempts} == {(2, 2), (1, 1, 1, 1)}
    assert [len(sub_array.members) for sub_array in planner(2, 4, "capuchin").plan(PLENTY).partition] == [4]
    seen: dict[str, set[str]] = {"none": set(), "swap_only": set(), "recompute_only": set()}
    for policy, kinds in seen.items():
        search = planner(5, 4, policy)
        for share in (0.0, 0.3, 0.6):
            plan = search.plan(between(search, share))
            assert plan.schedule.multiplexing is Multiplexing.TURNS
            kinds |= {type(record).__name__ for record in (*plan.swaps, *plan.recomputes)}
    assert seen == {"none": set(), "swap_only": {"Swap"}, "recompute_only": {"Recomputation"}}


def test_a_plan_says_how_far_its_plain_peak_is_over_the_limit() -> None:
    search = planner(6, 4, "capuchin")
    roomy = search.plan(PLENTY)
    assert roomy.peak_over_limit == 0
    assert roomy.plain_peak_bytes <= roomy.peak_bytes
    tight = search.plan(search.smallest_bytes())
    assert tight.plain_peak_bytes == roomy.plain_peak_bytes
    assert tight.peak_over_limit == pytest.approx(tight.plain_peak_bytes / tight.budget_bytes - 1)
    # Sub-arrays have less in use at a time than all members fused: §5.3 (d).
    narrow = planner(6, 4, "mutwo").plan(tight.budget_bytes)
    assert narrow.peak_over_limit < tight.peak_over_limit


def test_few_partitions_are_tried_and_what_is_left_out_is_counted() -> None:
    def left_out(max_partitions: int) -> int:
        return planner(3, 6, "none", max_partitions=max_partitions).plan(PLENTY).num_left_out

    assert left_out(1000) == 0
    assert left_out(3) - left_out(4) == 1
    # Of an odd number neither complete fusion nor width 1 is in pairs: `mutwo` has others.
    for policy in ("mutwo", "auto"):
        prove(planner(3, 5, policy, max_partitions=2).plan(PLENTY), 3)


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_every_stage_of_the_search_is_told_from_beginning_to_end(policy: str) -> None:
    told: list[PlanProgress] = []
    search = planner(4, 2, policy, progress=told.append)
    search.plan(int(search.smallest_bytes() * 1.05))
    by_stage: dict[str, list[PlanProgress]] = {}
    for each in told:
        by_stage.setdefault(each.stage, []).append(each)
    assert next(iter(by_stage)) == "profiling"
    assert f"scheduling by {policy}" in by_stage
    for stages in by_stage.values():
        done = [each.done for each in stages]
        assert done == sorted(done)
        assert done[-1] == stages[-1].total
        assert all(each.current for each in stages)


def test_the_same_arguments_give_the_same_plan() -> None:
    budget = int(planner(4, 3).smallest_bytes() * 1.05)
    assert planner(4, 3).plan(budget) == planner(4, 3).plan(budget)


def test_unknown_policies_and_curves_of_one_budget_are_refused() -> None:
    with pytest.raises(ConfigError):
        planner(0, 2, "best")
    with pytest.raises(ConfigError):
        planner(0, 2, "none").curve(1)


def member(num_layers: int = 6) -> Profile:
    """Much state, used once a step, and a link that takes four nodes' time for a map."""
    builder = Builder()

    def tensor(name: str, kib: int, byte_class: ByteClass) -> None:
        builder.tensor(name, byte_class, kib * KIB, kib / 10 * 1e-3, kib / 10 * 1e-3)

    tensor("z-1", 1, ByteClass.BATCH)
    for n in range(num_layers):
        tensor(f"w{n}", 20, ByteClass.PARAMETER)
        tensor(f"s{n}", 40, ByteClass.OPTIMIZER_STATE)
        tensor(f"z{n}", 40, ByteClass.FEATURE_MAP)
        tensor(f"g{n}", 20, ByteClass.GRADIENT)
        builder.node(f"forward {n}", Phase.FORWARD, [f"z{n - 1}", f"w{n}"], [f"z{n}"], 1e-3)
    for n in reversed(range(num_layers)):
        builder.node(f"backward {n}", Phase.BACKWARD, [f"z{n}", f"w{n}"], [f"g{n}"], 1e-3)
    for n in reversed(range(num_layers)):
        builder.node(f"update {n}", Phase.UPDATE, [f"g{n}"], [], 1e-3, changes=[f"w{n}", f"s{n}"])
    return builder.profile("member")


def members(profile: Profile, num_members: int, **settings: object) -> Planner:
    """Members that take as long together as one after another."""
    return Planner(
        [group(num_members)],
        profile_of=lambda _, width: side_by_side(profile, width),
        max_partitions=2,
        **settings,
    )


def test_swaps_stay_within_the_host_and_a_refusal_says_so() -> None:
    plenty = members(member(4), 2, evaluations=6)
    with pytest.raises(BudgetError) as refused:
        plenty.plan(1)
    assert "host" not in str(refused.value)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    assert smallest < 2 * static_bytes([member(4)])  # static tensors are swapped too
    needed = plenty.plan(smallest).host_bytes
    assert needed > 0
    little = members(member(4), 2, evaluations=6, host_bytes=needed // 2)
    with pytest.raises(BudgetError) as caught:
        little.plan(smallest)
    assert "host" in str(caught.value)
    larger = caught.value.smallest_bytes
    assert larger is not None
    assert larger > smallest
    assert little.plan(larger).host_bytes <= needed // 2


def near_static_memory(profile: Profile, num_members: int, **settings: object) -> PlanRecord:
    budget = num_members * static_bytes([profile]) + 100 * KIB
    return members(profile, num_members, **settings).plan(budget)


def test_eight_members_near_static_memory_take_hardly_longer_than_their_nodes() -> None:
    """Some of every member's state is on the host while the others run."""
    profile = member()
    plan = near_static_memory(profile, 8)
    assert plan.step_seconds < 1.02 * 8 * sum(node.seconds for node in profile.nodes)
    kinds = {profile.tensors[swap.tensor].byte_class for swap in plan.swaps}
    assert ByteClass.OPTIMIZER_STATE in kinds


def test_what_the_next_step_needs_first_may_be_fetched_before_this_one_ends() -> None:
    """Where compute would wait for it otherwise."""
    profile = member()
    plan = members(profile, 4).plan(int(0.95 * 4 * static_bytes([profile])))
    place = {node: position for position, node in enumerate(plan.schedule.order)}
    kept = (ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE)
    last_use = {
        (sub_array, tensor): max(
            place[sub_array, rank]
            for rank, node in enumerate(profile.nodes)
            if tensor in (*node.reads, *node.changes)
        )
        for sub_array in range(4)
        for tensor, each in enumerate(profile.tensors)
        if each.byte_class in kept
    }
    swaps = [swap for swap in plan.swaps if (swap.sub_array, swap.tensor) in last_use]
    assert any(place[swap.prefetch_prompt] > last_use[swap.sub_array, swap.tensor] for swap in swaps)
    assert fault(rewrite([profile] * 4, plan.schedule), [profile] * 4) == ""
    assert plan.step_seconds < 1.02 * plan.bound_seconds


def test_what_waits_between_lanes_cost_is_predicted_and_held_down() -> None:
    """Each of them takes half a node's time, and the step less than a third more."""
    profile = member(4)
    costly = replace(profile, sync_seconds=min(node.seconds for node in profile.nodes) / 2)
    without, plan = (near_static_memory(each, 3, evaluations=6) for each in (profile, costly))
    assert without.step_seconds < plan.step_seconds < 1.3 * without.step_seconds


@pytest.mark.parametrize("policy", ["auto", "mutwo"])
def test_copies_have_slack_where_there_is_memory_for_it(policy: str) -> None:
    """With copies half as quick again as predicted, steps still take hardly longer."""
    ratios = []
    for seed in range(4):
        search = planner(seed, 2, policy)
        plan = search.plan(between(search, 0.6))
        profiles = [profile(seed, len(sub_array.members)) for sub_array in plan.partition]
        body = rewrite(profiles, plan.schedule).body
        if plan.swaps:
            ratios.append(lane_times(body, profiles, 1.3).seconds / plan.step_seconds)
    assert ratios
    assert sum(ratios) / len(ratios) < 1.1


def test_another_step_of_the_same_sub_arrays_fits_or_is_refused() -> None:
    profiles = [profile(1, 1)] * 2
    plain = fit_program(profiles, PLENTY, PLENTY, plainly=True)
    assert not plain.host_bytes
    tight = fit_program(profiles, plain.slab_bytes - 512, PLENTY)
    assert tight.slab_bytes < plain.slab_bytes
    assert fault(tight, profiles) == ""
    for plainly in (True, False):
        with pytest.raises(BudgetError):
            fit_program(profiles, plain.slab_bytes - 512 if plainly else 1, PLENTY, plainly=plainly)


def test_planning_time_grows_at_most_with_the_square_of_the_members() -> None:
    """Processor time, as the machine may have other work."""

    def seconds_to_plan(num_members: int) -> float:
        search = planner(4, num_members, evaluations=None, max_partitions=5)
        static = static_bytes([profile(4, num_members)])
        budget = static + (search.plan(PLENTY).peak_bytes - static) // 3
        begin = time.process_time()
        found = search.plan(budget)
        taken = time.process_time() - begin
        assert sum(len(sub_array.members) for sub_array in found.partition) == num_members
        assert found.peak_bytes <= budget
        return taken

    seconds_to_plan(4)  # imports and caches
    few, many = seconds_to_plan(4), seconds_to_plan(48)
    assert many <= few * (48 / 4) ** 2
