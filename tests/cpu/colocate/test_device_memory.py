"""Memory that devices lay out: an arena under the addresses of two jobs, on a CPU and on a CUDA device.

The CUDA device maps regions by the system's own mappings (`fake_cuda`).
"""

from __future__ import annotations

import ctypes
import os
import random

import pytest
import torch
from tests.fake_cuda import DEVICE, PAGE, SystemDriver, install

from trainmux.colocate import _virtual_memory
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.colocate._demand import JobDemand, Segment, SegmentRef
from trainmux.colocate._host_device import HostDevice
from trainmux.colocate._layout import ArenaLayout, MemoryLayout
from trainmux.errors import BudgetError, ConfigError

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's shared memory files")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SystemDriver:
    return install(monkeypatch)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, driver: SystemDriver) -> HostDevice | CudaDevice:
    return HostDevice() if request.param == "cpu" else CudaDevice(DEVICE, region_bytes=PAGE)


def demands_of(**pages: tuple[int, int, int]) -> dict[str, JobDemand]:
    """Jobs by their pages of area, of local memory and at their peak."""
    return {
        name: JobDemand(
            name, name, PAGE, local * PAGE, (Segment(1, peak * PAGE, 0, 1.0),), area_bytes=area * PAGE
        )
        for name, (area, local, peak) in pages.items()
    }


def pair(num_regions: int) -> MemoryLayout:
    return MemoryLayout((ArenaLayout(("a",), ("b",), num_regions * PAGE),))


def test_two_jobs_see_one_arena_from_its_ends(device: HostDevice | CudaDevice) -> None:
    demands = demands_of(a=(1, 2, 3), b=(2, 2, 2))
    device.arrange(pair(4), demands)
    assert device.reserved_bytes == (2 + 2 + 4) * PAGE
    base, top = device.memory_of("a"), device.memory_of("b")
    for region in range(3):
        base.at((1 + region) * PAGE, PAGE).fill_(region + 1)
    assert int(top.at(2 * PAGE, PAGE)[0]) == 0  # the last region, which only the top sees
    assert int(top.at(3 * PAGE, PAGE)[0]) == 3  # the third from one end is the second from the other
    for capacity in (3, 5):
        device.arrange(pair(capacity), demands)
        assert device.memory_of("a") is base
        assert device.memory_of("b") is top
        assert device.reserved_bytes == (2 + 2 + capacity) * PAGE
        assert [int(base.at((1 + region) * PAGE, PAGE)[0]) for region in range(3)] == [1, 2, 3]
        if capacity == 3:
            assert [int(top.at((2 + region) * PAGE, PAGE)[0]) for region in range(2)] == [3, 2]
    device.arrange(MemoryLayout((ArenaLayout(("a",), (), 3 * PAGE),)), demands)
    assert device.reserved_bytes == (2 + 3) * PAGE
    device.arrange(MemoryLayout(), demands)
    assert device.reserved_bytes == 0


# ---- a CPU ---------------------------------------------------------------------------------------------


def test_pages_above_the_capacity_are_given_back() -> None:
    device = HostDevice(poisons=True)
    demands = demands_of(a=(1, 1, 16), b=(1, 1, 16))
    device.arrange(pair(32), demands)
    assert bool(device.memory_of("b").at(0, PAGE).view(torch.float32).isnan().all())
    base = device.memory_of("a").at(PAGE, 16 * PAGE)
    base.fill_(7)
    device.arrange(MemoryLayout((ArenaLayout(("a",), ("b",), PAGE + 904),)), demands)  # a part of the second
    assert bool((base[: 2 * PAGE] == 7).all())
    assert not base[2 * PAGE :].any()


def test_a_segment_starts_when_only_the_processor_keeps_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(100))
    monkeypatch.setattr(HostDevice, "now", lambda device: float(next(moments)))
    device = HostDevice()
    refs = [SegmentRef("a", 0, 0), SegmentRef("b", 0, 0), SegmentRef("b", 0, 1)]
    for ref, after in zip(refs, ((), (), (refs[0],)), strict=True):  # at 0, 1 and 2
        device.enqueue(ref, after, lambda: None)
    # The second waited for the processor alone, the third for its own job's last segment, too.
    assert device.next_ended() == (refs[0], 0.0, 3.0)
    assert device.next_ended() == (refs[1], 1.0, 4.0)
    assert device.next_ended() == (refs[2], 4.0, 5.0)


# ---- a CUDA device -------------------------------------------------------------------------------------


def test_random_layouts_hold_no_more_than_they_need(driver: SystemDriver) -> None:
    rng = random.Random(7)
    device = CudaDevice(DEVICE, region_bytes=PAGE)
    demands = demands_of(**{name: (rng.randint(1, 3), 4, rng.randint(0, 6)) for name in "abcdef"})
    held = 0
    for _ in range(60):
        names = rng.sample("abcdef", rng.randint(0, 6))
        rows = []
        while names:
            base, top = tuple(names[:1]), tuple(names[1 : 1 + rng.randint(0, 2)])
            names = names[len(base + top) :]
            peaks = [demands[name].peak_bytes for name in base + top]
            rows.append(ArenaLayout(base, top, max(peaks) + rng.randint(0, 3) * PAGE))
        driver.most_bytes = 0
        device.arrange(MemoryLayout(tuple(rows)), demands)
        areas = sum(demands[name].area_bytes for row in rows for name in row.names)
        assert driver.held_bytes == areas + sum(row.capacity_bytes for row in rows)
        assert driver.most_bytes <= max(held, driver.held_bytes)
        held = driver.held_bytes
        for name in (name for row in rows for name in row.names):  # all that a job may need is mapped
            size = demands[name].area_bytes + demands[name].peak_bytes
            device.memory_of(name).at(0, size).fill_(1)
    device.arrange(MemoryLayout(), demands)
    assert driver.held_bytes == device.reserved_bytes == 0


def test_a_base_keeps_its_mappings(driver: SystemDriver) -> None:
    device = CudaDevice(DEVICE, region_bytes=PAGE)
    demands = demands_of(a=(1, 1, 3), b=(1, 1, 3))
    device.arrange(pair(6), demands)
    for capacity in (3, 5):
        mapped = device.num_mapped
        device.arrange(pair(capacity), demands)
        assert device.num_mapped == mapped + 3  # all of the top's


def test_memory_that_is_not_there_is_refused(driver: SystemDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        CudaDevice(DEVICE, region_bytes=PAGE // 2)
    driver.capacity_bytes = 3 * PAGE
    device = CudaDevice(DEVICE, region_bytes=PAGE)
    with pytest.raises(BudgetError):
        device.arrange(pair(4), demands_of(a=(1, 1, 4), b=(1, 1, 4)))
    monkeypatch.setattr(driver, "cuMemAddressReserve", lambda *arguments: 1)
    with pytest.raises(ConfigError):
        _virtual_memory.VirtualRange(PAGE, DEVICE)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_virtual_memory, "_LIBRARY", "libcuda-that-is-not-there.so")
    with pytest.raises(ConfigError):
        _virtual_memory._driver.__wrapped__()


def test_records_are_as_the_driver_lays_them_out() -> None:
    assert ctypes.sizeof(_virtual_memory._AllocationProperties) == 32
    assert ctypes.sizeof(_virtual_memory._Access) == 12
