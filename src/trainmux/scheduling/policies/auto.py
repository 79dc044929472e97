"""The best of all policies, improved while the simulation says so; the default.

The other policies' schedules are tried as they are and as places to begin; so are reliefs at several prices of
the link (`_relieve`), in several orders. The best is then improved (`_improve`) by a seeded number of
evaluations on the clock. Decisions are the same kinds as everyone's, and three more: static tensors that are
idle may be swapped too, so that budgets near or below static memory work; a recomputed tensor may be made
early and kept for others; prefetches and releases lie wherever memory and lanes let compute wait the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmux.ir import Schedule
from trainmux.scheduling._policy import Infeasible, Policy, Task, plain_order
from trainmux.scheduling.policies._body import FixedBody, infeasible, known_facts
from trainmux.scheduling.policies._clock import times_of
from trainmux.scheduling.policies._gaps import Choice, Derivations, Gap, find_gaps
from trainmux.scheduling.policies._improve import LINK_PRICES, Found, Improver
from trainmux.scheduling.policies._layout import demand, lay_out
from trainmux.scheduling.policies._relieve import Reliever, Shortfall
from trainmux.scheduling.policies._stages import Stages
from trainmux.scheduling.policies.capuchin import Capuchin
from trainmux.scheduling.policies.mutwo import MuTwo
from trainmux.scheduling.policies.recompute_only import RecomputeOnly
from trainmux.scheduling.policies.swap_only import SwapOnly

_OTHERS: tuple[Policy, ...] = (MuTwo(), Capuchin(), RecomputeOnly(), SwapOnly())
_MAX_PAIR = 2
"""Sub-arrays that `mutwo` can schedule together."""
_EVALUATED_NODES = 150_000
_FEWEST_EVALUATIONS, _MOST_EVALUATIONS = 30, 300
_LARGE_BODY = 1500
"""From so many nodes on a search begins in fewer places, each of which takes longer."""
_CLOSE = 1.001
"""A body within this factor of its nodes alone is not worth looking further."""


@dataclass(frozen=True)
class Auto:
    """The policy ``auto``. ``evaluations`` bounds the improvement; ``None`` lets the size of the body decide."""

    name: str = "auto"
    seed: int = 0
    evaluations: int | None = None

    def schedule(self, task: Task) -> Schedule:
        search = _Search(task, self)
        return search.run()

    def smallest(self, task: Task, *, all_static: bool = False) -> Schedule:
        """The schedule that needs the fewest bytes of all that were found, whatever the limit says.

        With ``all_static`` every static tensor that can be on the host is there when it is idle.
        """
        return _Search(task, self).smallest(all_static)


class _Search:
    def __init__(self, task: Task, policy: Auto) -> None:
        self.task = task
        self.policy = policy
        self.facts = known_facts(task)
        self.derivations = Derivations()
        self.stages = Stages(task, self.facts)
        plain = plain_order(task.profiles, task.multiplexing)
        self.plain = FixedBody(task, plain, self.facts, self.derivations)
        self.least_seconds = float(self.plain.starts[-1])
        self.least_excess: int | None = None
        evaluations = policy.evaluations
        if evaluations is None:
            per_node = _EVALUATED_NODES // max(1, self.plain.length)
            evaluations = min(max(per_node, _FEWEST_EVALUATIONS), _MOST_EVALUATIONS)
        self.evaluations = evaluations

    def run(self) -> Schedule:
        task = self.task
        if int(self.plain.needed().max()) <= task.limit_bytes:
            return self.plain.plain_schedule()
        others = self._others()
        best: tuple[float, Schedule] | None = None
        for schedule in others:
            seconds = times_of(self.plain.reordered(schedule.order), schedule).seconds
            if best is None or seconds < best[0]:
                best = (seconds, schedule)
        for with_static in (False, True):
            if best is not None and best[0] <= self.least_seconds * _CLOSE:
                break
            found = self._search(others, with_static)
            if found is not None and (best is None or found.seconds < best[0]):
                best = (found.seconds, self._emit(found))
        if best is None:
            raise infeasible(task, self.policy.name, self.least_excess or 1)
        return best[1]

    def _others(self) -> list[Schedule]:
        found = []
        for policy in _OTHERS:
            if isinstance(policy, MuTwo) and len(self.task.profiles) > _MAX_PAIR:
                continue
            try:
                found.append(policy.schedule(self.task))
            except Infeasible as reason:
                self._note_excess(reason.excess_bytes)
        return found

    def _search(self, others: Sequence[Schedule], with_static: bool) -> Found | None:
        """The best that begins from any start, improved."""
        gaps = find_gaps(self.facts, with_static=with_static)
        reliever = Reliever(gaps, [True] * len(gaps))
        improver = Improver(self.task, gaps, reliever, self.stages, self.evaluations, self.policy.seed)
        best: Found | None = None

        def consider(found: Found | None) -> bool:
            """Keep the better one; true where nothing better can come."""
            nonlocal best
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
            return best is not None and best.seconds <= self.least_seconds * _CLOSE

        for schedule in others:
            body = self.plain.reordered(schedule.order)
            if consider(improver.evaluate(body, choices_of(schedule, gaps))):
                return best
        is_large = self.plain.length >= _LARGE_BODY
        orders = self.stages.orders()
        orders += [s.order for s in others if s.order not in orders]
        for order in orders[:: 2 if is_large else 1]:
            body = self.plain.reordered(order)
            for price in LINK_PRICES[1::2] if is_large else LINK_PRICES:
                relief = reliever.relieve(body, self.task.limit_bytes, price)
                if isinstance(relief, Shortfall):
                    self._note_excess(relief.excess_bytes)
                elif consider(improver.evaluate(body, relief.choices, relief.needs)):
                    return best
        if best is None:
            return None
        improver.left = self.evaluations
        return improver.improve(best)

    def smallest(self, all_static: bool) -> Schedule:
        gaps = find_gaps(self.facts, with_static=True)
        begin = [Choice.SWAP if gap.is_static and all_static else Choice.KEEP for gap in gaps]
        reliever = Reliever(gaps, [True] * len(gaps))
        best = (int(self.plain.needed().max()), [Choice.KEEP] * len(gaps))
        for price in (0.0, 1.0):
            relief = reliever.relieve(self.plain, 0, price, begin=begin)
            assert isinstance(relief, Shortfall)
            if relief.excess_bytes < best[0]:
                best = (relief.excess_bytes, list(relief.choices))
        needs = demand(self.plain, gaps, best[1])
        assert needs is not None
        layout = lay_out(self.plain, gaps, needs, best[0])
        if layout is None:
            raise infeasible(self.task, self.policy.name, best[0] - self.task.limit_bytes)
        return layout.schedule("the fewest bytes")

    def _note_excess(self, excess: int) -> None:
        self.least_excess = excess if self.least_excess is None else min(self.least_excess, excess)

    def _emit(self, found: Found) -> Schedule:
        return found.layout.schedule(self._reasons(found))

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


def choices_of(schedule: Schedule, gaps: Sequence[Gap]) -> list[Choice]:
    """A schedule's decisions about feature maps as choices."""
    swapped = {(swap.sub_array, swap.tensor) for swap in schedule.swaps}
    recomputed = {(each.sub_array, each.tensor) for each in schedule.recomputes}
    choices = []
    for gap in gaps:
        key = (gap.sub_array, gap.tensor)
        if gap.is_static:
            choices.append(Choice.KEEP)
        elif key in swapped:
            choices.append(Choice.SWAP)
        else:
            choices.append(Choice.RECOMPUTE if key in recomputed else Choice.KEEP)
    return choices
