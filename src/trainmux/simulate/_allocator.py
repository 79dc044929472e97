"""Exact simulation of one pool of PyTorch's CUDA caching allocator.

A pool is the ordinary one, a CUDA graph's private pool, or a ``torch.cuda.MemPool``: the same code in torch
serves all three. Source: ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp`` (``malloc``,
``get_free_block``, ``alloc_block``, ``alloc_found_block``, ``free_block``, ``try_merge_blocks``), torch 2.11
to 2.13. The rules with their sizes are in `_rules`; they are followed here, the code is our own.

Assumed: nothing is returned to the driver meanwhile (in a live private pool nothing can be; the ordinary
pool returns segments on ``empty_cache`` and when the device is full), and blocks are freed at once (no
``record_stream``). torch 2.11 takes the lowest address among free blocks of equal size, and addresses are the
driver's choice: unless they are given, segments are assumed to lie at rising addresses in the order they are
made. On an H200 that held in 11 of 12 captures and never outside one. Later versions do not look at the
addresses of segments (`TieBreak`).
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainmux.errors import ConfigError
from trainmux.simulate._rules import DEFAULT_RULES, AllocatorRules, TieBreak

NO_BLOCK = 0
"""The handle of an allocation of zero bytes: torch takes no block for it, and freeing it does nothing."""


@dataclass(frozen=True)
class Block:
    """A part of a segment. ``handle`` is ``None`` where it is free."""

    offset_bytes: int
    size_bytes: int
    requested_bytes: int
    handle: int | None


@dataclass(frozen=True)
class Segment:
    """Memory reserved by one call to the driver; its ``blocks`` tile it in order of their offsets."""

    size_bytes: int
    stream: int
    is_small: bool
    blocks: tuple[Block, ...]

    @property
    def free_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks if block.handle is None)


@dataclass(slots=True)
class _Block:
    """A block as the simulator keeps it; ``previous`` and ``next`` are its neighbours in the segment."""

    segment: int
    address: int
    size: int
    stream: int
    is_small: bool
    previous: int | None = None
    next: int | None = None
    handle: int | None = None
    requested: int = 0


# Size, two values that decide between equal sizes, number of the block: the first that fits is the best fit.
_FreeEntry = tuple[int, int, int, int]


class PoolSimulator:
    """One pool, empty at first; a handle stands for the pointer torch would return.

    ``segment_addresses`` are those of the first segments, in the order they are reserved, where they are
    known: from a recorded run, or because the pool draws from memory of our own. Further ones lie above.
    """

    def __init__(self, rules: AllocatorRules = DEFAULT_RULES, segment_addresses: Sequence[int] = ()) -> None:
        self._rules = rules
        self._segment_addresses = tuple(segment_addresses)
        self._next_address = 0
        self._blocks: dict[int, _Block] = {}
        self._free: dict[tuple[bool, int], list[_FreeEntry]] = {}
        self._live: dict[int, int] = {}
        self._first_blocks: list[int] = []
        self._next_number = 0
        self._next_handle = NO_BLOCK + 1
        self._reserved = 0
        self._allocated = 0
        self._requested = 0
        self._peak_allocated = 0

    @property
    def reserved_bytes(self) -> int:
        """What the pool took from the driver; never shrinks."""
        return self._reserved

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use, counting all of a block, as torch does."""
        return self._allocated

    @property
    def requested_bytes(self) -> int:
        """Bytes that were asked for in the blocks in use."""
        return self._requested

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest `reserved_bytes` so far: the present one, as it never shrinks."""
        return self._reserved

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest `allocated_bytes` so far."""
        return self._peak_allocated

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """Take a block and return its handle; `NO_BLOCK` for zero bytes. A negative size is refused."""
        if size_bytes < 0:
            raise ConfigError(
                f"an allocation must have zero bytes or more, but got {size_bytes}; "
                "pass the size of the tensor's storage"
            )
        if size_bytes == 0:
            return NO_BLOCK
        wanted = self._rules.block_bytes(size_bytes)
        number = self._take_best_fit(wanted, stream)
        if number is None:
            number = self._reserve(wanted, stream)
        if self._rules.splits(self._blocks[number].size, wanted):
            number = self._split(number, wanted)

        block = self._blocks[number]
        handle = self._next_handle
        self._next_handle += 1
        block.handle, block.requested = handle, size_bytes
        self._live[handle] = number
        self._allocated += block.size
        self._requested += size_bytes
        self._peak_allocated = max(self._peak_allocated, self._allocated)
        return handle

    def free(self, handle: int) -> None:
        """Give a block back and merge it with free neighbours. A handle that is not in use is refused."""
        if handle == NO_BLOCK:
            return
        number = self._live.pop(handle, None)
        if number is None:
            raise ConfigError(
                f"free needs a handle that is in use, but got {handle}, which was never given out or is "
                "free already; free each allocation once"
            )
        block = self._blocks[number]
        self._allocated -= block.size
        self._requested -= block.requested
        block.handle, block.requested = None, 0
        for neighbour in (block.previous, block.next):
            if neighbour is not None and self._blocks[neighbour].handle is None:
                self._merge(number, neighbour)
        self._put_on_free_list(number)

    def segments(self) -> list[Segment]:
        """The segments in the order they were reserved, with their blocks."""
        return [self._segment(self._blocks[first]) for first in self._first_blocks]

    def copy(self) -> PoolSimulator:
        """An independent pool in the same state, to try what would happen next; handles stay valid."""
        other = copy.copy(self)
        other._blocks = {number: copy.copy(block) for number, block in self._blocks.items()}
        other._free = {key: list(entries) for key, entries in self._free.items()}
        other._live = dict(self._live)
        other._first_blocks = list(self._first_blocks)
        return other

    def _segment(self, first: _Block) -> Segment:
        records = []
        block = first
        while True:
            offset = block.address - first.address
            records.append(Block(offset, block.size, block.requested, block.handle))
            if block.next is None:
                break
            block = self._blocks[block.next]
        size = sum(record.size_bytes for record in records)
        return Segment(size, first.stream, first.is_small, tuple(records))

    def _take_best_fit(self, wanted: int, stream: int) -> int | None:
        """Remove the smallest free block of at least ``wanted`` bytes from its list, if it may be used."""
        entries = self._free.get((self._rules.is_small(wanted), stream), [])
        position = bisect_left(entries, (wanted, -1, -1, -1))
        if position == len(entries) or not self._rules.may_use(entries[position][0], wanted):
            return None
        return entries.pop(position)[-1]

    def _reserve(self, wanted: int, stream: int) -> int:
        """A new segment as one block, on no free list."""
        size = self._rules.segment_bytes(wanted)
        segment = len(self._first_blocks)
        if segment < len(self._segment_addresses):
            address = self._segment_addresses[segment]
        else:
            address = self._next_address
        self._next_address = max(self._next_address, address + size)
        block = _Block(segment, address, size, stream, self._rules.is_small(wanted))
        number = self._add(block)
        self._first_blocks.append(number)
        self._reserved += size
        return number

    def _split(self, rest_number: int, wanted: int) -> int:
        """Cut ``wanted`` bytes off the front as a new block; the rest keeps its number and becomes free."""
        rest = self._blocks[rest_number]
        front = _Block(rest.segment, rest.address, wanted, rest.stream, rest.is_small)
        number = self._add(front)
        rest.address += wanted
        rest.size -= wanted
        self._link(rest.segment, rest.previous, number)
        self._link(rest.segment, number, rest_number)
        self._put_on_free_list(rest_number)
        return number

    def _merge(self, number: int, neighbour_number: int) -> None:
        """Let a block that is on no free list swallow a free neighbour."""
        block, neighbour = self._blocks[number], self._blocks[neighbour_number]
        entries = self._free[neighbour.is_small, neighbour.stream]
        del entries[bisect_left(entries, self._entry(neighbour_number))]
        if block.previous == neighbour_number:
            block.address = neighbour.address
            self._link(block.segment, neighbour.previous, number)
        else:
            self._link(block.segment, number, neighbour.next)
        block.size += neighbour.size
        del self._blocks[neighbour_number]

    def _add(self, block: _Block) -> int:
        number = self._next_number
        self._next_number += 1
        self._blocks[number] = block
        return number

    def _link(self, segment: int, left: int | None, right: int | None) -> None:
        """Make two blocks of a segment neighbours; ``None`` stands for the segment's end on that side."""
        if right is not None:
            self._blocks[right].previous = left
        if left is not None:
            self._blocks[left].next = right
        elif right is not None:
            self._first_blocks[segment] = right

    def _entry(self, number: int) -> _FreeEntry:
        block = self._blocks[number]
        if self._rules.tie_break is TieBreak.BLOCK:
            return (block.size, number, 0, number)  # numbers are given in the order that records are made
        segment = block.segment if self._rules.tie_break is TieBreak.SEGMENT else 0
        return (block.size, segment, block.address, number)

    def _put_on_free_list(self, number: int) -> None:
        block = self._blocks[number]
        insort(self._free.setdefault((block.is_small, block.stream), []), self._entry(number))


@dataclass(frozen=True)
class Allocate:
    """``name`` takes ``size_bytes`` on ``stream``."""

    name: str
    size_bytes: int
    stream: int = 0


@dataclass(frozen=True)
class Free:
    """``name`` gives its block back."""

    name: str


Event = Allocate | Free


@dataclass(frozen=True)
class PoolUse:
    """What a row of events needs of a pool that was empty before."""

    reserved_bytes: int
    peak_allocated_bytes: int
    live_bytes: int
    live: tuple[str, ...]

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that is not in use even at the peak; 0 for an empty pool."""
        return 1 - self.peak_allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


def replay(events: Iterable[Event], rules: AllocatorRules = DEFAULT_RULES) -> PoolUse:
    """Run ``events`` in order on an empty pool.

    Refused with `ConfigError`: allocating a name that is live, and freeing one that is not.
    """
    pool = PoolSimulator(rules)
    handles: dict[str, int] = {}
    for event in events:
        if isinstance(event, Free):
            if event.name not in handles:
                raise ConfigError(
                    f"Free needs a live name, but got {event.name!r}; allocate it first and free it once"
                )
            pool.free(handles.pop(event.name))
        elif event.name in handles:
            raise ConfigError(
                f"Allocate needs a name that is not live, but got {event.name!r} again; "
                "free it first or use another name"
            )
        else:
            handles[event.name] = pool.allocate(event.size_bytes, event.stream)
    return PoolUse(pool.reserved_bytes, pool.peak_allocated_bytes, pool.allocated_bytes, tuple(handles))
