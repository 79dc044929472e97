"""Swapping alone, layer by layer: the class of vDNN (Rhu et al. 2016; µ-TWO Table E).

Feature maps leave after their last forward use, those that are idle for the longest time first, until the
rest fits. As in vDNN a copy has the time of one layer: the bytes are given back when the next node has run,
whether the copy is ready or not (compute then waits), and a feature map is fetched back when the layer before
its own begins its backward pass. Where memory does not allow that layer of advance, it is fetched when it is
needed.

A layer here is a node of the backward pass that is the first to need a feature map, with the nodes behind it
that need none.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from trainmux.ir import Schedule
from trainmux.planning._body import Task
from trainmux.planning._facts import Choice
from trainmux.planning._layout import Demand, Layout, PlacedSwap
from trainmux.planning.policies._greedy import Greedy, at_peak


def schedule(task: Task) -> Schedule:
    """The policy ``swap_only``."""
    greedy = Greedy(task, "swap_only")

    def choose(needs: Demand) -> tuple[int, Choice] | None:
        room = task.host_bytes - needs.host_bytes
        fitting = [each for each in greedy.idle_at(at_peak(needs)) if greedy.gaps[each].size_bytes <= room]
        if not fitting:
            return None
        return max(fitting, key=lambda each: (greedy.idle_seconds(each), -each)), Choice.SWAP

    needs = greedy.run(choose)
    return _a_layer_ahead(greedy, needs).schedule("fetched back one layer ahead")


def _a_layer_ahead(greedy: Greedy, needs: Demand) -> Layout:
    """Place each copy back one layer before its use, or at its use where memory does not allow more."""
    body, gaps, limit = greedy.body, greedy.gaps, greedy.task.limit_bytes
    curve = needs.tensors + needs.beyond
    layers = sorted({body.gap_places(gap)[1] for gap in gaps})
    swaps: list[PlacedSwap] = []
    for wanted in sorted(needs.swaps, key=lambda swap: (swap.deadline, swap.gap)):
        size = gaps[wanted.gap].size_bytes
        stop = wanted.deadline if wanted.deadline > wanted.out else body.length
        release = min(wanted.out + 1, stop)
        if release < stop and curve[release] + size <= limit:
            curve[release] += size
            release += 1
        index = bisect_left(layers, wanted.deadline)
        back = layers[index - 1] if index else 0
        earliest = release if wanted.deadline > wanted.out else 0
        back = max(back, earliest)
        if back < wanted.deadline and np.all(curve[back : wanted.deadline] + size <= limit):
            curve[back : wanted.deadline] += size
        else:
            back = wanted.deadline
        swaps.append(PlacedSwap(wanted.gap, wanted.out, release, back, wanted.copies_out))
    swaps.sort(key=lambda swap: (swap.back, swap.gap))
    return Layout(body, gaps, tuple(swaps), ())
