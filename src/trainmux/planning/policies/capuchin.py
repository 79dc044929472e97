"""Capuchin's decisions (Peng et al. 2020) on fused arrays: µ-TWO's baseline HFTA-Capuchin.

As in that paper, tensors that are idle during the peak are ranked by *free time*: from the end of the copy
out, started after the evicting access, to the latest start of the copy back. Swapping comes first, as long as
the free time hides it; the lane back is exclusive, and no copy back runs before the peak is over. From then
on the swap with the most free time is weighed against the recomputation that saves the most memory per second
(MSPS), and the one with less overhead is taken. A recomputation changes the sources, and so the MSPS, of
those left. Each copy back is triggered as late as it can be (*in-trigger*).

What differs: Capuchin measures at run time and shifts in-triggers by feedback; here the profile is known, so
they are computed. It also lets the first iterations run with passive swapping, which a plan has no need for.
There is no multiplexing: sub-arrays run in turns, and the partition that is meant is complete fusion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainmux.ir import Schedule
from trainmux.planning._body import Floats, Task
from trainmux.planning._facts import Choice, Key
from trainmux.planning._layout import Demand, lay_out
from trainmux.planning.policies._greedy import Greedy


def schedule(task: Task) -> Schedule:
    """The policy ``capuchin``."""
    deciding = _Deciding(task, "capuchin")
    needs = deciding.run(deciding.choose)
    layout = lay_out(deciding.body, deciding.gaps, needs, task.limit_bytes, late=True)
    return layout.schedule(deciding.reasons)


class _Deciding(Greedy):
    def __init__(self, task: Task, policy: str) -> None:
        super().__init__(task, policy)
        self.reasons: dict[Key, str] = {}

    def choose(self, needs: Demand) -> tuple[int, Choice] | None:
        """One tensor more to give up."""
        over = needs.tensors + needs.beyond > self.task.limit_bytes
        candidates = self.idle_at(over)
        turns = self.body.starts.copy()
        turns[1:] += np.cumsum(needs.recompute_seconds)
        peak_end = float(turns[int(np.nonzero(over)[0][-1]) + 1])
        swap, swap_overhead = self._best_swap(candidates, needs, turns, peak_end)
        if swap is not None and swap_overhead <= 0:
            return self._chosen(swap, Choice.SWAP, "its free time hides it")
        recompute, recompute_overhead = self._best_recompute(candidates)
        if recompute is not None and (swap is None or recompute_overhead <= swap_overhead):
            against = f", a swap stalls for {swap_overhead:.3g} s" if swap is not None else ""
            reason = f"recomputed in {recompute_overhead:.3g} s{against}"
            return self._chosen(recompute, Choice.RECOMPUTE, reason)
        if swap is None:
            return None
        return self._chosen(swap, Choice.SWAP, f"stalls for {swap_overhead:.3g} s")

    def _chosen(self, number: int, choice: Choice, reason: str) -> tuple[int, Choice]:
        self.reasons[self.gaps[number].key] = reason
        return number, choice

    def _best_swap(
        self, candidates: Sequence[int], needs: Demand, turns: Floats, peak_end: float
    ) -> tuple[int | None, float]:
        """The candidate with the most free time that the host has room for, and the stall it brings."""
        room = self.task.host_bytes - needs.host_bytes
        open_ones = [number for number in candidates if self.gaps[number].size_bytes <= room]
        if not open_ones:
            return None, 0.0
        chosen = max(open_ones, key=lambda number: (self._free_time(number, turns), -number))
        swapped = [number for number, choice in enumerate(self.choices) if choice is Choice.SWAP]
        before = self._stall(swapped, turns, peak_end)
        return chosen, self._stall([*swapped, chosen], turns, peak_end) - before

    def _free_time(self, number: int, turns: Floats) -> float:
        last, first = self.body.gap_places(self.gaps[number])
        record = self.body.record(self.gaps[number])
        swap_out_end = float(turns[last + 1]) + record.swap_out_seconds
        swap_in_start = float(turns[first]) - record.swap_in_seconds
        around = float(turns[-1]) if first <= last else 0.0
        return swap_in_start + around - swap_out_end

    def _stall(self, swapped: Sequence[int], turns: Floats, peak_end: float) -> float:
        """The seconds that compute waits for these copies back, one by one and none during the peak."""
        stall = 0.0
        free_from = out_free_from = 0.0
        out_end: dict[int, float] = {}
        places = {number: self.body.gap_places(self.gaps[number]) for number in swapped}
        for number in sorted(swapped, key=lambda n: (places[n][0], n)):
            record = self.body.record(self.gaps[number])
            out_free_from = max(out_free_from, float(turns[places[number][0] + 1])) + record.swap_out_seconds
            out_end[number] = out_free_from
        for number in sorted(swapped, key=lambda n: (places[n][1], n)):
            last, first = places[number]
            due = float(turns[first]) + stall
            # A copy back that is due while the peak lasts has to run then all the same.
            start = max(free_from, min(peak_end, due))
            if first > last:
                start = max(start, out_end[number])
            free_from = start + self.body.record(self.gaps[number]).swap_in_seconds
            stall += max(0.0, free_from - due)
        return stall

    def _best_recompute(self, candidates: Sequence[int]) -> tuple[int | None, float]:
        """The candidate with the highest MSPS, and the seconds it takes."""
        best: tuple[float, int, float] | None = None
        for number in candidates:
            seconds = self.recompute_seconds(number)
            if seconds is None:
                continue
            msps = self.gaps[number].size_bytes / seconds if seconds > 0 else float("inf")
            if best is None or msps > best[0]:
                best = (msps, number, seconds)
        return (best[1], best[2]) if best is not None else (None, 0.0)
