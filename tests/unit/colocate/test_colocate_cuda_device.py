"""A CUDA device's memory and lanes, over a driver and streams that exist on paper."""
# ruff: noqa: N802 (the driver's functions have the driver's names)

from __future__ import annotations

import contextlib
import ctypes
import random
from typing import Any

import pytest
import torch

from trainmux.colocate import _cuda_device, _virtual_memory
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._layout import ArenaLayout, MemoryLayout
from trainmux.colocate._protocols import MemoryNeed
from trainmux.errors import BudgetError, ConfigError

UNIT = 2 << 20
DEVICE = torch.device("cuda", 0)


class PaperDriver:
    """The driver's functions, strict: nothing is mapped twice, what is unmapped was mapped as a whole."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.blocks: dict[int, int] = {}
        self.released: set[int] = set()
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.ranges: dict[int, int] = {}
        self.most_bytes = 0
        self._next = 1 << 32

    @property
    def held_bytes(self) -> int:
        return sum(self.blocks.values())

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_SOMETHING"
        return 0

    def cuMemGetAllocationGranularity(self, found: Any, properties: Any, option: int) -> int:
        assert properties._obj.type == 1
        assert (properties._obj.location.type, properties._obj.location.id) == (1, 0)
        found._obj.value = UNIT
        return 0

    def cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        assert size % UNIT == 0
        if self.held_bytes + size > self.capacity_bytes:
            return 2
        handle._obj.value = number = len(self.blocks) + len(self.released) + 1
        while number in self.blocks or number in self.released:
            number += 1
        handle._obj.value = number
        self.blocks[number] = size
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return 0

    def cuMemRelease(self, handle: int) -> int:
        assert handle in self.blocks
        self.released.add(handle)
        self._free_unused()
        return 0

    def _free_unused(self) -> None:
        in_use = {handle for _, handle in self.mapped.values()}
        for handle in [one for one in self.blocks if one in self.released and one not in in_use]:
            del self.blocks[handle]

    def cuMemAddressReserve(self, address: Any, size: int, alignment: int, hint: int, flags: int) -> int:
        assert size % UNIT == 0
        address._obj.value = self._next
        self.ranges[self._next] = size
        self._next += size
        return 0

    def cuMemAddressFree(self, address: int, size: int) -> int:
        assert self.ranges.pop(address) == size
        return 0

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        assert any(begin <= address and address + size <= begin + n for begin, n in self.ranges.items())
        assert all(address + size <= at or at + n <= address for at, (n, _) in self.mapped.items())
        assert self.blocks[handle] == size
        self.mapped[address] = (size, handle)
        return 0

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> int:
        assert self.mapped[address][0] == size
        assert access._obj.flags == 3
        self.accessible.add(address)
        return 0

    def cuMemUnmap(self, address: int, size: int) -> int:
        assert self.mapped.pop(address)[0] == size
        self.accessible.discard(address)
        self._free_unused()
        return 0


class PaperEvent:
    """Ends when the test says so; its time is when that was."""

    clock = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.is_over = False
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.is_over = False
        stream.recorded.append(self)

    def end(self) -> None:
        PaperEvent.clock += 1.0
        self.is_over, self.at = True, PaperEvent.clock

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.end()

    def elapsed_time(self, other: PaperEvent) -> float:
        return (other.at - self.at) * 1e3


class PaperStream:
    made = 0

    def __init__(self, device: Any = None) -> None:
        PaperStream.made += 1
        self.cuda_stream = PaperStream.made
        self.recorded: list[PaperEvent] = []
        self.awaited: list[PaperEvent] = []

    def wait_event(self, event: PaperEvent) -> None:
        self.awaited.append(event)

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PaperDriver:
    paper = PaperDriver()
    monkeypatch.setattr(_virtual_memory, "_driver", lambda: paper)

    def tensor(addresses: _virtual_memory.VirtualRange) -> torch.Tensor:
        return torch.empty(addresses.size_bytes, dtype=torch.uint8, device="meta")

    monkeypatch.setattr(_virtual_memory.VirtualRange, "tensor", tensor)
    monkeypatch.setattr(_cuda_device, "granularity_bytes", lambda device: UNIT)
    monkeypatch.setattr(_cuda_device, "borrow_stream", lambda device, owner: PaperStream(device))
    current = PaperStream()
    for name, fake in {
        "Stream": PaperStream,
        "Event": PaperEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: current,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return paper


def regions_of(device: CudaDevice, name: str) -> list[int]:
    """The handles of the regions that a job sees, from the base of its stack on."""
    placed = device._placed[name]
    offsets = sorted(o for o in placed.addresses.mapped_offsets if o >= placed.need.area_bytes)
    assert offsets == [placed.need.area_bytes + i * UNIT for i in range(len(offsets))]
    found = []
    for offset in offsets:
        block = placed.addresses.block_at(offset)
        assert block is not None
        found.append(block.handle)
    return found


# ---- memory ---------------------------------------------------------------------------------------------


def test_jobs_see_an_arena_from_its_two_ends(driver: PaperDriver) -> None:
    device = CudaDevice(DEVICE, region_bytes=UNIT)
    needs = {"a": MemoryNeed(UNIT, UNIT + 512, 3 * UNIT), "b": MemoryNeed(2 * UNIT, 2 * UNIT, 2 * UNIT)}
    device.arrange(MemoryLayout((ArenaLayout(("a",), ("b",), 4 * UNIT),)), needs)
    a, b = regions_of(device, "a"), regions_of(device, "b")
    assert len(a) == 3
    assert len(b) == 2
    assert a[2] == b[1]  # the third from one end is the second from the other
    assert set(a[:2]).isdisjoint(b)
    assert driver.held_bytes == (1 + 2 + 4) * UNIT
    assert device.reserved_bytes == driver.held_bytes + 512
    assert driver.accessible == set(driver.mapped)


def test_another_capacity_leaves_the_base_alone(driver: PaperDriver) -> None:
    device = CudaDevice(DEVICE, region_bytes=UNIT)
    needs = {name: MemoryNeed(UNIT, UNIT, 3 * UNIT) for name in "ab"}
    memory = None
    for capacity in (6, 3, 5):
        before = regions_of(device, "a") if memory is not None else None
        mapped = device.num_mapped
        device.arrange(MemoryLayout((ArenaLayout(("a",), ("b",), capacity * UNIT),)), needs)
        assert memory is None or device.memory_of("b") is memory
        memory = device.memory_of("b")
        a, b = regions_of(device, "a"), regions_of(device, "b")
        if before is not None:
            assert a == before
            assert device.num_mapped == mapped + 3  # all of the top's
        assert driver.held_bytes == (2 + capacity) * UNIT
        assert len({*a, *b}) == min(6, capacity)


def test_random_layouts(driver: PaperDriver) -> None:
    """Whatever follows whatever: each end sees its regions, nothing is held beyond the larger layout."""
    random_ = random.Random(7)
    device = CudaDevice(DEVICE, region_bytes=UNIT)
    needs = {
        name: MemoryNeed(random_.randint(1, 3) * UNIT, 4 * UNIT, random_.randint(0, 6) * UNIT)
        for name in "abcdef"
    }
    held = 0
    for _ in range(60):
        names = random_.sample("abcdef", random_.randint(0, 6))
        rows = []
        while names:
            base, top = tuple(names[:1]), tuple(names[1 : 1 + random_.randint(0, 2)])
            names = names[len(base + top) :]
            peaks = [needs[name].peak_bytes for name in base + top]
            rows.append(ArenaLayout(base, top, max(peaks) + random_.randint(0, 3) * UNIT))
        driver.most_bytes = 0
        device.arrange(MemoryLayout(tuple(rows)), needs)
        areas = sum(needs[name].area_bytes for row in rows for name in row.names)
        assert driver.held_bytes == areas + sum(row.capacity_bytes for row in rows)
        assert driver.most_bytes <= max(held, driver.held_bytes)
        held = driver.held_bytes
        for row in rows:
            blocks = [block.handle for block in device._arenas[row.base, row.top]]
            for name in row.names:
                count = needs[name].peak_bytes // UNIT
                order = blocks[::-1] if name in row.top else blocks
                assert regions_of(device, name) == order[:count]
    device.arrange(MemoryLayout(()), needs)
    assert driver.held_bytes == device.reserved_bytes == 0


def test_regions_that_cannot_be_mapped_are_refused(driver: PaperDriver) -> None:
    with pytest.raises(ConfigError, match="multiple of 2097152"):
        CudaDevice(DEVICE, region_bytes=UNIT // 2)


def test_a_device_without_memory_says_so(driver: PaperDriver) -> None:
    driver.capacity_bytes = 3 * UNIT
    device = CudaDevice(DEVICE, region_bytes=UNIT)
    with pytest.raises(BudgetError, match="lower the budget"):
        device.arrange(
            MemoryLayout((ArenaLayout(("a",), (), 4 * UNIT),)), {"a": MemoryNeed(UNIT, UNIT, 4 * UNIT)}
        )


def test_what_the_driver_refuses_is_told(driver: PaperDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuMemAddressReserve", lambda *arguments: 1)
    with pytest.raises(ConfigError, match=r"cuMemAddressReserve, but got CUDA_ERROR_SOMETHING \(1\)"):
        _virtual_memory.VirtualRange(UNIT, DEVICE)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_virtual_memory, "_LIBRARY", "libcuda-that-is-not-there.so")
    with pytest.raises(ConfigError, match="install a driver"):
        _virtual_memory._driver.__wrapped__()


def test_records_are_as_the_driver_lays_them_out() -> None:
    assert ctypes.sizeof(_virtual_memory._AllocationProperties) == 32
    assert ctypes.sizeof(_virtual_memory._Access) == 12


def test_addresses_go_with_their_last_holder(driver: PaperDriver) -> None:
    addresses = _virtual_memory.VirtualRange(2 * UNIT, DEVICE)
    block = _virtual_memory.PhysicalBlock(UNIT, DEVICE)
    addresses.map([(UNIT, block)])
    interface = addresses.__cuda_array_interface__
    assert (interface["shape"], interface["data"]) == ((2 * UNIT,), (addresses.address, False))
    del addresses
    assert driver.mapped == driver.ranges == {}
    assert driver.held_bytes == UNIT
    block.release()
    block.release()
    assert driver.held_bytes == 0


# ---- segments -------------------------------------------------------------------------------------------


def two_jobs() -> CudaDevice:
    device = CudaDevice(DEVICE, region_bytes=UNIT)
    needs = {name: MemoryNeed(UNIT, UNIT, UNIT) for name in "ab"}
    device.arrange(MemoryLayout((ArenaLayout(("a",), ("b",), 2 * UNIT),)), needs)
    return device


def test_segments_wait_for_events_that_are_recorded(driver: PaperDriver) -> None:
    device = two_jobs()
    first, second = SegmentRef("a", 0, 0), SegmentRef("b", 0, 0)
    ran: list[str] = []
    device.enqueue(first, (), lambda: ran.append("a"))
    device.enqueue(second, (first, SegmentRef("a", 0, 9)), lambda: ran.append("b"))
    assert ran == ["a", "b"]
    streams = {name: device._placed[name].stream for name in "ab"}
    start, end = streams["a"].recorded  # type: ignore[attr-defined]
    assert streams["b"].awaited == [end]  # type: ignore[attr-defined]
    assert device.is_busy
    assert device.next_ended(until=0.0) is None
    start.end()
    end.end()
    ended = device.next_ended()
    assert ended is not None
    assert ended.ref == first
    assert ended.ended_at - ended.started_at == pytest.approx(1.0)
    for event in streams["b"].recorded:  # type: ignore[attr-defined]
        event.end()
    last = device.next_ended()
    assert last is not None
    assert last.ref == second
    assert not device.is_busy
    assert device.next_ended() is None


def test_what_ended_first_is_told_first(driver: PaperDriver) -> None:
    device = two_jobs()
    refs = [SegmentRef("a", 0, 0), SegmentRef("b", 0, 0), SegmentRef("a", 0, 1)]
    for ref in refs:
        device.enqueue(ref, (), lambda: None)
    streams = {name: device._placed[name].stream for name in "ab"}
    for name in "ba":
        for event in streams[name].recorded:  # type: ignore[attr-defined]
            event.end()
    told = [device.next_ended() for _ in refs]
    assert [ended.ref for ended in told if ended is not None] == [refs[1], refs[0], refs[2]]


def test_what_a_segment_raises_comes_with_its_end(driver: PaperDriver) -> None:
    device = two_jobs()
    error = ValueError("broken")

    def fail() -> None:
        raise error

    device.enqueue(SegmentRef("a", 0, 0), (), fail)
    for event in device._placed["a"].stream.recorded:  # type: ignore[attr-defined]
        event.end()
    ended = device.next_ended()
    assert ended is not None
    assert ended.error is error


def test_jobs_have_streams_of_their_own(driver: PaperDriver) -> None:
    device = two_jobs()
    streams = {placed.stream.cuda_stream for placed in device._placed.values()}
    assert len(streams) == 2


def test_what_comes_behind_a_job_is_on_its_stream_and_not_waited_for(
    driver: PaperDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CudaDevice(DEVICE, region_bytes=UNIT)
    needs = {name: MemoryNeed(UNIT, UNIT, UNIT) for name in "ab"}
    device.arrange(MemoryLayout((ArenaLayout(("a",), ("b",), 2 * UNIT),)), needs)
    used: list[Any] = []

    def on_stream(stream: Any) -> contextlib.AbstractContextManager[None]:
        used.append(stream)
        return contextlib.nullcontext()

    def wait(stream: Any) -> None:
        raise AssertionError("nobody is to wait")

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(PaperStream, "synchronize", wait)
    with device.behind("b"):
        pass
    assert used == [device._placed["b"].stream]
    assert used[0] is not device._placed["a"].stream
