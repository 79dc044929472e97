"""A search over all kinds of decisions, improved while the simulation says so; the default.

It begins with reliefs at several prices of the link (`_relieve`), in several orders; the best is improved
(`_improve`) by a seeded number of evaluations on the clock. Decisions are the same kinds as everyone's, and
three more: static tensors that are idle may be swapped too, so that budgets near or below static memory work;
a recomputed tensor may be made early and kept for others; prefetches and releases lie wherever memory and
lanes let compute wait the least.

A plan by ``auto`` is never slower than one by another policy, what it costs to meet copies aside: the planner
has those too and takes the best (`_plan`). As places to begin they were tried and brought nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainmux.ir import Multiplexing, Schedule
from trainmux.planning._policy import Node, Task, plain_order
from trainmux.planning.policies._body import FixedBody, infeasible, known_facts
from trainmux.planning.policies._clock import seconds_of
from trainmux.planning.policies._gaps import Choice, Derivations, Gap, find_gaps
from trainmux.planning.policies._improve import Found, Improver
from trainmux.planning.policies._layout import demand, lay_out
from trainmux.planning.policies._relieve import LINK_PRICES, LinkPrice, Path, Reliever, kept_again
from trainmux.planning.policies._stages import Stages

_EVALUATED_NODES = 20_000
_FEWEST_EVALUATIONS, _MOST_EVALUATIONS = 15, 100
_LARGE_BODY = 1000
"""From so many nodes on a search begins in fewer places, each of which takes longer."""
_LEFT_FREE = (0.0, 0.06, 0.12)
"""Shares of the limit that are left when swaps are undone."""
_LARGE_STATIC_PRICES = (LinkPrice(0.0), LinkPrice(0.2), LinkPrice(1.0, 0.9), LinkPrice(0.4))
"""Where static tensors are swapped too: the link is busy all the time, and never is no price for that."""
_MAX_KNOWN = 64
"""Sets of sub-arrays that are remembered at a time."""
_HOPELESS = 1.1
"""A start that is so many times slower than what is to be had without any decision is not improved."""
_LARGE_HOPELESS = 1.3
"""Nor is one of a large body that takes so many times what its nodes take: few evaluations change little."""
_CLOSE = 1 + 1e-9
"""A body that takes no longer than its nodes alone, rounding aside, cannot be improved."""


@dataclass(frozen=True)
class Auto:
    """The policy ``auto``. ``evaluations`` bounds the improvement; ``None``: the size of the body decides.

    ``swaps_static`` says whether static tensors may be swapped too, ``static_first`` that this is tried
    before keeping them: what is found first and costs no time is taken.
    """

    name: str = "auto"
    seed: int = 0
    evaluations: int | None = None
    swaps_static: bool = True
    static_first: bool = False
    _bodies: dict[tuple[int, ...], _Known] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def schedule(self, task: Task) -> Schedule:
        return _Search(task, self, self._known(task)).run()

    def smallest(self, task: Task) -> Schedule:
        """A schedule that needs as few bytes as any can: all that can be swapped is. The limit is ignored."""
        known = self._known(task)
        body = FixedBody(task, known.plain, known.facts, known.derivations)
        gaps = known.gaps(with_static=self.swaps_static)
        needs = demand(body, gaps, [Choice.SWAP] * len(gaps))
        assert needs is not None
        layout = lay_out(body, gaps, needs, needs.peak_bytes)
        if layout is None:
            raise infeasible(task, self.name, needs.peak_bytes - task.limit_bytes)
        return layout.schedule("as few bytes as can be")

    def other_way(self) -> Auto:
        """The same search, beginning with static tensors; it shares what is known of bodies."""
        other = replace(self, static_first=not self.static_first)
        object.__setattr__(other, "_bodies", self._bodies)
        return other

    def _known(self, task: Task) -> _Known:
        """What is known of sub-arrays, whatever the limit; remembered for the next one."""
        ring = int(task.multiplexing is Multiplexing.RING)
        key = (ring, task.host_bytes, *(id(profile) for profile in task.profiles))
        if key not in self._bodies:
            if len(self._bodies) >= _MAX_KNOWN:
                self._bodies.clear()
            self._bodies[key] = _Known(task)
        return self._bodies[key]


class _Known:
    """Facts, gaps and paths of sub-arrays, none of which depends on a limit."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.facts = known_facts(task)
        self.derivations = Derivations()
        self.plain = plain_order(task.profiles, task.multiplexing)
        self._gaps: dict[bool, tuple[Gap, ...]] = {}
        self._paths: dict[tuple[bool, tuple[Node, ...], LinkPrice], Path] = {}
        self._least_bytes: dict[bool, int] = {}
        self._last_limit = -1
        self._starts: dict[bool, Found | None] = {}
        self._improved: dict[bool, Found] = {}

    def start(
        self, limit_bytes: int, with_static: bool, find: Callable[[bool], Found | None]
    ) -> Found | None:
        """The best place to begin; found once for both ways to ask for a limit (`Auto.other_way`)."""
        self._at(limit_bytes)
        if with_static not in self._starts:
            self._starts[with_static] = find(with_static)
        return self._starts[with_static]

    def improved(
        self, limit_bytes: int, with_static: bool, improve: Callable[[bool, Found], Found], start: Found
    ) -> Found:
        """What improving that place leads to, likewise."""
        self._at(limit_bytes)
        if with_static not in self._improved:
            self._improved[with_static] = improve(with_static, start)
        return self._improved[with_static]

    def _at(self, limit_bytes: int) -> None:
        if limit_bytes != self._last_limit:
            self._last_limit = limit_bytes
            self._starts, self._improved = {}, {}

    def gaps(self, *, with_static: bool) -> tuple[Gap, ...]:
        if with_static not in self._gaps:
            self._gaps[with_static] = find_gaps(self.facts, with_static=with_static)
        return self._gaps[with_static]

    def least_bytes(self, *, with_static: bool) -> int:
        """What no schedule needs less than: in the plain order, with all swapped that can be."""
        if with_static not in self._least_bytes:
            gaps = self.gaps(with_static=with_static)
            body = FixedBody(self.task, self.plain, self.facts, self.derivations)
            needs = demand(body, gaps, [Choice.SWAP] * len(gaps))
            assert needs is not None
            self._least_bytes[with_static] = needs.peak_bytes
        return self._least_bytes[with_static]

    def path(self, body: FixedBody, link_price: LinkPrice, *, with_static: bool) -> Path:
        key = (with_static, body.order, link_price)
        if key not in self._paths:
            gaps = self.gaps(with_static=with_static)
            self._paths[key] = Reliever(gaps, [True] * len(gaps)).path(body, link_price)
        return self._paths[key]


class _Search:
    """One limit."""

    def __init__(self, task: Task, policy: Auto, known: _Known) -> None:
        self.task = task
        self.policy = policy
        self.known = known
        self.stages = Stages(task, known.facts)
        self.plain = FixedBody(task, known.plain, known.facts, known.derivations)
        self.least_seconds = float(self.plain.starts[-1])
        evaluations = policy.evaluations
        if evaluations is None:
            per_node = _EVALUATED_NODES // max(1, self.plain.length)
            evaluations = min(max(per_node, _FEWEST_EVALUATIONS), _MOST_EVALUATIONS)
        self.evaluations = evaluations

    def run(self) -> Schedule:
        if self._fits_plainly():
            return self.plain.plain_schedule()
        starts: list[tuple[bool, Found]] = []
        ways = (False, True) if self.policy.swaps_static else (False,)
        for with_static in reversed(ways) if self.policy.static_first else ways:
            start = self.known.start(self.task.limit_bytes, with_static, self._start)
            if start is not None:
                starts.append((with_static, start))
                if start.seconds <= self.least_seconds * _CLOSE:
                    return self._emit(start)
        if not starts:
            raise infeasible(self.task, self.policy.name, 1)
        with_static, start = min(starts, key=lambda pair: pair[1].seconds)
        if start.seconds > self._hopeless_seconds():
            return self._emit(start)
        return self._emit(self.known.improved(self.task.limit_bytes, with_static, self._improve, start))

    def _hopeless_seconds(self) -> float:
        hopeless = _HOPELESS * self.task.worth_seconds
        is_large = self.plain.length >= _LARGE_BODY
        return min(hopeless, _LARGE_HOPELESS * self.least_seconds) if is_large else hopeless

    def _fits_plainly(self) -> bool:
        """Whether nothing has to be decided; raises `Infeasible` where no decision can help."""
        if int(self.plain.needed().max()) <= self.task.limit_bytes:
            return True
        least = self.known.least_bytes(with_static=self.policy.swaps_static)
        if least > self.task.limit_bytes:
            raise infeasible(self.task, self.policy.name, least - self.task.limit_bytes)
        return False

    def _improve(self, with_static: bool, start: Found) -> Found:
        return self._improver(with_static, self.evaluations).improve(start)

    def _improver(self, with_static: bool, evaluations: int) -> Improver:
        gaps = self.known.gaps(with_static=with_static)
        reliever = Reliever(gaps, [True] * len(gaps))
        return Improver(self.task, gaps, reliever, self.stages, evaluations, self.policy.seed)

    def _start(self, with_static: bool) -> Found | None:
        """The best place to begin."""
        improver = self._improver(with_static, 0)
        best: Found | None = None
        for body, choices in self._places_to_begin(with_static):
            found = improver.evaluate(body, choices, below=best.seconds if best else math.inf)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
                if best.seconds <= self.least_seconds * _CLOSE:
                    return best
        return best

    def _places_to_begin(self, with_static: bool) -> Iterator[tuple[FixedBody, Sequence[Choice]]]:
        """The first step of each path that fits, and the same with swaps undone that need not be.

        What is left free lets copies back begin early: with how much of that is best, the clock decides.
        """
        is_large = self.plain.length >= _LARGE_BODY
        orders = self.stages.orders()
        prices = LINK_PRICES[:4] if is_large else LINK_PRICES
        gaps = self.known.gaps(with_static=with_static)
        if with_static:
            orders, prices = orders[:2], _LARGE_STATIC_PRICES if is_large else LINK_PRICES[:4]
        for order in orders[:: 2 if is_large else 1]:
            body = self.plain.reordered(order)
            for price in prices:
                path = self.known.path(body, price, with_static=with_static)
                step = path.first_within(self.task.limit_bytes, self.task.host_bytes)
                if step is None:
                    continue
                yield body, step.choices
                if is_large:
                    limits = [round(self.task.limit_bytes * (1 - share)) for share in _LEFT_FREE]
                    for kept in kept_again(body, gaps, step.choices, limits):
                        yield body, kept

    def _emit(self, found: Found) -> Schedule:
        """As records. Copies back that can wait do so, as long as nothing takes longer: it saves bytes."""
        layout = found.layout
        needs = demand(layout.body, layout.gaps, found.choices)
        assert needs is not None
        late = lay_out(layout.body, layout.gaps, needs, self.task.limit_bytes, late=True)
        if late is not None and seconds_of(late) <= found.seconds:
            layout = late
        return layout.schedule(self._reasons(found))

    def _reasons(self, found: Found) -> dict[tuple[int, int], str]:
        """Why each tensor was given up as it was, in words."""
        body, gaps = found.layout.body, found.layout.gaps
        seconds = {
            (each.sub_array, each.derived.tensor): each.derived.seconds for each in found.layout.recomputes
        }
        reasons = {}
        for gap, choice in zip(gaps, found.choices, strict=True):
            if choice is Choice.KEEP:
                continue
            key = (gap.sub_array, gap.tensor)
            record = self.task.profiles[gap.sub_array].tensors[gap.tensor]
            last, first = body.gap_places(gap)
            idle = float(body.starts[first] - body.starts[last + 1])
            idle += self.least_seconds if first <= last else 0.0
            if choice is Choice.SWAP:
                reasons[key] = f"idle for {idle:.3g} s, copied back in {record.swap_in_seconds:.3g} s"
            else:
                early = ", early for others" if choice is Choice.RECOMPUTE_EARLY else ""
                reasons[key] = f"made again in {seconds[key]:.3g} s{early}"
        return reasons
