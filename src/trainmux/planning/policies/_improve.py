"""Changing decisions and order as long as the clock says that a body takes less time.

A seeded number of evaluations, not time, ends the search: the same task gives the same schedule on any
machine. Decisions are given up a few at a time and made anew at another price of the link. In a ring forward
nodes are moved to where compute waits for copies, and back. Then all that is decided is looked through: is it
needed at all, would the other way be cheaper.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainmux.planning._policy import Node, Task
from trainmux.planning.policies._body import FixedBody
from trainmux.planning.policies._clock import seconds_of
from trainmux.planning.policies._gaps import RECOMPUTED, Choice, Gap
from trainmux.planning.policies._layout import Demand, Layout, demand, lay_out
from trainmux.planning.policies._relieve import LINK_PRICES, Reliever, Shortfall
from trainmux.planning.policies._stages import Stages

_NUM_ANEW = 24
"""How often in a row some decisions are made anew."""
_MOST_GIVEN_UP = 8
_SAME = 1e-9
"""Times that differ by less than this share of each other are equal."""


@dataclass(frozen=True)
class Found:
    """A body that fits, how it is done, and how long it takes."""

    choices: tuple[Choice, ...]
    layout: Layout
    seconds: float

    @property
    def order(self) -> tuple[Node, ...]:
        return self.layout.body.order


class Improver:
    """Searches among choices and orders of one task. ``left`` is the number of evaluations that remain."""

    def __init__(
        self,
        task: Task,
        gaps: tuple[Gap, ...],
        reliever: Reliever,
        stages: Stages,
        evaluations: int,
        seed: int,
    ) -> None:
        self.task = task
        self.gaps = gaps
        self.left = evaluations
        self._reliever = reliever
        self._stages = stages
        self._rng = random.Random(seed)

    def evaluate(
        self,
        body: FixedBody,
        choices: Sequence[Choice],
        needs: Demand | None = None,
        below: float = float("inf"),
    ) -> Found | None:
        """How long it takes; ``None`` where it does not fit, or surely takes longer than ``below``."""
        self.left -= 1
        needs = needs if needs is not None else demand(body, self.gaps, choices)
        if needs is None or self._at_least(body, needs) > below * (1 + _SAME):
            return None
        layout = lay_out(body, self.gaps, needs, self.task.limit_bytes)
        return Found(tuple(choices), layout, seconds_of(layout)) if layout is not None else None

    def _at_least(self, body: FixedBody, needs: Demand) -> float:
        """What compute, or one direction of the link, takes by itself."""
        compute = float(body.starts[-1] + needs.recompute_seconds.sum())
        seconds_out = seconds_in = 0.0
        for swap in needs.swaps:
            gap = self.gaps[swap.gap]
            record = self.task.profiles[gap.sub_array].tensors[gap.tensor]
            seconds_in += record.swap_in_seconds
            if swap.copies_out:
                seconds_out += record.swap_out_seconds
        return max(compute, seconds_out, seconds_in)

    def improve(self, found: Found) -> Found:
        """The best body met on the way from ``found``, which may be itself."""
        best = found
        least = float(best.layout.body.starts[-1])
        while self.left > 0:
            before = best
            for trial in (self._make_anew, self._move_forward_nodes, self._look_through):
                best = trial(best)
                if best.seconds <= least * (1 + _SAME):
                    return best
            if best is before and not self._may_try_again():
                break
        return best

    def _may_try_again(self) -> bool:
        return self.left > 0 and len(self.gaps) > 1

    def _look_through(self, best: Found) -> Found:
        """Each decision once: dropped, or taken the other way."""
        for number, choice in enumerate(best.choices):
            if best.choices[number] is Choice.KEEP:
                continue
            for other in self._others(number, choice):
                if self.left <= 0:
                    return best
                choices = (*best.choices[:number], other, *best.choices[number + 1 :])
                best = self._better(best, self.evaluate(best.layout.body, choices, below=best.seconds))
        return best

    def _others(self, number: int, choice: Choice) -> Iterator[Choice]:
        yield Choice.KEEP
        if choice is not Choice.SWAP:
            yield Choice.SWAP
        if self.gaps[number].can_recompute:
            yield from (other for other in RECOMPUTED if other is not choice)

    def _make_anew(self, best: Found) -> Found:
        """Give up some of the decisions and relieve the body again."""
        body, rng = best.layout.body, self._rng
        for _ in range(_NUM_ANEW):
            decided = [number for number, choice in enumerate(best.choices) if choice is not Choice.KEEP]
            if not decided or self.left <= 0:
                return best
            choices = list(best.choices)
            for number in rng.sample(decided, rng.randint(1, min(len(decided), _MOST_GIVEN_UP))):
                choices[number] = Choice.KEEP
            if rng.random() < 0.3:
                number = rng.randrange(len(self.gaps))
                choices[number] = rng.choice(
                    (Choice.SWAP, *(RECOMPUTED if self.gaps[number].can_recompute else ()))
                )
            relief = self._reliever.relieve(
                body, self.task.limit_bytes, rng.choice(LINK_PRICES), begin=choices, noise=rng
            )
            if isinstance(relief, Shortfall):
                self.left -= 1
                continue
            best = self._better(best, self.evaluate(body, relief.choices, relief.needs, best.seconds))
        return best

    def _move_forward_nodes(self, best: Found) -> Found:
        """Move forward nodes of a ring's stages, first to where compute waits."""
        for order in self._stages.neighbours(best.layout, self._rng):
            if self.left <= 0:
                return best
            body = best.layout.body.reordered(order)
            found = self.evaluate(body, best.choices)
            if found is None:
                relief = self._reliever.relieve(
                    body, self.task.limit_bytes, self._rng.choice(LINK_PRICES), best.choices
                )
                if isinstance(relief, Shortfall):
                    continue
                found = self.evaluate(body, relief.choices, relief.needs)
            best = self._better(best, found)
        return best

    def _better(self, best: Found, found: Found | None) -> Found:
        """The quicker one; of two that take the same time the one that needs less."""
        if found is None or found.seconds > best.seconds * (1 + _SAME):
            return best
        if found.seconds < best.seconds * (1 - _SAME) or found.layout.peak_bytes < best.layout.peak_bytes:
            return found
        return best
