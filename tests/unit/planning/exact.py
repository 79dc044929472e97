"""The optimum for a small step, by mixed integer programming: the oracle that policies are measured against.

Each feature map is kept, swapped (released before one node, prefetched before another) or recomputed before a
node, from sources that are on the device then. The cost model is that of the planner: three lanes that run in
issue order, memory by issue order, recomputations with what they throw away. It assumes one sub-array in
turns, that copies do not slow each other down (``swap_*_duplex_seconds`` equal to those alone) and that
releases, then prefetches, then recomputations are issued before a node. Only feature maps are decided on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from linear_program import LinearProgram
from steps import TURNS, num_forward, plain_order

from trainmux.ir import ByteClass, Profile, ProfiledTensor, Recomputation, Schedule, Swap


@dataclass(frozen=True)
class Optimum:
    """The best schedule in the plain order; ``bound_seconds`` is what the solver proved nothing can beat."""

    schedule: Schedule
    seconds: float
    bound_seconds: float


def solve(profile: Profile, limit_bytes: int, *, seconds: float = 20.0) -> Optimum | None:
    """The best decisions within ``limit_bytes``; ``None`` where there are none."""
    return _Exact(profile, limit_bytes).solve(seconds)


def _all(variables: Iterable[int], coefficient: float = 1.0) -> list[tuple[float, int]]:
    return [(coefficient, variable) for variable in variables]


class _Map:
    """A feature map that may leave: the node before ``path`` uses it last in the forward pass, the last node
    of ``path`` first in the backward pass. Its choices are by the rank before which they happen."""

    def __init__(self, model: LinearProgram, tensor: int, record: ProfiledTensor, creator: int, path: range):
        self.tensor, self.record, self.creator, self.path = tensor, record, creator, path
        self.keep, self.swap, self.drop = (model.choice() for _ in range(3))
        self.release, self.prefetch, self.recompute = ({at: model.choice() for at in path} for _ in range(3))
        self.out_start, self.in_start = model.number(), model.number()
        model.equal(_all([self.keep, self.swap, self.drop]), 1)
        for points, which in (
            (self.release, self.swap),
            (self.prefetch, self.swap),
            (self.recompute, self.drop),
        ):
            model.equal([*_all(points.values()), (-1, which)], 0)
        for rank in path:  # no prefetch before the release
            until = range(path.start, rank + 1)
            fetched = _all(self.prefetch[at] for at in until)
            model.at_most([*fetched, *_all((self.release[at] for at in until), -1)], 0)

    def there(self, rank: int, made_until: int) -> list[int]:
        """Choices that add up to 1 where it is on the device before a node, if made by ``made_until``."""
        return [
            self.keep,
            *(point for at, point in self.release.items() if at > rank),
            *(point for at, point in self.prefetch.items() if at <= rank),
            *(point for at, point in self.recompute.items() if at <= made_until),
        ]


class _Exact:
    """One program. By map and the rank it is made before, ``again`` has a choice for each rank to repeat."""

    def __init__(self, profile: Profile, limit_bytes: int) -> None:
        self.profile, self.nodes, self.tensors = profile, profile.nodes, profile.tensors
        self.limit = limit_bytes
        self.model = LinearProgram()
        self.spans: dict[int, range] = {}
        self.maps: dict[int, _Map] = {}
        for tensor in range(len(self.tensors)):
            self._read(tensor)
        copies = sum(
            each.record.swap_in_seconds + each.record.swap_out_seconds for each in self.maps.values()
        )
        self.horizon = 1.0 + copies
        self.horizon += 2 * sum(node.seconds for node in self.nodes) * (1 + len(self.maps))
        self.again: dict[tuple[int, int], dict[int, int]] = {}
        self.ready = [self.model.number() for _ in self.nodes]
        self.start = [self.model.number() for _ in self.nodes]
        self.total = self.model.number(cost=1.0)
        for each in self.maps.values():
            for rank in each.path:
                self._make_again(each, rank)
        for rank in range(len(self.nodes)):
            self._memory(rank)
            self._compute_lane(rank)
        self._after(self.start[-1], self.nodes[-1].seconds, self.total)
        self._copy_lanes()

    def solve(self, seconds: float) -> Optimum | None:
        found = self.model.solve(seconds)
        if found is None:
            return None
        values, bound = found
        return Optimum(self._schedule(values), float(values[self.total]), bound)

    def _read(self, tensor: int) -> None:
        """When a tensor is on the device while nothing is decided, and whether it may leave."""
        record = self.tensors[tensor]
        if record.byte_class.is_static:
            self.spans[tensor] = range(len(self.nodes))
            return
        uses = [
            n for n, node in enumerate(self.nodes) if tensor in (*node.reads, *node.creates, *node.changes)
        ]
        is_result = record.byte_class is ByteClass.RESULT
        self.spans[tensor] = range(uses[0], len(self.nodes) if is_result else uses[-1] + 1)
        count = num_forward(self.profile)
        forward = [n for n in uses if n < count]
        if record.byte_class is ByteClass.FEATURE_MAP and forward != uses:
            path = range(forward[-1] + 1, uses[len(forward)] + 1)
            if len(path) > 1:
                self.maps[tensor] = _Map(self.model, tensor, record, uses[0], path)

    def _make_again(self, each: _Map, rank: int) -> None:
        """Which ranks run again before ``rank`` for a map, from what is on the device there."""
        again = self.again[each.tensor, rank] = {}
        for n in range(num_forward(self.profile)):
            node = self.nodes[n]
            changed_later = {changed for later in self.nodes[n + 1 : rank] for changed in later.changes}
            is_safe = node.is_repeatable and not node.changes and not changed_later & {*node.reads}
            again[n] = self.model.choice(is_safe and n < rank)
        for n, choice in again.items():
            self.model.at_most([(1, choice), (-1, each.recompute[rank])], 0)
            for read in self.nodes[n].reads:  # on the device, or made again in the same recomputation
                source = self.maps.get(read)
                if source is not None and rank in source.path:
                    made_until = rank if source.creator < each.creator else rank - 1
                    there = [again[source.creator], *source.there(rank, made_until)]
                    self.model.at_most([(1, choice), *_all(there, -1)], 0)
                elif rank not in self.spans[read] or read in self.nodes[rank].creates:
                    self.model.at_most([(1, choice), (-1, again[self.spans[read].start])], 0)
        self.model.at_most([(1, each.recompute[rank]), (-1, again[each.creator])], 0)

    def _memory(self, rank: int) -> None:
        """Bytes while a node runs, and while ranks run again before it."""
        idle = [each for each in self.maps.values() if rank in each.path[:-1]]
        resident = [tensor for tensor, span in self.spans.items() if rank in span]
        always = sum(self.tensors[t].size_bytes for t in {*resident} - {each.tensor for each in idle})
        away = [term for each in idle for term in _all(each.there(rank, rank), each.record.size_bytes)]
        self.model.at_most(away, self.limit - always - self.nodes[rank].workspace_bytes)
        before = always - sum(self.tensors[made].size_bytes for made in self.nodes[rank].creates)
        for each in self.maps.values():
            if rank in each.path:
                self._memory_again(each, self.again[each.tensor, rank], before, away)

    def _memory_again(
        self, each: _Map, again: dict[int, int], before: int, away: list[tuple[float, int]]
    ) -> None:
        """While ranks run again: what is there, what they made so far and is needed, their workspace."""
        large = float(self.limit + sum(tensor.size_bytes for tensor in self.tensors) * 3)
        for n in again:
            terms = [*away, (large, again[n])]
            own = self.nodes[n].workspace_bytes
            own += sum(self.tensors[made].size_bytes for made in self.nodes[n].creates if made != each.tensor)
            for made, span in self.spans.items():
                if span.start >= n or made not in self.nodes[span.start].creates or made == each.tensor:
                    continue
                readers = [reader for reader in again if reader >= n and made in self.nodes[reader].reads]
                alive = self.model.number(1.0)
                for reader in readers:
                    both = _all([again[span.start], again[reader]])
                    self.model.at_most([*both, (-1, alive)], 1)
                terms.append((float(self.tensors[made].size_bytes), alive))
            self.model.at_most(terms, self.limit - before - own + large)

    def _after(self, first: int, seconds: float, then: int, *given: int, unless: Sequence[int] = ()) -> None:
        """``then`` is at least ``seconds`` after ``first``, if all choices in ``given`` are taken."""
        terms = [(1.0, first), (-1.0, then), *_all(given, self.horizon), *_all(unless, -self.horizon)]
        self.model.at_most(terms, len(given) * self.horizon - seconds)

    def _compute_lane(self, rank: int) -> None:
        """The compute lane before a node: ranks that run again one after another, then the node itself."""
        if rank:
            self._after(self.start[rank - 1], self.nodes[rank - 1].seconds, self.ready[rank])
        before: list[tuple[float, int]] = [(1, self.ready[rank])]
        made_here = [each for each in self.maps.values() if rank in each.path]
        for each in sorted(made_here, key=lambda each: each.creator):
            again = self.again[each.tensor, rank]
            for n, choice in again.items():
                begins = self.model.number()
                self.model.at_most([*before, (-1, begins)], 0)
                for source in made_here:
                    if source.tensor not in self.nodes[n].reads:
                        continue
                    for at in range(source.path.start, rank + 1):
                        given, unless = (source.prefetch[at], choice), [again[source.creator]]
                        seconds = source.record.swap_in_seconds
                        self._after(source.in_start, seconds, begins, *given, unless=unless)
                before = [(1, begins), (self.nodes[n].seconds, choice)]
        self.model.at_most([*before, (-1, self.start[rank])], 0)

    def _copy_lanes(self) -> None:
        for each in self.maps.values():
            out, back, path = each.out_start, each.in_start, each.path
            out_seconds, in_seconds = each.record.swap_out_seconds, each.record.swap_in_seconds
            last = path.start - 1
            self._after(self.start[last], self.nodes[last].seconds, out, each.swap)
            self._after(out, out_seconds, back, each.swap)
            self._after(back, in_seconds, self.start[path[-1]], each.swap)
            for rank in path:
                self._after(out, out_seconds, self.ready[rank], each.release[rank])
                self._after(self.ready[rank], 0.0, back, each.prefetch[rank])
        by_last = sorted(self.maps.values(), key=lambda each: each.path.start)
        for first, second in combinations(by_last, 2):
            both = (first.swap, second.swap)
            self._after(first.out_start, first.record.swap_out_seconds, second.out_start, *both)
        for first, second in combinations(self._by_need(), 2):
            self._queue(first, second)

    def _by_need(self) -> list[_Map]:
        return sorted(self.maps.values(), key=lambda each: each.path[-1])

    def _queue(self, first: _Map, second: _Map) -> None:
        """Prefetches run in issue order; of two before the same node ``first`` is issued first."""
        length = 2.0 * len(self.nodes)
        both = (first.swap, second.swap)
        later = [(float(at), point) for at, point in first.prefetch.items()]
        later += [(-float(at), point) for at, point in second.prefetch.items()]
        sooner = [(-ranks, point) for ranks, point in later]
        is_first = self.model.choice()
        self.model.at_most([*later, (length, is_first)], length)
        self.model.at_most([*sooner, (-length, is_first), *_all(both, length)], 2 * length - 1)
        self._after(first.in_start, first.record.swap_in_seconds, second.in_start, is_first, *both)
        self._after(second.in_start, second.record.swap_in_seconds, first.in_start, *both, unless=[is_first])

    def _schedule(self, values: np.ndarray) -> Schedule:
        def chosen(points: dict[int, int]) -> list[int]:
            return [at for at, point in points.items() if values[point] > 0.5]

        swaps: list[Swap] = []
        recomputes: list[Recomputation] = []
        for each in self._by_need():
            for release, back in zip(chosen(each.release), chosen(each.prefetch), strict=True):
                swaps.append(Swap(0, each.tensor, (0, each.path.start - 1), (0, release), (0, back)))
        for each in sorted(self.maps.values(), key=lambda each: each.creator):
            for rank in chosen(each.recompute):
                ranks = tuple(chosen(self.again[each.tensor, rank]))
                recomputes.append(Recomputation(0, each.tensor, ranks, (0, rank)))
        recomputes.sort(key=lambda record: record.before)
        return Schedule(TURNS, plain_order([self.profile], TURNS), tuple(swaps), tuple(recomputes))
