"""The ramp, the fall-back to turns and the return from it, without any device."""

from __future__ import annotations

from trainmux.colocate import ScroogeConstants
from trainmux.colocate._health import GainMeter, PairHealth

CONSTANTS = ScroogeConstants()


def test_the_budget_is_raised_after_each_clean_round() -> None:
    health = PairHealth(CONSTANTS, is_ramped=True)
    budgets = [health.soft_budget(100, 60)]
    for number in range(2 * CONSTANTS.ramp_steps):
        health.iteration_ended(float(number), 2.0, 2, stalled=False)
        budgets.append(health.soft_budget(100, 60))
    assert budgets == [75, 75, 81, 81, 87, 87, 93, 93, 100]
    assert PairHealth(CONSTANTS, is_ramped=False).soft_budget(100, 60) == 100


def test_predictions_may_always_fill_what_the_largest_job_needs() -> None:
    assert PairHealth(CONSTANTS, is_ramped=True).soft_budget(100, 90) == 90


def test_a_stall_delays_the_ramp_and_many_end_in_turns_for_longer_each_time() -> None:
    health = PairHealth(CONSTANTS, is_ramped=True)
    now, lengths = 0.0, []
    for _ in range(3):
        for _ in range(CONSTANTS.stalls_to_fall_back):
            assert not health.turns.are_on
            health.iteration_ended(now, 2.0, 2, stalled=True)
        begin = now
        while health.turns.are_on:
            now += 1.0
            health.iteration_ended(now, 2.0, 2, stalled=False)
        lengths.append(now - begin)
        assert health.soft_budget(100, 60) == 75
    assert lengths == [32.0, 128.0, 512.0]  # 16, 64 and 256 rounds of two seconds
    assert health.turns.num_fall_backs == 3


def test_a_few_stalls_among_many_iterations_are_tolerated() -> None:
    health = PairHealth(CONSTANTS, is_ramped=True)
    for number in range(100):
        health.iteration_ended(float(number), 2.0, 2, stalled=number % 3 == 0)
    assert not health.turns.are_on


def test_work_per_second_decides_for_the_device() -> None:
    for solo_seconds, loses in ((1.2, False), (1.0, False), (0.9, True)):
        meter = GainMeter(CONSTANTS)
        for number in range(6):
            meter.segment_ended(solo_seconds, float(number))
            meter.iteration_ended(float(number), 2.0, 2)
        assert meter.turns.are_on is loses
        assert meter.gain is not None
        assert abs(meter.gain - solo_seconds) < 1e-9


def test_one_job_alone_is_not_judged() -> None:
    meter = GainMeter(CONSTANTS)
    for number in range(20):
        meter.segment_ended(0.5, float(number))
        meter.iteration_ended(float(number), 1.0, 1)
    assert meter.gain is None
    assert not meter.turns.are_on
