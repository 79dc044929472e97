"""How much a pool must reserve beforehand so that a known row of events fits into it (D8 b).

Left to itself the allocator reserves a segment of its own for each large request that finds no hole, and
holes in different segments never join. With one segment per stream, reserved before anything else, holes
do join, less is wasted, and what will be reserved is known before anything runs: the events are simulated.
A simulation of one segment does not depend on the driver's addresses either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainmux.simulate._allocator import Allocate, Event, Free, PoolSimulator
from trainmux.simulate._rules import DEFAULT_RULES, AllocatorRules, round_up

_NUM_BISECTIONS = 7


@dataclass(frozen=True)
class Reservation:
    """``segments`` are (stream, bytes) to reserve before the events; the pool then takes ``reserved_bytes``
    in all, small segments included."""

    segments: tuple[tuple[int, int], ...]
    reserved_bytes: int


def find_reservation(events: Sequence[Event], rules: AllocatorRules = DEFAULT_RULES) -> Reservation:
    """The smallest pool found for ``events``: one segment per stream, or none where that is no better."""
    natural = _reserved(events, (), rules)
    segments = []
    for stream in sorted({event.stream for event in events if isinstance(event, Allocate)}):
        size = _segment_size(_large_of(events, stream, rules), stream, rules)
        if size:
            segments.append((stream, size))
    reserved = _reserved(events, segments, rules)
    if reserved > natural:
        return Reservation((), natural)
    return Reservation(tuple(segments), reserved)


class PoolForecast:
    """A pool that several rows of events share, one after another: what it will have reserved after each.

    The first row gets segments of its own; later ones use what is there and let the pool grow where that is
    not enough.
    """

    def __init__(self, rules: AllocatorRules = DEFAULT_RULES) -> None:
        self._rules = rules
        self._pool = PoolSimulator(rules)

    @property
    def reserved_bytes(self) -> int:
        return self._pool.reserved_bytes

    def reserve(self, events: Sequence[Event]) -> tuple[Reservation, list[int]]:
        """What to reserve before ``events`` run, and handles of what is live after them: to be released."""
        segments: tuple[tuple[int, int], ...] = ()
        if not self._pool.reserved_bytes:
            segments = find_reservation(events, self._rules).segments
        live = _run(self._pool, events, segments)
        return Reservation(segments, self._pool.reserved_bytes), live

    def release(self, handles: Iterable[int]) -> None:
        """What a row of events had left is given back."""
        for handle in handles:
            self._pool.free(handle)


def _segment_size(events: Sequence[Event], stream: int, rules: AllocatorRules) -> int:
    """The smallest segment that holds all of ``events`` by itself; 0 where they are too little for one."""
    live = _peak_live(events, rules)
    if live < rules.own_segment_from_bytes:
        return 0
    unit = rules.segment_round_bytes
    low = round_up(live, unit)
    high = low
    while _reserved(events, [(stream, high)], rules) > high:
        high = round_up(high + max(high // 16, unit), unit)
    for _ in range(_NUM_BISECTIONS):
        middle = round_up((low + high) // 2, unit)
        if middle >= high:
            break
        if _reserved(events, [(stream, middle)], rules) > middle:
            low = middle
        else:
            high = middle
    return high


def _reserved(events: Iterable[Event], segments: Iterable[tuple[int, int]], rules: AllocatorRules) -> int:
    pool = PoolSimulator(rules)
    _run(pool, events, segments)
    return pool.reserved_bytes


def _run(pool: PoolSimulator, events: Iterable[Event], segments: Iterable[tuple[int, int]]) -> list[int]:
    """Reserve, run the events, and return the handles of what is live at the end."""
    for stream, size in segments:
        pool.free(pool.allocate(size, stream))
    handles: dict[str, int] = {}
    for event in events:
        if isinstance(event, Free):
            pool.free(handles.pop(event.name))
        else:
            handles[event.name] = pool.allocate(event.size_bytes, event.stream)
    return list(handles.values())


def _large_of(events: Sequence[Event], stream: int, rules: AllocatorRules) -> list[Event]:
    """The events of one stream that large segments serve."""
    kept: set[str] = set()
    found: list[Event] = []
    for event in events:
        if isinstance(event, Free):
            if event.name in kept:
                kept.discard(event.name)
                found.append(event)
        elif (
            event.stream == stream
            and event.size_bytes
            and not rules.is_small(rules.block_bytes(event.size_bytes))
        ):
            kept.add(event.name)
            found.append(event)
    return found


def _peak_live(events: Iterable[Event], rules: AllocatorRules) -> int:
    sizes: dict[str, int] = {}
    live = highest = 0
    for event in events:
        if isinstance(event, Free):
            live -= sizes.pop(event.name)
        else:
            sizes[event.name] = rules.block_bytes(event.size_bytes)
            live += sizes[event.name]
            highest = max(highest, live)
    return highest
