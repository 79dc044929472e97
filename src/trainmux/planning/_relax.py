"""The relaxation of a body: a linear program in which bytes flow, and a time that no decisions go below.

The step's time is cut into bins. A tensor may be offloaded in part and recomputed in part, its copies may be
cut into pieces, and all copies of a direction are one stream: so far as much may have left as tensors were
given up, as much must have come back as was due. In each bin either direction of the link has the seconds
that compute takes there, waits and recomputations included; both at once are slower, and compute is slower
while copies run. At the node of each bin that needs the most, what is on the device is within the limit.

Whatever a schedule in this order does, the relaxation may do too, so its time is a lower bound for the order.
Its solution says what to offload and what to recompute: few tensors are divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from trainmux.planning._body import FixedBody, Floats
from trainmux.planning._facts import SYNCS_PER_SWAP, Gap, RecomputePrices

_NUM_BINS = 160
_MOST_CLASSES = 2000
"""Gaps of bodies with more of them share a variable where they are alike."""
_SPARED = 0.01
"""The price of a second of copies that compute hides, in seconds of compute, where they are spared."""
_ALIKE = 0.02
"""Relative difference in seconds per byte up to which recomputations count as alike."""

_Terms = Iterable[tuple[float, int]]


@dataclass(frozen=True)
class Relaxed:
    """A lower bound in ``seconds``, and the share of each gap's bytes that is swapped and recomputed."""

    seconds: float
    swapped: Floats
    recomputed: Floats


class Relaxation:
    """The relaxation of one body, for any limit.

    Gaps in the same bins that are alike in everything share one variable: many alike sub-arrays cost no more
    than a few.
    """

    def __init__(self, body: FixedBody, gaps: Sequence[Gap]) -> None:
        self._total = float(body.starts[-1])
        self._gaps = gaps
        self._needed = body.needed()
        self._byte = 1.0 / max(1.0, float(self._needed.max()))
        self._second = _NUM_BINS / self._total if self._total > 0 else 0.0
        self._slowdown = min(profile.slowdown_by_copies for profile in body.profiles)
        cuts = np.searchsorted(body.starts[:-1], np.linspace(0, self._total, _NUM_BINS + 1)[1:-1])
        edges = [0, *dict.fromkeys(int(cut) for cut in cuts if 0 < cut < body.length), body.length]
        self._bin_of = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        # The position of each bin that needs the most bytes.
        self._probes = np.asarray([at + int(self._needed[at:end].argmax()) for at, end in pairwise(edges)])
        self._bin_seconds = np.add.reduceat(body.seconds, edges[:-1]) * self._second
        self._classes, self._class_of = self._find_classes(body)
        sync = max(profile.sync_seconds for profile in body.profiles) * self._second
        counts = np.bincount(self._class_of, minlength=len(self._classes)) if gaps else np.zeros(0)
        copies = np.asarray([each.out + each.back for each in self._classes])
        self._prices = (SYNCS_PER_SWAP * counts * sync + copies * _SPARED).tolist()
        self._program = self._write() if self._total > 0 and gaps else None
        self._sparing: _LinearProgram | None = None

    def solve(self, limit_bytes: int, host_bytes: int, *, sparing: bool = False) -> Relaxed | None:
        """Return the least time within limits and the shares that lead to it; ``None`` if nothing fits.

        With ``sparing``, copies that would be hidden cost a little, too, so that there are no more of them
        than it takes, and bytes flow as in copies of the tensors that are chosen, not as in the largest ones;
        ``seconds`` is no bound then.
        """
        nothing = np.zeros(len(self._gaps))
        if int(self._needed.max()) <= limit_bytes:
            return Relaxed(self._total, nothing, nothing)
        program, prices = self._program, self._prices if sparing else None
        if program is None:
            return None
        room = np.asarray((limit_bytes - self._needed[self._probes]) * self._byte, dtype=np.float64)
        host = np.asarray([host_bytes * self._byte])
        if sparing and self._sparing is None:
            first = program.solve(room, host, prices)
            if first is not None:
                self._sparing = self._write(self._slowness(first[1][: len(self._classes)]))
        if sparing and self._sparing is not None:
            program = self._sparing
        found = program.solve(room, host, prices)
        if found is None:
            return None
        value, x = found
        num = len(self._classes)
        swapped, recomputed = self._shares(x[:num]), self._shares(x[num : 2 * num])
        return Relaxed(self._total + value / self._second, swapped, np.minimum(recomputed, 1 - swapped))

    def _slowness(self, swapped: Floats) -> float:
        """The time of copies of these shares of classes, relative to bytes in the largest copies."""
        size, back = np.asarray([(each.size, each.back) for each in self._classes]).T
        quickest = float(swapped @ size) * float((back / size).min())
        return float(swapped @ back) / quickest if quickest > 0 else 1.0

    def _shares(self, of_classes: Floats) -> Floats:
        """Shares of gaps: those of a class are given up one after another, the last one in part."""
        shares = np.zeros(len(self._gaps))
        left = [each.size * share for each, share in zip(self._classes, of_classes, strict=True)]
        for number, which in enumerate(self._class_of):
            size = self._gaps[number].size_bytes * self._byte
            shares[number] = min(1.0, max(0.0, left[which] / size))
            left[which] -= size
        return shares

    def _find_classes(self, body: FixedBody) -> tuple[list[_Class], list[int]]:
        prices = {id(facts): RecomputePrices(facts, {}) for facts in body.all_facts}
        known: dict[tuple[object, ...], int] = {}
        classes: list[_Class] = []
        class_of = []
        are_merged = len(self._gaps) > _MOST_CLASSES
        for number, gap in enumerate(self._gaps):
            record = body.record(gap)
            own = prices[id(body.all_facts[gap.sub_array])]
            again = own.seconds(gap.tensor) if gap.can_recompute else None
            size = gap.size_bytes * self._byte
            last, back = body.gap_places(gap)
            made = _Class(
                size,
                record.swap_out_seconds * self._second if gap.copies_out else 0.0,
                record.swap_in_seconds * self._second,
                record.swap_out_duplex_seconds * self._second,
                record.swap_in_duplex_seconds * self._second,
                None if again is None else again * self._second,
                gap.copies_out,
                back <= last,
                int(self._bin_of[last]),
                int(self._bin_of[back]),
                int(np.searchsorted(self._probes, last, side="right")),
                int(np.searchsorted(self._probes, back, side="left")),
            )
            key = made.key() if are_merged else (number,)
            if key in known:
                classes[known[key]] = classes[known[key]].joined(made)
            else:
                known[key] = len(classes)
                classes.append(made)
            class_of.append(known[key])
        return classes, class_of

    def _write(self, slowness: float = 1.0) -> _LinearProgram:
        classes, num_bins = self._classes, len(self._probes)
        lp = _LinearProgram()
        swap = lp.variables(len(classes), upper=1.0)
        again = lp.variables(len(classes), uppers=[1.0 if c.again is not None else 0.0 for c in classes])
        out, free, back, away = (lp.variables(num_bins) for _ in range(4))
        wait, recompute, slow = (lp.variables(num_bins, cost=1.0) for _ in range(3))
        # Given up and not copied yet (with and without a copy), fetched and not due yet; per bin. What is
        # due in the next pass may be fetched before this one ends.
        to_copy, to_free, early = (lp.variables(num_bins) for _ in range(3))
        swap_open, again_open, relief = (lp.variables(num_bins) for _ in range(3))
        released, dropped, due, opens, repeats, reopens = (_per_bin(num_bins) for _ in range(6))
        around, around_again = [], []
        for number, each in enumerate(classes):
            of_swap, of_again = (each.size, swap[number]), (each.size, again[number])
            (released if each.copies_out else dropped)[each.first].append(of_swap)
            due[each.due].append(of_swap)
            if each.wraps:
                around.append(of_swap)
            if each.again is not None:
                repeats[each.due].append((each.again, again[number]))
            # Probes from `opens` up to, not including, `closes` lie inside of the gap.
            opens[each.opens].append(of_swap)
            opens[each.closes].append((-each.size, swap[number]))
            if each.again is not None:
                if each.wraps:
                    around_again.append(of_again)
                reopens[each.opens].append(of_again)
                reopens[each.closes].append((-each.size, again[number]))
                lp.at_most([(1.0, swap[number]), (1.0, again[number])], 1.0)
        # Bytes flow as in the largest copies, whose share of latency is the least, or more slowly.
        leaving = [c for c in classes if c.copies_out]
        rate_out, both_out = (
            min((getattr(c, name) / c.size for c in leaving), default=0.0) for name in ("out", "out_duplex")
        )
        rate_in, both_in = (min(getattr(c, n) / c.size for c in classes) for n in ("back", "back_duplex"))
        quick = min(1.0, max(_ratio(rate_in, both_in), _ratio(rate_out, both_out) if leaving else 0.0))
        lost = (1 - quick) / quick if quick > 0 else 0.0
        rate_out, rate_in = rate_out * slowness, rate_in * slowness
        slowed = 1 - 1 / self._slowdown
        for b in range(num_bins):
            before = b - 1
            lp.equal([*released[b], (-1, out[b]), (-1, to_copy[b]), *_then(to_copy, before)], 0)
            lp.equal([*dropped[b], (-1, free[b]), (-1, to_free[b]), *_then(to_free, before)], 0)
            lp.equal([*_negative(due[b]), (1, back[b]), (-1, early[b]), (1, early[before])], 0)
            moved = [(1.0, out[b]), (1.0, free[b])]
            gone = _then(away, before) if b else [*around, (-1.0, early[-1])]
            lp.equal([(-1, away[b]), *gone, *moved, (-1, back[b])], 0)
            opened = _then(swap_open, before) if b else around
            reopened = _then(again_open, before) if b else around_again
            lp.equal([(-1, swap_open[b]), *opens[b], *opened], 0)
            lp.equal([(-1, again_open[b]), *reopens[b], *reopened], 0)
            lp.at_most([(1, relief[b]), *_negative(gone), *_negative(moved)], 0)
            lp.at_most([(1, relief[b]), (-1, swap_open[b])], 0)
            lp.at_most([(-1, relief[b]), (-1, again_open[b])], 0, name="room")
            lp.at_most([*repeats[b], (-1, recompute[b])], 0)
            lasts = [(-1.0, wait[b]), (-1.0, recompute[b]), (-1.0, slow[b])]
            for own, rate, other, other_rate in (
                (out[b], rate_out, back[b], rate_in),
                (back[b], rate_in, out[b], rate_out),
            ):
                copies = [(rate, own), (lost * other_rate, other)]
                lp.at_most([*copies, *lasts], float(self._bin_seconds[b]))
                if slowed > 0:
                    slowing = [(slowed * seconds, variable) for seconds, variable in copies]
                    lp.at_most([*slowing, (-slowed, wait[b]), (-1.0, slow[b])], 0)
        lp.equal([(1, away[-1]), (1, early[-1]), *_negative(around)], 0)
        everything = [(-1.0, variable) for row in (wait, recompute, slow) for variable in row]
        total = float(self._bin_seconds.sum())
        lp.at_most([*((c.out, s) for c, s in zip(classes, swap, strict=True)), *everything], total)
        lp.at_most([*((c.back, s) for c, s in zip(classes, swap, strict=True)), *everything], total)
        lp.at_most([(c.size, s) for c, s in zip(classes, swap, strict=True)], 0, name="host")
        return lp


@dataclass(frozen=True)
class _Class:
    """Gaps that share a variable: bytes and seconds of all of them; bins and probes are the same for each."""

    size: float
    out: float
    back: float
    out_duplex: float
    back_duplex: float
    again: float | None
    copies_out: bool
    wraps: bool
    first: int
    due: int
    opens: int
    closes: int

    def key(self) -> tuple[object, ...]:
        """Return the properties that gaps must have in common to share a variable."""
        price = None
        if self.again is not None:
            price = round(np.log(max(self.again / self.size, 1e-12)) / _ALIKE)
        return self.copies_out, self.wraps, self.first, self.due, self.opens, self.closes, price

    def joined(self, other: _Class) -> _Class:
        size, again = self.size + other.size, None
        if self.again is not None and other.again is not None:
            again = size * min(self.again / self.size, other.again / other.size)
        return replace(
            self,
            size=size,
            out=self.out + other.out,
            back=self.back + other.back,
            out_duplex=self.out_duplex + other.out_duplex,
            back_duplex=self.back_duplex + other.back_duplex,
            again=again,
        )


class _LinearProgram:
    """Rows of terms over non-negative variables, for SciPy."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._rows: dict[bool, _TermRows] = {True: _TermRows(), False: _TermRows()}
        self._named: dict[str, list[int]] = {}

    def variables(
        self, count: int, *, cost: float = 0.0, upper: float = np.inf, uppers: Sequence[float] | None = None
    ) -> range:
        begin = len(self._costs)
        self._costs += [cost] * count
        self._uppers += uppers if uppers is not None else [upper] * count
        return range(begin, begin + count)

    def at_most(self, terms: _Terms, bound: float, *, name: str = "") -> None:
        if name:
            self._named.setdefault(name, []).append(len(self._rows[False].bounds))
        self._rows[False].add(terms, bound)

    def equal(self, terms: _Terms, bound: float) -> None:
        self._rows[True].add(terms, bound)

    def solve(
        self, room: Floats, host: Floats, first_costs: Sequence[float] | None = None
    ) -> tuple[float, Floats] | None:
        """Minimize with these bounds of the named rows, and other costs of the first variables if given."""
        from scipy.optimize import linprog  # takes longer to import than the rest of the package's planning

        for name, bounds in (("room", room), ("host", host)):
            for row, bound in zip(self._named[name], bounds.tolist(), strict=True):
                self._rows[False].bounds[row] = bound
        num = len(self._costs)
        costs = self._costs if first_costs is None else [*first_costs, *self._costs[len(first_costs) :]]
        found = linprog(
            costs,
            self._rows[False].matrix(num),
            self._rows[False].bounds,
            self._rows[True].matrix(num),
            self._rows[True].bounds,
            bounds=np.column_stack([np.zeros(num), self._uppers]),
            method="highs",
        )
        return (float(found.fun), found.x) if found.status == 0 else None


class _TermRows:
    def __init__(self) -> None:
        self.bounds: list[float] = []
        self._numbers: list[int] = []
        self._variables: list[int] = []
        self._factors: list[float] = []

    def add(self, terms: _Terms, bound: float) -> None:
        for factor, variable in terms:
            self._numbers.append(len(self.bounds))
            self._variables.append(variable)
            self._factors.append(factor)
        self.bounds.append(bound)

    def matrix(self, num_variables: int) -> Any:
        from scipy.sparse import csr_matrix

        shape = (len(self.bounds), num_variables)
        return csr_matrix((self._factors, (self._numbers, self._variables)), shape=shape)


def _per_bin(num_bins: int) -> list[list[tuple[float, int]]]:
    """Terms for each bin, and for what lies behind the last."""
    return [[] for _ in range(num_bins + 1)]


def _then(row: Sequence[int], bin_before: int) -> list[tuple[float, int]]:
    """The term of a running total's value one bin before; none in the first."""
    return [(1.0, row[bin_before])] if bin_before >= 0 else []


def _negative(terms: _Terms) -> list[tuple[float, int]]:
    return [(-factor, variable) for factor, variable in terms]


def _ratio(alone: float, both: float) -> float:
    return alone / both if both > 0 else 1.0
