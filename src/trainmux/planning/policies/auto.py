"""The default policy: from the relaxation down.

The linear program of `_relax` says which share of each tensor to offload and to recompute within the limit.
Nearly all shares are 0 or 1; the rest are rounded at several thresholds. The relaxation knows nothing of
whole tensors, whose copies take memory before they are needed, so limits that leave some room for that are
solved for, too. Decisions that do not fit are repaired by greedy eviction; then copies are placed and the
clock decides (`_layout`). The best is improved by a seeded number of small changes.

Idle static tensors may be offloaded like any other, so that budgets near or below static memory work; a
recomputed tensor may be made early and kept for others.

Eviction gives up one tensor after another, the cheapest by seconds per byte, until a body fits. Two things
are scarce, compute time and the link's time. A link price says how many seconds of compute a second of
copying is worth: at 0 everything is swapped, at infinity recomputed whatever can be, in between what is cheap
to make again is recomputed and the rest swapped. No single price is right for all graphs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product

import numpy as np

from trainmux.errors import PlanError
from trainmux.ir import Multiplexing, Schedule
from trainmux.planning._body import FixedBody, GapSpans, Ints, Task, infeasible, plain_body
from trainmux.planning._draft import draft
from trainmux.planning._facts import RECOMPUTED, Choice, Gap, Key, added_prices, find_gaps
from trainmux.planning._layout import Demand, demand, lay_out
from trainmux.planning._relax import Relaxation

LINK_PRICES = (0.0, 0.2, 1.0, float("inf"))
"""Seconds of compute per second of copies, from swapping everything to recomputing all that can be."""
_REPAIR_PRICE = 0.2
_NUM_ROUNDS = 40
"""Rounds an eviction should take; in larger bodies each gives up more tensors at once."""
_ROOMS = (0.04, 0.02, 0.08, 0.01, 0.0, 0.16)
"""Shares of the bytes that can be given up: so much below the limit the relaxation is solved."""
_THRESHOLDS = (0.5, 0.25, 0.75)
_EVALUATED_NODES = 200_000
_FEWEST_EVALUATIONS, _MOST_EVALUATIONS = 60, 400
_SMALL_BODY = 500
"""Up to so many nodes the greedy solutions are looked at, too, and all of them before one is placed: one
tensor more or less weighs a lot."""
_MOST_GIVEN_UP = 8
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Auto:
    """The policy ``auto``. ``evaluations`` bounds the improvement; ``None``: the size of the body decides."""

    name: str = "auto"
    seed: int = 0
    evaluations: int | None = None
    _known: dict[tuple[int, ...], _Known] = field(default_factory=dict, init=False, repr=False, compare=False)

    def schedules(self, task: Task) -> Iterator[Schedule | None]:
        """Better and better schedules; one that takes no longer than its nodes is the last."""
        return _AutoSearch(task, self._of(task), self).run()

    def bound_seconds(self, task: Task) -> float:
        """A time that no schedule of the task in the plain order goes below; infinite where none fits."""
        found = self._of(task).relaxation.solve(task.limit_bytes, task.host_bytes)
        return float("inf") if found is None else found.seconds

    def smallest(self, task: Task) -> Schedule:
        """Offload all that can be: no schedule needs fewer live bytes. The limit is ignored."""
        known = self._of(task)
        needs = known.all_swapped
        if needs.host_bytes > task.host_bytes:
            raise infeasible(task, self.name, needs.peak_bytes - task.limit_bytes)
        layout = lay_out(known.body, known.gaps, needs, needs.peak_bytes)
        return layout.schedule("as few bytes as can be")

    def _of(self, task: Task) -> _Known:
        key = (task.multiplexing is Multiplexing.RING, *map(id, task.profiles))
        if key not in self._known:
            self._known[key] = _Known(task)
        return self._known[key]


class _Known:
    """Gaps and relaxation of sub-arrays, whatever the limits."""

    def __init__(self, task: Task) -> None:
        self.body = plain_body(task.profiles, task.multiplexing)
        self.gaps = find_gaps(self.body.all_facts, with_static=True)
        self.relaxation = Relaxation(self.body, self.gaps)
        needs = demand(self.body, self.gaps, [Choice.SWAP] * len(self.gaps))
        assert needs is not None
        self.all_swapped: Demand = needs


_Fitting = tuple[tuple[Choice, ...], Demand]
"""Choices that fit, and what they demand."""


@dataclass(frozen=True)
class _Found:
    choices: tuple[Choice, ...]
    schedule: Schedule
    seconds: float


class _AutoSearch:
    """The search for one limit."""

    def __init__(self, task: Task, known: _Known, policy: Auto) -> None:
        self.task = task
        self.known = known
        self.policy = policy
        self.body = known.body
        self.gaps = known.gaps
        self.least_seconds = float(self.body.starts[-1])
        self.idle_seconds = GapSpans(self.body, self.gaps).idle_seconds.tolist()
        self.rng = random.Random(policy.seed)
        self.best: _Found | None = None
        evaluations = policy.evaluations
        if evaluations is None:
            per_node = _EVALUATED_NODES // max(1, self.body.length)
            evaluations = min(max(per_node, _FEWEST_EVALUATIONS), _MOST_EVALUATIONS)
        self.left = evaluations

    def run(self) -> Iterator[Schedule | None]:
        limit, least = self.task.limit_bytes, self.known.all_swapped.peak_bytes
        if int(self.body.needed().max()) <= limit:
            yield self.body.plain_schedule()
            return
        if least > limit:
            raise infeasible(self.task, self.policy.name, least - limit)
        is_small = self.body.length <= _SMALL_BODY
        handed_out: _Found | None = None
        for choices in self._roundings():
            is_quicker = self._look_at(self._made_to_fit(choices))
            if not is_small:
                handed_out = self.best
                yield self.best.schedule if self.best is not None and is_quicker else None
            if self._is_done():
                break
        if self.best is None:
            self._look_at(self._made_to_fit([Choice.SWAP] * len(self.gaps)))
        if self.best is None:
            raise infeasible(self.task, self.policy.name, 1)
        if self.best is not handed_out:
            yield self.best.schedule
        while self.left > 0 and not self._is_done():
            self.left -= 1
            yield self.best.schedule if self._look_at(self._changed(self.best)) else None

    def _is_done(self) -> bool:
        return self.best is not None and self.best.seconds <= self.least_seconds * (1 + _ROUNDING)

    def _roundings(self) -> Iterator[Sequence[Choice]]:
        """Decisions to begin with: the relaxation's, rounded; in small bodies the greedy ones, too."""
        limit = self.task.limit_bytes
        way = int(self.body.needed().max()) - self.known.all_swapped.peak_bytes
        solve = cache(partial(self.known.relaxation.solve, host_bytes=self.task.host_bytes, sparing=True))
        seen = set()
        for threshold, room in product(_THRESHOLDS, _ROOMS):
            relaxed = solve(limit - int(room * way))
            if relaxed is None:
                continue
            choices = tuple(
                Choice.KEEP
                if swapped + recomputed < threshold
                else Choice.SWAP
                if swapped >= recomputed
                else Choice.RECOMPUTE_EARLY
                for swapped, recomputed in zip(relaxed.swapped, relaxed.recomputed, strict=True)
            )
            if choices not in seen:
                seen.add(choices)
                yield choices
        if self.body.length <= _SMALL_BODY:
            for price in LINK_PRICES:
                nothing = [Choice.KEEP] * len(self.gaps)
                greedy = _Eviction(self.task, self.body, self.gaps, price, nothing).run()
                if greedy is not None:
                    yield greedy[0]

    def _made_to_fit(self, choices: Sequence[Choice], noise: random.Random | None = None) -> _Fitting | None:
        """Decisions that fit, from these on; ``None`` where none are found."""
        needs = demand(self.body, self.gaps, choices)
        task = self.task
        if needs and needs.peak_bytes <= task.limit_bytes and needs.host_bytes <= task.host_bytes:
            return tuple(choices), needs
        price = _REPAIR_PRICE if noise is None else noise.choice(LINK_PRICES)
        return _Eviction(task, self.body, self.gaps, price, choices, noise).run()

    def _changed(self, best: _Found) -> _Fitting | None:
        """Other decisions close to the best: one taken the other way, or some made anew."""
        rng, choices = self.rng, list(best.choices)
        decided = [number for number, choice in enumerate(choices) if choice is not Choice.KEEP]
        if not decided:
            return None
        if rng.random() < 0.5:
            number = rng.choice(decided)
            choices[number] = rng.choice([each for each in self._ways(number) if each is not choices[number]])
        else:
            for number in rng.sample(decided, rng.randint(1, min(len(decided), _MOST_GIVEN_UP))):
                choices[number] = Choice.KEEP
            if rng.random() < 0.3:
                number = rng.randrange(len(self.gaps))
                choices[number] = rng.choice(self._ways(number)[1:])
        return self._made_to_fit(choices, rng)

    def _ways(self, number: int) -> list[Choice]:
        return [Choice.KEEP, Choice.SWAP, *(RECOMPUTED if self.gaps[number].can_recompute else ())]

    def _look_at(self, fitting: _Fitting | None) -> bool:
        """Take decisions that fit if they are quicker; whether they are."""
        if fitting is None:
            return False
        choices, needs = fitting
        if self.best is not None and self._least(needs) > self.best.seconds:
            return False
        layout = lay_out(self.body, self.gaps, needs, self.task.limit_bytes)
        schedule = layout.schedule(self._reasons(choices, needs))
        try:
            seconds = draft(self.body.profiles, schedule).seconds
        except PlanError:  # no program can carry it out
            return False
        if self.best is not None and seconds >= self.best.seconds * (1 - _ROUNDING):
            return False
        self.best = _Found(choices, schedule, seconds)
        return True

    def _least(self, needs: Demand) -> float:
        """The time of compute, or of one direction of the link, by itself."""
        compute = self.least_seconds + float(needs.recompute_seconds.sum())
        seconds_out = seconds_in = 0.0
        for swap in needs.swaps:
            record = self.body.record(self.gaps[swap.gap])
            seconds_in += record.swap_in_seconds
            if swap.copies_out:
                seconds_out += record.swap_out_seconds
        return max(compute, seconds_out, seconds_in)

    def _reasons(self, choices: Sequence[Choice], needs: Demand) -> dict[Key, str]:
        """Why each tensor was given up as it was, in words."""
        seconds = {(each.sub_array, each.derived.tensor): each.derived.seconds for each in needs.recomputes}
        reasons = {}
        for gap, choice, idle in zip(self.gaps, choices, self.idle_seconds, strict=True):
            if choice is Choice.KEEP:
                continue
            record = self.body.record(gap)
            if choice is Choice.SWAP:
                reasons[gap.key] = f"idle for {idle:.3g} s, copied back in {record.swap_in_seconds:.3g} s"
            else:
                early = ", early for others" if choice is Choice.RECOMPUTE_EARLY else ""
                reasons[gap.key] = f"made again in {seconds[gap.key]:.3g} s{early}"
        return reasons


class _Eviction:
    """Choices that fit the body's task, from those of ``begin`` on; ``noise`` shakes prices, for others."""

    def __init__(
        self,
        task: Task,
        body: FixedBody,
        gaps: tuple[Gap, ...],
        link_price: float,
        begin: Sequence[Choice],
        noise: random.Random | None = None,
    ) -> None:
        self._task = task
        self._body = body
        self._gaps = gaps
        self._link_price = link_price
        self._noise = noise
        self._choices = list(begin)
        self._cannot: set[int] = set()
        self._batch = max(1, len(gaps) // _NUM_ROUNDS)
        self._spans = GapSpans(body, gaps)
        self._prices = added_prices(self._body.all_facts, self._gaps, self._choices)

    def run(self) -> _Fitting | None:
        """The choices and what they demand; ``None`` where none are found."""
        task, added = self._task, list[int]()
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
                self._prices = added_prices(self._body.all_facts, self._gaps, self._choices)
                continue
            excess = needs.peak_bytes - task.limit_bytes
            if excess <= 0 and needs.host_bytes <= task.host_bytes:
                return tuple(self._choices), needs
            peak = int((needs.tensors + needs.beyond).argmax())
            added = self._take(peak, excess, needs.host_bytes)
            if not added:
                if not self._swap_instead(needs, peak):
                    return None
                self._prices = added_prices(self._body.all_facts, self._gaps, self._choices)
        return None

    def _take(self, peak: int, excess: int, host_bytes: int) -> list[int]:
        """Give up the cheapest at the peak, one in small bodies and several in large ones; returns which."""
        taken: list[int] = []
        given_up = 0
        idle = self._spans.around_any(np.arange(self._body.length) == peak)
        for number, choice in self._cheapest(np.nonzero(idle)[0]):
            if taken and (given_up >= excess or len(taken) >= self._batch):
                break
            gap = self._gaps[number]
            if choice is Choice.SWAP:
                if host_bytes + gap.size_bytes > self._task.host_bytes:
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
        """The cheaper way of giving up each of the gaps that is not given up yet, the cheapest first."""
        ways = []
        for number in numbers.tolist():
            if self._choices[number] is not Choice.KEEP:
                continue
            gap = self._gaps[number]
            record = self._body.record(gap)
            copying = record.swap_in_seconds
            if gap.is_static and gap.copies_out:
                copying += record.swap_out_seconds
            seconds, choice = self._link_price * copying if copying else 0.0, Choice.SWAP
            if gap.can_recompute and number not in self._cannot and self._link_price > 0:
                again = self._prices[gap.sub_array].seconds(gap.tensor)
                if again is not None and again < seconds:
                    seconds, choice = again, Choice.RECOMPUTE
            noise = self._noise.uniform(0.5, 1.5) if self._noise is not None else 1.0
            idle_seconds = float(self._spans.idle_seconds[number])
            ways.append((seconds * noise / gap.size_bytes, -idle_seconds, number, choice))
        for *_, number, choice in sorted(ways):
            yield number, choice

    def _swap_instead(self, needs: Demand, peak: int) -> bool:
        """Swap the recomputation that needs the most at the peak, if it can be; false where none can."""
        here = [each for each in needs.recomputes if each.before == peak]
        for each in sorted(here, key=lambda each: -each.derived.beyond_bytes):
            for number, gap in enumerate(self._gaps):
                is_it = (gap.sub_array, gap.tensor) == (each.sub_array, each.derived.tensor)
                fits = needs.host_bytes + gap.size_bytes <= self._task.host_bytes
                if is_it and self._choices[number] in RECOMPUTED and fits:
                    self._choices[number] = Choice.SWAP
                    return True
        return False
