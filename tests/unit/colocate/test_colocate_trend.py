"""Predictions: Equation 2 over two trends, and the least shift that could satisfy it."""

from __future__ import annotations

import pytest
from colocate_cases import job_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.colocate._trend import MAX_STEPS, Remainder, Trend, least_shift


def trend_of(heights: list[int], seconds: float | list[float] = 1.0) -> Trend:
    return Trend(job_of("job", heights, seconds))


def height_at(trend: Trend, time: float) -> int:
    """The height at a time since the iteration's start, found without walking."""
    for begin, end, height in zip(trend.step_begins, trend.step_ends, trend.heights, strict=True):
        if begin <= time < end:
            return height
    return 0


def test_the_example_of_section_5_3() -> None:
    """Job B is in its backward pass and gives back a region a second; job A takes one a second.

    With a budget of five regions, B at four of them and A needing four at its peak, A may begin when each of
    its allocations falls on a moment at which B has given back enough.
    """
    b, a = trend_of([1, 2, 3, 4, 4, 3, 2, 1]), trend_of([1, 2, 3, 4, 3, 2, 1])
    rest = [
        Remainder(0.0, b.step_of_segment[4], b)
    ]  # B holds 4 from second 3 to 5, then 3, 2, 1, and nothing from 8 on
    assert least_shift(a, 4.0, rest, 5) == 0.0  # 1 + 4, 2 + 3, 3 + 2, 4 + 1
    assert least_shift(a, 4.0, rest, 4) > 0.0
    assert least_shift(a, 5.0, rest, 4) == 0.0  # a second later: 1 + 3, 2 + 2, 3 + 1, 4


def test_an_iteration_may_end_before_the_other_job_rises() -> None:
    rest = [Remainder(0.0, 0, trend_of([0, 9, 0], 10.0))]
    short = trend_of([2, 4, 2])
    assert least_shift(short, 7.0, rest, 10) == 0.0
    assert least_shift(short, 7.5, rest, 10) == pytest.approx(20.0 - 7.5 - 2.0)
    # Begun a second later, two steps clash with the peak; the first of them has to come after it.
    assert least_shift(short, 9.0, rest, 10) == pytest.approx(20.0 - 9.0 - 1.0)
    # A second iteration follows the first.
    b, short = trend_of([1, 8, 1]), trend_of([5])
    both = [Remainder(0.0, b.step_of_segment[2], b), Remainder(b.iteration_seconds, 0, b)]
    assert least_shift(short, 2.5, both, 10) == 0.0
    assert least_shift(short, 3.5, both, 10) == pytest.approx(1.5)


SEGMENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None)
@given(
    ours=SEGMENTS, theirs=SEGMENTS, at=st.integers(0, 9), start=st.integers(0, 20), spare=st.integers(0, 5)
)
def test_it_fits_exactly_when_no_moment_passes_the_budget(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], at: int, start: int, spare: int
) -> None:
    """Times are whole, so every moment can be looked at; the shift is never past one that fits."""
    a, b = (trend_of([h for h, _ in rows], [float(s) for _, s in rows]) for rows in (ours, theirs))
    segment = at % len(theirs)
    budget = max(a.peak_bytes, b.peak_bytes) + spare
    begin = max(start, int(b.begins[segment]))

    def fits(shift: int) -> bool:
        return all(
            height_at(a, time - begin - shift + 0.5) + height_at(b, time + 0.5) <= budget
            for time in range(begin + shift, begin + shift + 50)
        )

    rest = [Remainder(0.0, b.step_of_segment[segment], b)]
    found = least_shift(a, float(begin), rest, budget)
    assert (found == 0) is fits(0)
    assert not any(fits(shift) for shift in range(int(found)))
    assert fits(int(b.iteration_seconds) + 1)


def test_many_steps_become_few_with_the_same_area() -> None:
    heights = [abs(500 - abs(500 - i)) + (i * 7919) % 13 for i in range(1000)]
    trend = trend_of(heights)
    assert len(trend.heights) <= MAX_STEPS
    coarse = [height_at(trend, i + 0.5) for i in range(1000)]
    assert sum(coarse) == pytest.approx(sum(heights), rel=0.01)
    assert max(abs(one - two) for one, two in zip(coarse, heights, strict=True)) < 0.1 * max(heights)
    assert trend.peak_bytes == max(heights)
