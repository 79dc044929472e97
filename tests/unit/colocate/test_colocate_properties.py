"""What holds for any jobs, any budget and any clock: random pairs and triples on a simulated GPU."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from colocate_cases import Case, overlaps, random_case, random_job, violations
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_gpu import Contention, SimulatedGpu

from trainmux.colocate import _arena
from trainmux.colocate._arena import ArenaSide
from trainmux.colocate._demand import JobDemand, Segment
from trainmux.colocate._layout import smallest_budget
from trainmux.colocate._scheduler import ScroogeScheduler
from trainmux.errors import PlanError, TrainmuxError

NUM_CASES = 300


def test_many_random_cases() -> None:
    """No byte over budget, no overlap, every job ends, never slower than turns on the same durations."""
    for seed in range(NUM_CASES):
        case = random_case(seed)
        run = case.run()
        assert violations(case, run) == [], seed
        assert run.ended_at <= 1.01 * case.temporal_seconds, seed
        assert run.idle_seconds == 0.0, seed


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(10**6, 10**9), jitter=st.floats(0.0, 0.9), steps=st.integers(1, 6))
def test_random_cases_with_any_jitter(seed: int, jitter: float, steps: int) -> None:
    case = random_case(seed, steps=steps, jitter=jitter)
    run = case.run()
    assert violations(case, run) == []
    assert run.ended_at <= 1.01 * case.temporal_seconds


def run_with_changes(seed: int) -> int:
    """Jobs come and go and the budget moves while a case runs. Returns how many changes were refused."""
    rng = random.Random(seed)
    case = random_case(seed, steps=6)
    late = random_job(rng, "late", 4, rng.random() < 0.5)
    scheduler = case.scheduler()
    durations = {**case.durations, "late": [[s.solo_seconds for s in late.segments] for _ in range(4)]}
    demands = {demand.name: demand for demand in (*case.demands, late)}
    contention = Contention({**case.contention.compute_demands, "late": 0.7})
    gpu = SimulatedGpu(scheduler, lambda ref: durations[ref.job][ref.iteration][ref.segment], contention)
    refused = 0

    def attempt(change: Callable[[float], None]) -> Callable[[float], None]:
        def command(now: float) -> None:
            nonlocal refused
            try:
                change(now)
            except TrainmuxError:
                refused += 1

        return command

    moments = sorted(rng.uniform(0, 0.8 * case.temporal_seconds) for _ in range(5))
    most = case.sum_of_peaks + late.local_bytes + late.peak_bytes
    for moment in moments[:3]:
        budget = rng.randint(smallest_budget(case.demands) // 2, most)
        gpu.at(moment, attempt(lambda now, budget=budget: scheduler.set_budget(budget)))
    gpu.at(moments[3], attempt(lambda now: scheduler.add(late)))
    name, at_once = rng.choice(case.demands).name, rng.random() < 0.5

    def remove(now: float) -> None:
        if name in scheduler.names:
            scheduler.remove(name, at_once=at_once)

    gpu.at(moments[4], remove)
    run = gpu.run()
    assert overlaps(demands, run) == []
    assert run.idle_seconds == 0.0
    for _, remap in run.remaps:
        named = [name for arena in remap.layout.arenas for name in arena.names]
        local = sum(demands[name].local_bytes for name in named)
        assert local + sum(arena.capacity_bytes for arena in remap.layout.arenas) <= remap.budget_bytes
    last = {name: len(demand.segments) - 1 for name, demand in demands.items()}
    ended = Counter(row.ref.job for row in run.executed if row.ref.segment == last[row.ref.job])
    for demand in case.demands:
        assert ended[demand.name] == demand.steps or demand.name == name
    return refused


def test_jobs_and_budgets_that_change_while_running() -> None:
    refused = [run_with_changes(seed) for seed in range(100)]
    assert 0 < sum(refused) < 0.5 * 5 * len(refused)


def test_segments_wait_only_for_what_was_enqueued_before_them() -> None:
    for seed in range(100):
        case = random_case(seed)
        scheduler = case.scheduler()
        enqueued = set()
        original = scheduler.next_action

        def watch(now: float, original=original, enqueued=enqueued):  # type: ignore[no-untyped-def]
            action = original(now)
            if hasattr(action, "ref"):
                assert enqueued.issuperset(action.after)
                enqueued.add(action.ref)
            return action

        scheduler.next_action = watch  # type: ignore[method-assign]
        case.run(scheduler)
        assert len(enqueued) == sum(len(d.segments) * (d.steps or 0) for d in case.demands)


def pairs() -> list[Case]:
    return [case for case in map(random_case, range(200)) if len(case.demands) == 2]


def test_with_room_for_all_peaks_nothing_is_ever_shifted() -> None:
    for case in map(random_case, range(200)):
        scheduler = case.scheduler(case.sum_of_peaks)
        case.run(scheduler)
        for demand in case.demands:
            assert scheduler.report(demand.name).total_shift_seconds == 0.0
            assert scheduler.report(demand.name).num_mispredicted == 0


def test_with_less_room_iterations_are_shifted() -> None:
    shifted = 0
    for case in pairs():
        scheduler = case.scheduler(smallest_budget(case.demands))
        case.run(scheduler)
        shifted += any(scheduler.report(demand.name).total_shift_seconds > 0 for demand in case.demands)
    assert shifted > len(pairs()) // 2


def test_the_smallest_budget_is_kept_and_one_byte_less_is_refused() -> None:
    for case in pairs()[:50]:
        least = smallest_budget(case.demands)
        tight = replace(case, budget_bytes=least)
        assert violations(tight, tight.run()) == []
        with pytest.raises(ValueError, match="budget must hold") as refused:
            case.scheduler(least - 1)
        assert refused.value.smallest_bytes == least  # type: ignore[attr-defined]


def test_without_gates_memory_would_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: predictions alone do not keep jittering jobs apart."""
    monkeypatch.setattr(ArenaSide, "gate", lambda self, job, segment, other, capacity: ())
    assert any(violations(case, case.run()) for case in map(random_case, range(60)))


def run_two_that_rise_together() -> None:
    """Ten bytes, two jobs that need eight. The second is believed to rise after the first one's peak.

    It is sooner, and asks for four bytes while the first, not yet at its peak, holds four.
    """
    first = (Segment(1, 4, 4, 1.0), Segment(1, 8, 1, 1.0), Segment(1, 1, 0, 1.0))
    second = (Segment(1, 1, 1, 2.5), Segment(1, 4, 4, 1.0), Segment(1, 8, 0, 1.0))
    demands = tuple(
        JobDemand(name, name, 1, 0, segments, steps=1, is_measured=True)
        for name, segments in (("first", first), ("second", second))
    )
    scheduler = ScroogeScheduler(demands, 10)
    really = {"first": 1.0, "second": 0.5}
    SimulatedGpu(scheduler, lambda ref: really[ref.job], Contention({"first": 0.5, "second": 0.5})).run()


def test_the_banker_s_rule_is_what_prevents_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arena, "_IN_FLIGHT", 1)
    run_two_that_rise_together()
    monkeypatch.setattr(ArenaSide, "_stays_safe", staticmethod(lambda job, segment, other, capacity: True))
    with pytest.raises(PlanError, match="deadlock"):
        run_two_that_rise_together()
