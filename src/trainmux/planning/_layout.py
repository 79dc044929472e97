"""Decisions with every copy placed.

Offloads run in the order of the last uses, several behind one dependency on compute where memory allows. A
tensor's bytes are given back when its copy has ended. Where memory demands it earlier, compute waits for the
copies that end first. Prefetches run in the order of their deadlines; each is issued as soon as the lane is
free and there is memory for it until it is used, or with the one before it. Taking memory early for the one
that is due first never holds up one that is due later, as that could not have been copied before it. What is
due first in the next pass may be fetched before this one ends.

What must be on the device in any case decides whether the decisions fit at all; the rest is slack. The times
that serve to place copies are those of a link that is always busy both ways for copies to the host, because
compute waits where bytes are given back though nobody needs them yet; for copies back it is never busy. When
all copies are placed, bytes are given back later where there is room, so that slower copies hold nobody up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trainmux.ir import Recomputation, Schedule, Swap
from trainmux.planning._body import FixedBody, Floats, Ints
from trainmux.planning._facts import Choice, Derivation, Derived, Gap, derive

_SLACK = 1.5
"""How much longer copies to the host may take before compute waits for one, if there is room."""
_SLACK_ROOM = 0.96
"""The part of the limit that slack may fill: in a full slab tensors find no place."""
_BATCH = 120
"""Copies begin behind one cross-stream dependency until they take so many times as long as it costs."""
_TRIES_AHEAD = 4
"""How often it is tried to fetch more for the next pass, or less where that was too much."""


@dataclass(frozen=True, slots=True)
class WantedSwap:
    """A swap of which the two uses are known: offloaded after position ``out``, back before ``deadline``.

    ``copies_out`` is false where the host has a true copy already, ``is_source`` true where a recomputation
    just before the deadline reads the tensor.
    """

    gap: int
    out: int
    deadline: int
    copies_out: bool
    is_source: bool = False


@dataclass(frozen=True, slots=True)
class PlacedSwap:
    """A swap by positions: ``release`` is the body's length where the bytes are given back at its end."""

    gap: int
    out: int
    release: int
    back: int
    copies_out: bool


@dataclass(frozen=True)
class PlacedRecompute:
    """A recomputation just before a position."""

    sub_array: int
    derived: Derived
    before: int


@dataclass(frozen=True)
class Demand:
    """Bytes and time that decisions demand, wherever copies are placed.

    ``tensors`` and ``beyond`` add up to the bytes needed at each position; ``recompute_seconds`` run just
    before each.
    """

    tensors: Ints
    beyond: Ints
    recompute_seconds: Floats
    swaps: tuple[WantedSwap, ...]
    recomputes: tuple[PlacedRecompute, ...]
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        return int((self.tensors + self.beyond).max())


@dataclass(frozen=True)
class Layout:
    """Decisions with every copy placed."""

    body: FixedBody
    gaps: tuple[Gap, ...]
    swaps: tuple[PlacedSwap, ...]
    recomputes: tuple[PlacedRecompute, ...]

    def schedule(self, reasons: str | Mapping[tuple[int, int], str]) -> Schedule:
        """Records that name nodes; ``reasons`` by sub-array and tensor, or one for all."""
        order = self.body.order

        def reason(sub_array: int, tensor: int) -> str:
            return reasons if isinstance(reasons, str) else reasons.get((sub_array, tensor), "")

        swaps = tuple(
            Swap(
                gap.sub_array,
                gap.tensor,
                order[swap.out],
                order[swap.release % len(order)],
                order[swap.back],
                reason(gap.sub_array, gap.tensor),
            )
            for swap in self.swaps
            for gap in (self.gaps[swap.gap],)
        )
        recomputes = tuple(
            Recomputation(
                each.sub_array,
                each.derived.tensor,
                each.derived.ranks,
                order[each.before],
                reason(each.sub_array, each.derived.tensor),
            )
            for each in self.recomputes
        )
        return Schedule(self.body.multiplexing, order, swaps, recomputes)


def demand(body: FixedBody, gaps: Sequence[Gap], choices: Sequence[Choice]) -> Demand | None:
    """The demand of ``choices``, one per gap; ``None`` where a recomputation is not possible."""
    derivations = _derive_all(body, gaps, choices)
    if derivations is None:
        return None
    beyond, created = body.workspace.tolist(), body.created
    seconds = [0.0] * body.length
    recomputes: list[PlacedRecompute] = []
    made_before: dict[tuple[int, int], int] = {}
    for sub_array, derivation in derivations.items():
        for derived in derivation.recomputes:
            before = body.place[sub_array][derived.before]
            recomputes.append(PlacedRecompute(sub_array, derived, before))
            made_before[sub_array, derived.tensor] = before
            seconds[before] += derived.seconds
            if derived.beyond_bytes > beyond[before]:
                beyond[before] = max(beyond[before], derived.beyond_bytes - int(created[before]))
    swaps = []
    host_bytes = {}
    changes = [0] * (body.length + 1)  # of the bytes on the device, from one position to the next
    for number, choice in enumerate(choices):
        if choice is Choice.KEEP:
            continue
        gap = gaps[number]
        last, back = body.gap_places(gap)
        if choice is Choice.SWAP:
            rank, is_source = _deadline(gap, derivations.get(gap.sub_array))
            back = body.place[gap.sub_array][rank]
            swaps.append(WantedSwap(number, last, back, gap.copies_out, is_source))
            host_bytes[gap.sub_array, gap.tensor] = gap.size_bytes
        else:
            back = made_before[gap.sub_array, gap.tensor]
        changes[last + 1] -= gap.size_bytes
        changes[back] += gap.size_bytes
        if back < last + 1:  # around the body's end
            changes[0] -= gap.size_bytes
    tensors: Ints = body.tensors + np.cumsum(np.asarray(changes[:-1], dtype=np.int64))
    return Demand(
        tensors,
        np.asarray(beyond, dtype=np.int64),
        np.asarray(seconds),
        tuple(swaps),
        tuple(recomputes),
        sum(host_bytes.values()),
    )


def lay_out(
    body: FixedBody,
    gaps: tuple[Gap, ...],
    needs: Demand,
    limit_bytes: int,
    *,
    late: bool = False,
    prompts: Mapping[int, int] | None = None,
) -> Layout:
    """Place the copies of ``needs``, which fit into the limit.

    With ``late`` prefetches are issued as late as they can be without holding up compute, not as early. With
    ``prompts`` each is issued just before the position given for its gap.
    """
    if prompts is not None:
        needs = _back_by(prompts, gaps, needs)
    assert needs.peak_bytes <= limit_bytes
    curve = needs.tensors + needs.beyond
    turns = body.starts.copy()
    turns[1:] += np.cumsum(needs.recompute_seconds)  # a turn begins with what is recomputed before its node
    placing = _Placing(body, gaps, curve, turns, needs.recompute_seconds, limit_bytes)
    wanted = placing.gathered(needs.swaps)
    released = placing.releases(wanted)
    if prompts is None:
        fetched = _quickest(placing, wanted, released, late)
        swaps, curve = fetched.swaps, fetched.curve
    else:
        by_deadline = sorted(needs.swaps, key=lambda swap: (swap.deadline, swap.gap))
        curve = placing.curve
        swaps = tuple(
            PlacedSwap(swap.gap, swap.out, released[swap.gap], swap.deadline, swap.copies_out)
            for swap in by_deadline
        )
    swaps = tuple(placing.with_slack(swap, curve) for swap in swaps)
    return Layout(body, gaps, swaps, needs.recomputes)


def _back_by(prompts: Mapping[int, int], gaps: Sequence[Gap], needs: Demand) -> Demand:
    """The demand of the same decisions with each swapped tensor back at its prompt."""
    tensors = needs.tensors.copy()
    for swap in needs.swaps:
        tensors[prompts[swap.gap] : swap.deadline] += gaps[swap.gap].size_bytes
    swaps = tuple(replace(swap, deadline=prompts[swap.gap]) for swap in needs.swaps)
    return replace(needs, tensors=tensors, swaps=swaps)


def _quickest(
    placing: _Placing, swaps: Sequence[WantedSwap], released: dict[int, int], late: bool
) -> _Fetched:
    """Place the copies back, those that are due first in the next pass before the end of this one if they
    hold up compute there and the lane is idle here."""
    best = placing.prefetches(swaps, released, late, frozenset())
    assert best is not None
    share = 1.0
    for _ in range(_TRIES_AHEAD):
        idle = share * (best.seconds - best.in_end)
        ahead = placing.due_next(swaps, released, best.ahead, idle) if best.waits_for_copies else best.ahead
        if ahead == best.ahead:
            break
        trial = placing.prefetches(swaps, released, late, ahead)
        if trial is not None and trial.seconds < best.seconds:
            best = trial
        else:
            share /= 4
    return best


@dataclass(frozen=True)
class _Fetched:
    """Copies back by position, those of ``ahead`` for the next pass; when the lane and the pass end.

    ``curve`` are the bytes needed at each position with all of that.
    """

    swaps: tuple[PlacedSwap, ...]
    curve: Ints
    ahead: frozenset[int]
    in_end: float
    seconds: float
    waits_for_copies: bool


@dataclass
class _Placing:
    """``curve`` are the bytes needed at each position so far, ``turns`` when each position's turn comes."""

    body: FixedBody
    gaps: Sequence[Gap]
    curve: Ints
    turns: Floats
    recompute_seconds: Floats
    limit: int
    out_ends: dict[int, float] = field(default_factory=dict)

    @cached_property
    def batch_seconds(self) -> float:
        """Copies of so many seconds are worth a cross-stream dependency."""
        return _BATCH * max(profile.sync_seconds for profile in self.body.profiles)

    def gathered(self, swaps: Sequence[WantedSwap]) -> list[WantedSwap]:
        """Hold copies to the host back until there are enough for a dependency on compute.

        None is held back where memory is short, nor for more than half of the way to its deadline.
        """
        found: list[WantedSwap] = []
        held: list[WantedSwap] = []
        seconds, size, latest = 0.0, 0, self.body.length
        for swap in sorted(swaps, key=lambda swap: (swap.out, swap.gap)):
            if held:
                until = held[-1].out
                is_short = self.curve[until + 1 : swap.out + 1].max(initial=0) + size > self.limit
                if is_short or seconds >= self.batch_seconds or swap.out > latest:
                    found += self._held_until(until, held)
                    held, seconds, size, latest = [], 0.0, 0, self.body.length
            due = swap.deadline if swap.deadline > swap.out else self.body.length
            held.append(swap)
            size += self.gaps[swap.gap].size_bytes
            latest = min(latest, (swap.out + due) // 2)
            if swap.copies_out:
                seconds += self.body.record(self.gaps[swap.gap]).swap_out_seconds
        return found + (self._held_until(held[-1].out, held) if held else [])

    def _held_until(self, out: int, held: Sequence[WantedSwap]) -> list[WantedSwap]:
        """Swaps that all begin after position ``out``, whose bytes stay until then."""
        for swap in held:
            self.curve[swap.out + 1 : out + 1] += self.gaps[swap.gap].size_bytes
        return [replace(swap, out=out) for swap in held]

    def releases(self, swaps: Sequence[WantedSwap]) -> dict[int, int]:
        """For each swapped gap the position before which its bytes are given back.

        Where memory is short, those give theirs back whose copies end first: compute waits for as few copies
        as it can, and what is copied behind them stays for longer.
        """
        length = self.body.length
        curve, turns = self.curve.tolist(), self.turns.tolist()
        in_order = sorted(swaps, key=lambda swap: (swap.out, swap.gap))
        due: dict[int, list[int]] = {}
        for swap in in_order:
            if swap.deadline > swap.out:
                due.setdefault(swap.deadline, []).append(swap.gap)
        coming, leaving = deque(in_order), deque[int]()
        released: dict[int, int] = {}
        waits: dict[int, float] = {}
        free_from = waited = 0.0
        held_bytes = position = 0

        def release(number: int) -> None:
            nonlocal held_bytes
            released[number] = position
            held_bytes -= self.gaps[number].size_bytes

        while coming or leaving:
            position = position + 1 if leaving else max(position, coming[0].out) + 1
            while coming and coming[0].out < position:
                swap = coming.popleft()
                end = max(free_from, turns[position] + waited)
                if swap.copies_out:
                    end += self.body.record(self.gaps[swap.gap]).swap_out_duplex_seconds
                    free_from = end
                self.out_ends[swap.gap] = end
                leaving.append(swap.gap)
                held_bytes += self.gaps[swap.gap].size_bytes
            if position == length:
                break
            for number in due.get(position, ()):
                if number not in released:
                    release(number)
            while leaving:
                number = leaving[0]
                if number not in released:
                    wait = self.out_ends[number] - turns[position] - waited
                    if wait > 0:
                        if curve[position] + held_bytes <= self.limit:
                            break
                        waits[position] = waits.get(position, 0.0) + wait
                        waited += wait
                    release(number)
                leaving.popleft()
        for position, wait in waits.items():
            self.turns[position:] += wait
        for swap in in_order:
            until = released.setdefault(swap.gap, length)
            self.curve[swap.out + 1 : until] += self.gaps[swap.gap].size_bytes
        return released

    def with_slack(self, swap: PlacedSwap, curve: Ints) -> PlacedSwap:
        """Give bytes back as late as a slower copy ends, as far as there is room, which is then taken."""
        size = self.gaps[swap.gap].size_bytes
        end = self.out_ends[swap.gap]
        end += (_SLACK - 1) * (end - float(self.turns[swap.out + 1]))
        release = int(np.searchsorted(self.turns[:-1], end))
        release = min(release, swap.back if swap.back > swap.out else self.body.length - 1)
        over = np.nonzero(curve[swap.release : release] > _SLACK_ROOM * self.limit - size)[0]
        if len(over):
            release = swap.release + int(over[0])
        if release <= swap.release:
            return swap
        curve[swap.release : release] += size
        return replace(swap, release=release)

    def prefetches(
        self, swaps: Sequence[WantedSwap], released: dict[int, int], late: bool, ahead: frozenset[int]
    ) -> _Fetched | None:
        """Place the copies back in the order of their deadlines, those of ``ahead`` for the next pass.

        ``None`` where one of those does not fit before the end.
        """
        curve, turns, length = self.curve.copy(), self.turns.copy(), self.body.length
        free_from = 0.0
        issued = 0
        placed = []
        stalls: dict[int, float] = {}
        in_order = sorted(swaps, key=lambda swap: (swap.gap in ahead, swap.deadline, swap.gap))
        latest = self._latest_starts(in_order, ahead) if late else {}
        for swap in in_order:
            if swap.gap in ahead:
                curve[: swap.deadline] += self.gaps[swap.gap].size_bytes
        for swap in in_order:
            gap, last = self.gaps[swap.gap], swap.out
            due = length if swap.gap in ahead else swap.deadline
            release = released[swap.gap]
            in_this_pass = due > last
            lowest = max(issued, release if in_this_pass else 0)
            back = due
            if lowest < due:
                over = np.nonzero(curve[lowest:due] > self.limit - gap.size_bytes)[0]
                by_memory = lowest + int(over[-1]) + 1 if len(over) else lowest
                start = max(free_from, latest.get(swap.gap, 0.0))
                by_lane = int(np.searchsorted(turns[:-1], start, side="right")) - 1
                if by_memory <= issued and 0 < free_from - turns[issued] < self.batch_seconds:
                    by_lane = issued  # behind the copies that begin there: no dependency more
                back = min(max(by_memory, by_lane), due)
                curve[back:due] += gap.size_bytes
            if back == length:
                return None
            start = max(free_from, float(turns[back]))
            if in_this_pass:
                start = max(start, self.out_ends[swap.gap])
            free_from = start + self.body.record(gap).swap_in_seconds
            issued = max(issued, min(back, due))
            if due < length:
                ready = float(turns[due]) + float(self.recompute_seconds[due]) + stalls.get(due, 0.0)
                if free_from > ready:
                    stalls[due] = stalls.get(due, 0.0) + free_from - ready
                    turns[due + 1 :] += free_from - ready
            placed.append(PlacedSwap(swap.gap, last, release, back, swap.copies_out))
        seconds = max(float(turns[-1]), free_from)
        return _Fetched(tuple(placed), curve, ahead, free_from, seconds, bool(stalls))

    def due_next(
        self,
        swaps: Sequence[WantedSwap],
        released: dict[int, int],
        ahead: frozenset[int],
        idle_seconds: float,
    ) -> frozenset[int]:
        """``ahead`` and those due first in the next pass for which there is time, and memory until then."""
        found, curve = set[int](), self.curve.copy()
        for swap in sorted(swaps, key=lambda swap: (swap.gap not in ahead, swap.deadline, swap.gap)):
            gap = self.gaps[swap.gap]
            if swap.deadline > swap.out or released[swap.gap] == self.body.length:
                continue
            if swap.gap not in ahead:
                idle_seconds -= self.body.record(gap).swap_in_seconds
                if (
                    idle_seconds < 0
                    or int(curve[: swap.deadline].max(initial=0)) + gap.size_bytes > self.limit
                ):
                    break
            curve[: swap.deadline] += gap.size_bytes
            found.add(swap.gap)
        return frozenset(found)

    def _latest_starts(self, in_order: Sequence[WantedSwap], ahead: frozenset[int]) -> dict[int, float]:
        """When each copy back must start at the latest so that it and all behind it are in time."""
        starts = {}
        limit = float(self.turns[-1])
        for swap in reversed(in_order):
            due = limit if swap.gap in ahead else float(self.turns[swap.deadline])
            limit = min(limit, due) - self.body.record(self.gaps[swap.gap]).swap_in_seconds
            starts[swap.gap] = limit
        return starts


def _derive_all(
    body: FixedBody, gaps: Sequence[Gap], choices: Sequence[Choice]
) -> dict[int, Derivation] | None:
    """The derivation of each sub-array that recomputes something."""
    recomputed: dict[int, dict[int, Choice]] = {}
    for gap, choice in zip(gaps, choices, strict=True):
        if choice >= Choice.RECOMPUTE:
            recomputed.setdefault(gap.sub_array, {})[gap.tensor] = choice
    found = {}
    for sub_array, own in recomputed.items():
        derivation = derive(body.all_facts[sub_array], own)
        if derivation is None:
            return None
        found[sub_array] = derivation
    return found


def _deadline(gap: Gap, derivation: Derivation | None) -> tuple[int, bool]:
    """The rank before which a swapped tensor must be back, and whether a recomputation reads it there.

    That rank is its next use, or a recomputation before that.
    """
    due = derivation.first_reads.get(gap.tensor) if derivation is not None else None
    if due is None or not (due == gap.first or gap.last < due < gap.first):
        return gap.first, False
    return due, True
