"""The stages of a ring's body: one sub-array's backward pass beside the forward pass of the next.

The order of a stage is how many forward nodes have run when each backward node's turn comes, a row of counts
that never falls. All orders that keep each sub-array's own are such rows.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainmux.ir import Multiplexing
from trainmux.planning._facts import Facts
from trainmux.planning._policy import Node, Task, plain_order
from trainmux.planning.policies._clock import stalls_of
from trainmux.planning.policies._layout import Layout

_NUM_STALLS = 6
_NUM_RANDOM = 6


@dataclass(frozen=True)
class _Stage:
    """Backward nodes and the forward nodes beside them; ``forward_starts`` are times in the forward row."""

    backward: tuple[Node, ...]
    forward: tuple[Node, ...]
    forward_starts: tuple[float, ...]


class Stages:
    """The stages of a task; none where its sub-arrays run in turns, which leaves nothing to move."""

    def __init__(self, task: Task, all_facts: Sequence[Facts]) -> None:
        self._task = task
        self._stages: list[_Stage] = []
        if task.multiplexing is Multiplexing.RING and len(task.profiles) > 1:
            for sub_array, facts in enumerate(all_facts):
                other = (sub_array + 1) % len(all_facts)
                self._stages.append(
                    _Stage(
                        tuple((sub_array, rank) for rank in range(facts.num_forward, len(facts.nodes))),
                        tuple((other, rank) for rank in range(all_facts[other].num_forward)),
                        all_facts[other].start_seconds[: all_facts[other].num_forward + 1],
                    )
                )

    def orders(self) -> list[tuple[Node, ...]]:
        """Where a search begins: backward before forward, both spread evenly, and halfway between."""
        task = self._task
        plain = plain_order(task.profiles, task.multiplexing)
        if not self._stages:
            return [plain]
        spread = plain_order(task.profiles, task.multiplexing, interleaved=True)
        halfway = [[count // 2 for count in row] for row in self._counts(spread)]
        return list(dict.fromkeys([plain, spread, self._order(halfway)]))

    def neighbours(self, layout: Layout, rng: random.Random) -> Iterator[tuple[Node, ...]]:
        """Orders close to a layout's: forward nodes pulled to where compute waits, rows shifted at random."""
        if not self._stages:
            return
        counts = self._counts(layout.body.order)
        stalls = sorted(stalls_of(layout).items(), key=lambda stall: -stall[1])[:_NUM_STALLS]
        for position, seconds in stalls:
            node = layout.body.order[position]
            for number, stage in enumerate(self._stages):
                if node in stage.backward:
                    at = stage.backward.index(node)
                    for share in (1.0, 0.5):
                        moved = self._pulled(counts, number, at, share * seconds)
                        if moved is not None:
                            yield self._order(moved)
        for _ in range(_NUM_RANDOM):
            yield self._order(self._shaken(counts, rng))

    def _pulled(
        self, counts: list[list[int]], number: int, at: int, seconds: float
    ) -> list[list[int]] | None:
        """Forward nodes of ``seconds`` more run before backward node ``at``; those behind it keep theirs."""
        stage = self._stages[number]
        have = counts[number][at]
        wanted = bisect_left(stage.forward_starts, stage.forward_starts[have] + seconds)
        wanted = min(max(wanted, have + 1), len(stage.forward))
        if wanted == have:
            return None
        moved = [list(row) for row in counts]
        moved[number] = [
            count if place < at else max(count, wanted) for place, count in enumerate(counts[number])
        ]
        return moved

    def _shaken(self, counts: list[list[int]], rng: random.Random) -> list[list[int]]:
        """One stretch of a stage with more or fewer forward nodes before it."""
        moved = [list(row) for row in counts]
        number = rng.randrange(len(moved))
        row, most = moved[number], len(self._stages[number].forward)
        if not row:
            return moved
        begin, end = sorted(rng.choices(range(len(row) + 1), k=2))
        change = rng.choice((-1, 1)) * rng.randint(1, max(1, most // 3))
        for place in range(begin, end):
            row[place] = min(max(row[place] + change, 0), most)
        for place in range(1, len(row)):
            row[place] = max(row[place], row[place - 1])
        return moved

    def _counts(self, order: Sequence[Node]) -> list[list[int]]:
        place = {node: position for position, node in enumerate(order)}
        counts = []
        for stage in self._stages:
            forward = [place[node] for node in stage.forward]
            counts.append([bisect_left(forward, place[node]) for node in stage.backward])
        return counts

    def _order(self, counts: Sequence[Sequence[int]]) -> tuple[Node, ...]:
        order: list[Node] = []
        for stage, row in zip(self._stages, counts, strict=True):
            done = 0
            for node, count in zip(stage.backward, row, strict=True):
                order += stage.forward[done:count]
                done = max(done, count)
                order.append(node)
            order += stage.forward[done:]
        return tuple(order)
