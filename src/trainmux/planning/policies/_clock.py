"""How long a body takes: the three lanes of `simulate` over as few operations as say the same.

Nodes between two decisions run one after another whatever happens on the other lanes, so they are one
operation here. The rest is issued as `rewrite` issues it: before a node what is released, fetched back and
recomputed there, behind it what is copied out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmux.ir import Lane, Profile, ProfiledTensor
from trainmux.planning._lanes import LaneClock, LaneTimes
from trainmux.planning.policies._body import FixedBody
from trainmux.planning.policies._layout import Layout


@dataclass
class _At:
    """What happens at a position; swaps and recomputations by their number."""

    offloads: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    prefetches: list[int] = field(default_factory=list)
    recomputes: list[int] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Copy:
    """A swap as the clock needs it; ``first_use`` is the position of the next node that touches it."""

    sub_array: int
    tensor: int
    out: int
    release: int
    back: int
    first_use: int
    copies_out: bool


def seconds_of(layout: Layout) -> float:
    """How long one pass takes."""
    return _Clocking(layout.body, *_parts(layout)).run().seconds


def _parts(layout: Layout) -> tuple[list[_Copy], list[tuple[int, tuple[int, ...], int]]]:
    body = layout.body
    copies = []
    for swap in layout.swaps:
        gap = layout.gaps[swap.gap]
        first_use = body.place[gap.sub_array][gap.first]
        copies.append(
            _Copy(gap.sub_array, gap.tensor, swap.out, swap.release, swap.back, first_use, swap.copies_out)
        )
    again = [(each.sub_array, each.derived.ranks, each.before) for each in layout.recomputes]
    return copies, again


def _mean_slowdown(profiles: Sequence[Profile]) -> float:
    """By what copies slow down the nodes of all sub-arrays, the longer ones counting for more."""
    seconds = [sum(node.seconds for node in profile.nodes) for profile in profiles]
    slowed = [taken * profile.slowdown_by_copies for taken, profile in zip(seconds, profiles, strict=True)]
    return sum(slowed) / sum(seconds) if sum(seconds) > 0 else 1.0


class _Clocking:
    """One pass, operation by operation. Each lane runs in order, so to wait for an operation is to wait for
    all before it on its lane: waits that say nothing new are left out.
    """

    def __init__(
        self, body: FixedBody, copies: Sequence[_Copy], again: Sequence[tuple[int, tuple[int, ...], int]]
    ) -> None:
        self._body = body
        self._copies = copies
        self._again = again
        self._clock = LaneClock()
        self._slowdown = _mean_slowdown(body.task.profiles)
        self._offload_at: dict[int, int] = {}
        self._prefetch_at: dict[int, int] = {}
        self._fetched: dict[tuple[int, int], int] = {}
        self._last_on_compute = -1
        self._knows_out = self._knows_in = -1  # what compute has waited for on the two copy lanes

    def run(self) -> LaneTimes:
        starts, length, clock = self._body.starts, self._body.length, self._clock
        events = self._events()
        done = 0
        for position in sorted(events):
            here = events[position]
            if position > done:
                self._last_on_compute = self._node(float(starts[position] - starts[done]))
                done = position
            if here.offloads:
                self._offload(here.offloads)
            if here.releases:
                self._release(here.releases)
            if here.prefetches:
                self._prefetch(position, here.prefetches)
            for number in sorted(here.recomputes, key=lambda n: (self._again[n][0], self._again[n][1][-1])):
                self._recompute(*self._again[number][:2])
            for number in here.uses:
                self._wait_for_prefetch(self._prefetch_at[number])
        self._node(float(starts[length] - starts[done]))
        return clock.run()

    def _events(self) -> dict[int, _At]:
        events: dict[int, _At] = {}

        def at(position: int) -> _At:
            if position not in events:
                events[position] = _At()
            return events[position]

        for number, copy in enumerate(self._copies):
            if copy.copies_out:
                at(copy.out + 1).offloads.append(number)
            if copy.release < self._body.length:
                at(copy.release).releases.append(number)
            at(copy.back).prefetches.append(number)
            if copy.first_use >= copy.back:
                at(copy.first_use).uses.append(number)
        for number, (_, _, before) in enumerate(self._again):
            at(before).recomputes.append(number)
        return events

    def _offload(self, numbers: list[int]) -> None:
        clock = self._clock
        if self._last_on_compute >= 0:
            clock.wait(Lane.OUT, self._last_on_compute)
        for number in sorted(numbers, key=lambda n: (self._copies[n].release, n)):
            record = self._record(number)
            self._offload_at[number] = clock.offload(record.swap_out_seconds, record.swap_out_duplex_seconds)

    def _release(self, numbers: list[int]) -> None:
        last = max(self._offload_at.get(number, -1) for number in numbers)
        if last > self._knows_out:
            self._clock.wait(Lane.COMPUTE, last)
            self._knows_out = last
            self._last_on_compute = self._clock.node(0.0)  # prefetches into the bytes wait for this

    def _prefetch(self, position: int, numbers: list[int]) -> None:
        clock, copies, length = self._clock, self._copies, self._body.length
        if self._last_on_compute >= 0:
            clock.wait(Lane.IN, self._last_on_compute)
        for number in sorted(numbers, key=lambda n: (copies[n].first_use - position) % length):
            record = self._record(number)
            at = clock.prefetch(record.swap_in_seconds, record.swap_in_duplex_seconds)
            self._prefetch_at[number] = at
            self._fetched[copies[number].sub_array, copies[number].tensor] = at

    def _recompute(self, sub_array: int, ranks: tuple[int, ...]) -> None:
        nodes = self._body.task.profiles[sub_array].nodes
        seconds = 0.0
        for rank in ranks:
            for read in nodes[rank].reads:
                fetched = self._fetched.get((sub_array, read), -1)
                if fetched > self._knows_in:
                    self._node(seconds)
                    seconds = 0.0
                    self._wait_for_prefetch(fetched)
            seconds += nodes[rank].seconds
        self._last_on_compute = self._node(seconds)

    def _node(self, seconds: float) -> int:
        return self._clock.node(seconds, seconds * self._slowdown)

    def _wait_for_prefetch(self, at: int) -> None:
        if at > self._knows_in:
            self._knows_in = at
            self._clock.wait(Lane.COMPUTE, at)

    def _record(self, number: int) -> ProfiledTensor:
        copy = self._copies[number]
        return self._body.task.profiles[copy.sub_array].tensors[copy.tensor]
