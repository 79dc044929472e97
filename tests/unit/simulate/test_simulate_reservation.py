"""One segment per stream, reserved beforehand: all events fit, and less is wasted than by growing."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.simulate import (
    Allocate,
    AllocatorRules,
    Event,
    Free,
    PoolForecast,
    PoolSimulator,
    TieBreak,
    find_reservation,
    replay,
)

MIB = 1024 * 1024


def step_like(seed: int, num_layers: int = 24, num_streams: int = 1) -> list[Event]:
    """Activations that grow and are freed in reverse, with short-lived ones between, as in a step."""
    rng = random.Random(seed)
    events: list[Event] = []
    for stream in range(num_streams):
        saved = []
        for layer in range(num_layers):
            short, kept = f"{stream}.short{layer}", f"{stream}.kept{layer}"
            events.append(Allocate(short, rng.randrange(1, 48 * MIB), stream))
            events.append(Allocate(kept, rng.randrange(1, 32 * MIB), stream))
            events.append(Free(short))
            saved.append(kept)
        for layer, kept in enumerate(reversed(saved)):
            gradient = f"{stream}.gradient{layer}"
            events.append(Allocate(gradient, rng.randrange(1, 40 * MIB), stream))
            events.append(Free(kept))
            if layer % 3:
                events.append(Free(gradient))
    return events


def run(pool: PoolSimulator, events: list[Event]) -> None:
    handles: dict[str, int] = {}
    for event in events:
        if isinstance(event, Free):
            pool.free(handles.pop(event.name))
        else:
            handles[event.name] = pool.allocate(event.size_bytes, event.stream)


def test_one_segment_of_what_two_tensors_need() -> None:
    events: list[Event] = [Allocate("a", 30 * MIB), Allocate("b", 20 * MIB), Free("a"), Free("b")]
    found = find_reservation(events)
    assert found.segments == ((0, 50 * MIB),)
    assert found.reserved_bytes == 50 * MIB


def test_holes_join_in_one_segment() -> None:
    # Grown piece by piece, the two holes of 30 MiB never make room for 60.
    events: list[Event] = [
        Allocate("a", 30 * MIB),
        Allocate("b", 30 * MIB),
        Free("a"),
        Free("b"),
        Allocate("c", 60 * MIB),
    ]
    assert replay(events).reserved_bytes == 120 * MIB
    assert find_reservation(events).reserved_bytes == 60 * MIB


def test_little_is_left_to_the_allocator() -> None:
    events: list[Event] = [Allocate("a", 3 * MIB), Allocate("b", 1000)]
    found = find_reservation(events)
    assert found.segments == ()
    assert found.reserved_bytes == replay(events).reserved_bytes == 22 * MIB


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3), st.sampled_from(list(TieBreak)))
def test_the_events_fit_into_what_was_reserved(seed: int, num_streams: int, tie_break: TieBreak) -> None:
    events = step_like(seed, num_streams=num_streams)
    rules = AllocatorRules(tie_break=tie_break)
    found = find_reservation(events, rules)
    pool = PoolSimulator(rules)
    for stream, size in found.segments:
        pool.free(pool.allocate(size, stream))
    run(pool, events)
    assert pool.reserved_bytes == found.reserved_bytes
    assert found.reserved_bytes <= replay(events, rules).reserved_bytes
    assert found.reserved_bytes >= replay(events, rules).peak_allocated_bytes


def test_less_is_wasted_than_by_growing() -> None:
    steps = [step_like(seed) for seed in range(20)]
    ours = sum(find_reservation(events).reserved_bytes for events in steps)
    grown = sum(replay(events).reserved_bytes for events in steps)
    in_use = sum(replay(events).peak_allocated_bytes for events in steps)
    assert ours - in_use < 0.8 * (grown - in_use)


def test_a_second_step_shares_the_memory_of_the_first() -> None:
    forecast = PoolForecast()
    first, left = forecast.reserve(step_like(1))
    assert first.reserved_bytes == forecast.reserved_bytes == find_reservation(step_like(1)).reserved_bytes
    forecast.release(left)
    again, _ = forecast.reserve([Allocate("a", 20 * MIB), Free("a")])
    assert again.segments == ()
    assert again.reserved_bytes == first.reserved_bytes


def test_what_the_first_step_left_is_not_shared() -> None:
    forecast = PoolForecast()
    first, left = forecast.reserve([Allocate("a", 40 * MIB)])
    assert len(left) == 1
    second, _ = forecast.reserve([Allocate("b", 40 * MIB), Free("b")])
    assert second.reserved_bytes == 2 * first.reserved_bytes == 80 * MIB
