"""When a group takes fewer slots, and how many."""

from __future__ import annotations

import pytest

import trainmux.fleet._widths as module
from trainmux.fleet._widths import Widths


class Clock:
    """Stands still unless told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_widths_are_halves_of_the_most_slots_there_were(clock: Clock) -> None:
    expected = {50: 50, 26: 50, 25: 25, 24: 25, 13: 13, 12: 13, 4: 4, 1: 1}
    assert {num: Widths(50, can_shrink=True).narrower(50, num, 0.0) for num in expected} == expected
    widths = Widths(4, can_shrink=True)
    widths.note(7)
    assert [widths.narrower(7, num, 0.0) for num in (4, 3, 2)] == [7, 4, 2]
    assert [widths.wider(width) for width in (1, 2, 4)] == [2, 4, 7]


def test_slots_go_when_they_have_cost_a_share_of_what_narrower_programs_do(clock: Clock) -> None:
    widths, build_s = Widths(64, can_shrink=True), 3.0
    assert widths.narrower(64, 10, build_s) == 64
    clock.now_s += 1.0
    assert widths.narrower(64, 10, build_s) == 64  # lost: 3/4 of a second
    assert widths.narrower(64, 60, build_s) == 64
    clock.now_s += 1000.0  # all of them were taken
    assert widths.narrower(64, 10, build_s) == 64
    clock.now_s += 1.0
    assert widths.narrower(64, 10, build_s) == 16
    widths.note(16)
    assert widths.narrower(16, 2, build_s) == 16  # another width, another account


def test_a_fleet_whose_results_may_depend_on_its_width_keeps_it(clock: Clock) -> None:
    assert Widths(64, can_shrink=False).narrower(64, 1, 0.0) == 64
