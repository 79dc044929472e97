"""Predicted memory of a job over time, and how long a new iteration must wait (§5.1-5.3).

A job's *trend* is its height over one iteration: steps up while regions are allocated, steps down while they
are released. Before an iteration begins, its trend is compared with what remains of the other job's. Where
the sum exceeds the budget, the iteration is shifted. Equation 1 asks for the least shift, which the paper
finds by adding T until everything fits. One walk over both trends also gives a lower bound: two steps that
clash now clash until the other job's step has ended.

A walk touches every step once that could clash. To take microseconds in Python, a trend has at most
`MAX_STEPS`: where heights change more often, neighbouring steps are merged at their mean height. A prediction
may then be slightly off; if it was too low, a gate holds the job up for a moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from trainmux.colocate._demand import JobDemand

MAX_STEPS = 48


class Trend:
    """A job's height over its iteration, with the durations of the last one that ended."""

    def __init__(self, demand: JobDemand) -> None:
        heights = [segment.height_bytes for segment in demand.segments]
        self._firsts = _first_segments(heights)
        spans = list(zip(self._firsts, [*self._firsts[1:], len(heights)], strict=True))
        self.heights = [sum(heights[first:end]) // (end - first) for first, end in spans]
        self.step_of_segment = [step for step, (first, end) in enumerate(spans) for _ in range(first, end)]
        self.peak_bytes = max(heights)
        self.need_from = list(accumulate([0, *reversed(heights)], max))[::-1]
        """The greatest height of a segment and those after it; 0 after the last."""
        self._spans_above: dict[int, tuple[int, int]] = {}
        self.set_seconds([segment.solo_seconds for segment in demand.segments])

    def span_above(self, num_bytes: int) -> tuple[int, int]:
        """The steps from the first that is higher than this to the last, as (first, end)."""
        found = self._spans_above.get(num_bytes)
        if found is None:
            above = [step for step, height in enumerate(self.heights) if height > num_bytes]
            found = self._spans_above[num_bytes] = (above[0], above[-1] + 1) if above else (0, 0)
        return found

    def set_seconds(self, seconds: Sequence[float]) -> None:
        """Use ``seconds`` as the durations of the segments from now on."""
        self.seconds = list(seconds)
        self.begins = [0.0, *accumulate(self.seconds)]
        """When each segment begins, counted from the start of the iteration; last, when the iteration
        ends."""
        self.step_begins = [self.begins[first] for first in self._firsts]
        self.step_ends = [*self.step_begins[1:], self.begins[-1]]

    @property
    def iteration_seconds(self) -> float:
        return self.begins[-1]


def _first_segments(heights: Sequence[int]) -> list[int]:
    """The segments at which steps begin: where heights change, rounded until there are few enough."""
    coarseness = 1
    while True:
        rough = [height // coarseness for height in heights]
        firsts = [i for i, height in enumerate(rough) if i == 0 or height != rough[i - 1]]
        if len(firsts) <= MAX_STEPS:
            return firsts
        coarseness = max(coarseness + 1, coarseness * len(firsts) // MAX_STEPS, max(heights) // len(firsts))


class Remainder(NamedTuple):
    """The rest of an iteration that began at ``origin``: the steps of its trend from ``first`` on."""

    origin: float
    first: int
    trend: Trend


def least_shift(newcomer: Trend, start: float, others: Sequence[Remainder], budget_bytes: int) -> float:
    """The least shift, in seconds, of an iteration that would begin at ``start``; 0 if it fits.

    After the shift it may clash with another step, so predict again then.
    """
    return max((_least_shift(newcomer, start, other, budget_bytes) for other in others), default=0.0)


def _least_shift(newcomer: Trend, start: float, other: Remainder, budget_bytes: int) -> float:
    """Test Equation 2 for each pair of steps that overlap in time, if they could clash at all."""
    origin, first, trend = other
    i, i_end = newcomer.span_above(budget_bytes - trend.peak_bytes)
    j, j_end = trend.span_above(budget_bytes - newcomer.peak_bytes)
    j = max(j, first)
    if i == i_end or j >= j_end:
        return 0.0
    ours, our_heights, our_ends = newcomer.step_begins, newcomer.heights, newcomer.step_ends
    ends, heights = trend.step_ends, trend.heights
    start -= origin  # the other job's clock from here on
    j = bisect_right(ends, start + ours[i], j, j_end)
    if j < j_end:
        i = bisect_right(our_ends, trend.step_begins[j] - start, i, i_end)
    shift = 0.0
    while i < i_end and j < j_end:
        end = ends[j] - start
        if our_heights[i] + heights[j] > budget_bytes and end - ours[i] > shift:
            shift = end - ours[i]
        our_end = our_ends[i]
        if our_end <= end:
            i += 1
        if our_end >= end:
            j += 1
    return shift
