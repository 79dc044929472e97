"""The scrooge scheduler, phase by phase, on a simulated GPU whose regions are single bytes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from colocate_cases import gpu_of, job_of, num_ended, run_for, wave
from simulated_gpu import Run

from trainmux.colocate import _arena, _scheduler
from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._scheduler import Enqueue, Idle, Remap, ScroogeScheduler


def waits(run: Run, name: str) -> list[tuple[float, float]]:
    """When each iteration but a job's last ended, and how long nothing of it ran until the next began."""
    found = []
    rows = [row for row in run.executed if row.ref.job == name]
    for (start, end), (next_start, _) in pairwise(run.iterations(name)):
        ran = sum(row.ended_at - row.started_at for row in rows if start <= row.started_at < next_start)
        found.append((end, next_start - start - ran))
    return found


def capacities(run: Run) -> list[int]:
    return [sum(arena.capacity_bytes for arena in remap.layout.arenas) for _, remap in run.remaps]


def seconds_of_both(run: Run, begin: float, end: float) -> float:
    """Seconds in which both ran, of those between two moments."""
    rows = [row for row in run.executed if begin <= row.started_at and row.ended_at <= end]
    return sum(
        max(0.0, min(one.ended_at, two.ended_at) - max(one.started_at, two.started_at))
        for one in rows
        for two in rows
        if one.ref.job < two.ref.job
    )


# ---- profiling and the order of iterations --------------------------------------------------------------


def test_a_new_job_s_first_iteration_runs_alone() -> None:
    jobs = [wave("a", 30, is_measured=False), wave("b", 30, 2.0, is_measured=False)]
    scheduler = ScroogeScheduler(jobs, 100)
    run = gpu_of(scheduler, jobs, seconds_of=lambda ref: 0.125).run()
    a, b = run.iterations("a"), run.iterations("b")
    assert a[0][1] <= b[0][0]
    assert b[0][1] <= a[1][0] == b[1][0]
    report = scheduler.report("a")
    assert report is not None
    assert report.solo_seconds == [0.125] * 20
    known = [wave("a", 30), wave("b", 30)]
    run = gpu_of(ScroogeScheduler(known, 100), known).run()
    assert run.iterations("a")[0][0] == run.iterations("b")[0][0] == 0.0


def test_gaps_that_no_gate_made_are_no_stalls() -> None:
    """A device, and a busy host more so, takes a moment from one segment to the next: no gate's doing."""
    scheduler = ScroogeScheduler([wave("a", 30, steps=3, is_measured=False)], 100)
    now = 0.0
    while not scheduler.is_done:
        action = scheduler.next_action(now)
        if isinstance(action, Enqueue):
            extra = 0.5 if action.ref == ("a", 2, 7) else 0.0
            scheduler.complete(action.ref, now + 0.01 + extra, now + 0.06 + extra)
            now += 0.06 + extra
    report = scheduler.report("a")
    assert report is not None
    assert report.num_mispredicted == 0


def test_a_job_that_is_watched_has_one_iteration_on_its_way() -> None:
    jobs = [wave("a", 30, steps=4, is_watched=True), wave("b", 30, steps=4)]
    run = gpu_of(ScroogeScheduler(jobs, 100), jobs).run()

    def begins_early(name: str) -> list[bool]:
        rows = [row for row in run.executed if row.ref.job == name]
        ends = {row.ref.iteration: row.ended_at for row in rows}  # of the last segment
        firsts = [row for row in rows if row.ref.segment == 0 and row.ref.iteration > 0]
        return [row.enqueued_at < ends[row.ref.iteration - 1] for row in firsts]

    assert begins_early("a") == [False] * 3
    assert begins_early("b") == [True] * 3


@pytest.mark.parametrize(("num_segments", "num_at_once"), [(6, 6), (40, 16)])
def test_where_both_peaks_fit_an_iteration_is_enqueued_at_once(num_segments: int, num_at_once: int) -> None:
    """But no more than a host launches in a moment. Each job has its four segments before either has more."""
    demands = [job_of(name, (*range(1, num_segments), 0), 1.0, steps=1) for name in "ab"]
    scheduler = ScroogeScheduler(demands, 1000)
    enqueued = []
    while not isinstance(action := scheduler.next_action(0.0), Idle):
        enqueued += [action.ref.job] if isinstance(action, Enqueue) else []
    assert sorted(enqueued[:8]) == ["a"] * 4 + ["b"] * 4
    assert sorted(enqueued) == ["a"] * num_at_once + ["b"] * num_at_once


def test_next_to_a_falling_job_an_iteration_begins_early_and_waits_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for the one that begins early; and what it waits itself is not a misprediction."""
    begins, ends = [], []
    for lead in (1e-9, 1 / 8):
        monkeypatch.setattr(_scheduler, "_LEAD_SHARE", lead)
        jobs = [wave(name, 60, steps=20, fingerprint="same", num_segments=9) for name in "ab"]
        rng = random.Random(5)
        scheduler = ScroogeScheduler(jobs, 60)
        run = gpu_of(scheduler, jobs, 0.6, seconds_of=lambda ref, rng=rng: rng.uniform(0.7, 1.3) / 9).run()
        begins.append(run.iterations("b")[0][0])
        ends.append(run.ended_at)
        assert sum(row.num_mispredicted for name in "ab" if (row := scheduler.report(name))) == 0
        assert run.iterations("a")[0][1] == pytest.approx(1.0, rel=0.35)
    assert begins[1] < begins[0] - 1 / 16
    assert ends[1] < 0.98 * ends[0]


# ---- budgets and jobs that change -----------------------------------------------------------------------


def test_the_budget_moves_from_70_to_50_and_back() -> None:
    """Figure 10: two NASNets run without delay at 70%, with waits at 50%, without at 70% again."""
    jobs = [wave(name, 45, steps=45, fingerprint="nasnet") for name in "ab"]
    scheduler = ScroogeScheduler(jobs, 70)
    gpu = gpu_of(scheduler, jobs)
    gpu.at(15.0, lambda: scheduler.set_budget(50))
    gpu.at(35.0, lambda: scheduler.set_budget(70))
    run = gpu.run()
    starts = [start for start, _ in run.iterations("a")]
    before = [wait for end, wait in waits(run, "a") if 3 < end < 15]
    during = [wait for end, wait in waits(run, "a") if 18 < end < 34]
    after = [wait for end, wait in waits(run, "a") if 39 < end < starts[-1] - 1]
    assert max(before) == pytest.approx(0.0, abs=1e-9)
    assert min(during) > 0.1
    assert max(after) == pytest.approx(0.0, abs=1e-9)
    budgets = list(zip((remap.budget_bytes for _, remap in run.remaps), capacities(run), strict=True))
    assert budgets[:2] == [(70, 70), (50, 50)]
    assert (70, 70) in budgets[2:4]  # the budget is in force at once, the arena grows when its top is idle
    # The pause that a change costs: the job at the top finishes its iteration first, nobody else waits.
    assert run.remaps[1][0] - 15.0 <= 1.0
    assert run.idle_seconds == 0.0


def test_a_job_that_settles_may_be_cut_anew_and_give_memory_back() -> None:
    """From then on it is as if it had been cut so from the beginning."""
    asked = [
        wave("a", 60, is_measured=False, num_segments=4, local_bytes=20),
        wave("b", 60, 2.0, is_measured=False, local_bytes=20),
    ]
    finer = wave("a", 60, is_measured=False, num_segments=30, local_bytes=5)
    for gives_back in (False, True):
        scheduler = ScroogeScheduler(asked, 110)
        assert isinstance(scheduler.next_action(0.0), Remap)
        scheduler.settled(replace(finer, is_measured=True), gives_back=gives_back)
        scheduler.settled(finer, gives_back=gives_back)  # after all, it has to be profiled
        scheduler.settled(asked[1], gives_back=gives_back)
        jobs = [finer, asked[1]]
        run = gpu_of(scheduler, jobs).run()
        kept = finer if gives_back else replace(finer, local_bytes=20)
        same = ScroogeScheduler([kept, asked[1]], 110)
        expected = gpu_of(same, jobs).run()
        assert (85 in capacities(run)) is gives_back
        assert [row.ref for row in run.executed] == [row.ref for row in expected.executed]
        assert run.ended_at == pytest.approx(expected.ended_at)


def test_a_job_that_fails_leaves_at_once_and_the_other_goes_on() -> None:
    jobs = [wave("a", 60), wave("b", 60)]
    scheduler = ScroogeScheduler(jobs, 90)
    gpu = gpu_of(scheduler, jobs)
    gpu.at(2.3, lambda: scheduler.remove("b", at_once=True))
    run = gpu.run()
    assert num_ended(run, jobs[0]) == 10
    last = max(row.ended_at for row in run.executed if row.ref.job == "b")
    assert last < 2.3 + 4 * 2 / 20  # no more than what was in flight, slowed by its peer


# ---- who gets the device --------------------------------------------------------------------------------


def test_a_short_job_runs_more_often_than_a_long_one() -> None:
    """Figure 9: while NASNet runs once, ResNet-110 runs several times where it fits."""
    jobs = [wave("resnet", 40, 0.25, steps=100), wave("nasnet", 90, 1.5, steps=10)]
    run = gpu_of(ScroogeScheduler(jobs, 110), jobs).run()
    while_both = min(run.iterations(job.name)[-1][1] for job in jobs)
    ran = Counter(row.ref.job for row in run.executed if row.ended_at <= while_both and row.ref.segment == 19)
    assert ran["resnet"] > 3 * ran["nasnet"] > 0
    assert seconds_of_both(run, 0.0, while_both) > 0.3 * while_both


def service_of_two(share: float = 1.0) -> tuple[float, float]:
    """Seconds of work that each of two jobs gets of which the first has little memory, the second all."""
    jobs = [wave("low", 40, 1.3, steps=None, share=share), wave("high", 60, 1.0, steps=None)]
    run = run_for(150.0, jobs, 60, 0.6)
    return num_ended(run, jobs[0]) * 1.3, num_ended(run, jobs[1]) * 1.0


def test_a_job_may_get_half_more_than_its_peer_where_that_is_more_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    low, high = service_of_two(share=2.0)  # who asked for shares of scarce memory gets them
    assert low / high == pytest.approx(2.0, rel=0.1)
    free = service_of_two()
    monkeypatch.setattr(_arena, "_LEEWAY", 1.0)
    strict = service_of_two()
    assert strict[0] == pytest.approx(strict[1], rel=0.05)
    assert 1.1 < max(free) / min(free) < 1.55
    assert sum(free) > 1.01 * sum(strict)


@pytest.mark.parametrize("had_enough", [False, True])
def test_no_job_starves(had_enough: bool) -> None:
    """A long job that needs nearly all memory, beside a short one that is always there first.

    What the long one got while there was memory for both is not held against it: a hundred seconds in which
    the short one runs slowly for other reasons.
    """
    jobs = [wave("short", 50, 0.1, steps=None), wave("long", 95, 3.0, steps=None)]
    scheduler = ScroogeScheduler(jobs, 145 if had_enough else 100)

    def seconds_of(ref: SegmentRef) -> float:
        demand = jobs[ref.job == "long"]
        slowly = had_enough and ref.job == "short" and ref.iteration < 200
        return demand.segments[ref.segment].solo_seconds * (5 if slowly else 1)

    gpu = gpu_of(scheduler, jobs, seconds_of=seconds_of)
    if had_enough:
        gpu.at(100.0, lambda: scheduler.set_budget(100))
    for name in ("short", "long"):
        gpu.at(160.0, lambda name=name: scheduler.remove(name))
    run = gpu.run()
    begins = [start for start, _ in run.iterations("long")]
    assert max(two - one for one, two in pairwise([*begins, 160.0])) < 3 * (3.0 + 3.0)
    assert num_ended(run, jobs[0]) > 100


@pytest.mark.parametrize(("num_jobs", "room"), [(2, 40), (2, 79), (3, 50), (3, 70)])
def test_a_job_that_waits_is_not_passed_over(num_jobs: int, room: int) -> None:
    """Just when a peak of the others ends it is not asked: their next one must not begin before it."""
    demands = [job_of(name, (40, 40, 0), 1.0) for name in "abc"[:num_jobs]]
    run = run_for(600.0, demands, room, 1.0)
    ran = Counter(row.ref.job for row in run.executed)
    assert min(ran.values()) > 0.9 * max(ran.values())
    assert len(ran) == num_jobs


# ---- the fall-back to time slicing ----------------------------------------------------------------------


def erratic(ref: SegmentRef) -> float:
    """One job is to rise when its peer's peak is over. Every other time it is too early, and stalls."""
    is_early = ref.job == "second" and ref.segment == 0 and ref.iteration % 2 and ref.iteration < 30
    return 0.1 if is_early else 2.5 if ref.job == "second" and ref.segment == 0 else 1.0


@pytest.mark.parametrize("has_more_memory", [False, True])
def test_mispredictions_end_in_time_slicing_and_sharing_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, has_more_memory: bool
) -> None:
    """After a number of rounds, or at once where the budget changes."""
    rounds = 1000 if has_more_memory else 4
    for name, value in (("_SLICING_ROUNDS", rounds), ("_STALLS_TO_FALL_BACK", 2), ("_IN_FLIGHT", 1)):
        monkeypatch.setattr(_arena, name, value)
    first = job_of("first", (4, 8, 1), 1.0, steps=160)
    jobs = [first, job_of("second", (1, 4, 8), (2.5, 1.0, 1.0), steps=160)]
    scheduler = ScroogeScheduler(jobs, 10)
    gpu = gpu_of(scheduler, jobs, seconds_of=erratic)
    fell_back_at: list[float] = []
    complete = scheduler.complete

    def watch(ref: SegmentRef, started_at: float, ended_at: float) -> None:
        complete(ref, started_at, ended_at)
        if scheduler.num_fall_backs > len(fell_back_at):
            fell_back_at.append(ended_at)

    monkeypatch.setattr(scheduler, "complete", watch)
    if has_more_memory:
        gpu.at(300.0, lambda: scheduler.set_budget(11))
    run = gpu.run()
    assert fell_back_at
    assert sum(row.num_mispredicted for job in jobs if (row := scheduler.report(job.name))) >= 2
    until = 300.0 if has_more_memory else fell_back_at[0] + 4 * 7.5
    assert seconds_of_both(run, fell_back_at[0] + 8, until - 1) == 0.0
    assert seconds_of_both(run, until, run.ended_at) > 10.0


def test_a_few_stalls_among_many_iterations_are_tolerated() -> None:
    pair = _arena.StallCounter()
    assert not any(pair.iteration_ended("a", float(n), 2.0, stalled=n % 3 == 0) for n in range(100))


def test_a_job_that_is_held_up_is_noticed_beside_one_of_many_short_iterations() -> None:
    """Every other iteration of one job is held up, and its peer runs many in between that never are."""

    def seconds_of(ref: SegmentRef) -> float:
        if ref.job == "long" and ref.segment == 0:  # never as long as the last time
            return 0.01 if ref.iteration % 2 else 1.0
        return jobs[ref.job == "long"].segments[ref.segment].solo_seconds

    jobs = [
        job_of("short", (6, 1, 6), 0.1, steps=2000),
        job_of("long", (1, 8, 1), (1.0, 0.02, 0.5), steps=100),
    ]
    scheduler = ScroogeScheduler(jobs, 10)
    gpu_of(scheduler, jobs, seconds_of=seconds_of).run()
    short, long = (scheduler.report(job.name) for job in jobs)
    assert short is not None
    assert long is not None
    assert (short.num_mispredicted, scheduler.num_fall_backs) == (0, 1)
    assert 4 <= long.num_mispredicted < 10
