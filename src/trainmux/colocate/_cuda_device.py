"""Co-location on a CUDA device: a stream per job, ends by events, arenas in virtual memory (D10).

Each job has a range of addresses of its own: its area, then as many regions as it needs at its peak. An arena
is a row of physical regions. The job at its base sees them from the first on, the job at its top from the
last on, each counting upwards. So one region is mapped into both ranges, and the scheduler decides who may
use it. Nothing is mapped or unmapped per iteration. A new budget, pairing or job exchanges regions under the
same addresses, and captured graphs stay valid.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from trainmux.colocate._demand import JobDemand, SegmentRef
from trainmux.colocate._layout import MemoryLayout
from trainmux.colocate._protocols import Ended
from trainmux.colocate._virtual_memory import PhysicalBlock, VirtualRange, granularity_bytes
from trainmux.engine import Memory
from trainmux.errors import ConfigError
from trainmux.runtime import borrow_stream

_POISON = 0xFF
"""A byte that makes every floating-point number NaN."""

_POLL_SECONDS = 10e-6
_SECONDS_PER_CLOCK = 4.0
"""How long one event serves as the zero of times: elapsed times are 32-bit floats."""

_Places = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class _Moment:
    """An event whose time on the host's clock is known."""

    event: torch.cuda.Event
    at: float

    def time_of(self, event: torch.cuda.Event) -> float:
        return self.at + float(self.event.elapsed_time(event)) / 1e3


@dataclass(frozen=True)
class _Flying:
    """A segment that is enqueued and whose end was not reported."""

    ref: SegmentRef
    start: torch.cuda.Event
    end: torch.cuda.Event
    clock: _Moment

    def ended_at(self) -> float:
        """The end of a segment that has ended."""
        return self.clock.time_of(self.end)


@dataclass(eq=False)
class _PlacedJob:
    """A job on the device: its stream, its addresses, its own memory."""

    addresses: VirtualRange
    area: PhysicalBlock
    memory: Memory
    demand: JobDemand
    in_flight: deque[_Flying] = field(default_factory=deque)
    stream: torch.cuda.Stream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = borrow_stream(self.addresses.device, self)


class CudaDevice:
    """Runs segments on the streams of one device, in regions of ``region_bytes``.

    ``work`` is called when a segment is enqueued, with its job's stream as the current one; it must enqueue
    work there and not wait for it. ``poisons`` fills new memory with NaN. Refused with `ConfigError`: regions
    that the device cannot map.
    """

    def __init__(self, device: torch.device, *, region_bytes: int, poisons: bool = False) -> None:
        unit = granularity_bytes(device)
        if region_bytes <= 0 or region_bytes % unit:
            raise ConfigError(
                f"on this device a region must be a positive multiple of {unit} bytes, but got "
                f"{region_bytes}; leave it out to have it chosen"
            )
        self.device = device
        self._region_bytes = region_bytes
        self._poisons = poisons
        self._placed: dict[str, _PlacedJob] = {}
        self._arenas: dict[_Places, list[PhysicalBlock]] = {}
        self._ends: dict[SegmentRef, torch.cuda.Event] = {}
        self._spare_events: list[torch.cuda.Event] = []
        self._clock_stream = borrow_stream(device, self)
        self._clock = self._look_at_clock()
        self.num_mapped = 0
        """Mappings of regions made so far."""

    @property
    def reserved_bytes(self) -> int:
        areas = sum(
            placed.area.size_bytes + placed.demand.local_bytes - placed.demand.area_bytes
            for placed in self._placed.values()
        )
        return areas + sum(block.size_bytes for blocks in self._arenas.values() for block in blocks)

    @property
    def free_bytes(self) -> float:
        return torch.cuda.mem_get_info(self.device)[0]

    def now(self) -> float:
        return time.perf_counter()

    # ---- memory ------------------------------------------------------------------------------------

    def arrange(self, layout: MemoryLayout, demands: Mapping[str, JobDemand]) -> None:
        gone = self._placed.keys() - layout.names
        for name in gone:
            self._give_back(self._placed.pop(name))
        if gone:
            torch.cuda.empty_cache()  # memory cached for a job that has left would count against the others
        spare = self._shrink(layout)
        missing = self._refill(layout, spare)
        for row in layout.arenas:  # unmap before anything new is created
            blocks = self._arenas[row.base, row.top]
            for name in row.names:
                if name in self._placed:
                    self._unmap(self._placed[name], self._wanted(blocks, name in row.top, demands[name]))
        for block in spare:
            block.release()
        for places, number in missing.items():
            new = [PhysicalBlock(self._region_bytes, self.device) for _ in range(number)]
            self._arenas[places] += new
            if self._poisons:
                self._poison(new)
        for row in layout.arenas:
            blocks = self._arenas[row.base, row.top]
            for name in row.names:
                if name not in self._placed:
                    self._placed[name] = self._let_in(demands[name])
                self._placed[name].demand = demands[name]  # its scratch may have grown
                self._map(self._placed[name], self._wanted(blocks, name in row.top, demands[name]))

    def keep_less(self, demand: JobDemand) -> None:
        self._placed[demand.name].demand = demand

    def _shrink(self, layout: MemoryLayout) -> list[PhysicalBlock]:
        """Take regions out of arenas that have too many or are gone; a base keeps the regions it sees."""
        wanted = {(row.base, row.top): row.capacity_bytes // self._region_bytes for row in layout.arenas}
        spare = []
        for places, blocks in list(self._arenas.items()):
            keeps = wanted.get(places, 0)
            spare += blocks[keeps:]
            del blocks[keeps:]
            if places not in wanted:
                del self._arenas[places]
        return spare

    def _refill(self, layout: MemoryLayout, spare: list[PhysicalBlock]) -> dict[_Places, int]:
        """Put spare regions into arenas that lack some; returns how many each still lacks."""
        missing = {}
        for row in layout.arenas:
            blocks = self._arenas.setdefault((row.base, row.top), [])
            lacks = row.capacity_bytes // self._region_bytes - len(blocks)
            found = min(lacks, len(spare))
            blocks += [spare.pop() for _ in range(found)]
            missing[row.base, row.top] = lacks - found
        return missing

    def _wanted(
        self, blocks: list[PhysicalBlock], is_top: bool, demand: JobDemand
    ) -> dict[int, PhysicalBlock]:
        """The regions that a job is to see, by offset among its addresses, as far as they exist yet."""
        num_seen = -(-demand.peak_bytes // self._region_bytes)
        seen = list(reversed(blocks))[:num_seen] if is_top else blocks[:num_seen]
        return {demand.area_bytes + index * self._region_bytes: block for index, block in enumerate(seen)}

    def _unmap(self, placed: _PlacedJob, wanted: Mapping[int, PhysicalBlock]) -> None:
        for offset in placed.addresses.mapped_offsets:
            is_own = offset < placed.demand.area_bytes
            if not is_own and placed.addresses.block_at(offset) is not wanted.get(offset):
                placed.addresses.unmap(offset)

    def _map(self, placed: _PlacedJob, wanted: Mapping[int, PhysicalBlock]) -> None:
        self._unmap(placed, wanted)  # at a top, new regions at the end move all others
        rows = [
            (offset, block) for offset, block in wanted.items() if placed.addresses.block_at(offset) is None
        ]
        placed.addresses.map(rows)
        self.num_mapped += len(rows)

    def _poison(self, blocks: list[PhysicalBlock]) -> None:
        """Fill new regions."""
        for block in blocks:
            addresses = VirtualRange(block.size_bytes, self.device)
            addresses.map([(0, block)])
            addresses.tensor().fill_(_POISON)
            torch.cuda.synchronize(self.device)
            addresses.unmap(0)

    def _let_in(self, demand: JobDemand) -> _PlacedJob:
        num_regions = -(-demand.peak_bytes // self._region_bytes)
        area = PhysicalBlock(demand.area_bytes, self.device)
        addresses = VirtualRange(demand.area_bytes + num_regions * self._region_bytes, self.device)
        addresses.map([(0, area)])
        memory = Memory(addresses.tensor(), torch.zeros(1, dtype=torch.uint8), {})
        memory.at(0, demand.area_bytes).fill_(_POISON if self._poisons else 0)
        torch.cuda.current_stream(self.device).synchronize()
        return _PlacedJob(addresses, area, memory, demand)

    def _give_back(self, placed: _PlacedJob) -> None:
        placed.stream.synchronize()
        for flying in placed.in_flight:  # the run was aborted
            del self._ends[flying.ref]
        for offset in placed.addresses.mapped_offsets:
            placed.addresses.unmap(offset)
        placed.area.release()

    def memory_of(self, job: str) -> Memory:
        return self._placed[job].memory

    # ---- segments ----------------------------------------------------------------------------------

    @contextmanager
    def lane(self, job: str) -> Iterator[None]:
        stream = self._placed[job].stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    def behind(self, job: str) -> AbstractContextManager[None]:
        on_stream: AbstractContextManager[None] = torch.cuda.stream(self._placed[job].stream)
        return on_stream

    def enqueue(self, ref: SegmentRef, after: tuple[SegmentRef, ...], work: Callable[[], None]) -> None:
        placed = self._placed[ref.job]
        stream, start, end, clock = placed.stream, self._event(), self._event(), self._clock_now()
        with torch.cuda.stream(stream):
            for other in after:
                ends = self._ends.get(other)
                if ends is not None:  # else it has ended
                    stream.wait_event(ends)
            start.record(stream)
            work()
            end.record(stream)
        placed.in_flight.append(_Flying(ref, start, end, clock))
        self._ends[ref] = end

    @property
    def is_busy(self) -> bool:
        return bool(self._ends)

    def next_ended(self, until: float | None = None) -> Ended | None:
        while self._ends:
            ready = [
                placed
                for placed in self._placed.values()
                if placed.in_flight and placed.in_flight[0].end.query()
            ]
            if ready:  # in order of their ends, or a job of short segments would starve the reports of others
                several = len(ready) > 1
                first = min(ready, key=lambda one: one.in_flight[0].ended_at()) if several else ready[0]
                flying = first.in_flight.popleft()
                del self._ends[flying.ref]
                self._spare_events += (flying.start, flying.end)
                return Ended(flying.ref, flying.clock.time_of(flying.start), flying.ended_at())
            if until is not None and time.perf_counter() >= until:
                return None
            time.sleep(_POLL_SECONDS)
        return None

    # ---- events ------------------------------------------------------------------------------------

    def _event(self) -> torch.cuda.Event:
        return self._spare_events.pop() if self._spare_events else torch.cuda.Event(enable_timing=True)

    def _clock_now(self) -> _Moment:
        """The zero of times, renewed every now and then."""
        if time.perf_counter() - self._clock.at > _SECONDS_PER_CLOCK:
            self._clock = self._look_at_clock()
        return self._clock

    def _look_at_clock(self) -> _Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._clock_stream)
        event.synchronize()
        return _Moment(event, time.perf_counter())
