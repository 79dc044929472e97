"""How much memory a job will need as time goes by, and how long a newcomer must wait (§5.1-5.3).

A job's *trend* is its height over one iteration: steps up while regions are allocated, steps down while they
are released. Before an iteration starts, its trend and what remains of the other job's are laid side by
side. Where the sum passes the budget, the iteration is shifted. Equation 1 asks for the least shift, found
in the paper by adding T until nothing passes the budget. One walk here also says how much of that is in
vain: two steps that clash now clash until the other job's has ended.

A walk touches every step once. So that it takes microseconds in Python, a trend has at most `MAX_STEPS`:
where a job changes more often, neighbouring steps are one, as high as their mean. A prediction may then be
off by a little either way; if it was too low, a gate holds the job up for a moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from trainmux.colocate._demand import JobDemand

MAX_STEPS = 48


class Trend:
    """A job's height over its iteration, with times that are refined after each one."""

    __slots__ = (
        "_firsts",
        "begins",
        "heights",
        "need_from",
        "peak_bytes",
        "seconds",
        "step_begins",
        "step_ends",
        "step_of_segment",
    )

    def __init__(self, demand: JobDemand) -> None:
        heights = [segment.height_bytes for segment in demand.segments]
        self._firsts = _first_segments(heights)
        ends = [*self._firsts[1:], len(heights)]
        self.heights = [
            sum(heights[first:end]) // (end - first) for first, end in zip(self._firsts, ends, strict=True)
        ]
        self.step_of_segment = [
            step
            for step, (first, end) in enumerate(zip(self._firsts, ends, strict=True))
            for _ in range(first, end)
        ]
        self.peak_bytes = max(heights)
        self.need_from = list(accumulate([0, *reversed(heights)], max))[::-1]
        """The most height that a segment or one after it has; 0 after the last."""
        self.believe([segment.solo_seconds for segment in demand.segments])

    def believe(self, seconds: Sequence[float]) -> None:
        """Take ``seconds`` as the times of the segments from now on."""
        self.seconds = list(seconds)
        self.begins = [0.0, *accumulate(self.seconds)]
        """When each segment begins, counted from the iteration's start; last, when the iteration ends."""
        self.step_begins = [self.begins[first] for first in self._firsts]
        self.step_ends = [*self.step_begins[1:], self.begins[-1]]

    def refine(self, observed: Sequence[float], weight: float) -> None:
        """Move the times towards those of the iteration that just ended: the feedback of §5.3."""
        self.believe([old + weight * (new - old) for old, new in zip(self.seconds, observed, strict=True)])

    @property
    def iteration_seconds(self) -> float:
        return self.begins[-1]


def _first_segments(heights: Sequence[int]) -> list[int]:
    """The segments with which steps begin: where heights change, by more and more until that is seldom."""
    coarseness = 1
    while True:
        rough = [height // coarseness for height in heights]
        firsts = [i for i, height in enumerate(rough) if i == 0 or height != rough[i - 1]]
        if len(firsts) <= MAX_STEPS:
            return firsts
        coarseness = max(coarseness + 1, coarseness * len(firsts) // MAX_STEPS, max(heights) // len(firsts))


class Remainder:
    """What is left of a lane's iterations: steps from ``first`` on, their ends counted from ``origin``."""

    __slots__ = ("ends", "first", "heights", "origin", "peak_bytes")

    def __init__(self, trend: Trend, segment: int, origin: float) -> None:
        """What is left of an iteration that began at ``origin`` and is at ``segment``."""
        self.first = trend.step_of_segment[segment]
        self.origin = origin
        self.ends = trend.step_ends
        self.heights = trend.heights
        self.peak_bytes = trend.need_from[segment]

    def followed_by(self, later: Remainder) -> Remainder:
        """This, then ``later``, which begins when this has ended."""
        joined = Remainder.__new__(Remainder)
        joined.first, joined.origin = self.first, self.origin
        offset = later.origin - self.origin
        joined.ends = self.ends + [end + offset for end in later.ends]
        joined.heights = self.heights + later.heights
        joined.peak_bytes = max(self.peak_bytes, later.peak_bytes)
        return joined


def least_shift(newcomer: Trend, start: float, other: Remainder, budget_bytes: int) -> float:
    """By how many seconds at least an iteration that would begin at ``start`` must be shifted; 0 if it fits.

    After the shift it may clash with something else: predict again then. Equation 2 is tested for each pair
    of steps that share time.
    """
    ours, our_heights, our_ends = newcomer.step_begins, newcomer.heights, newcomer.step_ends
    ends, heights = other.ends, other.heights
    # Steps at either end that fit beside anything the other side needs are passed over.
    room = budget_bytes - newcomer.peak_bytes
    end_of_theirs = len(ends)
    while end_of_theirs > other.first and heights[end_of_theirs - 1] <= room:
        end_of_theirs -= 1
    if end_of_theirs == other.first:
        return 0.0
    room = budget_bytes - other.peak_bytes
    i, end_of_ours = 0, len(ours)
    while end_of_ours and our_heights[end_of_ours - 1] <= room:
        end_of_ours -= 1
    while i < end_of_ours and our_heights[i] <= room:
        i += 1
    if i == end_of_ours:
        return 0.0
    start -= other.origin  # from here on their clock
    j = bisect_right(ends, start + ours[i], other.first, end_of_theirs)
    shift = 0.0
    while i < end_of_ours and j < end_of_theirs:
        end = ends[j] - start
        if our_heights[i] + heights[j] > budget_bytes and end - ours[i] > shift:
            shift = end - ours[i]
        our_end = our_ends[i]
        if our_end <= end:
            i += 1
        if our_end >= end:
            j += 1
    return shift
