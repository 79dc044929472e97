"""Recomputation alone: the class of Checkmate (Jain et al. 2020; µ-TWO Table E).

Checkmate solves an integer program over what is kept at each point of the step. Here feature maps are dropped
greedily, by bytes given back per second of recomputation with lineages as they then are
(``recompute_ratio``), until the rest fits. Then it is looked through, the most expensive first: what need not
be dropped any more is kept, and what several recomputations go through is made once and kept for all of them
where that takes less time and still fits. On small graphs the tests compare this with the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmux.ir import Schedule
from trainmux.planning._policy import Task, plain_order
from trainmux.planning.policies._body import FixedBody, infeasible
from trainmux.planning.policies._gaps import RECOMPUTED, Choice, Gap, find_gaps
from trainmux.planning.policies._layout import Demand, demand, lay_out
from trainmux.planning.policies._relieve import LinkPrice, Relief, Reliever, Shortfall


@dataclass(frozen=True)
class RecomputeOnly:
    """The policy ``recompute_only``."""

    name: str = "recompute_only"

    def schedule(self, task: Task) -> Schedule:
        body = FixedBody(task, plain_order(task.profiles, task.multiplexing))
        gaps = find_gaps(body.all_facts, with_static=False)
        usable = [gap.can_recompute for gap in gaps]
        reliever = Reliever(gaps, usable, may_swap=False)
        relief = reliever.relieve(body, task.limit_bytes, LinkPrice(float("inf")))
        if isinstance(relief, Shortfall):
            raise infeasible(task, self.name, relief.excess_bytes)
        needs = _look_through(body, gaps, relief)
        layout = lay_out(body, gaps, needs, task.limit_bytes)
        assert layout is not None
        return layout.schedule("highest recompute_ratio")


def _look_through(body: FixedBody, gaps: tuple[Gap, ...], relief: Relief) -> Demand:
    """Keep what need not be dropped, and share what is made several times."""
    choices, needs = list(relief.choices), relief.needs
    seconds = {(each.sub_array, each.derived.tensor): each.derived.seconds for each in needs.recomputes}
    dropped = [number for number, choice in enumerate(choices) if choice in RECOMPUTED]
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
