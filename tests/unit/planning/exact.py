"""The optimum for small graphs, by mixed integer programming: the oracle that policies are measured against.

Given a body's order, each feature map is kept, swapped (released before one position, prefetched before
another) or recomputed before a position, from sources that are on the device then. The cost model is that of
the planner: three lanes that run in issue order, memory by issue order, recomputations with what they throw
away. It assumes that copies do not slow each other down (``swap_*_duplex_seconds`` equal to those alone) and
that releases, then prefetches, then recomputations are issued before a node. Only feature maps are decided
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from linear_program import LinearProgram

from trainmux.ir import Multiplexing, Profile, Recomputation, Schedule, Swap

Node = tuple[int, int]


@dataclass(frozen=True)
class Optimum:
    """The best schedule for an order; ``bound_seconds`` is what the solver proved nothing can be below."""

    schedule: Schedule
    seconds: float
    bound_seconds: float


@dataclass(frozen=True)
class _Candidate:
    """A feature map: its last forward use at position ``last``, first backward use at ``path[-1]``.

    ``path`` are the positions after ``last`` up to the first backward use, around the body's end where it is.
    """

    sub_array: int
    tensor: int
    size: int
    creator: int
    last: int
    path: tuple[int, ...]


class Body:
    """An order with the positions at which each tensor is used and resident when nothing is decided."""

    def __init__(
        self, profiles: Sequence[Profile], multiplexing: Multiplexing, order: Sequence[Node]
    ) -> None:
        self.profiles = profiles
        self.order = tuple(order)
        self.is_ring = multiplexing is Multiplexing.RING
        self.place = {node: position for position, node in enumerate(order)}
        self.length = len(order)
        self.spans: dict[Node, tuple[int, int, int] | None] = {}
        self.candidates: list[_Candidate] = []
        for sub_array, profile in enumerate(profiles):
            for tensor in range(len(profile.tensors)):
                self._read(sub_array, tensor)

    def node(self, position: int):
        sub_array, rank = self.order[position]
        return self.profiles[sub_array].nodes[rank]

    def _read(self, sub_array: int, tensor: int) -> None:
        profile = self.profiles[sub_array]
        record = profile.tensors[tensor]
        if record.byte_class.is_static:
            self.spans[sub_array, tensor] = None
            return
        uses = [
            rank
            for rank, node in enumerate(profile.nodes)
            if tensor in (*node.reads, *node.creates, *node.changes)
        ]
        num_forward = sum(node.phase.value == "forward" for node in profile.nodes)
        last_rank = len(profile.nodes) - 1 if record.byte_class.value == "result" else uses[-1]
        begin = self.place[sub_array, uses[0]]
        end = self.place[sub_array, last_rank]
        if record.byte_class.value == "result" and not (self.is_ring and sub_array == 0):
            end = self.length - 1
        self.spans[sub_array, tensor] = (begin, (end - begin) % self.length, uses[0])
        forward = [rank for rank in uses if rank < num_forward]
        backward = [rank for rank in uses if rank >= num_forward]
        if record.byte_class.value == "feature map" and forward and backward:
            last, first = self.place[sub_array, forward[-1]], self.place[sub_array, backward[0]]
            path = tuple((last + 1 + step) % self.length for step in range((first - last) % self.length))
            if len(path) > 1:
                self.candidates.append(_Candidate(sub_array, tensor, record.size_bytes, uses[0], last, path))

    def is_resident(self, key: Node, position: int) -> bool:
        """Whether a tensor that is not decided on is on the device when the node at ``position`` runs."""
        span = self.spans[key]
        return span is None or (position - span[0]) % self.length <= span[1]

    def base(self, position: int) -> int:
        """Bytes at a node without the candidates that are idle there."""
        idle = {(c.sub_array, c.tensor) for c in self.candidates if position in c.path[:-1]}
        total = self.node(position).workspace_bytes
        for key in self.spans:
            if key not in idle and self.is_resident(key, position):
                total += self.profiles[key[0]].tensors[key[1]].size_bytes
        return total

    def needed(self) -> np.ndarray:
        """Bytes at each node while nothing is decided."""
        sizes = {key: self.profiles[key[0]].tensors[key[1]].size_bytes for key in self.spans}
        return np.array(
            [
                self.node(position).workspace_bytes
                + sum(size for key, size in sizes.items() if self.is_resident(key, position))
                for position in range(self.length)
            ]
        )

    def next_rank(self, sub_array: int, position: int) -> int:
        """The rank of the sub-array that runs next, at ``position`` or after it."""
        for step in range(self.length):
            owner, rank = self.order[(position + step) % self.length]
            if owner == sub_array:
                return rank
        raise AssertionError("every sub-array has nodes in the body")


def solve(
    profiles: Sequence[Profile],
    multiplexing: Multiplexing,
    order: Sequence[Node],
    limit_bytes: int,
    *,
    seconds: float = 60.0,
    gap: float = 1e-6,
) -> Optimum | None:
    """The best decisions for ``order`` within ``limit_bytes``; ``None`` where there are none."""
    body = Body(profiles, multiplexing, order)
    return _Exact(body, multiplexing, limit_bytes).solve(seconds, gap)


class _Exact:
    """One program. Suffixes of names: c a candidate's number, k a place on its path, n a rank to repeat."""

    def __init__(self, body: Body, multiplexing: Multiplexing, limit_bytes: int) -> None:
        self.body = body
        self.multiplexing = multiplexing
        self.limit = limit_bytes
        self.model = LinearProgram()
        candidates = body.candidates
        self.horizon = 1.0 + 2 * sum(body.node(p).seconds for p in range(body.length)) * (1 + len(candidates))
        for c in candidates:
            record = body.profiles[c.sub_array].tensors[c.tensor]
            self.horizon += record.swap_in_seconds + record.swap_out_seconds
        model = self.model
        self.keep = [model.choice() for _ in candidates]
        self.swap = [model.choice() for _ in candidates]
        self.drop = [model.choice() for _ in candidates]
        self.release = [[model.choice() for _ in c.path] for c in candidates]
        self.prefetch = [[model.choice() for _ in c.path] for c in candidates]
        self.recompute = [[model.choice() for _ in c.path] for c in candidates]
        self.again: dict[tuple[int, int, int], int] = {}
        self.out_start = [model.number() for _ in candidates]
        self.in_start = [model.number() for _ in candidates]
        self.ready = [model.number() for _ in range(body.length)]
        self.start = [model.number() for _ in range(body.length)]
        self.total = model.number(cost=1.0)
        self._decide()
        self._lineages()
        self._memory()
        self._lanes()

    def solve(self, seconds: float, gap: float) -> Optimum | None:
        found = self.model.solve(seconds, gap)
        if found is None:
            return None
        values, bound = found
        return Optimum(self._schedule(values), float(values[self.total]), bound)

    def _decide(self) -> None:
        model = self.model
        for c in range(len(self.body.candidates)):
            model.equal([(1, self.keep[c]), (1, self.swap[c]), (1, self.drop[c])], 1)
            for points, which in (
                (self.release[c], self.swap[c]),
                (self.prefetch[c], self.swap[c]),
                (self.recompute[c], self.drop[c]),
            ):
                model.equal([*((1.0, point) for point in points), (-1, which)], 0)
            for k in range(len(self.release[c])):
                until = [(1.0, point) for point in self.prefetch[c][: k + 1]]
                model.at_most([*until, *((-1.0, point) for point in self.release[c][: k + 1])], 0)

    def _there(self, c: int, k: int) -> list[tuple[float, int]]:
        """Terms that add up to 1 where a candidate is on the device at position ``k`` of its path, else 0."""
        return [
            (1.0, self.keep[c]),
            *((1.0, point) for point in self.release[c][k + 1 :]),
            *((1.0, point) for point in self.prefetch[c][: k + 1]),
            *((1.0, point) for point in self.recompute[c][: k + 1]),
        ]

    def _lineages(self) -> None:
        """Which ranks run again for each candidate at each position, from what is on the device there."""
        body, model = self.body, self.model
        for c, candidate in enumerate(body.candidates):
            nodes = body.profiles[candidate.sub_array].nodes
            num_forward = sum(node.phase.value == "forward" for node in nodes)
            for k, position in enumerate(candidate.path):
                anchor = body.next_rank(candidate.sub_array, position)
                for n in range(num_forward):
                    allowed = nodes[n].is_repeatable and not nodes[n].changes and anchor > n
                    self.again[c, k, n] = model.choice(allowed)
                for n in range(num_forward):
                    again = self.again[c, k, n]
                    model.at_most([(1, again), (-1, self.recompute[c][k])], 0)
                    for read in nodes[n].reads:
                        self._source(c, k, n, read, anchor, position)
                model.at_most([(1, self.recompute[c][k]), (-1, self.again[c, k, candidate.creator])], 0)

    def _source(self, c: int, k: int, n: int, read: int, anchor: int, position: int) -> None:
        """A rank that runs again needs ``read``: on the device, or made again in the same recomputation."""
        body, model = self.body, self.model
        sub_array = body.candidates[c].sub_array
        profile = body.profiles[sub_array]
        changed = [rank for rank, node in enumerate(profile.nodes) if read in node.changes]
        if any(n < rank < anchor for rank in changed):
            model.at_most([(1, self.again[c, k, n])], 0)
            return
        if profile.tensors[read].byte_class.is_static:
            return
        creator = next(rank for rank, node in enumerate(profile.nodes) if read in node.creates)
        terms: list[tuple[float, int]] = [(1, self.again[c, k, n]), (-1, self.again[c, k, creator])]
        other = self._number_of(sub_array, read)
        if other is not None and position in body.candidates[other].path:
            at = body.candidates[other].path.index(position)
            there = [
                (1.0, self.keep[other]),
                *((1.0, point) for point in self.release[other][at + 1 :]),
                *((1.0, point) for point in self.prefetch[other][: at + 1]),
                *((1.0, point) for point in self.recompute[other][:at]),
            ]
            if body.candidates[other].creator < body.candidates[c].creator:
                there.append((1.0, self.recompute[other][at]))
            terms += [(-coefficient, variable) for coefficient, variable in there]
        elif body.is_resident((sub_array, read), position) and not self._is_made_at(
            sub_array, read, position
        ):
            return
        model.at_most(terms, 0)

    def _is_made_at(self, sub_array: int, tensor: int, position: int) -> bool:
        return self.body.order[position][0] == sub_array and tensor in self.body.node(position).creates

    def _number_of(self, sub_array: int, tensor: int) -> int | None:
        for number, candidate in enumerate(self.body.candidates):
            if (candidate.sub_array, candidate.tensor) == (sub_array, tensor):
                return number
        return None

    def _memory(self) -> None:
        body, model = self.body, self.model
        for position in range(body.length):
            base = body.base(position)
            idle: list[tuple[float, int]] = []
            for c, candidate in enumerate(body.candidates):
                if position in candidate.path[:-1]:
                    k = candidate.path.index(position)
                    idle += [(candidate.size * share, point) for share, point in self._there(c, k)]
            model.at_most(idle, self.limit - base) if idle else None
            if not idle and base > self.limit:
                model.at_most([(1, self.keep[0] if self.keep else self.total)], -1)
            sizes = body.profiles[body.order[position][0]].tensors
            node = body.node(position)
            before = base - node.workspace_bytes - sum(sizes[made].size_bytes for made in node.creates)
            for c, candidate in enumerate(body.candidates):
                if position in candidate.path:
                    self._recompute_memory(c, candidate.path.index(position), before, idle)

    def _recompute_memory(self, c: int, k: int, before: int, idle: list[tuple[float, int]]) -> None:
        """While ranks run again: what is there, what they made so far and is needed, their workspace."""
        body, model = self.body, self.model
        candidate = body.candidates[c]
        profile = body.profiles[candidate.sub_array]
        ranks = sorted(n for (owner, at, n) in self.again if (owner, at) == (c, k))
        large = float(self.limit + sum(tensor.size_bytes for tensor in profile.tensors) * 3)
        for n in ranks:
            terms = list(idle)
            own = profile.nodes[n].workspace_bytes
            own += sum(profile.tensors[made].size_bytes for made in profile.nodes[n].creates)
            if candidate.tensor in profile.nodes[n].creates:
                own -= candidate.size
            for earlier in ranks:
                if earlier >= n:
                    break
                for made in profile.nodes[earlier].creates:
                    readers = [rank for rank in ranks if rank >= n and made in profile.nodes[rank].reads]
                    if made == candidate.tensor or not readers:
                        continue
                    alive = model.number(1.0)
                    for reader in readers:
                        model.at_most(
                            [(1, self.again[c, k, earlier]), (1, self.again[c, k, reader]), (-1, alive)], 1
                        )
                    terms.append((float(profile.tensors[made].size_bytes), alive))
            terms.append((large, self.again[c, k, n]))
            model.at_most(terms, self.limit - before - own + large)

    def _after(self, first: int, seconds: float, then: int, *given: int, unless: Sequence[int] = ()) -> None:
        """``then`` is at least ``seconds`` after ``first``, if all choices in ``given`` are taken."""
        big = self.horizon
        terms = [(1.0, first), (-1.0, then), *((big, choice) for choice in given)]
        terms += [(-big, choice) for choice in unless]
        self.model.at_most(terms, len(given) * big - seconds)

    def _lanes(self) -> None:
        body = self.body
        candidates = body.candidates
        records = [body.profiles[c.sub_array].tensors[c.tensor] for c in candidates]
        for position in range(body.length):
            if position:
                self._after(self.start[position - 1], body.node(position - 1).seconds, self.ready[position])
            self._recompute_times(position)
        self._after(self.start[-1], body.node(body.length - 1).seconds, self.total)
        for c, candidate in enumerate(candidates):
            out, back, swap = self.out_start[c], self.in_start[c], self.swap[c]
            out_seconds, in_seconds = records[c].swap_out_seconds, records[c].swap_in_seconds
            self._after(self.start[candidate.last], body.node(candidate.last).seconds, out, swap)
            self._after(out, out_seconds, self.total, swap)
            self._after(back, in_seconds, self.total, swap)
            for k, position in enumerate(candidate.path):
                if position > candidate.last:  # in the same pass
                    self._after(out, out_seconds, self.ready[position], self.release[c][k])
                    self._after(out, out_seconds, back, self.prefetch[c][k])
                self._after(self.ready[position], 0.0, back, self.prefetch[c][k])
                if position <= candidate.path[-1]:
                    self._after(back, in_seconds, self.start[candidate.path[-1]], self.prefetch[c][k])
            for other in range(len(candidates)):
                if (candidate.last, c) < (candidates[other].last, other):
                    self._after(out, out_seconds, self.out_start[other], swap, self.swap[other])
        tie_order = sorted(range(len(candidates)), key=lambda c: (candidates[c].path[-1], c))
        for at, first in enumerate(tie_order):
            for second in tie_order[at + 1 :]:
                self._queue(first, second, records[first].swap_in_seconds, records[second].swap_in_seconds)

    def _queue(self, first: int, second: int, first_seconds: float, second_seconds: float) -> None:
        """Prefetches run in issue order; of two at the same position ``first`` is issued first."""
        model, length = self.model, 2.0 * self.body.length
        issue = [
            [
                (float(position), point)
                for position, point in zip(self.body.candidates[c].path, self.prefetch[c], strict=True)
            ]
            for c in (first, second)
        ]
        less = [[(-coefficient, variable) for coefficient, variable in terms] for terms in issue]
        both = (self.swap[first], self.swap[second])
        is_first = model.choice()
        model.at_most([*issue[0], *less[1], (length, is_first)], length)
        model.at_most(
            [*issue[1], *less[0], (-length, is_first), *((length, swap) for swap in both)], 2 * length - 1
        )
        self._after(self.in_start[first], first_seconds, self.in_start[second], is_first, *both)
        self._after(self.in_start[second], second_seconds, self.in_start[first], *both, unless=[is_first])

    def _recompute_times(self, position: int) -> None:
        """The compute lane before a node: ranks that run again one after another, then the node itself."""
        body, model = self.body, self.model
        before: list[tuple[float, int]] = [(1, self.ready[position])]
        numbers = [c for c, candidate in enumerate(body.candidates) if position in candidate.path]
        for c in sorted(numbers, key=lambda c: (body.candidates[c].creator, c)):
            candidate = body.candidates[c]
            k = candidate.path.index(position)
            nodes = body.profiles[candidate.sub_array].nodes
            for n in sorted(rank for (owner, at, rank) in self.again if (owner, at) == (c, k)):
                begins = model.number()
                model.at_most([*before, (-1, begins)], 0)
                for read in nodes[n].reads:
                    other = self._number_of(candidate.sub_array, read)
                    if other is None or position not in body.candidates[other].path:
                        continue
                    seconds = body.profiles[candidate.sub_array].tensors[read].swap_in_seconds
                    made = self.again[c, k, self._creator(candidate.sub_array, read)]
                    path = body.candidates[other].path
                    for earlier in range(path.index(position) + 1):
                        if path[earlier] <= position:
                            given = (self.prefetch[other][earlier], self.again[c, k, n])
                            self._after(self.in_start[other], seconds, begins, *given, unless=[made])
                before = [(1, begins), (nodes[n].seconds, self.again[c, k, n])]
        model.at_most([*before, (-1, self.start[position])], 0)

    def _creator(self, sub_array: int, tensor: int) -> int:
        nodes = self.body.profiles[sub_array].nodes
        return next(rank for rank, node in enumerate(nodes) if tensor in node.creates)

    def _schedule(self, values: np.ndarray) -> Schedule:
        body = self.body
        swaps: list[tuple[int, Swap]] = []
        recomputes: list[tuple[int, int, Recomputation]] = []
        for c, candidate in enumerate(body.candidates):
            if values[self.swap[c]] > 0.5:
                released = candidate.path[int(np.argmax(values[self.release[c]]))]
                fetched = candidate.path[int(np.argmax(values[self.prefetch[c]]))]
                swap = Swap(
                    candidate.sub_array,
                    candidate.tensor,
                    body.order[candidate.last],
                    body.order[released],
                    body.order[fetched],
                    "optimum",
                )
                swaps.append((candidate.path[-1], swap))
            elif values[self.drop[c]] > 0.5:
                k = int(np.argmax(values[self.recompute[c]]))
                ranks = tuple(
                    n
                    for (owner, at, n), variable in sorted(self.again.items())
                    if (owner, at) == (c, k) and values[variable] > 0.5
                )
                record = Recomputation(
                    candidate.sub_array, candidate.tensor, ranks, body.order[candidate.path[k]], "optimum"
                )
                recomputes.append((candidate.path[k], candidate.creator, record))
        return Schedule(
            self.multiplexing,
            body.order,
            tuple(swap for _, swap in sorted(swaps, key=lambda pair: pair[0])),
            tuple(record for _, _, record in sorted(recomputes, key=lambda triple: triple[:2])),
        )
