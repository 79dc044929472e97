"""Recomputation alone: the class of Checkmate (Jain et al. 2020; µ-TWO Table E).

Checkmate solves an integer program over what is kept at each point of the step. Here feature maps are dropped
greedily, by bytes given back per second of recomputation with lineages as they then are
(``recompute_ratio``), until the rest fits. Then it is looked through, the most expensive first: what need not
be dropped any more is kept, and what several recomputations go through is made once and kept for all of them
where that takes less time and still fits. On small graphs the tests compare this with the optimum.
"""

from __future__ import annotations

from trainmux.ir import Schedule
from trainmux.planning._body import Task
from trainmux.planning._facts import Choice
from trainmux.planning._layout import Demand, demand, lay_out
from trainmux.planning.policies._greedy import Greedy, at_peak


def schedule(task: Task) -> Schedule:
    """The policy ``recompute_only``."""
    greedy = Greedy(task, "recompute_only", recompute_only=True)

    def choose(needs: Demand) -> tuple[int, Choice] | None:
        costs = []
        for number in greedy.idle_at(at_peak(needs)):
            seconds = greedy.recompute_seconds(number)
            if seconds is not None:
                costs.append((seconds / greedy.gaps[number].size_bytes, number))
        return (min(costs)[1], Choice.RECOMPUTE) if costs else None

    needs = _look_through(greedy, greedy.run(choose))
    layout = lay_out(greedy.body, greedy.gaps, needs, task.limit_bytes)
    return layout.schedule("highest recompute_ratio")


def _look_through(greedy: Greedy, needs: Demand) -> Demand:
    """Keep what need not be dropped, and share what is made several times."""
    gaps, choices = greedy.gaps, greedy.choices
    seconds = {(each.sub_array, each.derived.tensor): each.derived.seconds for each in needs.recomputes}
    dropped = [number for number, choice in enumerate(choices) if choice is Choice.RECOMPUTE]
    by_cost = sorted(dropped, key=lambda number: (-seconds[gaps[number].key], number))
    for other in (Choice.KEEP, Choice.RECOMPUTE_EARLY):
        for number in by_cost:
            if choices[number] is Choice.KEEP:
                continue
            before, choices[number] = choices[number], other
            found = demand(greedy.body, gaps, choices)
            fits = found is not None and found.peak_bytes <= greedy.task.limit_bytes
            if found is not None and fits and _total(found) < _total(needs):
                needs = found
            else:
                choices[number] = before
    return needs


def _total(needs: Demand) -> float:
    return float(needs.recompute_seconds.sum())
