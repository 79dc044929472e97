"""µ-TWO's scheduling policy (§4.2, Algorithms B to G) for sub-arrays in pairs.

While memory is over the limit somewhere in the body, one feature map more is given up: swapped, the one with
the longest ``inactive_time``, or recomputed, the one with the highest ``recompute_ratio``, whichever of the
two costs less time. A swap's overhead and its ``prefetch_prompt`` are Algorithm C (`Multiplexer`), a
recomputation's overhead and what decisions do to one another is Algorithms D to F (`_facts`), memory is
Algorithm G (`_layout.demand`). Both stages of a pair, BW₀ with FW₁ and BW₁ with FW₀, share one set of
candidates, one limit and one peak.

Several pairs are scheduled one by one, each within what the static tensors of the others leave, and then put
together. A program has one ring for all sub-arrays, so the last stage of a pair runs with the forward pass of
the next pair and not of its own. Neighbours are partners: a partition has its sub-arrays in the order of
their iteration time.

A copy back must have ended at its deadline: the first backward access, or the first recomputation before that
which reads the tensor. Copies run one after another in the order of their deadlines, each as late as it can;
the node whose turn has come when it starts is its ``prefetch_prompt``. What hides a copy, in this order:
recomputations before the deadline; forward nodes of the other sub-array, put in front of the deadline;
backward nodes before that. It may not begin where memory is over the limit, in the peak interval. What cannot
be hidden is a stall, which from then on is time like any other.

1a  the deadline lies in the peak interval: nothing hides the copy
1b  so it does, and another copy runs at that time: compute waits for that one too
2a  hidden by forward nodes alone
2b  hidden by backward nodes, or by both
3   hidden in part, up to the peak interval or to the beginning of the backward pass

Departures from Algorithm B:

- Memory is tested before the first decision; the peak interval is found anew in each round.
- The candidate that was chosen is removed, also when it is the one for recomputation (line 17).
- A candidate that would lower no position over the limit is passed over, and so is a recomputation that would
  need more than the limit itself.
- A recomputation may read a swapped tensor, which then comes back for it.
- Running out of candidates is infeasibility. Recomputations keep their sources from leaving, so it is tried
  again without any.
- At the end decisions that later ones have made needless are taken back.

Departures from Algorithm C: overheads are never negative; forward nodes that make a position worse that is,
or comes, over the limit are not added; prompts are exact, not one node early; a wait for the copy to the
host, where memory demands the bytes before it has ended, counts as overhead too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainmux.ir import Multiplexing, Profile, Schedule
from trainmux.planning._body import (
    Bools,
    FixedBody,
    Floats,
    GapSpans,
    Infeasible,
    Ints,
    Node,
    Task,
    infeasible,
    part_of,
    plain_body,
)
from trainmux.planning._facts import Choice, Gap, Key, RecomputePrices, added_prices, facts_of, find_gaps
from trainmux.planning._layout import Demand, demand, lay_out


def schedule(task: Task, policy: str = "mutwo") -> Schedule:
    """The policy ``mutwo``; for a sub-array that runs in turns it decides without multiplexing."""
    count = len(task.profiles)
    if count <= 2:
        return _decided(task, policy).schedule()
    parts = [part_of(task, [first, (first + 1) % count]) for first in range(0, count, 2)]
    alike = {tuple(map(id, part.profiles)): part for part in parts}
    try:
        known = {key: _decided(part, policy) for key, part in alike.items()}
    except Infeasible:  # the others' results are not there all the time
        return _decided(task, policy).schedule()
    whole = _AlgorithmB(task, policy, [known[tuple(map(id, part.profiles))] for part in parts])
    whole.run()
    return whole.schedule()


def _decided(task: Task, policy: str) -> _AlgorithmB:
    """Decide for sub-arrays together; where that fails, without recomputations."""
    greedy = _AlgorithmB(task, policy)
    try:
        greedy.run()
    except Infeasible as failure:
        if not greedy.now.needs.recomputes:
            raise
        greedy = _AlgorithmB(task, policy, may_recompute=False)
        try:
            greedy.run()
        except Infeasible as other:
            raise min(failure, other, key=lambda each: each.excess_bytes) from None
    greedy.take_back()
    return greedy


class _AlgorithmB:
    """One run of Algorithm B, from what is decided for ``pairs`` of the sub-arrays if there are any."""

    def __init__(
        self, task: Task, policy: str, pairs: Sequence[_AlgorithmB] = (), *, may_recompute: bool = True
    ) -> None:
        body = plain_body(task.profiles, task.multiplexing)
        self.task, self.policy = task, policy
        self.gaps = find_gaps(body.all_facts, with_static=False)
        self.multiplexer = Multiplexer(task, self.gaps)
        self.reasons: dict[Key, str] = {}
        self.cannot = set() if may_recompute else set(range(len(self.gaps)))
        starts = [body.all_facts[gap.sub_array].start_seconds for gap in self.gaps]
        idle = [own[gap.first] - own[gap.last + 1] for own, gap in zip(starts, self.gaps, strict=True)]
        self.by_inactive_time = sorted(range(len(self.gaps)), key=lambda number: (-idle[number], number))
        decided = Decided(body, (Choice.KEEP,) * len(self.gaps), {}, {})
        now = self.multiplexer.look(self._together(pairs) if pairs else decided)
        assert now is not None
        self.now = now
        for number in self.now.numbers.tolist():
            index = self.now.index[number]
            if self.now.behind_peak(index) > self.now.prompts[index]:
                self.now = self.multiplexer.book_stall(self.now, number)

    def _together(self, pairs: Sequence[_AlgorithmB]) -> Decided:
        """Join the pairs' decisions; an odd last sub-array has the first one for partner."""
        choices: list[Choice] = []  # gaps stand sub-array by sub-array
        wants, stalls = dict[Node, float](), dict[int, float]()
        for number, pair in enumerate(pairs):
            decided = pair.now.decided
            wants |= {(2 * number + own, rank): each for (own, rank), each in decided.wants.items()}
            stalls |= {len(choices) + gap: each for gap, each in decided.stalls.items()}
            self.reasons |= {(2 * number + own, tensor): why for (own, tensor), why in pair.reasons.items()}
            choices += decided.choices
        count = len(self.gaps)
        stalls = {gap: each for gap, each in stalls.items() if gap < count}
        body = multiplexed(self.task.profiles, self.task.multiplexing, wants)
        return Decided(body, tuple(choices[:count]), wants, stalls)

    def run(self) -> None:
        """Give feature maps up until the rest fits; raises `Infeasible`."""
        limit = self.task.limit_bytes
        all_swapped = demand(self.now.decided.body, self.gaps, (Choice.SWAP,) * len(self.gaps))
        assert all_swapped is not None
        if all_swapped.peak_bytes > limit:
            raise infeasible(self.task, self.policy, all_swapped.peak_bytes - limit)
        lowest = int(self.now.needed.max()) - limit
        prices = added_prices(self.now.decided.body.all_facts, self.gaps, self.now.decided.choices)
        while (excess := int(self.now.needed.max()) - limit) > 0:
            lowest = min(lowest, excess)
            helps = self._helps()
            recompute = self._max_recompute_candidate(helps, prices)
            swap = None
            if recompute is None or recompute.overhead > 0:
                worth_seconds = recompute.overhead if recompute is not None else math.inf
                swap = self._max_idle_candidate(helps, worth_seconds)
            if swap is not None and (recompute is None or swap.overhead < recompute.overhead):
                self.now, self.reasons[self.gaps[swap.number].key] = swap.found, swap.reason
            elif recompute is not None:
                against = f", a swap would stall for {swap.overhead:.3g} s" if swap is not None else ""
                gap = self.gaps[recompute.number]
                self.now, self.reasons[gap.key] = recompute.found, recompute.reason + against
                prices[gap.sub_array].add(gap.tensor, Choice.RECOMPUTE)
            else:
                raise infeasible(self.task, self.policy, lowest)

    def _helps(self) -> Bools:
        """For each gap whether nothing is decided about it and it lies around a position over the limit."""
        spans = GapSpans(self.now.decided.body, self.gaps)
        is_open = np.asarray(self.now.decided.choices, dtype=np.int64) == Choice.KEEP
        helps: Bools = is_open & spans.around_any(self.now.needed > self.task.limit_bytes)
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
            if gap.can_recompute and number not in self.cannot:
                seconds = prices[gap.sub_array].seconds(gap.tensor)
                if seconds is not None:
                    total = seconds * (1 + counts[gap.key])
                    ratio = gap.size_bytes / total if total > 0 else float("inf")
                    candidates.append((-ratio, -gap.size_bytes, number))
        allowed = self.now.allowed()
        for _, _, number in sorted(candidates):
            found = self.multiplexer.look(self.now.decided.choose(number, Choice.RECOMPUTE))
            if found is None:
                self.cannot.add(number)
                continue
            for late in found.numbers[~found.is_hidden].tolist():
                found = self.multiplexer.book_stall(found, late)
            if found.is_safe(allowed) and self._excess(found) < self._excess(self.now):
                overhead = max(0.0, found.seconds - self.now.seconds)
                return SwapTrial(number, found, overhead, f"recomputed in {overhead:.3g} s")
            self.cannot.add(number)
        return None

    def _excess(self, look: Overlap) -> int:
        return int(np.maximum(look.needed - self.task.limit_bytes, 0).sum())

    def take_back(self) -> None:
        """Keep every tensor after all that there is memory for, those that cost the most time first."""
        again = {
            (each.sub_array, each.derived.tensor): each.derived.seconds for each in self.now.needs.recomputes
        }
        stalls, limit = self.now.decided.stalls, self.task.limit_bytes
        by_cost = []
        for number, gap in enumerate(self.gaps):
            if self.now.decided.choices[number] is not Choice.KEEP:
                recompute_seconds = again.get(gap.key, 0.0)
                by_cost.append((-recompute_seconds, -stalls.get(number, 0.0), -gap.size_bytes, number))
        for *_, number in sorted(by_cost):
            if not self._has_room(number):
                continue
            found = self.multiplexer.look(self.now.decided.choose(number, Choice.KEEP))
            if found is not None and found.is_hidden.all() and int(found.needed.max()) <= limit:
                self.now = found
                del self.reasons[self.gaps[number].key]

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
        """The decisions as records, with every copy back at its prompt."""
        now = self.now
        prompts = dict(zip(now.numbers.tolist(), now.prompts.tolist(), strict=True))
        layout = lay_out(now.decided.body, self.gaps, now.needs, self.task.limit_bytes, prompts=prompts)
        return layout.schedule(self.reasons)


_ROUNDING = 1e-9
"""Times that differ by less than this share of the body's are equal."""

_NUM_PARTS = 8
"""Forward nodes are tried in steps of this part of what would hide a copy."""


@dataclass(frozen=True)
class Decided:
    """A body with decisions: a choice per gap, and what hides the copies back.

    ``wants`` are the seconds of forward nodes that stand in front of a node, ``stalls`` those for which
    compute waits for the copy back of a gap.
    """

    body: FixedBody
    choices: tuple[Choice, ...]
    wants: Mapping[Node, float]
    stalls: Mapping[int, float]

    def choose(self, number: int, choice: Choice) -> Decided:
        """Change the choice for one gap, which nothing waits for yet."""
        choices = (*self.choices[:number], choice, *self.choices[number + 1 :])
        return replace(self, choices=choices).stall(number, 0.0)

    def stall(self, number: int, seconds: float) -> Decided:
        """Let compute wait so long for the copy back of a gap."""
        stalls = {**self.stalls, number: seconds}
        if not seconds:
            del stalls[number]
        return replace(self, stalls=stalls)

    def multiplex(self, node: Node, seconds: float) -> Decided:
        """Put so many seconds of forward nodes in front of a node; later ones follow suit."""
        wants = {**self.wants, node: seconds * (1 - _ROUNDING)}
        body = multiplexed(self.body.profiles, self.body.multiplexing, wants)
        return replace(self, body=body, wants=wants)


def multiplexed(
    profiles: Sequence[Profile], multiplexing: Multiplexing, wants: Mapping[Node, float]
) -> FixedBody:
    """The body in which each backward node has the forward nodes it wants in front of it.

    Forward nodes are handed out in their own order, so one that wants more leaves later ones to those behind
    it (the paper's ``adjust_graph``).
    """
    if multiplexing is Multiplexing.TURNS or not wants:
        return plain_body(profiles, multiplexing)
    all_facts = list(map(facts_of, profiles))
    rows = [
        [(sub_array, rank) for rank in range(len(facts.nodes))] for sub_array, facts in enumerate(all_facts)
    ]
    order: list[Node] = []
    for sub_array, facts in enumerate(all_facts):
        following = (sub_array + 1) % len(all_facts)
        starts, count = all_facts[following].start_seconds, all_facts[following].num_forward
        begin, done = facts.num_forward, 0
        for rank in sorted(rank for owner, rank in wants if owner == sub_array):
            end = min(count, bisect_left(starts, starts[done] + wants[sub_array, rank]))
            order += rows[sub_array][begin:rank] + rows[following][done:end]
            begin, done = rank, end
        order += rows[sub_array][begin:] + rows[following][done:count]
    return FixedBody(profiles, multiplexing, order)


class Overlap:
    """The simulation of decisions: when each position has its turn, which copies run then, the bytes needed.

    ``turns`` has one entry more than there are positions. Copies back are in the order they run: ``numbers``
    are their gaps, ``starts`` the latest times to start, ``prompts`` the positions by then. Compute takes
    ``seconds``, stalls included.
    """

    def __init__(self, table: Multiplexer, decided: Decided, needs: Demand) -> None:
        body = decided.body
        self.table, self.decided, self.needs = table, decided, needs
        swaps = sorted(needs.swaps, key=lambda swap: (swap.deadline, swap.gap))
        self.numbers: Ints = np.asarray([swap.gap for swap in swaps], dtype=np.int64)
        self.index = {swap.gap: index for index, swap in enumerate(swaps)}
        self.outs: Ints = np.asarray([swap.out for swap in swaps], dtype=np.int64)
        self.deadlines: Ints = np.asarray([swap.deadline for swap in swaps], dtype=np.int64)
        is_source: Bools = np.asarray([swap.is_source for swap in swaps], dtype=np.bool_)
        waits = np.zeros(body.length)
        for number, stall in decided.stalls.items():
            waits[self.deadlines[self.index[number]]] += stall
        self.turns: Floats = body.starts.copy()
        self.turns[1:] += np.cumsum(needs.recompute_seconds + waits)
        self.seconds = float(self.turns[-1])
        self.tolerance = _ROUNDING * float(body.starts[-1])
        seconds, sizes = table.seconds_in[self.numbers], table.sizes[self.numbers]
        hidden_by = np.where(is_source, 0.0, needs.recompute_seconds[self.deadlines])
        due = self.turns[self.deadlines] + waits[self.deadlines] + hidden_by
        # A copy may start when all that follow it on the lane up to any deadline still fit before that one.
        own_and_after = np.cumsum(seconds[::-1])[::-1]
        latest = np.minimum.accumulate((due + own_and_after - seconds)[::-1])[::-1]
        self.starts: Floats = latest - own_and_after
        self.lowest: Ints = np.where(self.deadlines > self.outs, self.outs + 1, 0)
        by_time = np.searchsorted(self.turns[:-1], self.starts + self.tolerance, side="right") - 1
        self.is_hidden: Bools = by_time >= self.lowest
        self.prompts: Ints = np.minimum(np.maximum(by_time, self.lowest), self.deadlines)
        change = np.zeros(body.length + 1, dtype=np.int64)
        np.add.at(change, self.prompts, sizes)
        np.subtract.at(change, self.deadlines, sizes)
        self.needed: Ints = needs.tensors + needs.beyond + np.cumsum(change[:-1])

    def allowed(self, absent: tuple[int, int, int] | None = None) -> Ints:
        """By node, what others may need: the limit, or no more than now.

        ``absent`` are a tensor's bytes and the positions between which they are not there any more.
        """
        needed = self.needed
        if absent is not None:
            size, begin, end = absent
            needed = needed.copy()
            for part in (slice(begin, end),) if begin <= end else (slice(begin, None), slice(0, end)):
                needed[part] -= size
        allowed: Ints = np.maximum(needed, self.table.limit)[self.decided.body.places]
        return allowed

    def is_safe(self, allowed: Ints, number: int | None = None) -> bool:
        """Whether no node needs more than it is allowed, and no copy but that of gap ``number`` is late."""
        is_hidden = self.is_hidden
        if number is not None:
            is_hidden = is_hidden.copy()
            is_hidden[self.index[number]] = True
        return bool(is_hidden.all()) and not bool((self.needed[self.decided.body.places] > allowed).any())

    def behind_peak(self, index: int) -> int:
        """The first position from which on, to its deadline, memory allows for a copy's tensor."""
        lowest, prompt, deadline = self.lowest[index], self.prompts[index], self.deadlines[index]
        needed = self.needed[lowest:deadline].copy()
        needed[: prompt - lowest] += self.table.sizes[self.numbers[index]]
        over = np.nonzero(needed > self.table.limit)[0]
        return int(lowest + over[-1] + 1) if len(over) else int(lowest)

    def wait_out(self) -> float:
        """The seconds that compute waits for copies to the host, each where its tensor's bytes are needed."""
        order = np.argsort(self.outs, kind="stable")
        seconds = self.table.seconds_out[self.numbers[order]]
        so_far = np.cumsum(seconds)
        ends = so_far + np.maximum.accumulate(self.turns[self.outs[order] + 1] - (so_far - seconds))
        waited = 0.0
        for index, end in zip(order.tolist(), ends.tolist(), strict=True):
            begin, prompt = int(self.outs[index]) + 1, int(self.prompts[index])
            stop = prompt if prompt >= begin else len(self.needed)
            over = self.needed[begin:stop] > self.table.limit - self.table.sizes[self.numbers[index]]
            released = begin + int(over.argmax()) if over.any() else stop
            waited = max(waited, end - float(self.turns[released]))
        return waited


@dataclass(frozen=True)
class SwapTrial:
    """A swap that was tried: what it comes to, its overhead in seconds, and what hides it, in words."""

    number: int
    found: Overlap
    overhead: float
    reason: str


class Multiplexer:
    """Tries swaps within a task's limit; sizes and copy times of its gaps, as arrays.

    Copies take as long as they take alone, or, in a ring, while others run the other way.
    """

    def __init__(self, task: Task, gaps: tuple[Gap, ...]) -> None:
        records = [task.profiles[gap.sub_array].tensors[gap.tensor] for gap in gaps]
        is_duplex = task.multiplexing is Multiplexing.RING and len(task.profiles) > 1
        self.limit = task.limit_bytes
        self.gaps = gaps
        self.sizes: Ints = np.asarray([gap.size_bytes for gap in gaps], dtype=np.int64)
        self.seconds_in: Floats = np.asarray(
            [each.swap_in_duplex_seconds if is_duplex else each.swap_in_seconds for each in records]
        )
        self.seconds_out: Floats = np.asarray(
            [each.swap_out_duplex_seconds if is_duplex else each.swap_out_seconds for each in records]
        )

    def look(self, decided: Decided) -> Overlap | None:
        """Simulate decisions; ``None`` where a recomputation is not possible."""
        needs = demand(decided.body, self.gaps, decided.choices)
        return Overlap(self, decided, needs) if needs is not None else None

    def try_swap(self, before: Overlap, number: int, worth_seconds: float) -> SwapTrial:
        """Algorithm C: swap one gap more.

        One that waits for its copy out for ``worth_seconds`` or more needs no forward nodes: it will not be
        chosen.
        """
        first = self._look(before.decided.choose(number, Choice.SWAP))
        index = first.index[number]
        out, deadline = int(first.outs[index]), int(first.deadlines[index])
        in_peak = bool(before.needed[deadline] > self.limit)
        allowed = before.allowed((int(self.sizes[number]), out + 1, deadline))
        found = first
        waited = before.wait_out()
        if not in_peak and first.wait_out() - waited < worth_seconds:
            found = self._add_forward_nodes(first, number, allowed)
        found = self.book_stall(found, number, at_deadline=in_peak)
        if not found.is_safe(allowed, number):
            # Copies that are due earlier stay where they are, and this one comes behind them.
            free_from = 0.0
            if index:
                end = before.starts[index - 1] + self.seconds_in[before.numbers[index - 1]]
                free_from = max(float(end), float(before.turns[before.prompts[index - 1]]))
            found = self.book_stall(first, number, at_deadline=in_peak, free_from=free_from)
        wait_out = max(0.0, found.wait_out() - waited)
        overhead = max(0.0, found.seconds - before.seconds) + wait_out
        return SwapTrial(number, found, overhead, self._reason(found, number, in_peak, wait_out))

    def book_stall(
        self, look: Overlap, number: int, *, at_deadline: bool = False, free_from: float = 0.0
    ) -> Overlap:
        """Let compute wait for a copy that cannot start in time: behind the peak, when the lane is free."""
        index = look.index[number]
        earliest = int(look.deadlines[index]) if at_deadline else look.behind_peak(index)
        stall = max(float(look.turns[earliest]), free_from) - float(look.starts[index])
        if stall <= look.tolerance:
            return look
        return self._look(look.decided.stall(number, stall))

    def _look(self, decided: Decided) -> Overlap:
        found = self.look(decided)
        assert found is not None  # swaps keep recomputations possible
        return found

    def _add_forward_nodes(self, look: Overlap, number: int, allowed: Ints) -> Overlap:
        """Put forward nodes of the other sub-array in front of the deadline until they hide the copy.

        Where not as many are safe as that takes, so many go there that few more would not be.
        """
        body, index = look.decided.body, look.index[number]
        if body.multiplexing is Multiplexing.TURNS or len(body.all_facts) < 2:
            return look
        deadline = int(look.deadlines[index])
        node = body.order[deadline]
        following = (node[0] + 1) % len(body.all_facts)
        starts, count = body.all_facts[following].start_seconds, body.all_facts[following].num_forward
        done = bisect_left(body.place[following][:count], deadline)
        there = 0  # nodes of another sub-array that stand just in front of the deadline
        while there < deadline and body.order[deadline - there - 1][0] != node[0]:
            there += 1
        missing = float(look.turns[deadline - there] - look.starts[index]) - look.tolerance
        if missing <= 0:
            return look
        most = min(count, bisect_left(starts, starts[done] + missing)) - done
        num_safe, num_unsafe, best = 0, most + 1, look
        while num_unsafe - num_safe > 1 + most // _NUM_PARTS:
            num_tried = (num_safe + num_unsafe) // 2 if num_safe else 1
            if num_unsafe > most:
                num_tried = most
            seconds = min(starts[done + num_tried] - starts[done], missing)
            wanted = starts[done] - starts[done - there] + seconds
            tried = self._look(look.decided.multiplex(node, wanted))
            if tried.is_safe(allowed, number):
                num_safe, best = num_tried, tried
            else:
                num_unsafe = num_tried
        return best

    def _reason(self, found: Overlap, number: int, in_peak: bool, wait_out: float) -> str:
        index = found.index[number]
        prompt, deadline = int(found.prompts[index]), int(found.deadlines[index])
        stall = found.decided.stalls.get(number, 0.0)
        owner = self.gaps[number].sub_array
        num_own = sum(sub_array == owner for sub_array, _ in found.decided.body.order[prompt:deadline])
        num_others = deadline - prompt - num_own
        forward = f"{_nodes(num_others, 'forward node')} of the other sub-array"
        by = f"{forward} and {_nodes(num_own, 'node')} of its own"
        if in_peak:
            is_busy = stall > self.seconds_in[number] + found.tolerance
            while_busy = " while another copy runs" if is_busy else ""
            case = f"1{'b' if is_busy else 'a'}: due in the peak interval{while_busy}, nothing hides the copy"
        elif stall > 0:
            case = f"3: copy back hidden in part by {by}"
        elif num_others and not num_own:
            case = f"2a: copy back hidden by {forward}"
        else:
            case = f"2b: copy back hidden by {by}"
        stalls = [f"stall of {stall:.3g} s"] if stall > 0 else []
        stalls += [f"release waits {wait_out:.3g} s for the copy out"] if wait_out > 0 else []
        return "; ".join([f"case {case}", *stalls])


def _nodes(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
