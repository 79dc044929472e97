"""A bound for large steps, by linear programming: what an order takes if bytes could be divided at will.

`scheduling.bound_seconds` looks at single nodes. Here time is cut into bins, and bytes flow: a tensor may be
swapped in part and recomputed in part, its copies may be cut into pieces, and a piece is away as soon as the
bin begins in which it is copied out, and not back before the bin ends in which it comes. What is left of the
planner's cost model: each direction of the link has so many seconds in a bin as compute takes there, waits
and recomputations included; both at once go slower, and compute goes slower beside them; copies are over when
a body ends; a recomputation runs all that it takes at least, before the next use; and at the node of each bin
that needs the most, what is on the device is within the limit.

So no decisions for that order are quicker. Another order may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from trainmux.ir import Multiplexing, Profile, ProfiledTensor
from trainmux.planning import Task
from trainmux.planning.policies._body import FixedBody
from trainmux.planning.policies._gaps import Gap, RecomputePrices, find_gaps

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
    body = FixedBody(Task(tuple(profiles), multiplexing, limit_bytes, 1 << 60), order)
    return _Flow(body, num_bins).solve(limit_bytes)


@dataclass
class _Rows:
    """Σ coefficient · variable against a value, row by row."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, terms: Terms, value: float) -> None:
        for coefficient, variable in terms:
            self.rows.append(len(self.values))
            self.columns.append(variable)
            self.coefficients.append(coefficient)
        self.values.append(value)

    def matrix(self, num_columns: int) -> csr_matrix | None:
        if not self.values:
            return None
        shape = (len(self.values), num_columns)
        return csr_matrix((self.coefficients, (self.rows, self.columns)), shape=shape)


@dataclass
class _Model:
    """Variables from 0 on with their costs, and rows."""

    costs: list[float] = field(default_factory=list)
    most: _Rows = field(default_factory=_Rows)
    equal: _Rows = field(default_factory=_Rows)

    def variable(self, cost: float = 0.0) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def solve(self) -> float | None:
        count = len(self.costs)
        result = linprog(
            self.costs,
            self.most.matrix(count),
            self.most.values,
            self.equal.matrix(count),
            self.equal.values or None,
            method="highs",
        )
        if result.status == 2:
            return None
        assert result.status == 0, result.message
        return float(result.fun)


class _Flow:
    """The program itself, in units in which numbers are neither large nor small: bins and a peak."""

    def __init__(self, body: FixedBody, num_bins: int) -> None:
        self.body = body
        self.needed = body.needed()
        self.byte = 1.0 / float(self.needed.max())
        self.total = float(body.starts[-1])
        self.second = num_bins / self.total
        cuts = np.searchsorted(body.starts[:-1], np.linspace(0, self.total, num_bins + 1)[1:-1])
        edges = [0, *dict.fromkeys(int(cut) for cut in cuts if 0 < cut < body.length), body.length]
        self.bin_of = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        self.num_bins = len(edges) - 1
        self.probes = [begin + int(self.needed[begin:end].argmax()) for begin, end in pairwise(edges)]
        self.busy = np.add.reduceat(body.seconds, edges[:-1]) * self.second
        self.model = _Model()
        self.waits = [self.model.variable(1.0) for _ in range(self.num_bins)]
        self.repeats = [self.model.variable(1.0) for _ in range(self.num_bins)]
        self.slowed = [self.model.variable(1.0) for _ in range(self.num_bins)]
        slowdown = min(profile.slowdown_by_copies for profile in body.task.profiles)
        self.lost_beside = 1 - 1 / slowdown
        self.again = self._terms_by_bin()
        self.copies = {lane: self._terms_by_bin() for lane in _LANES}
        self.relief = self._terms_by_bin()
        self.quickest_beside = 0.0
        self.classes: dict[tuple[int, ...], list[tuple[Gap, int]]] = {}
        self.prices = {id(facts): RecomputePrices(facts, {}) for facts in body.all_facts}

    def solve(self, limit_bytes: int) -> float:
        if int(self.needed.max()) <= limit_bytes:
            return self.total
        for gap in find_gaps(self.body.all_facts, with_static=True):
            self._add_gap(gap)
        for gaps in self.classes.values():
            self._add_flow(gaps)
        for number, probe in enumerate(self.probes):
            excess = (int(self.needed[probe]) - limit_bytes) * self.byte
            relief = [(-coefficient, variable) for coefficient, variable in self.relief[number]]
            self.model.most.add(relief, -excess)
            self._add_lanes(number)
        found = self.model.solve()
        return float("inf") if found is None else self.total + found / self.second

    def _terms_by_bin(self) -> list[Terms]:
        return [[] for _ in range(self.num_bins)]

    def _add_gap(self, gap: Gap) -> None:
        """How much of it is swapped, and how much recomputed."""
        last, back = self.body.gap_places(gap)
        size = gap.size_bytes * self.byte
        swapped = self.model.variable()
        all_of_it = [(1.0, swapped)]
        rate = round(float(np.log2(self._seconds(gap, "in") / size)) * _RATES_PER_DOUBLING)
        bins = (int(self.bin_of[last]), int(self.bin_of[back]))
        self.classes.setdefault((*bins, back <= last, gap.copies_out, rate), []).append((gap, swapped))
        if gap.can_recompute:
            seconds = self.prices[id(self.body.all_facts[gap.sub_array])].seconds(gap.tensor)
            assert seconds is not None
            recomputed = self.model.variable()
            all_of_it.append((1.0, recomputed))
            self.again[bins[1]].append((seconds * self.second / size, recomputed))
            for number, probe in enumerate(self.probes):
                if last < probe < back or (back <= last and not back <= probe <= last):
                    self.relief[number].append((1.0, recomputed))
        self.model.most.add(all_of_it, size)
        record = self._record(gap)
        for alone, beside in (
            (record.swap_out_seconds, record.swap_out_duplex_seconds),
            (record.swap_in_seconds, record.swap_in_duplex_seconds),
        ):
            self.quickest_beside = max(self.quickest_beside, min(1.0, alone / beside))

    def _add_flow(self, swaps: Sequence[tuple[Gap, int]]) -> None:
        """Tensors that leave in one bin and are due in another: pieces out, pieces back, what is away."""
        gaps = [gap for gap, _ in swaps]
        places = [self.body.gap_places(gap) for gap in gaps]
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
            lane: min(self._seconds(gap, lane) / (gap.size_bytes * self.byte) for gap in gaps)
            for lane in _LANES
        }
        moved: dict[str, Terms] = {lane: [(-1.0, swapped) for _, swapped in swaps] for lane in _LANES}
        away: Terms = []  # of the bin before, without what came back in it
        for number, lanes in path:
            pieces = {lane: model.variable() for lane in lanes}
            for lane, piece in pieces.items():
                moved[lane].append((1.0, piece))
                if lane == "in" or gaps[0].copies_out:
                    self.copies[lane][number].append((rates[lane], piece))
            now = model.variable()
            model.equal.add(
                [*away, (-1.0, now), *((1.0, pieces[lane]) for lane in lanes if lane == "out")], 0.0
            )
            away = [(1.0, now), *((-1.0, pieces[lane]) for lane in lanes if lane == "in")]
            probe = self.probes[number]
            if any(
                ("out" not in lanes or last < probe) and ("in" not in lanes or probe < back)
                for last, back in places
            ):
                self.relief[number].append((1.0, now))
        for terms in moved.values():
            model.equal.add(terms, 0.0)

    def _add_lanes(self, number: int) -> None:
        """What the link can copy while a bin lasts, and how much longer that makes compute.

        A copy is beside compute unless that waits.
        """
        self.model.most.add([*self.again[number], (-1.0, self.repeats[number])], 0.0)
        lasts: Terms = [(-1.0, longer[number]) for longer in (self.waits, self.repeats, self.slowed)]
        lost = (1 - self.quickest_beside) / self.quickest_beside if self.quickest_beside else 0.0
        for lane, other in (_LANES, _LANES[::-1]):
            beside = [(lost * coefficient, piece) for coefficient, piece in self.copies[other][number]]
            copying = [*self.copies[lane][number], *beside]
            self.model.most.add([*copying, *lasts], self.busy[number])
            slowing = [*copying, (-1.0, self.waits[number])]
            slow = [(self.lost_beside * coefficient, variable) for coefficient, variable in slowing]
            self.model.most.add([*slow, (-1.0, self.slowed[number])], 0.0)

    def _record(self, gap: Gap) -> ProfiledTensor:
        return self.body.task.profiles[gap.sub_array].tensors[gap.tensor]

    def _seconds(self, gap: Gap, lane: str) -> float:
        """Of its copy alone, in our unit."""
        record = self._record(gap)
        return (record.swap_out_seconds if lane == "out" else record.swap_in_seconds) * self.second
