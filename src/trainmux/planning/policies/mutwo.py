"""µ-TWO's scheduling policy (§4.2, Algorithms B to G) for sub-arrays in pairs.

While memory is over the limit somewhere in the body, one feature map more is given up: swapped, the one with
the longest ``inactive_time``, or recomputed, the one with the highest ``recompute_ratio``, whichever of the
two costs less time. A swap's overhead and its ``prefetch_prompt`` are Algorithm C (`_overlap`), a
recomputation's overhead and what decisions do to one another is Algorithms D to F (`_gaps`), memory is
Algorithm G (`_layout.demand`). Both stages of a pair, BW₀ with FW₁ and BW₁ with FW₀, share one set of
candidates, one limit and one peak.

Several pairs are scheduled one by one, each within what the static tensors of the others leave; sub-arrays
that run in turns likewise. A program has one ring for all sub-arrays, so the last stage of a pair runs beside
the forward pass of the next pair and not of its own. Neighbours are partners: a partition has its sub-arrays
in the order of their iteration time.

Where this departs from Algorithm B:

- Memory is tested before the first decision; the peak interval is found anew in each round.
- The candidate that was chosen is removed, also when it is the one for recomputation (line 17).
- A candidate that would lower no position over the limit is passed over, and so is a recomputation that would
  need more than the limit itself, until nothing else is left.
- A recomputation may read a swapped tensor, which then comes back for it.
- Running out of candidates is infeasibility. Recomputations made at nodes still over the limit are to blame,
  as they keep their sources from leaving: without these it is tried again, at last without any.
- At the end decisions that later ones have made needless are taken back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from trainmux.ir import Multiplexing, Schedule
from trainmux.planning._policy import Infeasible, Node, Task
from trainmux.planning.policies._body import Bools, FixedBody, Ints, infeasible, known_facts, static_bytes
from trainmux.planning.policies._gaps import Choice, RecomputePrices, find_gaps
from trainmux.planning.policies._layout import demand, lay_out
from trainmux.planning.policies._overlap import (
    Decided,
    GapTable,
    Multiplexer,
    Overlap,
    SwapTrial,
    multiplexed,
)

_MAX_ATTEMPTS = 4
"""How often it is tried before recomputing is given up altogether."""
_MAX_SECOND_LOOKS = 4
"""How often candidates that were passed over are looked at again."""


@dataclass(frozen=True)
class MuTwo:
    """The policy; for sub-arrays that run in turns it decides without multiplexing."""

    name: str = "mutwo"

    def schedule(self, task: Task) -> Schedule:
        return _schedule(task, self.name).schedule()


@dataclass(frozen=True)
class _Share:
    """Decisions of one sub-array; gaps are counted from its first, nodes go by rank."""

    choices: tuple[Choice, ...] = ()
    wants: dict[int, float] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def _schedule(task: Task, policy: str) -> _Greedy:
    """Decide for one sub-array or one pair, or for each by itself and then for all of them together."""
    count = len(task.profiles)
    num_together = 2 if task.multiplexing is Multiplexing.RING else 1
    if count <= num_together:
        return _with_fewer_recomputes(task, policy)
    own_bytes = [static_bytes([facts]).total for facts in known_facts(task)]
    known: dict[tuple[int, ...], _Greedy] = {}
    shares: list[_Share] = []
    for first in range(0, count, num_together):
        together = [(first + each) % count for each in range(num_together)]
        profiles = tuple(task.profiles[each] for each in together)
        limit = task.limit_bytes - sum(own_bytes) + sum(own_bytes[each] for each in together)
        part = Task(profiles, task.multiplexing, limit, num_together * task.host_bytes // count)
        key = tuple(map(id, profiles))
        if key not in known:
            try:
                known[key] = _with_fewer_recomputes(part, policy)
            except Infeasible:  # the others' results are not there all the time
                return _with_fewer_recomputes(task, policy)
        shares += [known[key].share(role) for role in range(num_together)]
    whole = _Greedy(task, policy, shares[:count])
    whole.run()
    return whole


def _with_fewer_recomputes(task: Task, policy: str) -> _Greedy:
    """Schedule one sub-array or pair; where that fails without the recomputations that are in the way."""
    never: frozenset[int] = frozenset()
    failures: list[Infeasible] = []
    while True:
        greedy = _Greedy(task, policy, never=never)
        try:
            greedy.run()
        except Infeasible as failure:
            failures.append(failure)
        else:
            greedy.take_back()
            return greedy
        if not greedy.now.needs.recomputes:
            raise min(failures, key=lambda failure: failure.excess_bytes)
        in_the_way = greedy.recomputes_in_the_way()
        if in_the_way and len(failures) < _MAX_ATTEMPTS:
            never |= in_the_way
        else:
            never = frozenset(range(len(greedy.gaps)))


class _Greedy:
    """One run of Algorithm B, from decisions that are there already if any."""

    def __init__(
        self, task: Task, policy: str, shares: Iterable[_Share] = (), *, never: frozenset[int] = frozenset()
    ) -> None:
        all_facts = known_facts(task)
        self.task, self.policy = task, policy
        self.gaps = find_gaps(all_facts, with_static=False)
        self.multiplexer = Multiplexer(GapTable(task, self.gaps), task.limit_bytes)
        self.reasons: dict[int, str] = {}
        self.cannot = set(never)
        self.passed_over: set[int] = set()
        self.num_looks = 0
        idle = [all_facts[gap.sub_array].tensors[gap.tensor].inactive_time for gap in self.gaps]
        self.by_inactive_time = sorted(range(len(self.gaps)), key=lambda number: (-idle[number], number))
        self.first_gap = [
            sum(gap.sub_array < each for gap in self.gaps) for each in range(len(all_facts) + 1)
        ]
        self.first_node = np.cumsum([0, *(len(facts.nodes) for facts in all_facts)])
        of = self.first_node[[gap.sub_array for gap in self.gaps]] if self.gaps else 0
        self.lasts: Ints = of + np.asarray([gap.last for gap in self.gaps], dtype=np.int64)
        self.firsts: Ints = of + np.asarray([gap.first for gap in self.gaps], dtype=np.int64)
        self.now = self._begin(tuple(shares))

    def _begin(self, shares: tuple[_Share, ...]) -> Overlap:
        choices: tuple[Choice, ...] = (Choice.KEEP,) * len(self.gaps)
        wants: dict[Node, float] = {}
        stalls: dict[int, float] = {}
        if shares:
            choices = tuple(choice for share in shares for choice in share.choices)
        for sub_array, share in enumerate(shares):
            first = self.first_gap[sub_array]
            wants |= {(sub_array, rank): seconds for rank, seconds in share.wants.items()}
            stalls |= {first + number: seconds for number, seconds in share.stalls.items()}
            self.reasons |= {first + number: reason for number, reason in share.reasons.items()}
        all_facts = known_facts(self.task)
        body = FixedBody(self.task, multiplexed(self.task, all_facts, wants), all_facts)
        now = self.multiplexer.look(Decided(body, choices, wants, stalls))
        assert now is not None
        for number in now.numbers.tolist() if shares else ():
            index = now.index[number]
            if now.behind_peak(index, self.task.limit_bytes) > now.prompts[index]:
                now = self.multiplexer.book_stall(now, number)
        return now

    def share(self, sub_array: int) -> _Share:
        """What is decided for one of the sub-arrays."""
        first, end = self.first_gap[sub_array : sub_array + 2]
        decided = self.now.decided
        return _Share(
            decided.choices[first:end],
            {rank: seconds for (owner, rank), seconds in decided.wants.items() if owner == sub_array},
            {number - first: each for number, each in decided.stalls.items() if first <= number < end},
            {number - first: each for number, each in self.reasons.items() if first <= number < end},
        )

    def run(self) -> None:
        """Give feature maps up until the rest fits; raises `Infeasible`."""
        limit = self.task.limit_bytes
        all_swapped = demand(self.now.decided.body, self.gaps, (Choice.SWAP,) * len(self.gaps))
        assert all_swapped is not None
        if all_swapped.peak_bytes > limit:
            raise infeasible(self.task, self.policy, all_swapped.peak_bytes - limit)
        lowest = int(self.now.needed.max()) - limit
        prices = [RecomputePrices(facts, {}) for facts in self.now.decided.body.all_facts]
        for number, choice in enumerate(self.now.decided.choices):
            if choice is Choice.RECOMPUTE:
                prices[self.gaps[number].sub_array].add(self.gaps[number].tensor, choice)
        while (excess := int(self.now.needed.max()) - limit) > 0:
            lowest = min(lowest, excess)
            helps = self._helps()
            recompute = self._max_recompute_candidate(helps, prices)
            swap = None
            if recompute is None or recompute.overhead > 0:
                worth_seconds = recompute.overhead if recompute is not None else math.inf
                swap = self._max_idle_candidate(helps, worth_seconds)
            if swap is not None and (recompute is None or swap.overhead < recompute.overhead):
                self.now, self.reasons[swap.number] = swap.found, swap.reason
            elif recompute is not None:
                against = f", a swap would stall for {swap.overhead:.3g} s" if swap is not None else ""
                self.now, self.reasons[recompute.number] = recompute.found, recompute.reason + against
                gap = self.gaps[recompute.number]
                prices[gap.sub_array].add(gap.tensor, Choice.RECOMPUTE)
            elif self.passed_over and self.num_looks < _MAX_SECOND_LOOKS:
                self.num_looks += 1
                self.passed_over.clear()
            else:
                raise infeasible(self.task, self.policy, lowest)

    def _helps(self) -> Bools:
        """For each gap whether nothing is decided about it and it lies around a position over the limit."""
        num_over = np.zeros(len(self.now.needed) + 1, dtype=np.int64)
        np.cumsum(self.now.needed > self.task.limit_bytes, out=num_over[1:])
        places = self.now.decided.body.places
        lasts, firsts = places[self.lasts], places[self.firsts]
        within = num_over[firsts] - num_over[lasts + 1]
        within = np.where(lasts < firsts, within, within + num_over[-1])
        is_open = np.asarray(self.now.decided.choices, dtype=np.int64) == Choice.KEEP
        helps: Bools = is_open & (within > 0)
        return helps

    def _max_idle_candidate(self, helps: Bools, worth_seconds: float) -> SwapTrial | None:
        """The swap of the most inactive feature map that helps."""
        room = self.task.host_bytes - self.now.needs.host_bytes
        for number in self.by_inactive_time:
            if helps[number] and self.gaps[number].size_bytes <= room:
                trial = self.multiplexer.try_swap(self.now, number, worth_seconds)
                if self._excess(trial.found) < self._excess(self.now):
                    return trial
        return None

    def _max_recompute_candidate(self, helps: Bools, prices: list[RecomputePrices]) -> SwapTrial | None:
        """The recomputation with the highest ratio that helps, as it would be."""
        counts = Counter(
            (each.sub_array, read) for each in self.now.needs.recomputes for read in each.derived.reads
        )
        candidates = []
        for number in np.nonzero(helps)[0].tolist():
            gap = self.gaps[number]
            if gap.can_recompute and number not in self.cannot and number not in self.passed_over:
                seconds = prices[gap.sub_array].seconds(gap.tensor)
                if seconds is not None:
                    total = seconds * (1 + counts[gap.sub_array, gap.tensor])
                    ratio = gap.size_bytes / total if total > 0 else float("inf")
                    candidates.append((-ratio, -gap.size_bytes, number))
        allowed = self.now.allowed(self.task.limit_bytes)
        for _, _, number in sorted(candidates):
            found = self.multiplexer.look(self.now.decided.choose(number, Choice.RECOMPUTE))
            if found is None:
                self.cannot.add(number)
                continue
            for late in found.numbers[~found.is_hidden].tolist():
                found = self.multiplexer.book_stall(found, late)
            is_safe = self.num_looks > 0 or found.is_safe(allowed)
            if is_safe and self._excess(found) < self._excess(self.now):
                overhead = max(0.0, found.seconds - self.now.seconds)
                return SwapTrial(number, found, overhead, f"recomputed in {overhead:.3g} s")
            self.passed_over.add(number)
        return None

    def _excess(self, look: Overlap) -> int:
        return int(np.maximum(look.needed - self.task.limit_bytes, 0).sum())

    def recomputes_in_the_way(self) -> frozenset[int]:
        """Those that are made just before a node that is over the limit."""
        over = set(np.nonzero(self.now.needed > self.task.limit_bytes)[0].tolist())
        made = {
            (each.sub_array, each.derived.tensor) for each in self.now.needs.recomputes if each.before in over
        }
        return frozenset(
            number for number, gap in enumerate(self.gaps) if (gap.sub_array, gap.tensor) in made
        )

    def take_back(self) -> None:
        """Keep every tensor after all that there is memory for, those that cost the most time first."""
        again = {
            (each.sub_array, each.derived.tensor): each.derived.seconds for each in self.now.needs.recomputes
        }
        stalls, limit = self.now.decided.stalls, self.task.limit_bytes
        by_cost = []
        for number, gap in enumerate(self.gaps):
            if self.now.decided.choices[number] is not Choice.KEEP:
                recompute_seconds = again.get((gap.sub_array, gap.tensor), 0.0)
                by_cost.append((-recompute_seconds, -stalls.get(number, 0.0), -gap.size_bytes, number))
        for *_, number in sorted(by_cost):
            if not self._has_room(number):
                continue
            found = self.multiplexer.look(self.now.decided.choose(number, Choice.KEEP))
            if found is not None and found.is_hidden.all() and int(found.needed.max()) <= limit:
                self.now = found
                del self.reasons[number]

    def _has_room(self, number: int) -> bool:
        """Whether a tensor that was given up could lie where it does all the time it is not there."""
        now, size = self.now, self.gaps[number].size_bytes
        begin, end = now.decided.body.gap_places(self.gaps[number])
        if number in now.index:
            end = int(now.prompts[now.index[number]])
        absent = now.needed[begin + 1 : end]
        if end <= begin:
            absent = np.concatenate([now.needed[begin + 1 :], now.needed[:end]])
        return int(absent.max(initial=0)) + size <= self.task.limit_bytes

    def schedule(self) -> Schedule:
        """What is decided, with every copy back at its prompt."""
        now = self.now
        prompts = dict(zip(now.numbers.tolist(), now.prompts.tolist(), strict=True))
        layout = lay_out(now.decided.body, self.gaps, now.needs, self.task.limit_bytes, prompts=prompts)
        assert layout is not None
        reasons = {
            (gap.sub_array, gap.tensor): self.reasons.get(number, "") for number, gap in enumerate(self.gaps)
        }
        return layout.schedule(reasons)
