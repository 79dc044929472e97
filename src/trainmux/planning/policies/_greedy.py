"""Choices made one after another until a body fits: the loop that the published policies share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainmux.planning._body import Bools, GapSpans, Task, infeasible, plain_body
from trainmux.planning._facts import Choice, added_prices, find_gaps
from trainmux.planning._layout import Demand, demand


class Greedy:
    """Choices for the feature maps of a task in plain order, and what recomputing one more would cost.

    With ``recompute_only`` gaps whose tensor cannot be recomputed are left out.
    """

    def __init__(self, task: Task, policy: str, *, recompute_only: bool = False) -> None:
        self.task, self.policy = task, policy
        self.body = plain_body(task.profiles, task.multiplexing)
        gaps = find_gaps(self.body.all_facts, with_static=False)
        self.gaps = tuple(gap for gap in gaps if gap.can_recompute or not recompute_only)
        self.choices = [Choice.KEEP] * len(self.gaps)
        self.prices = added_prices(self.body.all_facts, self.gaps, self.choices)
        self._spans = GapSpans(self.body, self.gaps)
        self._cannot: set[int] = set()

    def run(self, choose: Callable[[Demand], tuple[int, Choice] | None]) -> Demand:
        """Give up what ``choose`` names until the rest fits; `Infeasible` where it names nothing."""
        needs = demand(self.body, self.gaps, self.choices)
        assert needs is not None
        lowest = needs.peak_bytes - self.task.limit_bytes
        while (excess := needs.peak_bytes - self.task.limit_bytes) > 0:
            lowest = min(lowest, excess)
            chosen = choose(needs)
            if chosen is None:
                raise infeasible(self.task, self.policy, lowest)
            number, choice = chosen
            self.choices[number] = choice
            after = demand(self.body, self.gaps, self.choices)
            if after is None:  # another recomputation cannot do without it
                self.choices[number] = Choice.KEEP
                self._cannot.add(number)
                continue
            needs = after
            if choice is Choice.RECOMPUTE:
                self.prices[self.gaps[number].sub_array].add(self.gaps[number].tensor, choice)
        return needs

    def idle_at(self, positions: Bools) -> list[int]:
        """The gaps around any of the positions that are true, of those about which nothing is decided."""
        idle = np.nonzero(self._spans.around_any(positions))[0].tolist()
        return [number for number in idle if self.choices[number] is Choice.KEEP]

    def idle_seconds(self, number: int) -> float:
        return float(self._spans.idle_seconds[number])

    def recompute_seconds(self, number: int) -> float | None:
        """The price of recomputing one more; ``None`` where that cannot be."""
        gap = self.gaps[number]
        if not gap.can_recompute or number in self._cannot:
            return None
        return self.prices[gap.sub_array].seconds(gap.tensor)


def at_peak(needs: Demand) -> Bools:
    """The position that needs the most bytes."""
    needed = needs.tensors + needs.beyond
    peak: Bools = np.arange(len(needed)) == needed.argmax()
    return peak
