"""Micro-batches of one job side by side, on a simulated GPU: in order, within the budget, never stuck."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from colocate_cases import REGION, Case, case_of, overlaps, random_job, violations
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_gpu import Contention, Run, SimulatedGpu

from trainmux.colocate._arena import ArenaSide
from trainmux.colocate._demand import JobDemand, MicroBatchLane, Segment, SegmentRef
from trainmux.colocate._job_state import JobState, MicroBatchOrder
from trainmux.colocate._layout import choose_layout, smallest_budget
from trainmux.colocate._scheduler import ScroogeScheduler
from trainmux.errors import PlanError, TrainmuxError

NUM_CASES = 200


def in_lanes(
    demand: JobDemand, steps: int | None, accumulate: int, *, first_ordered: int, num_before: int = 0
) -> tuple[JobDemand, JobDemand]:
    """``demand`` with its micro-batches in two lanes; ``steps`` counts those of both."""
    first = MicroBatchLane(demand.name, 0, 2, accumulate, first_ordered, num_before)
    rows = [first, replace(first, index=1)]
    names = [demand.name, f"{demand.name}'"]
    return tuple(  # type: ignore[return-value]
        replace(
            demand,
            name=name,
            steps=None if steps is None else row.steps_of(steps),
            share=demand.share / 2,
            micro_batches=row,
        )
        for name, row in zip(names, rows, strict=True)
    )


def random_lanes(rng: random.Random, name: str, is_measured: bool) -> tuple[JobDemand, ...]:
    """A job in two lanes whose last segments, or all, have an order."""
    demand = random_job(rng, name, 1, is_measured)
    first_ordered = rng.choice((len(demand.segments) - 1, rng.randrange(len(demand.segments))))
    accumulate = rng.randint(2, 5)
    num_before = rng.choice((0, 0, rng.randrange(accumulate)))
    steps = rng.randint(2, 11)
    return in_lanes(demand, steps, accumulate, first_ordered=first_ordered, num_before=num_before)


def random_lane_case(seed: int, jitter: float = 0.3) -> Case:
    """A job in lanes, by itself, beside one or two others or beside another in lanes; any budget."""
    rng = random.Random(seed)
    is_measured = rng.random() < 0.5
    demands = random_lanes(rng, "a", is_measured)
    beside = rng.choice(("nothing", "nothing", "one", "two", "lanes"))
    if beside == "lanes":
        demands += random_lanes(rng, "b", is_measured)
    for name in {"one": "b", "two": "bc"}.get(beside, ""):
        demands += (random_job(rng, name, rng.randint(1, 6), is_measured),)
    return case_of(rng, demands, jitter=jitter)


def out_of_order(demands: dict[str, JobDemand], run: Run) -> list[str]:
    """What ran before it should have, found from the log alone."""
    found = []
    rows = {row.ref: row for row in run.executed}
    for ref, row in rows.items():
        lane = demands[ref.job].micro_batches
        if lane is None:
            continue
        number = ref.iteration * 2 + lane.index
        if number == 0:
            continue
        names = [one.name for one in demands.values() if one.job == lane.job]
        last = len(demands[ref.job].segments) - 1

        def before(segment: int, number: int = number, names: list[str] = names) -> SegmentRef:
            return SegmentRef(names[(number - 1) % 2], (number - 1) // 2, segment)

        waits = [before(0)] if ref.segment == 0 else []
        if ref.segment >= lane.first_ordered or (lane.num_before + number) % lane.accumulate == 0:
            waits.append(before(last))
        found += [f"{ref} before {one}" for one in waits if rows[one].ended_at > row.started_at]
    return found


def test_many_random_cases() -> None:
    """No byte over budget, no overlap, every micro-batch in its order, never slower than turns."""
    num_at_once = 0
    for seed in range(NUM_CASES):
        case = random_lane_case(seed)
        run = case.run()
        demands = {demand.name: demand for demand in case.demands}
        assert violations(case, run) == [], seed
        assert out_of_order(demands, run) == [], seed
        assert run.ended_at <= 1.01 * case.temporal_seconds, seed
        assert run.idle_seconds == 0.0, seed
        num_at_once += are_at_once(run, "a", "a'")
    assert num_at_once > NUM_CASES // 4


def are_at_once(run: Run, one: str, other: str) -> bool:
    """Whether segments of two lanes ran at the same time."""
    rows = sorted(run.executed, key=lambda row: row.started_at)
    return any(
        later.started_at < row.ended_at and {row.ref.job, later.ref.job} == {one, other}
        for row in rows
        for later in rows
        if row.started_at <= later.started_at and row is not later
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(10**6, 10**9), jitter=st.floats(0.0, 0.9))
def test_random_cases_with_any_jitter(seed: int, jitter: float) -> None:
    case = random_lane_case(seed, jitter)
    run = case.run()
    assert violations(case, run) == []
    assert out_of_order({demand.name: demand for demand in case.demands}, run) == []
    assert run.idle_seconds == 0.0


def test_at_the_smallest_budget_lanes_take_turns() -> None:
    """What is beside another lane's peak then is what needs no memory; one byte less is refused."""
    for seed in range(60):
        case = random_lane_case(seed)
        least = smallest_budget(case.demands)
        tight = replace(case, budget_bytes=least)
        assert violations(tight, tight.run()) == [], seed
        with pytest.raises(ValueError, match="budget must hold"):
            case.scheduler(least - 1)


def test_with_room_for_all_nothing_is_shifted_for_memory() -> None:
    for case in map(random_lane_case, range(60)):
        scheduler = case.scheduler(case.sum_of_peaks)
        case.run(scheduler)
        for demand in case.demands:
            assert scheduler.report(demand.name).total_shift_seconds == 0.0
            assert scheduler.report(demand.name).num_mispredicted == 0


def run_with_changes(seed: int) -> int:
    """Budgets, a job in lanes that comes and one that goes while others run; how many were refused."""
    rng = random.Random(seed)
    case = random_lane_case(seed)
    late = random_lanes(rng, "late", False)
    demands = {demand.name: demand for demand in (*case.demands, *late)}
    if rng.random() < 0.5:  # one that ends only when it is removed
        case = replace(
            case, demands=tuple(replace(d, steps=None) if d.job == "a" else d for d in case.demands)
        )
    scheduler = case.scheduler()
    seconds = {name: [s.solo_seconds for s in demand.segments] for name, demand in demands.items()}
    contention = Contention({**case.contention.compute_demands, **{d.name: 0.7 for d in late}})
    gpu = SimulatedGpu(
        scheduler, lambda ref: seconds[ref.job][ref.segment] * rng.uniform(0.6, 1.4), contention
    )
    refused = 0

    def attempt(change: Callable[[], None]) -> Callable[[float], None]:
        def command(now: float) -> None:
            nonlocal refused
            try:
                change()
            except TrainmuxError:
                refused += 1

        return command

    moments = sorted(rng.uniform(0, 0.8 * case.temporal_seconds) for _ in range(5))
    most = case.sum_of_peaks + sum(demand.local_bytes + demand.peak_bytes for demand in late)
    for moment in moments[:3]:
        budget = rng.randint(smallest_budget(case.demands) // 2, most)
        gpu.at(moment, attempt(lambda budget=budget: scheduler.set_budget(budget)))  # type: ignore[misc]
    gpu.at(moments[3], attempt(lambda: scheduler.add(*late)))
    name, at_once = rng.choice(("a", "a'")), rng.random() < 0.5
    gpu.at(moments[4], attempt(lambda: scheduler.remove(name, at_once=at_once)))
    run = gpu.run()
    assert overlaps(demands, run) == []
    assert run.idle_seconds == 0.0
    if not at_once:
        assert out_of_order(demands, run) == []
    for _, remap in run.remaps:
        named = {name for arena in remap.layout.arenas for name in arena.names}
        local = sum(demands[name].local_bytes for name in named)
        assert local + sum(arena.capacity_bytes for arena in remap.layout.arenas) <= remap.budget_bytes
        for job in ("a", "b", "late"):  # lanes come and go together
            lanes = {d.name for d in demands.values() if d.job == job and d.micro_batches is not None}
            assert not lanes & named or lanes <= named
    ended = Counter(
        row.ref.job for row in run.executed if row.ref.segment == len(demands[row.ref.job].segments) - 1
    )
    for demand in case.demands:
        assert ended[demand.name] == demand.steps or demand.job == "a"
    assert at_once or 0 <= ended["a"] - ended["a'"] <= 1
    return refused


def test_jobs_and_budgets_that_change_while_running() -> None:
    refused = [run_with_changes(seed) for seed in range(80)]
    assert 0 < sum(refused) < 0.5 * 5 * len(refused)


def test_without_the_order_micro_batches_would_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail."""
    monkeypatch.setattr(MicroBatchOrder, "behind", lambda self, job, segment: ())
    cases = [random_lane_case(seed) for seed in range(40)]
    assert any(out_of_order({d.name: d for d in case.demands}, case.run()) for case in cases)


def run_a_second_that_is_early() -> None:
    """Ten bytes. The second micro-batch asks for two while the first, which holds one, will need nine.

    It could run to its end beside the one, if it had not to wait for the first.
    """
    segments = (Segment(1, 0, 0, 10.0), Segment(1, 2, 2, 1.0), Segment(1, 3, 1, 1.0), Segment(1, 9, 0, 1.0))
    whole = JobDemand("a", "a", 1, 0, segments, is_measured=True, in_flight_limit=1)
    scheduler = ScroogeScheduler(in_lanes(whole, 2, 2, first_ordered=2), 10)
    really = {"a": (0.1, 0.1, 5.0, 1.0), "a'": (0.1, 0.1, 0.1, 0.1)}
    SimulatedGpu(scheduler, lambda ref: really[ref.job][ref.segment], Contention({"a": 0.5, "a'": 0.5})).run()


def test_the_earlier_micro_batch_can_always_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run_a_second_that_is_early()

    def either(job: JobState, segment: int, other: ArenaSide, capacity_bytes: int) -> bool:
        this_can_end = job.trend.need_from[segment + 1] + other.tail_hold_bytes <= capacity_bytes
        return this_can_end or other.need_bytes + job.holds[segment] <= capacity_bytes

    monkeypatch.setattr(ArenaSide, "_stays_safe", staticmethod(either))
    with pytest.raises(PlanError, match="deadlock"):
        run_a_second_that_is_early()


def even_lanes(
    name: str = "a", steps: int | None = 8, accumulate: int = 4, **options: bool
) -> tuple[JobDemand, JobDemand]:
    """Three segments, the last with an order, a second each."""
    segments = (
        Segment(1, 4 * REGION, 4 * REGION, 1.0),
        Segment(1, 4 * REGION, 0, 1.0),
        Segment(1, 0, 0, 1.0),
    )
    whole = JobDemand(name, name, REGION, REGION, segments, is_measured=True, **options)  # type: ignore[arg-type]
    return in_lanes(whole, steps, accumulate, first_ordered=2)


def seconds_of(ref: SegmentRef) -> float:
    return 1.0


def test_an_update_is_a_barrier() -> None:
    """Two at once between updates; nothing runs beside the update, and nothing before it has ended."""
    scheduler = ScroogeScheduler(even_lanes(), 100 * REGION)
    run = SimulatedGpu(scheduler, seconds_of, Contention({"a": 0.5, "a'": 0.5})).run()
    assert are_at_once(run, "a", "a'")
    updates = [row for row in run.executed if row.ref[1:] in ((1, 2), (3, 2)) and row.ref.job == "a'"]
    assert len(updates) == 2
    for update in updates:
        beside = [
            row
            for row in run.executed
            if row is not update and row.started_at < update.ended_at and row.ended_at > update.started_at
        ]
        assert beside == []
    assert run.ended_at < 8 * 3.0


def test_a_job_that_is_watched_is_at_rest_after_each_update() -> None:
    """Between updates its micro-batches overlap all the same."""
    lanes = [replace(lane, in_flight_limit=8) for lane in even_lanes(is_watched=True)]
    scheduler = ScroogeScheduler(lanes, 100 * REGION)
    run = SimulatedGpu(scheduler, seconds_of, Contention({"a": 0.5, "a'": 0.5})).run()
    second_step = [row for row in run.executed if row.ref.iteration >= 2]
    update = next(row for row in run.executed if row.ref == SegmentRef("a'", 1, 2))
    assert min(row.enqueued_at for row in second_step) >= update.ended_at
    assert are_at_once(run, "a", "a'")


def test_two_lanes_get_no_more_than_one_share() -> None:
    """Beside another job at the smallest budget: half of the time each, not two thirds."""
    lanes = even_lanes(steps=None)
    other = replace(lanes[0], name="b", fingerprint="b", steps=None, share=1.0, micro_batches=None)
    demands = (*lanes, other)
    scheduler = ScroogeScheduler(demands, smallest_budget(demands))
    gpu = SimulatedGpu(scheduler, seconds_of, Contention(dict.fromkeys(("a", "a'", "b"), 1.0)))
    gpu.at(600.0, lambda now: scheduler.remove("a"))
    gpu.at(600.0, lambda now: scheduler.remove("b"))
    ran = Counter(row.ref.job for row in gpu.run().executed)
    assert 0.45 < ran["b"] / sum(ran.values()) < 0.55


def test_lanes_stay_in_one_arena() -> None:
    lanes = even_lanes()
    others = tuple(
        replace(lanes[0], name=name, fingerprint=name, share=1.0, micro_batches=None) for name in "bcd"
    )
    for demands in ((*lanes, others[0]), (*lanes, *others), (*lanes, *even_lanes("e"), *others)):
        budget = sum(demand.local_bytes + demand.peak_bytes for demand in demands)
        layout = choose_layout(demands, budget)
        assert len(layout.arenas) > 1
        assert layout.names == {demand.name for demand in demands}
        for names in (("a", "a'"), ("e", "e'")):
            assert len([arena for arena in layout.arenas if set(names) & set(arena.names)]) <= 1


def test_lanes_that_cannot_take_turns_are_refused() -> None:
    first, second = even_lanes()
    assert first.micro_batches is not None
    for wrong in (
        (first,),
        (second, first),
        (first, replace(second, steps=7)),
        (first, replace(second, share=1.0)),
        (first, replace(second, micro_batches=replace(first.micro_batches, index=1, accumulate=3))),
    ):
        with pytest.raises(PlanError, match="lanes of job 'a' in order"):
            ScroogeScheduler(wrong, 100 * REGION)
