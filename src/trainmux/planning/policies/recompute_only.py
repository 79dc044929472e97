"""Recomputation alone: the class of Checkmate (Jain et al. 2020; µ-TWO Table E).

Checkmate solves an integer program over what is kept at each point of the step. Here feature maps are dropped
greedily, by bytes given back per second of recomputation with lineages as they then are
(``recompute_ratio``), until the rest fits. Then it is looked through, the most expensive first: what need not
be dropped any more is kept, and what several recomputations go through is made once and kept for all of them
where that takes less time and still fits. On small graphs the tests compare this with the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainmux.ir import Schedule
from trainmux.planning._body import FixedBody, GapSpans, Ints, Task, infeasible, plain_order
from trainmux.planning._facts import Choice, Gap, RecomputePrices, find_gaps, prices_beside
from trainmux.planning._layout import Demand, demand, lay_out


@dataclass(frozen=True)
class RecomputeOnly:
    """The policy ``recompute_only``."""

    name: str = "recompute_only"

    def schedule(self, task: Task) -> Schedule:
        body = FixedBody(task, plain_order(task.profiles, task.multiplexing))
        gaps = tuple(gap for gap in find_gaps(body.all_facts, with_static=False) if gap.can_recompute)
        spans = GapSpans(body, gaps)
        choices = [Choice.KEEP] * len(gaps)
        prices = prices_beside(body.all_facts, gaps, choices)
        cannot: set[int] = set()
        needs = demand(body, gaps, choices)
        assert needs is not None
        lowest = needs.peak_bytes - task.limit_bytes
        while needs.peak_bytes > task.limit_bytes:
            lowest = min(lowest, needs.peak_bytes - task.limit_bytes)
            peak = int((needs.tensors + needs.beyond).argmax())
            number = _cheapest(gaps, np.nonzero(spans.around(peak))[0], choices, prices, cannot)
            if number is None:
                raise infeasible(task, self.name, lowest)
            choices[number] = Choice.RECOMPUTE
            after = demand(body, gaps, choices)
            if after is None:  # another recomputation cannot do without it
                choices[number] = Choice.KEEP
                cannot.add(number)
            else:
                needs = after
                prices[gaps[number].sub_array].add(gaps[number].tensor, Choice.RECOMPUTE)
        needs = _look_through(body, gaps, choices, needs)
        layout = lay_out(body, gaps, needs, task.limit_bytes)
        assert layout is not None
        return layout.schedule("highest recompute_ratio")


def _cheapest(
    gaps: tuple[Gap, ...],
    numbers: Ints,
    choices: list[Choice],
    prices: list[RecomputePrices],
    cannot: set[int],
) -> int | None:
    """The gap among ``numbers`` with the highest ratio, of those nothing is decided about."""
    best: tuple[float, int] | None = None
    for number in numbers.tolist():
        gap = gaps[number]
        if choices[number] is not Choice.KEEP or number in cannot:
            continue
        seconds = prices[gap.sub_array].seconds(gap.tensor)
        if seconds is not None and (best is None or seconds / gap.size_bytes < best[0]):
            best = (seconds / gap.size_bytes, number)
    return best[1] if best is not None else None


def _look_through(body: FixedBody, gaps: tuple[Gap, ...], choices: list[Choice], needs: Demand) -> Demand:
    """Keep what need not be dropped, and share what is made several times."""
    seconds = {(each.sub_array, each.derived.tensor): each.derived.seconds for each in needs.recomputes}
    dropped = [number for number, choice in enumerate(choices) if choice is Choice.RECOMPUTE]
    by_cost = sorted(dropped, key=lambda n: (-seconds[gaps[n].sub_array, gaps[n].tensor], n))
    for other in (Choice.KEEP, Choice.RECOMPUTE_EARLY):
        for number in by_cost:
            if choices[number] is Choice.KEEP:
                continue
            before, choices[number] = choices[number], other
            found = demand(body, gaps, choices)
            fits = found is not None and found.peak_bytes <= body.task.limit_bytes
            if found is not None and fits and _total(found) < _total(needs):
                needs = found
            else:
                choices[number] = before
    return needs


def _total(needs: Demand) -> float:
    return float(needs.recompute_seconds.sum())
