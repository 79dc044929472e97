"""The fall-back to time slicing and the return from it, without any device."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmux.colocate._health import GainMeter, StallCounter, TimeSlicing

LEAST_GAIN, ROUNDS_TO_LOSE = 0.97, 0.25


def test_many_stalls_end_in_time_slicing_for_longer_each_time() -> None:
    pair = StallCounter()
    now, lengths = 0.0, []
    for _ in range(3):
        while not pair.slicing.is_on:
            pair.iteration_ended(now, 2.0, stalled=True)
        begin = now
        while pair.slicing.is_on:
            now += 1.0
            pair.iteration_ended(now, 2.0, stalled=False)
        lengths.append(now - begin)
    assert lengths == [32.0, 128.0, 512.0]  # 16, 64 and 256 rounds of two seconds


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the fall-backs of every meter."""
    fall_back = TimeSlicing.fall_back

    def counting(self: TimeSlicing, now: float, round_seconds: float) -> None:
        self.num_fall_backs = getattr(self, "num_fall_backs", 0) + 1  # type: ignore[attr-defined]
        fall_back(self, now, round_seconds)

    monkeypatch.setattr(TimeSlicing, "fall_back", counting)


def fall_backs(meter: GainMeter) -> int:
    return getattr(meter.slicing, "num_fall_backs", 0)


def test_a_few_stalls_among_many_iterations_are_tolerated() -> None:
    pair = StallCounter()
    for number in range(100):
        pair.iteration_ended(float(number), 2.0, stalled=number % 3 == 0)
    assert not pair.slicing.is_on


def test_a_host_that_was_away_once_is_not_held_against_sharing() -> None:
    """Segments of a tenth of a round; a pause of three rounds between two of them is one of their lengths."""
    meter = GainMeter()
    now = 0.0
    for number in range(400):
        now += 6.0 if number % 100 == 50 else 0.18  # else ten per cent are gained
        meter.segment_ended(0.2, now)
        assert not meter.iteration_ended(now, 2.0, 2)
    for _ in range(40):  # always late, and it is
        now += 0.3
        meter.segment_ended(0.2, now)
        meter.iteration_ended(now, 2.0, 2)
    assert fall_backs(meter) == 1


@pytest.mark.parametrize("round_seconds", [1.3, 1.5, 1.8])
def test_a_short_segment_behind_a_long_one_does_not_hide_a_loss(round_seconds: float) -> None:
    """A tenth of a second of work and a second of it end close to each other, in more than their sum."""
    meter = GainMeter()
    now = 0.0
    for _ in range(8):
        now += round_seconds - 0.1
        meter.segment_ended(0.1, now)
        meter.iteration_ended(now, 1.1, 2)
        now += 0.1
        meter.segment_ended(1.0, now)
        meter.iteration_ended(now, 1.1, 2)
    assert fall_backs(meter) > 0


def run_back_to_back(
    meter: GainMeter, solo_seconds: float, count: int, *, gap: float = 0.0, round_seconds: float = 2.0
) -> None:
    """So many iterations of one segment, each a second on the device, jobs in turn."""
    start = meter._last_end or 0.0
    for number in range(count):
        begin = start + number * (1.0 + gap)
        meter.segment_ended(solo_seconds, begin + 1.0)
        meter.iteration_ended(begin + 1.0, round_seconds, 2)


def test_work_per_second_decides_for_the_device() -> None:
    for solo_seconds, loses in ((1.2, False), (1.0, False), (0.9, True)):
        meter = GainMeter()
        run_back_to_back(meter, solo_seconds, 16)
        assert meter.slicing.is_on is loses


def test_where_the_host_is_slow_sharing_must_be_as_good_as_slicing() -> None:
    """With a gap behind every iteration neither does 0.97 of the work; sharing is not given up for that."""
    meter = GainMeter()
    run_back_to_back(meter, 1.0, 40, gap=0.25)
    assert fall_backs(meter) == 1  # slicing was not known to be no better
    assert meter.required_gain == pytest.approx(0.99 * 0.8, rel=0.03)
    run_back_to_back(meter, 1.0, 2000, gap=0.25)
    assert fall_backs(meter) == 1
    run_back_to_back(meter, 1.0, 200, gap=0.45)  # worse than slicing
    assert fall_backs(meter) > 1
    meter.forget()
    assert meter.required_gain == LEAST_GAIN


def test_what_is_lost_adds_up_until_it_is_a_quarter_of_a_round_or_a_segment() -> None:
    lost_each = LEAST_GAIN - 0.9
    for round_seconds, to_lose in ((2.0, 0.9), (8.0, ROUNDS_TO_LOSE * 8.0)):
        enough = math.ceil(to_lose / lost_each)
        meter = GainMeter()
        run_back_to_back(meter, 0.9, enough, round_seconds=round_seconds)  # the first one starts the clock
        assert not meter.slicing.is_on
        meter = GainMeter()
        run_back_to_back(meter, 0.9, enough + 2, round_seconds=round_seconds)
        assert fall_backs(meter) == 1


@given(st.integers(1, 10_000), st.integers(4, 40), st.integers(4, 40), st.floats(1.0, 1.4))
def test_pieces_of_work_that_end_at_odd_times_are_not_a_loss(
    seed: int, first: int, second: int, gain: float
) -> None:
    """Two jobs side by side at any gain: however their segments are cut, and whatever one takes."""
    random, meter = Random(seed), GainMeter()
    rows = []
    for count in (first, second):
        now = random.random() / count
        for number in range(20 * count):
            solo = 1.0 / count
            taken = solo * 2 / gain
            rows.append((now + taken, solo, number % count == count - 1))
            now += taken
    for ended_at, solo, is_last in sorted(rows):
        meter.segment_ended(solo, ended_at)
        if is_last:
            meter.iteration_ended(ended_at, 2.0, 2)
    assert fall_backs(meter) == 0


@pytest.mark.parametrize(("gain", "loses"), [(1.14, False), (0.85, True)])
def test_a_long_segment_is_no_loss_while_it_runs(gain: float, loses: bool) -> None:
    """One job's iteration is two segments of 9, the other's ten of 0.3; each runs at half of the gain."""
    meter = GainMeter()
    ends = sorted(
        [(number * 9.0, 9.0) for number in range(1, 30)] + [(number * 0.3, 0.3) for number in range(1, 900)]
    )
    fell_back = False
    for number, (begin, seconds) in enumerate(ends):
        now = begin * 2 / gain
        meter.segment_ended(seconds, now)
        if seconds == 9.0 or number % 10 == 0:
            fell_back = fell_back or meter.iteration_ended(now, 21.0, 2)
    assert fell_back is loses


def test_slicing_is_short_again_once_sharing_has_worked() -> None:
    meter = GainMeter()
    for _ in range(2):
        meter.slicing.fall_back(0.0, 2.0)
    meter.slicing.iteration_ended(1e9)
    run_back_to_back(meter, 1.0, 40)
    meter.slicing.fall_back(0.0, 2.0)
    meter.slicing.iteration_ended(16 * 2.0)
    assert not meter.slicing.is_on


def test_sharing_again_ends_slicing_and_forgets_what_was_lost() -> None:
    meter = GainMeter()
    for _ in range(5):
        run_back_to_back(meter, 0.9, 5)
        meter.share_again()
    assert fall_backs(meter) == 0
    meter.slicing.fall_back(0.0, 2.0)
    meter.share_again()
    assert not meter.slicing.is_on


def test_one_job_alone_is_not_judged() -> None:
    meter = GainMeter()
    for number in range(20):
        meter.segment_ended(0.5, number + 1.0)
        meter.iteration_ended(number + 1.0, 1.0, 1)
    assert not meter.slicing.is_on
