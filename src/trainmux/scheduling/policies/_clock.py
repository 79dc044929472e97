"""How long a body takes: the three lanes of `simulate` over as few operations as say the same.

Nodes between two decisions run one after another whatever happens on the other lanes, so they are one
operation here. The rest is issued as `rewrite` issues it: before a node what is released, fetched back and
recomputed there, behind it what is copied out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmux.ir import Lane, Schedule
from trainmux.simulate import LaneClock, LaneTimes
from trainmux.scheduling.policies._body import FixedBody
from trainmux.scheduling.policies._layout import Layout


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


@dataclass(frozen=True)
class _Run:
    """``waits`` has, for each position that waits for copies back, the last wait and the operation before."""

    times: LaneTimes
    waits: dict[int, tuple[int, int]]


def seconds_of(layout: Layout) -> float:
    """How long one pass takes."""
    return _run(layout.body, *_parts(layout)).times.seconds


def stalls_of(layout: Layout) -> dict[int, float]:
    """The positions before which compute waits for a copy back, and for how long."""
    run = _run(layout.body, *_parts(layout))
    stalls = {}
    for position, (first_wait, node_before) in run.waits.items():
        before = run.times.ends[node_before] if node_before >= 0 else 0.0
        waited = run.times.ends[first_wait] - before
        if waited > 0:
            stalls[position] = waited
    return stalls


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


def times_of(body: FixedBody, schedule: Schedule) -> LaneTimes:
    """How long one pass through a schedule takes whose order is that of ``body``."""
    copies = []
    length = body.length
    for swap in schedule.swaps:
        out, release, back = (
            body.place[sub_array][rank]
            for sub_array, rank in (swap.offload_after, swap.release_before, swap.prefetch_before)
        )
        uses = [body.place[swap.sub_array][rank] for rank in _uses(body, swap.sub_array, swap.tensor)]
        first_use = min(uses, key=lambda use: (use - back) % length)
        release = release if release > out else length
        copies.append(_Copy(swap.sub_array, swap.tensor, out, release, back, first_use, True))
    again = [
        (each.sub_array, each.nodes, body.place[each.before[0]][each.before[1]])
        for each in schedule.recomputes
    ]
    return _run(body, copies, again).times


def _uses(body: FixedBody, sub_array: int, tensor: int) -> Sequence[int]:
    record = body.all_facts[sub_array].tensors[tensor]
    return [rank for rank in record.accesses if rank != record.created_at] or record.accesses


def _run(body: FixedBody, copies: Sequence[_Copy], again: Sequence[tuple[int, tuple[int, ...], int]]) -> _Run:
    profiles = body.task.profiles
    starts = body.starts
    length = body.length
    events: dict[int, _At] = {}

    def at(position: int) -> _At:
        if position not in events:
            events[position] = _At()
        return events[position]

    for number, copy in enumerate(copies):
        if copy.copies_out:
            at(copy.out + 1).offloads.append(number)
        if copy.release < length:
            at(copy.release).releases.append(number)
        at(copy.back).prefetches.append(number)
        if copy.first_use >= copy.back:
            at(copy.first_use).uses.append(number)
    for number, (_, _, before) in enumerate(again):
        at(before).recomputes.append(number)

    clock = LaneClock()
    offload_at: dict[int, int] = {}
    prefetch_at: dict[int, int] = {}
    fetched: dict[tuple[int, int], int] = {}
    waits: dict[int, tuple[int, int]] = {}
    last_on_compute = -1
    done = 0
    for position in sorted(events):
        here = events[position]
        if position > done:
            last_on_compute = clock.node(float(starts[position] - starts[done]))
            done = position
        for number in sorted(here.offloads, key=lambda n: (copies[n].release, n)):
            record = profiles[copies[number].sub_array].tensors[copies[number].tensor]
            if last_on_compute >= 0:
                clock.wait(Lane.OUT, last_on_compute)
            offload_at[number] = clock.offload(record.swap_out_seconds, record.swap_out_duplex_seconds)
        for number in here.releases:
            if number in offload_at:
                clock.wait(Lane.COMPUTE, offload_at[number])
        if here.releases:
            last_on_compute = clock.node(0.0)
        for number in sorted(here.prefetches, key=lambda n: (copies[n].first_use - position) % length):
            record = profiles[copies[number].sub_array].tensors[copies[number].tensor]
            if last_on_compute >= 0:
                clock.wait(Lane.IN, last_on_compute)
            if number in offload_at:
                clock.wait(Lane.IN, offload_at[number])
            prefetch_at[number] = clock.prefetch(record.swap_in_seconds, record.swap_in_duplex_seconds)
            fetched[copies[number].sub_array, copies[number].tensor] = prefetch_at[number]
        for number in sorted(here.recomputes, key=lambda n: (again[n][0], again[n][1][-1])):
            sub_array, ranks, _ = again[number]
            nodes = profiles[sub_array].nodes
            for rank in ranks:
                for read in nodes[rank].reads:
                    if (sub_array, read) in fetched:
                        clock.wait(Lane.COMPUTE, fetched[sub_array, read])
                last_on_compute = clock.node(nodes[rank].seconds)
        for number in here.uses:
            waits[position] = (clock.wait(Lane.COMPUTE, prefetch_at[number]), last_on_compute)
    clock.node(float(starts[length] - starts[done]))
    return _Run(clock.run(), waits)
