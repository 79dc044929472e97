"""The simulated pool, rule by rule, and against a second, slower one written for this test."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmux.errors import ConfigError
from trainmux.simulate import (
    NO_BLOCK,
    Allocate,
    AllocatorRules,
    Event,
    Free,
    PoolSimulator,
    Segment,
    TieBreak,
    replay,
)

KIB = 1024
MIB = 1024 * KIB


def sizes(segment: Segment) -> list[int]:
    return [block.size_bytes for block in segment.blocks]


def layout(pool: PoolSimulator) -> list[list[tuple[int, bool]]]:
    """Each segment as its blocks: size, and whether it is in use."""
    return [[(b.size_bytes, b.handle is not None) for b in segment.blocks] for segment in pool.segments()]


@pytest.mark.parametrize(
    ("size", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (5000, 5120)]
)
def test_requests_are_rounded_up_to_512_bytes(size: int, block: int) -> None:
    pool = PoolSimulator()
    pool.allocate(size)
    assert (pool.allocated_bytes, pool.requested_bytes) == (block, size)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded to 512 bytes first
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (12 * MIB, 12 * MIB),
        (63 * MIB, 64 * MIB),
    ],
)
def test_what_one_request_reserves(size: int, segment: int) -> None:
    pool = PoolSimulator()
    pool.allocate(size)
    assert pool.reserved_bytes == segment


def test_zero_bytes_take_no_block() -> None:
    pool = PoolSimulator()
    assert pool.allocate(0) == NO_BLOCK
    pool.free(NO_BLOCK)
    assert (pool.reserved_bytes, pool.allocated_bytes, pool.segments()) == (0, 0, [])


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    pool = PoolSimulator()
    for _ in range(4):
        pool.allocate(512 * KIB)
    assert pool.reserved_bytes == 2 * MIB
    pool.allocate(1)
    assert pool.reserved_bytes == 4 * MIB


def test_small_and_large_requests_never_share() -> None:
    pool = PoolSimulator()
    pool.free(pool.allocate(9 * MIB))
    pool.allocate(1 * MIB)
    assert [segment.size_bytes for segment in pool.segments()] == [20 * MIB, 2 * MIB]
    pool = PoolSimulator()
    pool.free(pool.allocate(1))
    pool.allocate(1 * MIB + 1)  # 2 MiB are free, in a small segment
    assert [segment.is_small for segment in pool.segments()] == [True, False]


def test_a_small_remainder_is_kept_from_512_bytes_on() -> None:
    pool = PoolSimulator()
    first = pool.allocate(1024)
    pool.allocate(512)
    pool.free(first)
    pool.allocate(512)
    assert sizes(pool.segments()[0])[:3] == [512, 512, 512]


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(11 * MIB, [11 * MIB, 9 * MIB]), (19 * MIB - 512, [19 * MIB - 512, MIB + 512]), (19 * MIB, [20 * MIB])],
)
def test_a_large_remainder_is_kept_above_1_mib_only(size: int, blocks: list[int]) -> None:
    pool = PoolSimulator()
    pool.free(pool.allocate(2 * MIB))
    pool.allocate(size)
    assert [sizes(segment) for segment in pool.segments()] == [blocks]
    assert pool.allocated_bytes == blocks[0]


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    pool = PoolSimulator()
    wide, _, tight, _ = (pool.allocate(size) for size in (6 * MIB, 2 * MIB, 4 * MIB, 8 * MIB))
    pool.free(wide)
    pool.free(tight)
    pool.allocate(3 * MIB + 512 * KIB)
    assert layout(pool) == [[(6 * MIB, False), (2 * MIB, True), (4 * MIB, True), (8 * MIB, True)]]


def test_a_block_is_cut_at_its_front() -> None:
    pool = PoolSimulator()
    pool.allocate(2 * MIB)
    assert layout(pool) == [[(2 * MIB, True), (18 * MIB, False)]]
    assert [block.offset_bytes for block in pool.segments()[0].blocks] == [0, 2 * MIB]


def test_a_freed_block_merges_on_both_sides() -> None:
    pool = PoolSimulator()
    left, middle, right, _ = (pool.allocate(5 * MIB) for _ in range(4))
    pool.free(left)
    pool.free(right)
    assert layout(pool) == [[(5 * MIB, False), (5 * MIB, True), (5 * MIB, False), (5 * MIB, True)]]
    pool.free(middle)
    assert layout(pool) == [[(15 * MIB, False), (5 * MIB, True)]]
    pool.allocate(15 * MIB)
    assert pool.reserved_bytes == 20 * MIB


def test_nothing_merges_across_segments() -> None:
    pool = PoolSimulator()
    handles = [pool.allocate(10 * MIB) for _ in range(2)]
    for handle in handles:
        pool.free(handle)
    pool.allocate(20 * MIB)
    assert [segment.size_bytes for segment in pool.segments()] == [10 * MIB, 10 * MIB, 20 * MIB]


def test_streams_do_not_share_free_blocks() -> None:
    pool = PoolSimulator()
    pool.free(pool.allocate(10 * MIB, stream=1))
    pool.allocate(10 * MIB, stream=2)
    assert pool.reserved_bytes == 20 * MIB
    pool.allocate(10 * MIB, stream=1)
    assert pool.reserved_bytes == 20 * MIB
    assert [segment.stream for segment in pool.segments()] == [1, 2]


def holes_of_equal_size(pool: PoolSimulator) -> list[int]:
    """Two full segments with a free block of 6 MiB each, at the end of the first, the start of the second."""
    handles = [pool.allocate(size) for size in (8 * MIB, 6 * MIB, 6 * MIB, 6 * MIB, 8 * MIB, 6 * MIB)]
    return [handles[2], handles[3]]


def which_hole(pool: PoolSimulator) -> int:
    """The segment from which the next 6 MiB are taken."""
    before = layout(pool)
    pool.allocate(6 * MIB)
    return next(i for i, (old, new) in enumerate(zip(before, layout(pool), strict=True)) if old != new)


def test_between_equal_sizes_the_oldest_segment_is_taken() -> None:
    for order in (1, -1):
        pool = PoolSimulator()
        for hole in holes_of_equal_size(pool)[::order]:
            pool.free(hole)
        assert which_hole(pool) == 0


@pytest.mark.parametrize(("addresses", "chosen"), [([], 0), ([10**9, 0], 1), ([0], 0), ([0, 10**9], 0)])
def test_torch_2_11_takes_the_lowest_address(addresses: list[int], chosen: int) -> None:
    pool = PoolSimulator(AllocatorRules.for_torch("2.11.0+cu130"), addresses)
    for hole in holes_of_equal_size(pool):
        pool.free(hole)
    assert which_hole(pool) == chosen


@pytest.mark.parametrize(("version", "offset"), [("2.11.0", 0), ("2.12.1", 14 * MIB), ("2.13.0", 0)])
def test_torch_2_12_takes_the_oldest_record(version: str, offset: int) -> None:
    pool = PoolSimulator(AllocatorRules.for_torch(version))
    first, _, last = (pool.allocate(size) for size in (6 * MIB, 8 * MIB, 6 * MIB))
    # The first two were cut off and got records of their own; the last is what remained of the segment.
    pool.free(first)
    pool.free(last)
    handle = pool.allocate(6 * MIB)
    assert [b.offset_bytes for b in pool.segments()[0].blocks if b.handle == handle] == [offset]


def test_the_tie_break_follows_the_version() -> None:
    ties = [AllocatorRules.for_torch(v).tie_break for v in ("2.11.0", "2.12.0+cu130", "2.13.0a0", "2.14")]
    assert ties == [TieBreak.ADDRESS, TieBreak.BLOCK, TieBreak.SEGMENT, TieBreak.SEGMENT]
    for version in ("2.10.1", "1.13", "none"):
        with pytest.raises(ConfigError, match=r"2\.11"):
            AllocatorRules.for_torch(version)


def test_oversized_blocks_are_not_used_for_less() -> None:
    limited = AllocatorRules(max_split_bytes=100 * MIB)
    for rules, reserved in ((AllocatorRules(), 120 * MIB), (limited, 120 * MIB + 50 * MIB)):
        pool = PoolSimulator(rules)
        pool.free(pool.allocate(120 * MIB))
        pool.allocate(50 * MIB)
        assert pool.reserved_bytes == reserved


@pytest.mark.parametrize(("size", "reserved"), [(102 * MIB, 120 * MIB), (100 * MIB, 220 * MIB)])
def test_oversized_blocks_may_exceed_an_oversized_request_by_less_than_20_mib(
    size: int, reserved: int
) -> None:
    pool = PoolSimulator(AllocatorRules(max_split_bytes=100 * MIB))
    pool.free(pool.allocate(120 * MIB))
    pool.allocate(size)
    assert pool.reserved_bytes == reserved
    assert all(len(segment.blocks) == 1 for segment in pool.segments())


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_block_bytes": 0},
        {"max_small_bytes": 1000},
        {"small_segment_bytes": 512 * KIB},
        {"large_segment_bytes": 8 * MIB},
        {"max_split_bytes": 20 * MIB},
    ],
)
def test_rules_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AllocatorRules(**wrong)  # type: ignore[arg-type]


def test_handles_are_freed_once() -> None:
    pool = PoolSimulator()
    handle = pool.allocate(1)
    pool.free(handle)
    pool.allocate(1)
    for wrong in (handle, 99):
        with pytest.raises(ConfigError, match=f"got {wrong}"):
            pool.free(wrong)
    with pytest.raises(ConfigError, match="-1"):
        pool.allocate(-1)


def test_peaks_and_segments_are_counted() -> None:
    pool = PoolSimulator()
    first = pool.allocate(3 * MIB)
    second = pool.allocate(700)
    pool.free(first)
    assert pool.peak_allocated_bytes == 3 * MIB + 1024
    assert (pool.allocated_bytes, pool.requested_bytes) == (1024, 700)
    assert pool.peak_reserved_bytes == pool.reserved_bytes == 22 * MIB
    assert [segment.free_bytes for segment in pool.segments()] == [20 * MIB, 2 * MIB - 1024]
    assert pool.segments()[1].blocks[0].handle == second


def test_replay() -> None:
    events: list[Event] = [
        Allocate("a", 10 * MIB),
        Free("a"),
        Allocate("b", 8 * MIB),
        Allocate("empty", 0),
        Allocate("c", 1, stream=1),
    ]
    use = replay(events)
    assert use.reserved_bytes == 12 * MIB
    assert use.peak_allocated_bytes == 10 * MIB
    assert use.fragmentation == pytest.approx(1 / 6)
    assert use.live == ("b", "empty", "c")
    assert use.live_bytes == 8 * MIB + 512
    assert (replay([]).reserved_bytes, replay([]).fragmentation) == (0, 0)
    refused: list[list[Event]] = [
        [Free("a")],
        [Allocate("a", 1), Allocate("a", 1)],
        [Allocate("a", 0), Free("a"), Free("a")],
    ]
    for wrong in refused:
        with pytest.raises(ConfigError, match="'a'"):
            replay(wrong)


def test_ten_thousand_events_take_well_under_a_second() -> None:
    rng = random.Random(0)
    events: list[Event] = []
    live: list[str] = []
    for number in range(10_000):
        if live and rng.random() < 0.48:
            events.append(Free(live.pop(rng.randrange(len(live)))))
        else:
            live.append(str(number))
            events.append(Allocate(live[-1], int(2 ** rng.uniform(0, 26))))
    start = time.process_time()
    replay(events)
    assert time.process_time() - start < 1


@dataclass
class SlowPool:
    """The same rules in the plainest form: a list of blocks per segment, and a search through all of them."""

    segments: list[tuple[int, bool, list[list[int]]]] = field(default_factory=list)
    """Stream, whether small, blocks of [size, number of the allocation or -1]."""

    def allocate(self, number: int, size: int, stream: int) -> None:
        size = (size + 511) // 512 * 512
        is_small = size <= MIB
        found = [
            (block[0], s, b)
            for s, (of_stream, of_small, blocks) in enumerate(self.segments)
            for b, block in enumerate(blocks)
            if block[1] < 0 and block[0] >= size and (of_stream, of_small) == (stream, is_small)
        ]
        if not found:
            whole = (
                2 * MIB if is_small else 20 * MIB if size < 10 * MIB else (size - 1) // (2 * MIB) * 2 * MIB
            )
            whole += 2 * MIB if size >= 10 * MIB else 0
            self.segments.append((stream, is_small, [[whole, -1]]))
            found = [(whole, len(self.segments) - 1, 0)]
        whole, s, b = min(found)
        rest = whole - size
        if rest >= 512 if is_small else rest > MIB:
            self.segments[s][2][b : b + 1] = [[size, number], [rest, -1]]
        else:
            self.segments[s][2][b] = [whole, number]

    def free(self, number: int) -> None:
        for _, _, blocks in self.segments:
            for b, block in enumerate(blocks):
                if block[1] == number:
                    block[1] = -1
                    if b + 1 < len(blocks) and blocks[b + 1][1] < 0:
                        block[0] += blocks.pop(b + 1)[0]
                    if b and blocks[b - 1][1] < 0:
                        blocks[b - 1][0] += blocks.pop(b)[0]
                    return

    def layout(self) -> list[list[tuple[int, bool]]]:
        return [[(size, number >= 0) for size, number in blocks] for _, _, blocks in self.segments]


# Few values, so that equal sizes and exact fits are common, beside any value at all.
SIZES = st.one_of(
    st.sampled_from(
        [1, 512, 513, 300 * KIB, MIB, MIB + 1, 2 * MIB, 5 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB]
    ),
    st.integers(0, 64 * MIB),
)
# A number >= 0 frees one of what is live, counted modulo how much that is.
STEPS = st.lists(st.one_of(st.tuples(SIZES, st.integers(0, 1)), st.integers(0, 1000)), max_size=60)
RULES = st.sampled_from([AllocatorRules(tie_break=tie) for tie in TieBreak])


def events_of(steps: list[tuple[int, int] | int]) -> list[Event]:
    events: list[Event] = []
    live: list[str] = []
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            live.append(str(number))
            events.append(Allocate(live[-1], *step))
        elif live:
            events.append(Free(live.pop(step % len(live))))
    return events


def apply(pool: PoolSimulator, event: Event, handles: dict[str, int]) -> None:
    if isinstance(event, Free):
        pool.free(handles.pop(event.name))
    else:
        handles[event.name] = pool.allocate(event.size_bytes, event.stream)


@settings(deadline=None)
@given(STEPS)
def test_like_the_slow_pool(steps: list[tuple[int, int] | int]) -> None:
    fast, slow = PoolSimulator(), SlowPool()
    handles: dict[str, int] = {}
    for event in events_of(steps):
        if isinstance(event, Free):
            slow.free(int(event.name))
        elif event.size_bytes:
            slow.allocate(int(event.name), event.size_bytes, event.stream)
        apply(fast, event, handles)
        assert layout(fast) == slow.layout()


@settings(deadline=None)
@given(STEPS, RULES)
def test_invariants(steps: list[tuple[int, int] | int], rules: AllocatorRules) -> None:
    pool = PoolSimulator(rules)
    handles: dict[str, int] = {}
    sizes_of: dict[str, int] = {}
    reserved = peak = 0
    for event in events_of(steps):
        apply(pool, event, handles)
        if isinstance(event, Allocate):
            sizes_of[event.name] = event.size_bytes
        segments = pool.segments()
        for segment in segments:
            ends = [0, *(block.offset_bytes + block.size_bytes for block in segment.blocks)]
            assert [block.offset_bytes for block in segment.blocks] == ends[:-1]
            assert ends[-1] == segment.size_bytes
            assert all(b.size_bytes >= max(512, b.requested_bytes) for b in segment.blocks)
            free = [block.handle is None for block in segment.blocks]
            assert not any(left and right for left, right in itertools.pairwise(free))
        used = [block for segment in segments for block in segment.blocks if block.handle is not None]
        live = {name: handle for name, handle in handles.items() if handle != NO_BLOCK}
        assert {block.handle for block in used} == set(live.values())
        assert len(used) == len(live)
        assert {b.handle: b.requested_bytes for b in used} == {h: sizes_of[name] for name, h in live.items()}
        assert pool.reserved_bytes == sum(segment.size_bytes for segment in segments)
        assert pool.allocated_bytes == sum(block.size_bytes for block in used)
        assert pool.requested_bytes <= pool.allocated_bytes <= pool.reserved_bytes
        assert pool.reserved_bytes >= reserved
        reserved, peak = pool.reserved_bytes, max(peak, pool.allocated_bytes)
    assert (pool.peak_reserved_bytes, pool.peak_allocated_bytes) == (reserved, peak)
    assert replay(events_of(steps), rules) == replay(events_of(steps), rules)
    assert replay(events_of(steps), rules).reserved_bytes == reserved


@settings(deadline=None)
@given(STEPS, RULES, SIZES, st.integers(0, 1))
def test_what_was_freed_is_reused(
    steps: list[tuple[int, int] | int], rules: AllocatorRules, size: int, stream: int
) -> None:
    pool = PoolSimulator(rules)
    handles: dict[str, int] = {}
    for event in events_of(steps):
        apply(pool, event, handles)
    handle = pool.allocate(size, stream)
    reserved, allocated = pool.reserved_bytes, pool.allocated_bytes
    pool.free(handle)
    pool.allocate(size, stream)
    assert pool.reserved_bytes == reserved
    assert pool.allocated_bytes == allocated


@settings(deadline=None)
@given(STEPS, STEPS, RULES)
def test_a_copy_goes_its_own_way(
    before: list[tuple[int, int] | int], after: list[tuple[int, int] | int], rules: AllocatorRules
) -> None:
    pool = PoolSimulator(rules)
    handles: dict[str, int] = {}
    for event in events_of(before):
        apply(pool, event, handles)
    state = (pool.segments(), pool.allocated_bytes, pool.peak_allocated_bytes)
    copies = [pool.copy(), pool.copy()]
    for copy in copies:
        mine = dict(handles)
        for handle in handles.values():
            copy.free(handle)
        assert copy.allocated_bytes == 0
        for event in events_of(after):
            if isinstance(event, Allocate):
                event = dataclasses.replace(event, name=f"after {event.name}")
            else:
                event = Free(f"after {event.name}")
            apply(copy, event, mine)
    assert (pool.segments(), pool.allocated_bytes, pool.peak_allocated_bytes) == state
    assert copies[0].segments() == copies[1].segments()
