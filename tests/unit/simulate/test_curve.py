"""The memory curve against plain lists, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.errors import ConfigError
from trainmux.simulate import MemoryCurve


def check_against(curve: MemoryCurve, values: list[int], limit: int, begin: int, end: int) -> None:
    over = [position for position, value in enumerate(values) if value > limit]
    assert curve.values() == values
    assert curve.peak() == max(values)
    assert curve.peak_position() == values.index(max(values))
    assert curve.first_over(limit) == (over[0] if over else None)
    assert curve.last_over(limit) == (over[-1] if over else None)
    if begin < end:
        assert curve.max_over(begin, end) == max(values[begin:end])
        assert curve.value(begin) == values[begin]


@st.composite
def curves_with_changes(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]], int]:
    base = draw(st.lists(st.integers(0, 100), min_size=1, max_size=40))
    ends = st.integers(0, len(base))
    change = st.tuples(ends, ends, st.integers(-60, 60)).map(lambda c: (min(c[:2]), max(c[:2]), c[2]))
    return base, draw(st.lists(change, max_size=12)), draw(st.integers(-50, 150))


@settings(max_examples=150, deadline=None)
@given(curves_with_changes())
def test_every_answer_is_that_of_a_plain_list(
    case: tuple[list[int], list[tuple[int, int, int]], int],
) -> None:
    base, changes, limit = case
    curve, values = MemoryCurve(base), list(base)
    check_against(curve, values, limit, 0, len(base))
    for begin, end, amount in changes:
        curve.add(begin, end, amount)
        values = [value + amount * (begin <= i < end) for i, value in enumerate(values)]
        check_against(curve, values, limit, begin, end)
    assert len(curve) == len(base)


@settings(max_examples=50, deadline=None)
@given(curves_with_changes(), st.data())
def test_what_was_tried_can_be_taken_back(
    case: tuple[list[int], list[tuple[int, int, int]], int], data: st.DataObject
) -> None:
    base, changes, _ = case
    curve = MemoryCurve(base)
    marks = []
    for change in changes:
        marks.append((curve.mark(), curve.values()))
        curve.add(*change)
    untouched = curve.copy()
    kept = curve.values()
    while marks:
        mark, values = marks[data.draw(st.integers(0, len(marks) - 1))]
        curve.rollback(mark)
        assert curve.values() == values
        marks = [(m, v) for m, v in marks if m < mark]
    assert untouched.values() == kept


def test_a_worked_example() -> None:
    curve = MemoryCurve([10, 20, 30, 20, 10])
    curve.add(0, 2, 15)
    assert curve.values() == [25, 35, 30, 20, 10]
    assert (curve.peak(), curve.peak_position()) == (35, 1)
    assert (curve.first_over(24), curve.last_over(24)) == (0, 2)
    assert (curve.first_over(35), curve.last_over(35)) == (None, None)
    assert (curve.max_over(2, 5), curve.max_over(4, 5)) == (30, 10)
    mark = curve.mark()
    curve.add(3, 5, 40)
    assert (curve.peak(), curve.peak_position()) == (60, 3)
    curve.rollback(mark)
    assert curve.values() == [25, 35, 30, 20, 10]


def test_a_committed_change_stays_and_a_mark_can_be_used_twice() -> None:
    curve = MemoryCurve([0, 0])
    mark = curve.mark()
    for _ in range(2):
        curve.add(0, 1, 5)
        curve.rollback(mark)
        assert curve.values() == [0, 0]
    curve.add(1, 2, 7)
    curve.commit()
    assert curve.values() == [0, 7]
    with pytest.raises(ConfigError, match="mark that is still set, but got 0"):
        curve.rollback(mark)


def test_a_copy_goes_its_own_way() -> None:
    curve = MemoryCurve([1, 2, 3])
    other = curve.copy()
    other.add(0, 3, 10)
    assert (curve.values(), other.values()) == ([1, 2, 3], [11, 12, 13])


@pytest.mark.parametrize("interval", [(-1, 1), (0, 4), (2, 1), (4, 4)])
def test_intervals_outside_of_the_curve_are_refused(interval: tuple[int, int]) -> None:
    curve = MemoryCurve([1, 2, 3])
    with pytest.raises(ConfigError, match="within 0 and 3"):
        curve.add(*interval, 1)
    with pytest.raises(ConfigError, match="within 0 and 3"):
        curve.max_over(*interval)
    assert curve.values() == [1, 2, 3]


def test_an_empty_interval_adds_nothing_and_has_no_highest_value() -> None:
    curve = MemoryCurve([1, 2, 3])
    curve.add(3, 3, 99)
    assert curve.values() == [1, 2, 3]
    with pytest.raises(ConfigError):
        curve.max_over(1, 1)


def test_a_curve_without_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one position"):
        MemoryCurve([])
