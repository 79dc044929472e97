"""Greedy eviction: give up one tensor after another, the cheapest by seconds per byte, until a body fits.

Two things are scarce, compute time and the link's time. A `LinkPrice` says how many seconds of compute a
second of copying is worth: at 0 everything is swapped, at infinity recomputed whatever can be, in between
what is cheap to make again is recomputed and the rest swapped. As copies are free while compute hides them,
a price may begin at 0 and apply only when the link has a share of the step's time to do. No single price is
right for all graphs, so callers try several and let the clock decide.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainmux.planning.policies._body import FixedBody, GapSpans, Ints
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
"""Rounds an eviction should take; in larger bodies each gives up more tensors at once."""


def evict(
    body: FixedBody,
    gaps: tuple[Gap, ...],
    link_price: LinkPrice,
    begin: Sequence[Choice] | None = None,
    noise: random.Random | None = None,
) -> tuple[tuple[Choice, ...], Demand] | None:
    """Find choices that fit the body's task, from those of ``begin`` on, and what they demand.

    ``None`` where it finds none. With ``noise`` prices are shaken, for searches that want other choices.
    """
    return _Eviction(body, gaps, link_price, begin, noise).run()


class _Eviction:
    def __init__(
        self,
        body: FixedBody,
        gaps: tuple[Gap, ...],
        link_price: LinkPrice,
        begin: Sequence[Choice] | None,
        noise: random.Random | None,
    ) -> None:
        self._body = body
        self._gaps = gaps
        self._link_price = link_price
        self._noise = noise
        self._choices = list(begin) if begin is not None else [Choice.KEEP] * len(gaps)
        self._cannot: set[int] = set()
        self._batch = max(1, len(gaps) // _NUM_ROUNDS)
        self._spans = GapSpans(body, gaps)
        self._prices = self._price_all()

    def run(self) -> tuple[tuple[Choice, ...], Demand] | None:
        task, added = self._body.task, list[int]()
        for _ in range(3 * len(self._gaps) + 3):
            needs = demand(self._body, self._gaps, self._choices)
            if needs is None:
                # Among those recomputed last is one that another recomputation cannot do without.
                undone = [number for number in added if self._choices[number] in RECOMPUTED]
                if not undone:
                    return None
                for number in undone:
                    self._choices[number] = Choice.KEEP
                self._cannot.update(undone)
                self._prices = self._price_all()
                continue
            excess = needs.peak_bytes - task.limit_bytes
            if excess <= 0 and needs.host_bytes <= task.host_bytes:
                return tuple(self._choices), needs
            peak = int((needs.tensors + needs.beyond).argmax())
            added = self._take(peak, excess, needs.host_bytes)
            if not added:
                if not self._swap_instead(needs, peak):
                    return None
                self._prices = self._price_all()
        return None

    def _take(self, peak: int, excess: int, host_bytes: int) -> list[int]:
        """Give up the cheapest at the peak, one in small bodies and several in large ones; returns which."""
        taken: list[int] = []
        given_up = 0
        for number, choice in self._cheapest(np.nonzero(self._spans.around(peak))[0]):
            if taken and (given_up >= excess or len(taken) >= self._batch):
                break
            gap = self._gaps[number]
            if choice is Choice.SWAP:
                if host_bytes + gap.size_bytes > self._body.task.host_bytes:
                    continue
                host_bytes += gap.size_bytes
            self._choices[number] = choice
            taken.append(number)
            given_up += gap.size_bytes
        for number in taken:
            if self._choices[number] in RECOMPUTED:
                self._prices[self._gaps[number].sub_array].add(
                    self._gaps[number].tensor, self._choices[number]
                )
        return taken

    def _cheapest(self, numbers: Ints) -> Iterator[tuple[int, Choice]]:
        """The cheaper way of giving up each of the gaps that is not given up yet, the cheapest first.

        Prices of recomputations only rise, so one that is out of date is brought up to date when it would
        come next: those far behind are left as they are.
        """
        link_price = self._price_of_link()
        heap = []
        for number in numbers.tolist():
            if self._choices[number] is not Choice.KEEP:
                continue
            gap = self._gaps[number]
            record = self._body.task.profiles[gap.sub_array].tensors[gap.tensor]
            copying = record.swap_in_seconds
            if gap.is_static and gap.copies_out:
                copying += record.swap_out_seconds
            swapping = link_price * copying if copying else 0.0
            per_byte = (self._noise.uniform(0.5, 1.5) if self._noise is not None else 1.0) / gap.size_bytes
            again = None
            if gap.can_recompute and number not in self._cannot and link_price > 0:
                again = self._prices[gap.sub_array].at_least(gap.tensor)
            seconds = swapping if again is None else min(swapping, again)
            rank = (seconds * per_byte, -float(self._spans.idle_seconds[number]), number)
            heap.append((rank, swapping, again, per_byte))
        heapq.heapify(heap)
        while heap:
            rank, swapping, again, per_byte = heap[0]
            number = rank[-1]
            is_recomputed = again is not None and again < swapping
            prices, tensor = self._prices[self._gaps[number].sub_array], self._gaps[number].tensor
            if is_recomputed and not prices.is_known(tensor):
                again = prices.seconds(tensor)
                seconds = swapping if again is None else min(swapping, again)
                heapq.heapreplace(heap, ((seconds * per_byte, *rank[1:]), swapping, again, per_byte))
                continue
            heapq.heappop(heap)
            yield number, Choice.RECOMPUTE if is_recomputed else Choice.SWAP

    def _price_of_link(self) -> float:
        """0 as long as the copies back that are decided take no more than the free share."""
        if not self._link_price.free_share:
            return self._link_price.price
        copying = sum(
            self._body.task.profiles[gap.sub_array].tensors[gap.tensor].swap_in_seconds
            for gap, choice in zip(self._gaps, self._choices, strict=True)
            if choice is Choice.SWAP
        )
        is_free = copying < self._link_price.free_share * float(self._body.starts[-1])
        return 0.0 if is_free else self._link_price.price

    def _swap_instead(self, needs: Demand, peak: int) -> bool:
        """Swap the recomputation that needs the most at the peak, if it can be; false where none can."""
        here = [each for each in needs.recomputes if each.before == peak]
        for each in sorted(here, key=lambda each: -each.derived.beyond_bytes):
            for number, gap in enumerate(self._gaps):
                is_it = (gap.sub_array, gap.tensor) == (each.sub_array, each.derived.tensor)
                fits = needs.host_bytes + gap.size_bytes <= self._body.task.host_bytes
                if is_it and self._choices[number] in RECOMPUTED and fits:
                    self._choices[number] = Choice.SWAP
                    return True
        return False

    def _price_all(self) -> list[RecomputePrices]:
        """Per sub-array, what recomputing one more costs beside those that are recomputed."""
        recomputed: list[dict[int, Choice]] = [{} for _ in self._body.all_facts]
        for gap, choice in zip(self._gaps, self._choices, strict=True):
            if choice in RECOMPUTED:
                recomputed[gap.sub_array][gap.tensor] = choice
        return [
            RecomputePrices(facts, own) for facts, own in zip(self._body.all_facts, recomputed, strict=True)
        ]
