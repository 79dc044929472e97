"""Giving tensors up, one after another, until a body fits: greedy, by seconds per byte.

Two things are scarce, compute time and the link's time. A `LinkPrice` says how many seconds of compute a
second of copying is worth: at 0 everything is swapped, at infinity recomputed whatever can be, in between
what is cheap to make again is recomputed and the rest swapped. As copies are free while compute hides them,
a price may begin at 0 and apply only when the link has a share of the step's time to do. No single price is
right for all graphs, so callers try several and let the clock decide.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainmux.planning.policies._body import Bools, FixedBody, Floats, Ints
from trainmux.planning.policies._gaps import RECOMPUTED, Choice, Gap, RecomputePrices
from trainmux.planning.policies._layout import Demand, demand


@dataclass(frozen=True)
class LinkPrice:
    """Seconds of compute per second of copies back, once these take ``free_share`` of the nodes' time."""

    price: float
    free_share: float = 0.0


_NEVER = float("inf")
LINK_PRICES = (
    LinkPrice(0.0),
    LinkPrice(_NEVER, 0.5),
    LinkPrice(1.0, 0.9),
    LinkPrice(0.2),
    LinkPrice(1.0),
    LinkPrice(_NEVER, 0.25),
    LinkPrice(_NEVER, 0.75),
    LinkPrice(_NEVER),
)
"""From swapping everything to recomputing all that can be, the more different ones first."""

_NUM_ROUNDS = 40
"""Rounds a relief should take; in larger bodies each gives up more tensors at once."""


@dataclass(frozen=True)
class Relief:
    """Choices that fit, and what they demand."""

    choices: tuple[Choice, ...]
    needs: Demand


@dataclass(frozen=True)
class Shortfall:
    """The choices that came closest, and by how many bytes they do not fit."""

    choices: tuple[Choice, ...]
    excess_bytes: int


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to give up a gap."""

    gap: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A gap that may be given up: seconds to swap it and to make it again, ``None`` where that cannot be."""

    gap: int
    swap_seconds: float | None
    again_seconds: float | None
    per_byte: float

    @property
    def is_recomputed(self) -> bool:
        if self.again_seconds is None:
            return False
        return self.swap_seconds is None or self.again_seconds < self.swap_seconds

    @property
    def seconds(self) -> float | None:
        return self.again_seconds if self.is_recomputed else self.swap_seconds


class Reliever:
    """Relieves bodies that share gaps. ``usable`` says which of them may be touched at all."""

    def __init__(
        self,
        gaps: tuple[Gap, ...],
        usable: Sequence[bool],
        *,
        may_swap: bool = True,
        num_rounds: int = _NUM_ROUNDS,
    ) -> None:
        self._gaps = gaps
        self._may_swap = may_swap
        self._usable: Bools = np.asarray(usable, dtype=np.bool_)
        self._batch = max(1, len(gaps) // num_rounds)

    def relieve(
        self,
        body: FixedBody,
        limit_bytes: int,
        link_price: LinkPrice,
        begin: Sequence[Choice] | None = None,
        noise: random.Random | None = None,
    ) -> Relief | Shortfall:
        """Choices that fit, from those of ``begin`` on, or those that came closest.

        With ``noise`` prices are shaken, for searches that want to see other choices.
        """
        closest = Shortfall((), 0)
        for relief in self._walk(body, limit_bytes, link_price, begin, noise):
            excess = relief.needs.peak_bytes - limit_bytes
            if excess <= 0 and relief.needs.host_bytes <= body.task.host_bytes:
                return relief
            if not closest.excess_bytes or excess < closest.excess_bytes:
                closest = Shortfall(relief.choices, max(1, excess))
        return closest

    def _walk(
        self,
        body: FixedBody,
        limit_bytes: int,
        link_price: LinkPrice,
        begin: Sequence[Choice] | None,
        noise: random.Random | None,
    ) -> Iterator[Relief]:
        """Choices with what they demand, each time with some tensors more that are given up."""
        choices = list(begin) if begin is not None else [Choice.KEEP] * len(self._gaps)
        covers = _Covers(body, self._gaps)
        prices = _Prices(body, self._gaps, choices)
        cannot: set[int] = set()
        added: list[int] = []
        for _ in range(3 * len(self._gaps) + 3):
            needs = demand(body, self._gaps, choices)
            if needs is None:
                # Among those recomputed last is one that another recomputation cannot do without.
                undone = [number for number in added if choices[number] in RECOMPUTED]
                if not undone:
                    return
                for number in undone:
                    choices[number] = Choice.KEEP
                cannot.update(undone)
                prices = _Prices(body, self._gaps, choices)
                continue
            yield Relief(tuple(choices), needs)
            peak = int((needs.tensors + needs.beyond).argmax())
            inside = np.nonzero(covers.at(peak) & self._usable)[0]
            link = self._price_now(body, choices, link_price)
            options = self._options(body, covers, choices, inside, link, prices, cannot, noise)
            added = self._take(body, choices, options, needs.peak_bytes - limit_bytes, needs.host_bytes)
            prices.add(added, choices)
            if not added:
                if not self._swap_instead(body, choices, needs, peak):
                    return
                prices = _Prices(body, self._gaps, choices)

    def _options(
        self,
        body: FixedBody,
        covers: _Covers,
        choices: Sequence[Choice],
        numbers: Ints,
        link_price: float,
        prices: _Prices,
        cannot: set[int],
        noise: random.Random | None,
    ) -> Iterator[_Option]:
        """The cheaper way of giving up each of the gaps that is not given up yet, the cheapest first.

        Prices of recomputations only rise, so one that is out of date is brought up to date when it would
        come next: those far behind are left as they are.
        """
        heap = []
        for number in numbers.tolist():
            if choices[number] is not Choice.KEEP:
                continue
            gap = self._gaps[number]
            record = body.task.profiles[gap.sub_array].tensors[gap.tensor]
            copying = record.swap_in_seconds
            if gap.is_static and gap.copies_out:
                copying += record.swap_out_seconds
            swapping = (link_price * copying if copying else 0.0) if self._may_swap else None
            shaken = noise.uniform(0.5, 1.5) if noise is not None else 1.0
            again = None
            if gap.can_recompute and number not in cannot and link_price > 0:
                again = prices.at_least(gap)
            waiting = _Waiting(number, swapping, again, shaken / gap.size_bytes)
            if waiting.seconds is not None:
                idle = float(covers.idle_seconds[number])
                heap.append((waiting.seconds * waiting.per_byte, -idle, number, waiting))
        heapq.heapify(heap)
        while heap:
            _, idle, number, waiting = heap[0]
            gap = self._gaps[number]
            if waiting.is_recomputed and not prices.is_known(gap):
                waiting = replace(waiting, again_seconds=prices.seconds(gap))
                if waiting.seconds is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (waiting.seconds * waiting.per_byte, idle, number, waiting))
                continue
            heapq.heappop(heap)
            yield _Option(number, Choice.RECOMPUTE if waiting.is_recomputed else Choice.SWAP)

    def _price_now(self, body: FixedBody, choices: Sequence[Choice], link_price: LinkPrice) -> float:
        """0 as long as the copies back that are decided take no more than the free share."""
        if not link_price.free_share:
            return link_price.price
        copying = sum(
            body.task.profiles[gap.sub_array].tensors[gap.tensor].swap_in_seconds
            for gap, choice in zip(self._gaps, choices, strict=True)
            if choice is Choice.SWAP
        )
        return 0.0 if copying < link_price.free_share * float(body.starts[-1]) else link_price.price

    def _take(
        self,
        body: FixedBody,
        choices: list[Choice],
        options: Iterable[_Option],
        excess: int,
        host_bytes: int,
    ) -> list[int]:
        """Give up the cheapest, one in small bodies and several in large ones; returns which."""
        taken: list[int] = []
        relieved = 0
        for option in options:
            if taken and (relieved >= excess or len(taken) >= self._batch):
                break
            size = self._gaps[option.gap].size_bytes
            if option.choice is Choice.SWAP:
                if host_bytes + size > body.task.host_bytes:
                    continue
                host_bytes += size
            choices[option.gap] = option.choice
            taken.append(option.gap)
            relieved += size
        return taken

    def _swap_instead(self, body: FixedBody, choices: list[Choice], needs: Demand, peak: int) -> bool:
        """Where recomputations themselves need too much: swap the one that needs the most at the peak."""
        if not self._may_swap:
            return False
        here = [each for each in needs.recomputes if each.before == peak]
        for each in sorted(here, key=lambda each: -each.derived.beyond_bytes):
            for number, gap in enumerate(self._gaps):
                is_it = (gap.sub_array, gap.tensor) == (each.sub_array, each.derived.tensor)
                fits = needs.host_bytes + gap.size_bytes <= body.task.host_bytes
                if is_it and choices[number] in RECOMPUTED and fits and self._usable[number]:
                    choices[number] = Choice.SWAP
                    return True
        return False


class _Prices:
    """What recomputing one more costs, by sub-array, kept up to date as choices are added."""

    def __init__(self, body: FixedBody, gaps: Sequence[Gap], choices: Sequence[Choice]) -> None:
        self._gaps = gaps
        recomputed: list[dict[int, Choice]] = [{} for _ in body.all_facts]
        for gap, choice in zip(gaps, choices, strict=True):
            if choice in RECOMPUTED:
                recomputed[gap.sub_array][gap.tensor] = choice
        self._prices = [
            RecomputePrices(facts, own) for facts, own in zip(body.all_facts, recomputed, strict=True)
        ]

    def seconds(self, gap: Gap) -> float | None:
        return self._prices[gap.sub_array].seconds(gap.tensor)

    def at_least(self, gap: Gap) -> float | None:
        return self._prices[gap.sub_array].at_least(gap.tensor)

    def is_known(self, gap: Gap) -> bool:
        return self._prices[gap.sub_array].is_known(gap.tensor)

    def add(self, numbers: Iterable[int], choices: Sequence[Choice]) -> None:
        for number in numbers:
            if choices[number] in RECOMPUTED:
                gap = self._gaps[number]
                self._prices[gap.sub_array].add(gap.tensor, choices[number])


class _Covers:
    """Which gaps lie around a position of a body, and how long each is."""

    def __init__(self, body: FixedBody, gaps: Sequence[Gap]) -> None:
        places = [body.gap_places(gap) for gap in gaps]
        self._lasts: Ints = np.asarray([last for last, _ in places], dtype=np.int64)
        self._firsts: Ints = np.asarray([first for _, first in places], dtype=np.int64)
        idle = body.starts[self._firsts] - body.starts[self._lasts + 1]
        self.idle_seconds: Floats = np.where(self._lasts < self._firsts, idle, idle + body.starts[-1])

    def at(self, position: int) -> Bools:
        after, before = position > self._lasts, position < self._firsts
        inside: Bools = np.where(self._lasts < self._firsts, after & before, after | before)
        return inside
