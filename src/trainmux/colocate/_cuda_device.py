"""Co-location on a CUDA device: a stream per job, ends by events, arenas in virtual memory (D10).

Each job has a row of addresses of its own: its area, and behind it as many regions as it needs at its peak.
An arena is a row of physical regions. The job at its base sees them from the first on, the job at its top
from the last on, each counting upwards; so one region is mapped into both, and who may use it is settled by
the scheduler. Nothing is mapped or unmapped per iteration. Another budget, another pairing or another job
exchanges regions under the same addresses: graphs that were captured stay as they are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from trainmux.colocate._device import Ended, MemoryNeed
from trainmux.colocate._lane import SegmentRef
from trainmux.colocate._layout import Layout
from trainmux.colocate._virtual_memory import PhysicalBlock, VirtualRange, granularity_bytes
from trainmux.engine import Memory
from trainmux.errors import ConfigError
from trainmux.runtime import borrow_stream

_POISON = 0xFF
"""A byte of which every floating number made is NaN."""

_SECONDS_BETWEEN_LOOKS = 10e-6
_SECONDS_PER_CLOCK = 4.0
"""How long the time between events is counted from one moment: it comes as a 32-bit number."""

_Places = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class _Moment:
    """An event of which the host knows when it was."""

    event: torch.cuda.Event
    at: float

    def time_of(self, event: torch.cuda.Event) -> float:
        return self.at + float(self.event.elapsed_time(event)) / 1e3


@dataclass(frozen=True)
class _Flying:
    """A segment that is enqueued and of whose end nobody was told."""

    ref: SegmentRef
    start: torch.cuda.Event
    end: torch.cuda.Event
    clock: _Moment
    error: Exception | None

    def started_at(self) -> float:
        return self.clock.time_of(self.start)

    def ended_at(self) -> float:
        """Only of one that has ended."""
        return self.clock.time_of(self.end)


@dataclass(eq=False)
class _Tenancy:
    """A job's place on the device: its stream, its addresses, its own bytes."""

    addresses: VirtualRange
    area: PhysicalBlock
    memory: Memory
    need: MemoryNeed
    in_flight: deque[_Flying] = field(default_factory=deque)
    stream: torch.cuda.Stream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = borrow_stream(self.addresses.device, self)


class CudaDevice:
    """Runs segments on the streams of one device, in regions of ``region_bytes``.

    ``work`` is called when a segment is enqueued, with its job's stream as the current one; it must leave
    work there and not wait for it. ``poisons`` fills new memory with ones, which are NaN. Refused with
    `ConfigError`: regions that the device cannot map.
    """

    def __init__(self, device: torch.device, *, region_bytes: int, poisons: bool = False) -> None:
        unit = granularity_bytes(device)
        if region_bytes <= 0 or region_bytes % unit:
            raise ConfigError(
                f"on this device a region must be a positive multiple of {unit} bytes, but got "
                f"{region_bytes}; leave it out for what suits the jobs"
            )
        self.device = device
        self._region_bytes = region_bytes
        self._poisons = poisons
        self._tenancies: dict[str, _Tenancy] = {}
        self._arenas: dict[_Places, list[PhysicalBlock]] = {}
        self._ends: dict[SegmentRef, torch.cuda.Event] = {}
        self._spare_events: list[torch.cuda.Event] = []
        self._clock_stream = borrow_stream(device, self)
        self._clock = self._look_at_clock()
        self.num_mapped = 0
        """Regions mapped so far, into one job's addresses each."""

    @property
    def reserved_bytes(self) -> int:
        areas = sum(
            tenancy.area.size_bytes + tenancy.need.local_bytes - tenancy.need.area_bytes
            for tenancy in self._tenancies.values()
        )
        return areas + sum(block.size_bytes for blocks in self._arenas.values() for block in blocks)

    @property
    def free_bytes(self) -> float:
        return torch.cuda.mem_get_info(self.device)[0]

    def laid_out(self) -> tuple[int, dict[str, MemoryNeed]]:
        """The bytes of all arenas, and what each job was given."""
        arenas = sum(block.size_bytes for blocks in self._arenas.values() for block in blocks)
        return arenas, {name: tenancy.need for name, tenancy in self._tenancies.items()}

    def now(self) -> float:
        return time.perf_counter()

    # ---- memory ------------------------------------------------------------------------------------

    def arrange(self, layout: Layout, needs: Mapping[str, MemoryNeed]) -> None:
        names = {name for row in layout.arenas for name in row.names}
        gone = self._tenancies.keys() - names
        for name in gone:
            self._give_back(self._tenancies.pop(name))
        if gone:
            torch.cuda.empty_cache()  # what torch keeps of a job that has left would count to the others
        spare = self._shrink(layout)
        missing = self._refill(layout, spare)
        for row in layout.arenas:  # what was mapped elsewhere goes before anything new is made
            blocks = self._arenas[row.base, row.top]
            for name in row.names:
                if name in self._tenancies:
                    self._unmap(self._tenancies[name], self._wanted(blocks, name in row.top, needs[name]))
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
                if name not in self._tenancies:
                    self._tenancies[name] = self._let_in(needs[name])
                self._tenancies[name].need = needs[name]  # what it takes beside its area may be more now
                self._map(self._tenancies[name], self._wanted(blocks, name in row.top, needs[name]))

    def keep_less(self, needs: Mapping[str, MemoryNeed]) -> None:
        for name, need in needs.items():
            self._tenancies[name].need = need

    def _shrink(self, layout: Layout) -> list[PhysicalBlock]:
        """Take regions out of arenas that have too many or are gone; a base keeps those it sees."""
        wanted = {(row.base, row.top): row.capacity_bytes // self._region_bytes for row in layout.arenas}
        spare = []
        for places, blocks in list(self._arenas.items()):
            keeps = wanted.get(places, 0)
            spare += blocks[keeps:]
            del blocks[keeps:]
            if places not in wanted:
                del self._arenas[places]
        return spare

    def _refill(self, layout: Layout, spare: list[PhysicalBlock]) -> dict[_Places, int]:
        """Put spare regions into arenas that lack some; how many each still lacks."""
        missing = {}
        for row in layout.arenas:
            blocks = self._arenas.setdefault((row.base, row.top), [])
            lacks = row.capacity_bytes // self._region_bytes - len(blocks)
            found = min(lacks, len(spare))
            blocks += [spare.pop() for _ in range(found)]
            missing[row.base, row.top] = lacks - found
        return missing

    def _wanted(
        self, blocks: list[PhysicalBlock], is_top: bool, need: MemoryNeed
    ) -> dict[int, PhysicalBlock]:
        """The regions that a job is to see, by offset among its addresses, as far as there are any yet."""
        num_seen = -(-need.peak_bytes // self._region_bytes)
        seen = list(reversed(blocks))[:num_seen] if is_top else blocks[:num_seen]
        return {need.area_bytes + index * self._region_bytes: block for index, block in enumerate(seen)}

    def _unmap(self, tenancy: _Tenancy, wanted: Mapping[int, PhysicalBlock]) -> None:
        for offset in tenancy.addresses.mapped_offsets:
            is_own = offset < tenancy.need.area_bytes
            if not is_own and tenancy.addresses.block_at(offset) is not wanted.get(offset):
                tenancy.addresses.unmap(offset)

    def _map(self, tenancy: _Tenancy, wanted: Mapping[int, PhysicalBlock]) -> None:
        self._unmap(tenancy, wanted)  # at a top, new regions at the end have moved all others
        rows = [
            (offset, block) for offset, block in wanted.items() if tenancy.addresses.block_at(offset) is None
        ]
        tenancy.addresses.map(rows)
        self.num_mapped += len(rows)

    def _poison(self, blocks: list[PhysicalBlock]) -> None:
        """Fill regions that nobody has seen yet."""
        for block in blocks:
            addresses = VirtualRange(block.size_bytes, self.device)
            addresses.map([(0, block)])
            addresses.tensor().fill_(_POISON)
            torch.cuda.synchronize(self.device)
            addresses.unmap(0)

    def _let_in(self, need: MemoryNeed) -> _Tenancy:
        num_regions = -(-need.peak_bytes // self._region_bytes)
        area = PhysicalBlock(need.area_bytes, self.device)
        addresses = VirtualRange(need.area_bytes + num_regions * self._region_bytes, self.device)
        addresses.map([(0, area)])
        memory = Memory(addresses.tensor(), torch.zeros(1, dtype=torch.uint8), {})
        memory.at(0, need.area_bytes).fill_(_POISON if self._poisons else 0)
        torch.cuda.current_stream(self.device).synchronize()
        return _Tenancy(addresses, area, memory, need)

    def _give_back(self, tenancy: _Tenancy) -> None:
        tenancy.stream.synchronize()
        for flying in tenancy.in_flight:  # of a run that was broken off
            del self._ends[flying.ref]
        for offset in tenancy.addresses.mapped_offsets:
            tenancy.addresses.unmap(offset)
        tenancy.area.release()

    def memory_of(self, job: str) -> Memory:
        return self._tenancies[job].memory

    # ---- segments ----------------------------------------------------------------------------------

    @contextmanager
    def lane(self, job: str) -> Iterator[None]:
        stream = self._tenancies[job].stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    def behind(self, job: str) -> AbstractContextManager[None]:
        on_stream: AbstractContextManager[None] = torch.cuda.stream(self._tenancies[job].stream)
        return on_stream

    def enqueue(self, ref: SegmentRef, after: tuple[SegmentRef, ...], work: Callable[[], None]) -> None:
        tenancy = self._tenancies[ref.job]
        stream, start, end, clock = tenancy.stream, self._event(), self._event(), self._clock_now()
        error = None
        with torch.cuda.stream(stream):
            for other in after:
                ends = self._ends.get(other)
                if ends is not None:  # else it is over
                    stream.wait_event(ends)
            start.record(stream)
            try:
                work()
            except Exception as raised:
                error = raised
            end.record(stream)
        tenancy.in_flight.append(_Flying(ref, start, end, clock, error))
        self._ends[ref] = end

    @property
    def is_busy(self) -> bool:
        return bool(self._ends)

    def next_ended(self, until: float | None = None) -> Ended | None:
        while self._ends:
            ready = [
                tenancy
                for tenancy in self._tenancies.values()
                if tenancy.in_flight and tenancy.in_flight[0].end.query()
            ]
            if ready:  # what ended first is told first, or a job of short segments would keep others waiting
                several = len(ready) > 1
                first = min(ready, key=lambda one: one.in_flight[0].ended_at()) if several else ready[0]
                return self._ended(first.in_flight.popleft())
            if until is not None and time.perf_counter() >= until:
                return None
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return None

    def _ended(self, flying: _Flying) -> Ended:
        ended = Ended(flying.ref, flying.started_at(), flying.ended_at(), flying.error)
        del self._ends[flying.ref]
        self._spare_events += (flying.start, flying.end)
        return ended

    # ---- events ------------------------------------------------------------------------------------

    def _event(self) -> torch.cuda.Event:
        return self._spare_events.pop() if self._spare_events else torch.cuda.Event(enable_timing=True)

    def _clock_now(self) -> _Moment:
        """The moment that times are counted from, a new one every now and then."""
        if time.perf_counter() - self._clock.at > _SECONDS_PER_CLOCK:
            self._clock = self._look_at_clock()
        return self._clock

    def _look_at_clock(self) -> _Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._clock_stream)
        event.synchronize()
        return _Moment(event, time.perf_counter())
