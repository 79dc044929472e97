"""A bound for large steps, by linear programming: what an order takes if bytes could be divided at will.

`bound_seconds` looks at single nodes. Here time is cut into bins, and bytes flow: a tensor may be swapped in
part and recomputed in part, its copies may be cut into pieces, and a piece is away as soon as the bin begins
in which it is copied out, and not back before the bin ends in which it comes. What is left of the planner's
cost model: each direction of the link has so many seconds in a bin as compute takes there, waits and
recomputations included; both at once go slower, and compute goes slower while they run; copies are over when
a body ends; a recomputation runs all that it takes at least, before the next use; and at the node of each bin
that needs the most, what is on the device is within the limit.

So no decisions for that order are quicker. Another order may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from exact import Body
from linear_program import LinearProgram

from trainmux.ir import ByteClass, Multiplexing, Profile, ProfiledTensor

Node = tuple[int, int]
Terms = list[tuple[float, int]]
_LANES = ("out", "in")
_RATES_PER_DOUBLING = 4
"""Tensors whose copies take nearly as long by the byte flow together, at the quickest one's rate."""


def fluid_seconds(
    profiles: Sequence[Profile],
    multiplexing: Multiplexing,
    order: Sequence[Node],
    limit_bytes: int,
    num_bins: int = 160,
) -> float:
    """A time that no decisions for this order within the limit go below; infinite where none fit."""
    return _Flow(Body(profiles, multiplexing, order), num_bins).solve(limit_bytes)


@dataclass(frozen=True)
class _Gap:
    """A tensor between two uses: the nodes at positions ``last`` and ``back``, the latter maybe in the next
    pass. ``again_seconds`` is what making it again takes at least; ``None`` where it cannot be."""

    record: ProfiledTensor
    last: int
    back: int
    copies_out: bool
    again_seconds: float | None


def _gaps(body: Body) -> list[_Gap]:
    """Feature maps between the passes, and static tensors between any two uses."""
    found = []
    for each in body.candidates:
        profile = body.profiles[each.sub_array]
        before = body.order[each.path[-1]][1]
        again = _again_seconds(profile, each.tensor, before)
        if each.size:
            found.append(_Gap(profile.tensors[each.tensor], each.last, each.path[-1], True, again))
    for sub_array, profile in enumerate(body.profiles):
        for tensor, record in enumerate(profile.tensors):
            if (
                not record.byte_class.is_static
                or record.byte_class is ByteClass.BATCH
                or not record.size_bytes
            ):
                continue
            uses = [
                (body.place[sub_array, rank], tensor in node.changes)
                for rank, node in enumerate(profile.nodes)
                if tensor in (*node.reads, *node.changes)
            ]
            for (last, is_changed), (back, _) in zip(uses, uses[1:] + uses[:1], strict=True):
                if (back - last) % body.length != 1:
                    found.append(_Gap(record, last, back, is_changed, None))
    return found


def _again_seconds(profile: Profile, tensor: int, before: int) -> float | None:
    """The nodes that make a tensor again before a rank, from all that the step has then."""
    nodes = profile.nodes
    made_by = {made: rank for rank, node in enumerate(nodes) for made in node.creates}
    last_use = {used: rank for rank, node in enumerate(nodes) for used in (*node.reads, *node.changes)}
    ranks: set[int] = set()
    waiting = [tensor]
    while waiting:
        rank = made_by[waiting.pop()]
        if not nodes[rank].is_repeatable or nodes[rank].changes:
            return None
        ranks.add(rank)
        for read in nodes[rank].reads:
            if any(read in node.changes for node in nodes[rank + 1 : before]):
                return None
            is_there = profile.tensors[read].byte_class.is_static or last_use[read] >= before
            if not is_there and made_by[read] not in ranks:
                waiting.append(made_by[read])
    if any(tensor in node.changes for node in nodes[:before]):
        return None
    return sum(nodes[rank].seconds for rank in ranks)


class _Flow:
    """The program itself, in units in which numbers are neither large nor small: bins and a peak."""

    def __init__(self, body: Body, num_bins: int) -> None:
        self.body = body
        self.needed = body.needed()
        self.byte = 1.0 / float(self.needed.max())
        seconds = np.array([body.node(position).seconds for position in range(body.length)])
        starts = np.concatenate([[0.0], np.cumsum(seconds)])
        self.total = float(starts[-1])
        self.second = num_bins / self.total
        cuts = np.searchsorted(starts[:-1], np.linspace(0, self.total, num_bins + 1)[1:-1])
        edges = [0, *dict.fromkeys(int(cut) for cut in cuts if 0 < cut < body.length), body.length]
        self.bin_of = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        self.num_bins = len(edges) - 1
        self.probes = [begin + int(self.needed[begin:end].argmax()) for begin, end in pairwise(edges)]
        self.busy = np.add.reduceat(seconds, edges[:-1]) * self.second
        self.model = LinearProgram()
        self.waits = [self.model.number(cost=1.0) for _ in range(self.num_bins)]
        self.repeats = [self.model.number(cost=1.0) for _ in range(self.num_bins)]
        self.slowed = [self.model.number(cost=1.0) for _ in range(self.num_bins)]
        slowdown = min(profile.slowdown_by_copies for profile in body.profiles)
        self.lost_beside = 1 - 1 / slowdown
        self.again = self._terms_by_bin()
        self.copies = {lane: self._terms_by_bin() for lane in _LANES}
        self.relief = self._terms_by_bin()
        self.quickest_beside = 0.0
        self.classes: dict[tuple[int, ...], list[tuple[_Gap, int]]] = {}

    def solve(self, limit_bytes: int) -> float:
        if int(self.needed.max()) <= limit_bytes:
            return self.total
        for gap in _gaps(self.body):
            self._add_gap(gap)
        for gaps in self.classes.values():
            self._add_flow(gaps)
        for number, probe in enumerate(self.probes):
            excess = (int(self.needed[probe]) - limit_bytes) * self.byte
            relief = [(-coefficient, variable) for coefficient, variable in self.relief[number]]
            self.model.at_most(relief, -excess)
            self._add_lanes(number)
        found = self.model.solve()
        return float("inf") if found is None else self.total + found[1] / self.second

    def _terms_by_bin(self) -> list[Terms]:
        return [[] for _ in range(self.num_bins)]

    def _add_gap(self, gap: _Gap) -> None:
        """How much of it is swapped, and how much recomputed."""
        last, back = gap.last, gap.back
        size = gap.record.size_bytes * self.byte
        swapped = self.model.number()
        all_of_it = [(1.0, swapped)]
        rate = round(float(np.log2(self._seconds(gap, "in") / size)) * _RATES_PER_DOUBLING)
        bins = (int(self.bin_of[last]), int(self.bin_of[back]))
        self.classes.setdefault((*bins, back <= last, gap.copies_out, rate), []).append((gap, swapped))
        if gap.again_seconds is not None:
            seconds = gap.again_seconds
            recomputed = self.model.number()
            all_of_it.append((1.0, recomputed))
            self.again[bins[1]].append((seconds * self.second / size, recomputed))
            for number, probe in enumerate(self.probes):
                if last < probe < back or (back <= last and not back <= probe <= last):
                    self.relief[number].append((1.0, recomputed))
        self.model.at_most(all_of_it, size)
        record = gap.record
        for alone, beside in (
            (record.swap_out_seconds, record.swap_out_duplex_seconds),
            (record.swap_in_seconds, record.swap_in_duplex_seconds),
        ):
            self.quickest_beside = max(self.quickest_beside, min(1.0, alone / beside))

    def _add_flow(self, swaps: Sequence[tuple[_Gap, int]]) -> None:
        """Tensors that leave in one bin and are due in another: pieces out, pieces back, what is away."""
        gaps = [gap for gap, _ in swaps]
        places = [(gap.last, gap.back) for gap in gaps]
        first, due = int(self.bin_of[places[0][0]]), int(self.bin_of[places[0][1]])
        goes_around = places[0][1] <= places[0][0]
        # A copy out is over when the body ends, and one for the next pass begins in that.
        if goes_around:
            path = [(number, ("out",)) for number in range(first, self.num_bins)]
            path += [(number, ("in",)) for number in range(due + 1)]
        else:
            path = [(number, _LANES) for number in range(first, due + 1)]
        model = self.model
        rates = {
            lane: min(self._seconds(gap, lane) / (gap.record.size_bytes * self.byte) for gap in gaps)
            for lane in _LANES
        }
        moved: dict[str, Terms] = {lane: [(-1.0, swapped) for _, swapped in swaps] for lane in _LANES}
        away: Terms = []  # of the bin before, without what came back in it
        for number, lanes in path:
            pieces = {lane: model.number() for lane in lanes}
            for lane, piece in pieces.items():
                moved[lane].append((1.0, piece))
                if lane == "in" or gaps[0].copies_out:
                    self.copies[lane][number].append((rates[lane], piece))
            now = model.number()
            model.equal([*away, (-1.0, now), *((1.0, pieces[lane]) for lane in lanes if lane == "out")], 0.0)
            away = [(1.0, now), *((-1.0, pieces[lane]) for lane in lanes if lane == "in")]
            probe = self.probes[number]
            if any(
                ("out" not in lanes or last < probe) and ("in" not in lanes or probe < back)
                for last, back in places
            ):
                self.relief[number].append((1.0, now))
        for terms in moved.values():
            model.equal(terms, 0.0)

    def _add_lanes(self, number: int) -> None:
        """What the link can copy while a bin lasts, and how much longer that makes compute.

        A copy is beside compute unless that waits.
        """
        self.model.at_most([*self.again[number], (-1.0, self.repeats[number])], 0.0)
        lasts: Terms = [(-1.0, longer[number]) for longer in (self.waits, self.repeats, self.slowed)]
        lost = (1 - self.quickest_beside) / self.quickest_beside if self.quickest_beside else 0.0
        for lane, other in (_LANES, _LANES[::-1]):
            beside = [(lost * coefficient, piece) for coefficient, piece in self.copies[other][number]]
            copying = [*self.copies[lane][number], *beside]
            self.model.at_most([*copying, *lasts], self.busy[number])
            slowing = [*copying, (-1.0, self.waits[number])]
            slow = [(self.lost_beside * coefficient, variable) for coefficient, variable in slowing]
            self.model.at_most([*slow, (-1.0, self.slowed[number])], 0.0)

    def _seconds(self, gap: _Gap, lane: str) -> float:
        """Of its copy alone, in our unit."""
        record = gap.record
        return (record.swap_out_seconds if lane == "out" else record.swap_in_seconds) * self.second
