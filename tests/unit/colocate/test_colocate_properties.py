"""What holds for any jobs, any budget and any clock: random pairs and triples on a simulated GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from colocate_cases import (
    Case,
    gpu_of,
    jittered,
    job_of,
    num_ended,
    over_budget,
    overlaps,
    random_case,
    random_job,
    violations,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.colocate import _arena
from trainmux.colocate._arena import ArenaSide
from trainmux.colocate._demand import JobDemand, cut_segments, segments_between
from trainmux.colocate._layout import smallest_budget
from trainmux.colocate._placement import Allocation, Iteration, TensorClass, place_in_arena
from trainmux.colocate._scheduler import ScroogeScheduler
from trainmux.errors import BudgetError, PlanError, TrainmuxError


@settings(max_examples=360, deadline=None)
@given(seed=st.integers(0, 10**9), jitter=st.floats(0.0, 0.9), steps=st.integers(1, 6))
def test_many_random_cases(seed: int, jitter: float, steps: int) -> None:
    """No byte over budget, no overlap, every job ends, never slower than turns on the same durations."""
    case = random_case(seed, steps=steps, jitter=jitter)
    run = case.run()
    assert violations(case, run) == []
    assert run.ended_at <= 1.01 * case.temporal_seconds
    assert run.idle_seconds == 0.0


def run_with_changes(seed: int) -> int:
    """Jobs come and go and the budget moves while a case runs. Returns how many changes were refused."""
    rng = random.Random(seed)
    case = random_case(seed, steps=6)
    late = random_job(rng, "late", 4, rng.random() < 0.5)
    demands = {demand.name: demand for demand in (*case.demands, late)}
    scheduler = case.scheduler()
    length = case.temporal_seconds
    case.durations.update(jittered(rng, [late], 0.0))
    case.compute_demands["late"] = 0.7
    gpu = case.gpu(scheduler)
    refused = 0

    def attempt(change: Callable[[], object]) -> Callable[[], None]:
        def command() -> None:
            nonlocal refused
            try:
                change()
            except TrainmuxError:
                refused += 1

        return command

    moments = sorted(rng.uniform(0, 0.8 * length) for _ in range(5))
    most = case.sum_of_peaks + late.local_bytes + late.peak_bytes
    for moment in moments[:3]:
        budget = rng.randint(smallest_budget(case.demands) // 2, most)
        gpu.at(moment, attempt(lambda budget=budget: scheduler.set_budget(budget)))
    gpu.at(moments[3], attempt(lambda: scheduler.add(late)))
    name, at_once = rng.choice(case.demands).name, rng.random() < 0.5
    gpu.at(moments[4], lambda: name in scheduler.names and scheduler.remove(name, at_once=at_once))
    run = gpu.run()
    assert overlaps(demands, run) == over_budget(demands, run) == []
    assert run.idle_seconds == 0.0
    for demand in case.demands:
        assert num_ended(run, demand) == demand.steps or demand.name == name
    if (newcomer := run.iterations("late")) and not late.is_measured:  # its first iteration is alone
        assert num_ended(run, late) == late.steps
        for other in case.demands:
            assert not any(
                start < newcomer[0][1] and newcomer[0][0] < end for start, end in run.iterations(other.name)
            )
    return refused


def test_jobs_and_budgets_that_change_while_running() -> None:
    refused = [run_with_changes(seed) for seed in range(100)]
    assert 0 < sum(refused) < 0.5 * 5 * len(refused)


def test_iterations_are_shifted_only_where_memory_is_short() -> None:
    def shifts(case: Case, budget: int) -> list[float]:
        """The seconds that jobs were shifted by, and how often they stalled nevertheless."""
        scheduler = case.scheduler(budget)
        case.run(scheduler)
        reports = [row for demand in case.demands if (row := scheduler.report(demand.name))]
        return [number for row in reports for number in (row.total_shift_seconds, row.num_mispredicted)]

    cases = [random_case(seed) for seed in range(150)]
    assert not any(any(shifts(case, case.sum_of_peaks)) for case in cases)
    assert sum(any(shifts(case, smallest_budget(case.demands))[::2]) for case in cases) > len(cases) // 2


def test_the_smallest_budget_is_kept_and_one_byte_less_is_refused() -> None:
    for case in map(random_case, range(50)):
        least = smallest_budget(case.demands)
        tight = replace(case, budget_bytes=least)
        assert violations(tight, tight.run()) == []
        with pytest.raises(BudgetError) as refused:
            case.scheduler(least - 1)
        assert refused.value.smallest_bytes == least


def test_without_gates_memory_would_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: predictions alone do not keep jittering jobs apart."""
    monkeypatch.setattr(ArenaSide, "gate", lambda self, job, segment: ())
    assert any(violations(case, case.run()) for case in map(random_case, range(60)))


def run_two_that_rise_together() -> None:
    """Ten bytes, two jobs that need eight. The second is believed to rise after the first one's peak.

    It is sooner, and asks for four bytes while the first, not yet at its peak, holds four.
    """
    demands = [job_of("first", (4, 8, 1), 1.0, steps=1), job_of("second", (1, 4, 8), (2.5, 1, 1), steps=1)]
    really = {"first": 1.0, "second": 0.5}
    gpu_of(ScroogeScheduler(demands, 10), demands, seconds_of=lambda ref: really[ref.job]).run()


def test_the_banker_s_rule_is_what_prevents_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arena, "_IN_FLIGHT", 1)
    run_two_that_rise_together()
    monkeypatch.setattr(ArenaSide, "_stays_safe", lambda self, job, segment: True)
    with pytest.raises(PlanError):
        run_two_that_rise_together()


# ---- gains in an arena of one peak ----------------------------------------------------------------------


def equal_jobs(num_layers: int = 24, size: int = 4 << 20) -> list[JobDemand]:
    """Two jobs of one shape, as transformers are: a forward pass of a third of the iteration, an output that
    is a quarter of the peak, a backward pass, and an update of a tenth."""
    maps = [(size, layer, 2 * num_layers - layer) for layer in range(num_layers)]
    maps.append((num_layers * size // 3, num_layers - 1, num_layers + 1))
    seconds = (0.3 / num_layers,) * num_layers + (0.6 / (num_layers + 1),) * (num_layers + 1) + (0.05,) * 2
    rows = tuple(Allocation("map", *row, TensorClass.FEATURE_MAP) for row in maps)
    iteration = Iteration("equal", seconds, rows)
    stack = place_in_arena(iteration, region_bytes=size)
    segments = segments_between(cut_segments(iteration, 4 * size), stack, seconds)
    return [JobDemand(name, "equal", size, 0, segments, steps=30, is_measured=True) for name in "ab"]


@pytest.mark.parametrize(("jitter", "least"), [(0.05, 0.6), (0.3, 0.55)])
def test_equal_jobs_share_an_arena_of_one_peak(jitter: float, least: float) -> None:
    """The backward pass of one beside the forward pass of the other, and the update beside anything.

    Both at once do a fourth more work than one.
    """
    demands = equal_jobs()
    durations = jittered(random.Random(3), demands, jitter)
    gains = []
    for budget in (smallest_budget(demands), 2 * smallest_budget(demands)):
        case = Case(tuple(demands), budget, durations, {"a": 0.8, "b": 0.8})
        run = case.run()
        assert violations(case, run) == []
        gains.append(case.temporal_seconds / run.ended_at - 1)
    assert gains[0] > least * gains[1]
