"""µ-TWO's scheduling policy (§4.2, Algorithms B to F) for a pair of sub-arrays, or one that has no partner.

While memory is over the limit somewhere in the body, one feature map more is given up: swapped, the one with
the longest ``inactive_time``, or recomputed, the one with the highest ``recompute_ratio``, whichever of the
two costs less time. What a swap costs is Algorithm C (`_mutwo_swap`), what a recomputation costs and what
decisions do to one another is Algorithms D to F (`trainmux.planning._recompute`), memory is Algorithm G
(`_mutwo_body`). Both stages of a pair, BW₀ with FW₁ and BW₁ with FW₀, share one set of candidates, one limit
and one peak: what the first sub-array leaves for its backward pass is there in both.

Where this departs from Algorithm B:

- Memory is tested before the first decision; the peak interval is found anew in each round.
- The candidate that was chosen is removed, also when it is the one for recomputation (line 17).
- A candidate that would lower no position over the limit is passed over, and so is a recomputation that would
  need more than the limit itself; both are looked at again when nothing else is left.
- Running out of candidates is infeasibility. Recomputations made at nodes still over the limit are to
  blame, as they keep their sources from leaving: without these it is tried again, at last without any.
- At the end (`_mutwo_finish`) decisions that later ones have made needless are taken back, and releases are
  settled: as soon as the copy to the host has ended, earlier only where memory demands it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from trainmux.errors import PlanError
from trainmux.ir import Schedule
from trainmux.planning._policy import Infeasible, Task
from trainmux.planning._recompute import Decision
from trainmux.planning.policies._mutwo_body import Ints
from trainmux.planning.policies._mutwo_copies import Key
from trainmux.planning.policies._mutwo_finish import emit, take_back
from trainmux.planning.policies._mutwo_pair import Pair, PairState
from trainmux.planning.policies._mutwo_swap import SwapTrial, try_swap

_MAX_SECOND_LOOKS = 4
"""How often candidates that were passed over are looked at again."""
_MAX_ATTEMPTS = 4
"""How often it is tried before recomputing is given up altogether."""


@dataclass(frozen=True)
class MuTwo:
    """The policy. ``schedule`` takes one or two sub-arrays; more are `PlanError`."""

    name: str = "mutwo"

    def schedule(self, task: Task) -> Schedule:
        if len(task.profiles) not in (1, 2):
            raise PlanError(
                f"mutwo schedules one or two sub-arrays, but got {len(task.profiles)}; schedule them in "
                "pairs or use another policy"
            )
        never: frozenset[Key] = frozenset()
        failures: list[Infeasible] = []
        while True:
            greedy = _Greedy(Pair(task), never)
            try:
                return greedy.run()
            except Infeasible as failure:
                failures.append(failure)
            if not greedy.pair.recomputed:
                raise min(failures, key=lambda failure: failure.excess_bytes)
            in_the_way = greedy.recomputes_in_the_way()
            if in_the_way and len(failures) < _MAX_ATTEMPTS:
                never |= in_the_way
            else:
                never = greedy.feature_maps


@dataclass(frozen=True)
class _RecomputeTrial:
    """A recomputation that would help: the ranks to run for it and for those that grow, and its overhead."""

    key: Key
    graphs: dict[int, frozenset[int]]
    overhead: float


@dataclass
class _Round:
    """What holds at the beginning of a round."""

    state: PairState
    needed: Ints
    over: Ints
    excess: int


@dataclass
class _Candidates:
    """Feature maps nothing is decided about, in the two orders; those passed over wait apart."""

    by_inactive_time: list[Key] = field(default_factory=list)
    by_recompute_ratio: list[tuple[float, int, Key]] = field(default_factory=list)
    swaps_passed_over: list[Key] = field(default_factory=list)
    recomputes_passed_over: list[Key] = field(default_factory=list)


class _Greedy:
    """One run of Algorithm B."""

    def __init__(self, pair: Pair, never_recomputed: frozenset[Key]) -> None:
        self.pair = pair
        self.never_recomputed = never_recomputed
        self.reasons: dict[Key, str] = {}
        self.host_bytes = 0
        self.second_looks = 0
        self.lowest_peak: int | None = None
        keys = [
            (sub_array, tensor)
            for sub_array, facts in enumerate(pair.all_facts)
            for tensor in facts.feature_maps
            if facts.tensors[tensor].memory_size > 0
        ]
        # Taken from the end: the longest inactive time last, the first of equals last.
        keys.sort(key=lambda key: (-pair.all_facts[key[0]].tensors[key[1]].inactive_time, key), reverse=True)
        self.feature_maps = frozenset(keys)
        self.candidates = _Candidates(by_inactive_time=keys)
        for key in keys:
            self._offer_recompute(key)

    def run(self) -> Schedule:
        pair = self.pair
        while True:
            needed = pair.body.needed()
            over = pair.over(needed)
            peak = int(needed.max(initial=0))
            self.lowest_peak = peak if self.lowest_peak is None else min(self.lowest_peak, peak)
            if not len(over):
                for key in take_back(pair):
                    del self.reasons[key]
                return emit(pair, self.reasons)
            now = _Round(pair.state(), needed, over, pair.excess(needed))
            recompute = self._max_recomp_candidate(now)
            swap = None
            if recompute is None or recompute.overhead > 0:
                swap = self._max_idle_candidate(now)
            if swap is not None and (recompute is None or swap.overhead < recompute.overhead):
                self._commit_swap(swap)
                if recompute is not None:
                    self._offer_recompute(recompute.key)
            elif recompute is not None:
                if swap is not None:
                    pair.go_back(now.state)
                    self.candidates.by_inactive_time.append(swap.key)
                self._commit_recompute(recompute, swap)
            elif not self._look_again():
                raise self._infeasible()

    def recomputes_in_the_way(self) -> frozenset[Key]:
        """Those that are made just before a node that is over the limit."""
        pair = self.pair
        over = {int(number) for number in pair.body.order[pair.over(pair.body.needed())]}
        return frozenset(key for key, recomputed in pair.recomputed.items() if recomputed.before in over)

    def _max_idle_candidate(self, now: _Round) -> SwapTrial | None:
        """The swap of the most inactive feature map that helps, left scheduled in the pair's state."""
        pair, queue = self.pair, self.candidates.by_inactive_time
        while queue:
            key = queue.pop()
            if not self._is_open(key) or self.host_bytes + pair.size(key) > pair.task.host_bytes:
                continue
            if self._would_help(key, now):
                trial = try_swap(pair, key)
                if trial is not None and pair.excess(pair.body.needed()) < now.excess:
                    return trial
                pair.go_back(now.state)
            self.candidates.swaps_passed_over.append(key)
        return None

    def _max_recomp_candidate(self, now: _Round) -> _RecomputeTrial | None:
        """The recomputation with the highest ratio that helps; the pair's state is left as it was."""
        pair, heap = self.pair, self.candidates.by_recompute_ratio
        while heap:
            ratio, _, key = heapq.heappop(heap)
            lineage = pair.lineages[key[0]]
            if not self._is_open(key) or -ratio != lineage.recompute_ratio(key[1]):
                continue
            if self._would_help(key, now):
                graphs = lineage.would_run(key[1])
                if graphs is None:
                    continue
                pair.recompute(key, graphs)
                needed = pair.body.needed()
                helps = pair.excess(needed) < now.excess
                is_safe = bool((needed <= pair.allowed(now.needed)[pair.body.order]).all())
                pair.go_back(now.state)
                if helps and (is_safe or self.second_looks):
                    return _RecomputeTrial(key, graphs, lineage.total_recomp_time(key[1]))
            self.candidates.recomputes_passed_over.append(key)
        return None

    def _would_help(self, key: Key, now: _Round) -> bool:
        """Whether any position over the limit lies where the tensor is not needed."""
        place = self.pair.body.place
        begin = int(place[self.pair.last_fw_access(key)]) + 1
        deadline = self.pair.lineages[key[0]].deadline(key[1])
        end = int(place[self.pair.body.number(key[0], deadline)])
        after, before = np.searchsorted(now.over, [begin, end])
        if begin <= end:
            return bool(after < before)
        return bool(after < len(now.over) or before > 0)

    def _commit_swap(self, trial: SwapTrial) -> None:
        pair, key = self.pair, trial.key
        pair.lane_out.add(key, trial.offload, trial.seconds_out)
        self.host_bytes += pair.size(key)
        self.reasons[key] = trial.reason
        for tensor in pair.lineages[key[0]].swap(key[1]):
            self._offer_recompute((key[0], tensor))

    def _commit_recompute(self, trial: _RecomputeTrial, swap: SwapTrial | None) -> None:
        pair, (sub_array, tensor) = self.pair, trial.key
        pair.recompute(trial.key, trial.graphs)
        lineage = pair.lineages[sub_array]
        changed = lineage.recompute(tensor)
        for recomputed in trial.graphs:
            for source in lineage.recomp_srcs(recomputed):
                if lineage.decisions.get(source) is Decision.SWAP:
                    pair.read_before((sub_array, source), pair.first_bw_access((sub_array, recomputed)))
        against = f", a swap would stall for {swap.overhead:.3g} s" if swap is not None else ""
        self.reasons[trial.key] = f"recomputed in {trial.overhead:.3g} s{against}"
        for candidate in changed:
            self._offer_recompute((sub_array, candidate))

    def _offer_recompute(self, key: Key) -> None:
        ratio = self.pair.lineages[key[0]].recompute_ratio(key[1])
        if ratio > 0 and key not in self.never_recomputed:
            heapq.heappush(self.candidates.by_recompute_ratio, (-ratio, -self.pair.size(key), key))

    def _is_open(self, key: Key) -> bool:
        return self.pair.lineages[key[0]].decisions[key[1]] is Decision.KEEP

    def _look_again(self) -> bool:
        """Take back those that were passed over; from now on recomputations may need more than the limit."""
        candidates = self.candidates
        if self.second_looks == _MAX_SECOND_LOOKS:
            return False
        self.second_looks += 1
        candidates.by_inactive_time += reversed(candidates.swaps_passed_over)
        for key in candidates.recomputes_passed_over:
            self._offer_recompute(key)
        found = bool(candidates.swaps_passed_over or candidates.recomputes_passed_over)
        candidates.swaps_passed_over, candidates.recomputes_passed_over = [], []
        return found

    def _infeasible(self) -> Infeasible:
        assert self.lowest_peak is not None
        excess = self.lowest_peak - self.pair.limit
        return Infeasible(
            f"sub-arrays of widths {', '.join(str(p.width) for p in self.pair.task.profiles)} must fit into "
            f"{self.pair.limit} bytes, but mutwo's best needs {excess} more; raise the budget or make the "
            "sub-arrays narrower",
            excess_bytes=excess,
        )
