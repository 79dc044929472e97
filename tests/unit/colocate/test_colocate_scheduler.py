"""The scrooge scheduler, phase by phase, on a simulated GPU."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from simulated_gpu import Contention, Run, SimulatedGpu

from trainmux.colocate import _arena, _scheduler
from trainmux.colocate._arena import StallCounter
from trainmux.colocate._demand import JobDemand, Segment, SegmentRef
from trainmux.colocate._layout import smallest_budget
from trainmux.colocate._scheduler import Enqueue, Remap, ScroogeScheduler
from trainmux.errors import BudgetError

GPU = 100
"""Bytes of a GPU whose regions are single bytes: budgets read as percent."""


def wave(
    name: str,
    peak: int,
    seconds: float = 1.0,
    *,
    steps: int | None = 10,
    num_segments: int = 20,
    is_measured: bool = True,
    share: float = 1.0,
    local: int = 0,
    fingerprint: str | None = None,
) -> JobDemand:
    """A job that rises to its peak for a third of its iteration and falls for the rest."""
    heights = []
    for number in range(num_segments):
        place = (number + 0.5) / num_segments
        heights.append(round(peak * min(place / 0.35, (1 - place) / 0.65)))
    heights[heights.index(max(heights))] = peak
    segments = tuple(
        Segment(1, height, min(height, (*heights[1:], 0)[number]), seconds / num_segments)
        for number, height in enumerate(heights)
    )
    return JobDemand(name, fingerprint or name, 1, local, segments, steps, share, is_measured)


def gpu_of(
    scheduler: ScroogeScheduler,
    demands: list[JobDemand],
    compute_demand: float = 0.5,
    seconds_of: Callable[[SegmentRef], float] | None = None,
) -> SimulatedGpu:
    seconds = {demand.name: [segment.solo_seconds for segment in demand.segments] for demand in demands}
    contention = Contention({demand.name: compute_demand for demand in demands})
    return SimulatedGpu(scheduler, seconds_of or (lambda ref: seconds[ref.job][ref.segment]), contention)


def iterations(run: Run, name: str) -> list[tuple[float, float]]:
    """When each iteration of a job started and ended."""
    found: dict[int, list[float]] = {}
    for row in run.executed:
        if row.ref.job == name:
            found.setdefault(row.ref.iteration, []).extend((row.started_at, row.ended_at))
    return [(min(times), max(times)) for _, times in sorted(found.items())]


def overlap(run: Run, one: str, two: str) -> float:
    """Seconds in which iterations of both jobs were running."""
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in iterations(run, one)
        for other_start, other_end in iterations(run, two)
    )


def waits(run: Run, name: str) -> list[tuple[float, float]]:
    """When each iteration but a job's last ended, and how long nothing of it ran until the next began."""
    found = []
    rows = [row for row in run.executed if row.ref.job == name]
    for (start, end), (next_start, _) in pairwise(iterations(run, name)):
        ran = sum(row.ended_at - row.started_at for row in rows if start <= row.started_at < next_start)
        found.append((end, next_start - start - ran))
    return found


def test_a_new_job_s_first_iteration_runs_alone() -> None:
    jobs = [wave("a", 30, is_measured=False), wave("b", 30, 2.0, is_measured=False)]
    scheduler = ScroogeScheduler(jobs, GPU)
    run = gpu_of(scheduler, jobs, seconds_of=lambda ref: 0.125).run()
    a, b = iterations(run, "a"), iterations(run, "b")
    assert a[0][1] <= b[0][0]
    assert a[1][0] >= b[0][1]
    assert a[1][0] == b[1][0]
    assert scheduler.report("a").solo_seconds == (0.125,) * 20


def test_gaps_that_no_gate_made_are_no_stalls() -> None:
    """A device, and a busy host more so, takes a moment from one segment to the next: no gate's doing."""
    job = wave("a", 30, steps=3, is_measured=False)
    scheduler = ScroogeScheduler([job], GPU)
    now = 0.0
    while not scheduler.is_done:
        action = scheduler.next_action(now)
        if isinstance(action, Enqueue):
            extra = 0.5 if action.ref == ("a", 2, 7) else 0.0
            scheduler.complete(action.ref, now + 0.01 + extra, now + 0.06 + extra)
            now += 0.06 + extra
    assert scheduler.report("a").num_mispredicted == 0


def test_a_job_that_is_watched_has_one_iteration_on_its_way() -> None:
    jobs = [wave("a", 30, steps=4), wave("b", 30, steps=4)]
    jobs[0] = replace(jobs[0], is_watched=True)
    run = gpu_of(ScroogeScheduler(jobs, GPU), jobs).run()

    def begins_early(name: str) -> list[bool]:
        rows = [row for row in run.executed if row.ref.job == name]
        ends = {row.ref.iteration: row.ended_at for row in rows}  # of the last segment
        firsts = [row for row in rows if row.ref.segment == 0 and row.ref.iteration > 0]
        return [row.enqueued_at < ends[row.ref.iteration - 1] for row in firsts]

    assert begins_early("a") == [False] * 3
    assert begins_early("b") == [True] * 3


def test_a_job_with_known_lifespans_is_not_profiled() -> None:
    jobs = [wave("a", 30), wave("b", 30)]
    run = gpu_of(ScroogeScheduler(jobs, GPU), jobs).run()
    assert iterations(run, "a")[0][0] == iterations(run, "b")[0][0] == 0.0


def test_the_budget_moves_from_70_to_50_and_back() -> None:
    """Figure 10: two NASNets run without delay at 70%, with waits at 50%, without at 70% again."""
    jobs = [wave(name, 45, steps=45, fingerprint="nasnet") for name in "ab"]
    scheduler = ScroogeScheduler(jobs, 70)
    gpu = gpu_of(scheduler, jobs)
    gpu.at(15.0, lambda now: scheduler.set_budget(50))
    gpu.at(35.0, lambda now: scheduler.set_budget(70))
    run = gpu.run()
    starts = [start for start, _ in iterations(run, "a")]
    before = [wait for end, wait in waits(run, "a") if 3 < end < 15]
    during = [wait for end, wait in waits(run, "a") if 18 < end < 34]
    after = [wait for end, wait in waits(run, "a") if 39 < end < starts[-1] - 1]
    assert max(before) == pytest.approx(0.0, abs=1e-9)
    assert min(during) > 0.1
    assert max(after) == pytest.approx(0.0, abs=1e-9)
    capacities = [sum(arena.capacity_bytes for arena in remap.layout.arenas) for _, remap in run.remaps]
    budgets = list(zip((remap.budget_bytes for _, remap in run.remaps), capacities, strict=True))
    assert budgets[:2] == [(70, 70), (50, 50)]
    assert (70, 70) in budgets[2:4]  # the budget is in force at once, the arena grows when its top is idle
    # The pause that a change costs: the job at the top finishes its iteration first, nobody else waits.
    assert run.remaps[1][0] - 15.0 <= 1.0
    assert run.idle_seconds == 0.0


def test_what_a_job_does_not_keep_goes_to_the_arena() -> None:
    jobs = [wave(name, 40, steps=20, local=28, fingerprint="same") for name in "ab"]
    scheduler = ScroogeScheduler(jobs, GPU)
    gpu = gpu_of(scheduler, jobs)
    gpu.at(5.0, lambda now: scheduler.keep_less({"a": 10}))
    gpu.at(10.0, lambda now: scheduler.keep_less({"b": 15}))
    gpu.at(11.0, lambda now: scheduler.keep_less({"b": 18}))  # more than it keeps: nothing is taken back
    gpu.at(12.0, lambda now: scheduler.keep_less({"c": 1}))
    run = gpu.run()
    capacities = [sum(arena.capacity_bytes for arena in remap.layout.arenas) for _, remap in run.remaps]
    assert capacities[:3] == [44, 62, 75]
    assert all(remap.budget_bytes == GPU for _, remap in run.remaps)
    assert run.remaps[1][0] - 5.0 <= 1.0  # when the job at the top is between two iterations
    assert run.idle_seconds == 0.0
    waited = [wait for end, wait in waits(run, "a") if end < 5]
    later = [wait for end, wait in waits(run, "a") if 12 < end < run.ended_at - 3]
    assert max(later) < max(waited)
    # One more job fits now than what was asked for left room for.
    scheduler = ScroogeScheduler(jobs, GPU)
    third = wave("c", 40, local=21)
    with pytest.raises(BudgetError):
        scheduler.add(third)
    scheduler.keep_less({"a": 10})
    scheduler.add(third)


def test_a_job_may_be_cut_anew_before_it_begins() -> None:
    asked = [wave("a", 60, is_measured=False, num_segments=4), wave("b", 60, 2.0, is_measured=False)]
    scheduler = ScroogeScheduler(asked, GPU)
    assert isinstance(scheduler.next_action(0.0), Remap)
    finer = wave("a", 60, is_measured=False, num_segments=30, local=7)  # what it keeps is another matter
    scheduler.cut_anew(replace(finer, is_measured=True))
    scheduler.cut_anew(asked[1])
    scheduler.cut_anew(finer)  # after all, it has to be profiled
    jobs = [finer, asked[1]]
    gpu = gpu_of(scheduler, jobs)
    assert scheduler.layout.arenas[0].capacity_bytes == GPU  # no local bytes, as before
    run = gpu.run()
    assert {row.ref.segment for row in run.executed if row.ref.job == "a"} == set(range(30))
    assert len(scheduler.report("a").solo_seconds) == 30
    assert scheduler.report("a").num_iterations == 10
    # From then on it is as if it had been cut so from the beginning.
    same = gpu_of(ScroogeScheduler([replace(finer, local_bytes=0), asked[1]], GPU), jobs).run()
    assert run.executed == same.executed


def test_a_short_job_runs_more_often_than_a_long_one() -> None:
    """Figure 9: while NASNet runs once, ResNet-110 runs several times where it fits."""
    jobs = [wave("resnet", 40, 0.25, steps=200), wave("nasnet", 90, 1.5, steps=20)]
    run = gpu_of(ScroogeScheduler(jobs, 110), jobs).run()
    while_both = min(iterations(run, "resnet")[-1][1], iterations(run, "nasnet")[-1][1])
    ran = Counter(row.ref.job for row in run.executed if row.ended_at <= while_both and row.ref.segment == 19)
    assert ran["resnet"] > 3 * ran["nasnet"] > 0
    assert overlap(run, "resnet", "nasnet") > 0.3 * while_both


def test_shifts_are_whole_steps_and_delay_whole_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scheduler, "_LEAD_SHARE", 0.0)
    jobs = [wave(name, 60, steps=5, fingerprint="same") for name in "ab"]
    run = gpu_of(ScroogeScheduler(jobs, 80), jobs).run()
    starts, ends = zip(*iterations(run, "b"), strict=True)
    assert starts[0] * 64 == pytest.approx(round(starts[0] * 64))
    # Nothing stalls inside an iteration: segments follow one another.
    rows = [row for row in run.executed if row.ref.job == "b" and row.ref.iteration == 0]
    assert all(two.started_at == one.ended_at for one, two in pairwise(rows))
    assert ends[0] - starts[0] == pytest.approx(1.0, rel=0.01)


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
        begins.append(iterations(run, "b")[0][0])
        ends.append(run.ended_at)
        assert sum(scheduler.report(name).num_mispredicted for name in "ab") == 0
        assert iterations(run, "a")[0][1] == pytest.approx(1.0, rel=0.35)
    assert begins[1] < begins[0] - 1 / 16
    assert ends[1] < 0.98 * ends[0]


def test_mispredictions_end_in_time_slicing_and_sharing_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that is to rise when its peer's peak is over does so before that, now and then, and stalls."""
    rows = {
        "first": ((4, 4, 1.0), (8, 1, 1.0), (1, 0, 1.0)),
        "second": ((1, 1, 2.5), (4, 4, 1.0), (8, 0, 1.0)),
    }
    jobs = [
        JobDemand(name, name, 1, 0, tuple(Segment(1, *row) for row in segments), steps=160, is_measured=True)
        for name, segments in rows.items()
    ]

    def seconds_of(ref: SegmentRef) -> float:
        is_early = ref.job == "second" and ref.segment == 0 and ref.iteration < 25
        return 0.1 if is_early else rows[ref.job][ref.segment][2]

    for module, name, value in (
        (_arena, "_FIRST_ROUNDS", 4),
        (_arena, "_STALLS_TO_FALL_BACK", 2),
        (_arena, "_IN_FLIGHT", 1),
        (_scheduler, "_FEEDBACK_WEIGHT", 0.01),
    ):
        monkeypatch.setattr(module, name, value)
    scheduler = ScroogeScheduler(jobs, 10)
    modes = []
    original = scheduler.complete

    def watch(ref: SegmentRef, started_at: float, ended_at: float) -> None:
        original(ref, started_at, ended_at)
        is_slicing = any(arena.stalls.is_slicing for arena in scheduler._arenas)
        if not modes or modes[-1] != is_slicing:
            modes.append(is_slicing)

    scheduler.complete = watch  # type: ignore[method-assign]
    gpu_of(scheduler, jobs, seconds_of=seconds_of).run()
    assert modes[:3] == [False, True, False]
    stalls = sum(scheduler.report(demand.name).num_mispredicted for demand in jobs)
    assert stalls >= 2


def test_shares_decide_where_jobs_want_the_same_memory() -> None:
    """With memory for one at a time, a job with three shares gets three times the iterations."""
    jobs = [wave("rich", 90, steps=None, share=3.0), wave("poor", 90, steps=None)]
    scheduler = ScroogeScheduler(jobs, 90)
    gpu = gpu_of(scheduler, jobs)
    for name in ("rich", "poor"):
        gpu.at(100.0, lambda now, name=name: scheduler.remove(name))
    run = gpu.run()
    ratio = len(iterations(run, "rich")) / len(iterations(run, "poor"))
    assert ratio == pytest.approx(3.0, rel=0.15)


def service_of_two(**shares: float) -> dict[str, float]:
    """Seconds of work that each of two jobs gets of which the first has little memory, the second all."""
    jobs = [wave("low", 40, 1.3, steps=None), wave("high", 60, 1.0, steps=None)]
    jobs = [replace(job, share=shares.get(job.name, 1.0)) for job in jobs]
    scheduler = ScroogeScheduler(jobs, 60)
    gpu = gpu_of(scheduler, jobs, 0.6)
    for name in ("low", "high"):
        gpu.at(300.0, lambda now, name=name: scheduler.remove(name))
    run = gpu.run()
    return {job.name: len(iterations(run, job.name)) * job.solo_seconds for job in jobs}


def test_a_job_may_get_half_more_than_its_peer_where_that_is_more_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = service_of_two()
    monkeypatch.setattr(_arena, "_LEEWAY", 1.0)
    strict = service_of_two()
    assert strict["low"] == pytest.approx(strict["high"], rel=0.05)
    ratio = max(free.values()) / min(free.values())
    assert 1.1 < ratio < 1.55
    assert sum(free.values()) > 1.01 * sum(strict.values())


def test_who_asked_for_shares_gets_them() -> None:
    served = service_of_two(low=2.0)
    assert served["low"] / served["high"] == pytest.approx(2.0, rel=0.1)


def test_no_job_starves() -> None:
    """A long job that needs nearly all memory, beside a short one that is always there first."""
    jobs = [wave("short", 50, 0.1, steps=None), wave("long", 95, 3.0, steps=None)]
    scheduler = ScroogeScheduler(jobs, 100)
    gpu = gpu_of(scheduler, jobs)
    for name in ("short", "long"):
        gpu.at(120.0, lambda now, name=name: scheduler.remove(name))
    run = gpu.run()
    begins = [start for start, _ in iterations(run, "long")]
    assert max(two - one for one, two in pairwise(begins)) < 3 * (3.0 + 3.0)
    assert len(iterations(run, "short")) > 100


def test_what_a_job_got_while_there_was_memory_for_all_is_not_held_against_it() -> None:
    """A hundred seconds in which the short one runs slowly for other reasons; then memory becomes scarce."""
    jobs = [wave("short", 50, 0.1, steps=None), wave("long", 95, 3.0, steps=None)]
    scheduler = ScroogeScheduler(jobs, 145)

    def seconds_of(ref: SegmentRef) -> float:
        demand = jobs[ref.job == "long"]
        slowly = ref.job == "short" and ref.iteration < 200
        return demand.segments[ref.segment].solo_seconds * (5 if slowly else 1)

    gpu = gpu_of(scheduler, jobs, 0.5, seconds_of=seconds_of)
    gpu.at(100.0, lambda now: scheduler.set_budget(100))
    for name in ("short", "long"):
        gpu.at(160.0, lambda now, name=name: scheduler.remove(name))
    run = gpu.run()
    begins = [start for start, _ in iterations(run, "long")]
    assert max(two - one for one, two in pairwise([*begins, 160.0])) < 3 * (3.0 + 3.0)


@pytest.mark.parametrize("num_jobs", [2, 3])
@pytest.mark.parametrize("room", [40, 50, 70, 79])
def test_a_job_that_waits_is_not_passed_over(num_jobs: int, room: int) -> None:
    """Just when a peak of the others ends it is not asked: their next one must not begin before it."""
    segments = (Segment(1, 40, 40, 1.0), Segment(1, 40, 0, 1.0), Segment(1, 0, 0, 1.0))
    demands = [JobDemand(name, name, 1, 0, segments, is_measured=True) for name in "abc"[:num_jobs]]
    scheduler = ScroogeScheduler(demands, room)
    gpu = SimulatedGpu(scheduler, lambda ref: 1.0, Contention(dict.fromkeys("abc", 1.0)))
    for demand in demands:
        gpu.at(600.0, lambda now, name=demand.name: scheduler.remove(name))  # type: ignore[misc]
    ran = Counter(row.ref.job for row in gpu.run().executed)
    assert min(ran.values()) > 0.9 * max(ran.values())
    assert len(ran) == num_jobs


def test_a_job_joins_and_leaves_while_others_run() -> None:
    jobs = [wave("a", 40, steps=40, local=5), wave("b", 40, steps=40, local=5)]
    late = wave("late", 30, 0.5, steps=10, is_measured=False, local=10)
    scheduler = ScroogeScheduler(jobs, 100)
    gpu = gpu_of(scheduler, [*jobs, late])
    gpu.at(5.0, lambda now: scheduler.add(late))
    gpu.at(12.0, lambda now: scheduler.remove("b"))
    reserved = []
    gpu.at(11.0, lambda now: reserved.append(sum(arena.capacity_bytes for arena in scheduler.layout.arenas)))
    run = gpu.run()
    assert len(iterations(run, "late")) == 10
    assert len(iterations(run, "a")) == 40
    assert scheduler.report("b").num_iterations == len(iterations(run, "b")) < 20
    first = iterations(run, "late")[0]
    for name in "ab":  # the newcomer's first iteration is alone
        assert all(end <= first[0] or start >= first[1] for start, end in iterations(run, name))
    assert 0 < reserved[0] <= 80  # next to 20 local bytes
    assert run.idle_seconds == 0.0
    assert scheduler.is_done


def test_a_job_that_fails_leaves_at_once_and_the_other_goes_on() -> None:
    jobs = [wave("a", 60, steps=10), wave("b", 60, steps=10)]
    scheduler = ScroogeScheduler(jobs, 90)
    gpu = gpu_of(scheduler, jobs)
    gpu.at(2.3, lambda now: scheduler.remove("b", at_once=True))
    run = gpu.run()
    assert len(iterations(run, "a")) == 10
    last = max(row.ended_at for row in run.executed if row.ref.job == "b")
    assert last < 2.3 + 4 * 2 / 20  # no more than what was in flight, slowed by its peer
    assert scheduler.is_done


def test_a_budget_that_grows_is_in_force_before_all_arenas_have_grown() -> None:
    """One pair is amid its peaks, the other between two iterations and gets its part at once."""
    num_parts = 0
    for moment in range(0, 60, 3):
        demands = [wave(name, 20, 1.0 + 0.3 * number, steps=6) for number, name in enumerate("abcd")]
        scheduler = ScroogeScheduler(demands, 50)
        gpu = gpu_of(scheduler, demands)
        gpu.at(0.05 * moment, lambda now, scheduler=scheduler: scheduler.set_budget(70))  # type: ignore[misc]
        remaps = [remap for _, remap in gpu.run().remaps]
        for remap in remaps:
            assert sum(arena.capacity_bytes for arena in remap.layout.arenas) <= remap.budget_bytes
        num_parts += sum(len(remap.layout.arenas) == 2 and remap.budget_bytes == 70 for remap in remaps) > 1
    assert num_parts


def test_jobs_that_cannot_be_scheduled_are_refused() -> None:
    a, b = wave("a", 60, local=20), wave("b", 30, local=20)
    assert smallest_budget([a, b]) == 100
    with pytest.raises(BudgetError, match="job 'a' needs") as too_large:
        ScroogeScheduler([a, b], 79)
    assert too_large.value.smallest_bytes == 100
    with pytest.raises(BudgetError, match="local memory of every job") as together:
        ScroogeScheduler([a, b], 99)
    assert together.value.smallest_bytes == 100


def test_changes_that_cannot_be_are_refused_and_change_nothing() -> None:
    jobs = [wave("a", 40), wave("b", 40)]
    scheduler = ScroogeScheduler(jobs, 80)
    with pytest.raises(BudgetError, match="needs"):
        scheduler.set_budget(39)
    with pytest.raises(BudgetError, match="job 'c' needs"):
        scheduler.add(wave("c", 81))
    assert scheduler.report("c") is None
    assert gpu_of(scheduler, jobs).run().ended_at == pytest.approx(10.0)


# ---- the fall-back to time slicing -----------------------------------------------------------------------


def test_many_stalls_end_in_time_slicing_for_longer_each_time() -> None:
    pair = StallCounter()
    now, lengths = 0.0, []
    for _ in range(3):
        while not pair.is_slicing:
            pair.iteration_ended(now, 2.0, stalled=True)
        begin = now
        while pair.is_slicing:
            now += 1.0
            pair.iteration_ended(now, 2.0, stalled=False)
        lengths.append(now - begin)
    assert lengths == [32.0, 128.0, 512.0]  # 16, 64 and 256 rounds of two seconds


def test_a_few_stalls_among_many_iterations_are_tolerated() -> None:
    pair = StallCounter()
    assert not any(pair.iteration_ended(float(n), 2.0, stalled=n % 3 == 0) for n in range(100))


def test_another_budget_ends_time_slicing() -> None:
    jobs = [wave(name, 60, 1.0, steps=None) for name in "ab"]
    scheduler = ScroogeScheduler(jobs, 60)
    scheduler.next_action(0.0)
    (arena,) = scheduler._arenas
    while not arena.stalls.iteration_ended(0.0, 1e6, stalled=True):
        pass
    gpu = gpu_of(scheduler, jobs, 0.6)
    gpu.at(20.0, lambda now: scheduler.set_budget(120))
    for name in "ab":
        gpu.at(60.0, lambda now, name=name: scheduler.remove(name))
    run = gpu.run()
    done = [end for name in "ab" for _, end in iterations(run, name)]
    assert sum(end <= 20.0 for end in done) == pytest.approx(20, abs=2)
    assert sum(20.0 < end <= 60.0 for end in done) > 1.5 * 40
