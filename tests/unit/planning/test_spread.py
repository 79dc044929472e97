"""The same share of every sub-array's static tensors on the host: it fits, can be done, and is quick."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.random_steps import DEVICE, KIB, Shape, random_profile

from trainmux.ir import (
    ByteClass,
    Multiplexing,
    Phase,
    Plan,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Wait,
    verify,
)
from trainmux.planning import Group, Planner, Task, _candidates, _spread, lane_times, peak_live_bytes
from trainmux.planning._arrangement import Arrangement
from trainmux.planning._candidates import Candidates
from trainmux.planning._facts import facts_of
from trainmux.planning._lift import schedule_sub_arrays
from trainmux.planning._policy import live_bytes, plain_order
from trainmux.planning._rewrite import draft, rewrite
from trainmux.planning._spread import spread_static
from trainmux.planning.policies import Auto, policy_named
from trainmux.planning.policies._body import FixedBody
from trainmux.planning.policies._gaps import find_gaps

SHAPE = Shape(num_layers=4, constant=0.3, frozen=0.3, unrepeatable=0.0, optimizer_states=2)


def task_of(profile: Profile, count: int, multiplexing: Multiplexing, share: float) -> Task:
    """With a limit at a share of the way from half of static memory to what nothing decided needs."""
    task = Task((profile,) * count, multiplexing, 0, 1 << 50)
    high = max(live_bytes(task, plain_order(task.profiles, multiplexing)))
    static = count * sum(tensor.size_bytes for tensor in profile.tensors if tensor.byte_class.is_static)
    limit = round(static / 2 + share * (high - static / 2))
    return Task(task.profiles, multiplexing, limit, 1 << 50)


@pytest.mark.parametrize("multiplexing", list(Multiplexing))
@pytest.mark.parametrize("count", [2, 3, 5])
def test_it_fits_is_alike_in_all_but_the_last_and_can_be_carried_out(
    multiplexing: Multiplexing, count: int
) -> None:
    num_found = num_recomputing = num_less = 0
    for seed in range(6):
        profile = random_profile(seed, 1, SHAPE)
        for share in (0.5, 0.7, 0.9):
            task = task_of(profile, count, multiplexing, share)
            schedule = spread_static(task)
            if schedule is None:
                continue
            num_found += 1
            num_recomputing += bool(schedule.recomputes)
            program = rewrite(task.profiles, schedule)
            assert peak_live_bytes(program.body) <= task.limit_bytes
            verify(program, task.profiles, budget_bytes=program.slab_bytes)
            away, again = (
                [{each.tensor for each in decided if each.sub_array == number} for number in range(count)]
                for decided in (schedule.swaps, schedule.recomputes)
            )
            assert all(found == again[0] for found in again)
            assert all(found == away[0] for found in away[:-1])
            first, last = (sum(profile.tensors[tensor].size_bytes for tensor in away[n]) for n in (0, -1))
            assert last <= first
            num_less += last < first
            seconds = lane_times(draft(task.profiles, schedule).body, task.profiles).seconds
            assert lane_times(program.body, task.profiles).seconds <= seconds * (1 + 1e-12)
            assert spread_static(task, below=seconds * 0.999) is None
            assert spread_static(task, below=seconds * 1.01) == schedule
    assert num_found >= 4
    assert num_recomputing >= 1
    assert 0 < num_less < num_found


def test_small_tensors_are_away_only_where_all_large_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are many of them, and copies of few bytes are slow."""
    profile = member()
    sizes = {tensor.size_bytes for tensor in profile.tensors if tensor.byte_class.is_static}
    assert sizes == {KIB, 20 * KIB, 40 * KIB}
    monkeypatch.setattr(_spread, "_SMALL_BYTES", 30 * KIB)
    facts = [facts_of(profile)]
    gaps = find_gaps(facts, with_static=True)
    task = Task((profile,), Multiplexing.TURNS, 0, 1 << 50)
    body = FixedBody(task, plain_order(task.profiles, task.multiplexing), facts)
    (row,) = _spread._static_rows(body, gaps)
    num_large = sum(gap.is_static and gap.size_bytes == 40 * KIB for gap in gaps)
    seen = set()
    for share in range(21):
        away = [gaps[number].size_bytes for number in _spread._filled(gaps, row, share / 20)]
        num_small = sum(size < 30 * KIB for size in away)
        assert not num_small or len(away) - num_small == num_large
        seen.add((bool(away), bool(num_small)))
    assert seen == {(False, False), (True, False), (True, True)}


def test_nothing_where_all_static_tensors_away_are_not_enough() -> None:
    profile = random_profile(1, 1, SHAPE)
    task = Task((profile,) * 3, Multiplexing.TURNS, 1, 1 << 50)
    assert spread_static(task) is None


def test_nothing_without_room_on_the_host() -> None:
    profile = random_profile(1, 1, SHAPE)
    task = task_of(profile, 3, Multiplexing.TURNS, 0.8)
    assert spread_static(task) is not None
    assert spread_static(Task(task.profiles, task.multiplexing, task.limit_bytes, 0)) is None


def member(num_layers: int = 6) -> Profile:
    """One member: much state, used once a step, and a link that takes four nodes' time for a map."""
    tensors: list[ProfiledTensor] = []
    nodes: list[ProfiledNode] = []

    def tensor(name: str, size: int, byte_class: ByteClass) -> int:
        seconds = size / (10 * KIB) * 1e-3
        tensors.append(ProfiledTensor(name, byte_class, size, seconds, seconds, seconds, seconds))
        return len(tensors) - 1

    def node(name: str, phase: Phase, reads: list[int], creates: list[int], changes: list[int]) -> None:
        nodes.append(ProfiledNode(name, phase, tuple(reads), tuple(creates), tuple(changes), 1e-3, 0, True))

    last = tensor("batch", KIB, ByteClass.BATCH)
    weights = [tensor(f"w{n}", 20 * KIB, ByteClass.PARAMETER) for n in range(num_layers)]
    states = [tensor(f"s{n}", 40 * KIB, ByteClass.OPTIMIZER_STATE) for n in range(num_layers)]
    maps = []
    for n in range(num_layers):
        maps.append(tensor(f"z{n}", 40 * KIB, ByteClass.FEATURE_MAP))
        node(f"forward {n}", Phase.FORWARD, [last, weights[n]], [maps[-1]], [])
        last = maps[-1]
    gradients = []
    for n in reversed(range(num_layers)):
        gradients.append(tensor(f"g{n}", 20 * KIB, ByteClass.GRADIENT))
        node(f"backward {n}", Phase.BACKWARD, [maps[n], weights[n]], [gradients[-1]], [])
    for n, gradient in zip(reversed(range(num_layers)), gradients, strict=True):
        node(f"update {n}", Phase.UPDATE, [gradient], [], [weights[n], states[n]])
    return Profile("member", "analytic", 1, DEVICE, tuple(tensors), tuple(nodes))


def seconds_of(task: Task, policy: Auto) -> tuple[float, float, float]:
    """Of the nodes alone, of sub-arrays each by itself, and of static tensors spread over all."""
    least = sum(node.seconds for profile in task.profiles for node in profile.nodes)
    by_itself = rewrite(task.profiles, schedule_sub_arrays(policy.schedule, task))
    schedule = spread_static(task)
    assert schedule is not None
    spread = rewrite(task.profiles, schedule)
    times = [lane_times(program.body, task.profiles).seconds for program in (by_itself, spread)]
    return least, times[0], times[1]


def test_eight_members_near_static_memory_take_hardly_longer_than_their_nodes() -> None:
    profile = member()
    task = Task((profile,) * 8, Multiplexing.TURNS, 0, 1 << 50)
    high = max(live_bytes(task, plain_order(task.profiles, Multiplexing.TURNS)))
    task = Task(task.profiles, Multiplexing.TURNS, high - 150 * KIB, 1 << 50)
    least, by_itself, spread = seconds_of(task, Auto(evaluations=15))
    assert by_itself > 1.1 * least
    assert spread < 1.03 * least


def plan_of(profile: Profile, num_members: int, max_partitions: int) -> Plan:
    """Of single members, or of wider arrays, a little above static memory."""
    planner = Planner(
        [Group("0", tuple(f"member {number}" for number in range(num_members)))],
        profile_of=lambda group, width: profile if width == 1 else _wide(profile, width),
        policy="auto",
        max_partitions=max_partitions,
    )
    static = sum(tensor.size_bytes for tensor in profile.tensors if tensor.byte_class.is_static)
    return planner.plan(num_members * static + 100 * KIB)


def test_the_planner_takes_it() -> None:
    profile = member()
    record = plan_of(profile, 8, 2)
    least = 8 * sum(node.seconds for node in profile.nodes)
    assert record.step_seconds < 1.02 * least
    assert any(
        profile.tensors[swap.tensor].byte_class is ByteClass.OPTIMIZER_STATE for swap in record.schedule.swaps
    )


def test_what_meetings_cost_is_predicted_and_decides_nothing() -> None:
    """A draft has more of them than the program has."""
    profile = member(4)
    meeting = replace(profile, meeting_seconds=min(node.seconds for node in profile.nodes) / 2)
    without, met = (plan_of(each, 3, 2) for each in (profile, meeting))
    assert without.schedule == met.schedule
    widths = [len(sub_array.members) for sub_array in met.partition]
    body = rewrite([_wide(meeting, width) for width in widths], met.schedule).body
    most = sum(isinstance(item, Wait) for item in body.instructions) * meeting.meeting_seconds
    assert without.step_seconds < met.step_seconds <= without.step_seconds + most


def test_maps_are_made_again_no_more_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few shares are too many maps or too much for the link."""
    task = task_of(member(24), 4, Multiplexing.RING, 0.2)

    def seconds() -> float:
        schedule = spread_static(task)
        assert schedule is not None
        return lane_times(rewrite(task.profiles, schedule).body, task.profiles).seconds

    finely = seconds()
    monkeypatch.setattr(_spread, "_NUM_SHARES", 4)
    assert finely < 0.98 * seconds()


def test_memory_between_two_limits_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The more of it, the less time; without fine steps it is that of the limit below."""
    profile = member()

    def single_members() -> Candidates:
        planner = Planner(
            [Group("0", tuple(f"member {number}" for number in range(8)))],
            profile_of=lambda group, width: _wide(profile, width),
            max_partitions=2,
        )
        return next(each for each in planner._all if each.arrangement.widths == (1,) * 8)

    def found(candidates: Candidates, available: int) -> float:
        best = candidates.best(available, math.inf)
        assert best is not None
        assert best.slab_bytes <= available
        return best.seconds

    fine = single_members()
    low, high = fine.limits()[2:4]
    budgets = [low + (high - low) * tenths // 10 for tenths in (0, 3, 6, 9, 10)]
    times = [found(fine, budget) for budget in budgets]
    assert times == sorted(times, reverse=True)
    assert times[3] < 0.93 * times[0]
    assert len(set(times)) == len(times)
    monkeypatch.setattr(_candidates, "_NUM_FINE_STEPS", 1)
    coarse = single_members()
    assert {found(coarse, budget) for budget in budgets[:-1]} == {times[0]}


@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.extensive) for seed in (11, 30))])
def test_more_memory_is_never_slower_whoever_asked_before(seed: int) -> None:
    """Around every limit and where a body's live bytes fit but its slab does not; up, down and by itself."""
    shape = Shape(num_layers=4, odd_sizes=True, optimizer_states=2, max_parameter_kib=64)
    profile = random_profile(seed, 1, shape)
    arrangement = Arrangement((("a",), ("b",)), (profile, profile), Multiplexing.TURNS)

    def fresh() -> Candidates:
        return Candidates(arrangement, policy_named("auto", seed=0, evaluations=3), 1 << 50)

    def found(candidates: Candidates, available: int) -> float:
        best = candidates.best(available, math.inf)
        return math.inf if best is None else best.seconds

    limits = fresh().limits()
    slab = fresh().plain().slab_bytes
    budgets = {limit + more for limit in limits[2::3] for more in (0, (limits[3] - limits[2]) // 2)}
    budgets |= {fresh().plain_bytes - 1, fresh().plain_bytes, slab - 1, slab}
    up, down = fresh(), fresh()
    rising = {budget: found(up, budget) for budget in sorted(budgets)}
    falling = {budget: found(down, budget) for budget in sorted(budgets, reverse=True)}
    assert rising == falling
    assert list(rising.values()) == sorted(rising.values(), reverse=True)
    for budget in sorted(budgets)[::3]:
        assert found(fresh(), budget) == rising[budget]


def test_of_large_bodies_shares_around_the_best_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As quick as with all shares, or nearly, in a part of the time."""
    task = task_of(member(24), 4, Multiplexing.RING, 0.35)
    tried: list[int] = []
    look_at = _spread._Search.look_at

    def noting(search: _spread._Search, number: int) -> None:
        tried.append(number)
        look_at(search, number)

    monkeypatch.setattr(_spread._Search, "look_at", noting)
    times = []
    for large in (0, 1 << 30):
        monkeypatch.setattr(_spread, "_LARGE_BODY", large)
        schedule = spread_static(task)
        assert schedule is not None
        times.append(lane_times(rewrite(task.profiles, schedule).body, task.profiles).seconds)
        tried.append(-1)
    assert times[0] <= 1.05 * times[1]
    assert tried.index(-1) <= 25
    assert len(tried) - tried.index(-1) > 100


def _wide(profile: Profile, width: int) -> Profile:
    """The same for several members, which take as long as one after another."""

    def widened(tensor: ProfiledTensor) -> ProfiledTensor:
        seconds = width * tensor.swap_in_seconds
        size = width * tensor.size_bytes
        return ProfiledTensor(tensor.name, tensor.byte_class, size, seconds, seconds, seconds, seconds)

    return replace(
        profile,
        fingerprint=f"member {width}",
        width=width,
        tensors=tuple(map(widened, profile.tensors)),
        nodes=tuple(replace(node, seconds=width * node.seconds) for node in profile.nodes),
    )
