"""Regions of a CUDA device under the addresses of two jobs, over the system's own mappings."""

from __future__ import annotations

import ctypes
import os
import random

import pytest
from tests.fake_cuda import DEVICE, PAGE, SystemDriver, install

from trainmux.colocate import _virtual_memory
from trainmux.colocate._cuda_device import CudaDevice
from trainmux.colocate._layout import ArenaLayout, MemoryLayout
from trainmux.colocate._protocols import MemoryNeed
from trainmux.errors import BudgetError, ConfigError

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's shared memory files")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SystemDriver:
    return install(monkeypatch)


def pair(num_regions: int) -> MemoryLayout:
    return MemoryLayout((ArenaLayout(("a",), ("b",), num_regions * PAGE),))


def test_jobs_see_an_arena_from_its_two_ends(driver: SystemDriver) -> None:
    device = CudaDevice(DEVICE, region_bytes=PAGE)
    needs = {"a": MemoryNeed(PAGE, PAGE + 512, 3 * PAGE), "b": MemoryNeed(2 * PAGE, 2 * PAGE, 2 * PAGE)}
    device.arrange(pair(4), needs)
    assert driver.held_bytes == (1 + 2 + 4) * PAGE == device.reserved_bytes - 512
    base, top = device.memory_of("a"), device.memory_of("b")
    for region in range(3):
        base.at((1 + region) * PAGE, PAGE).fill_(region + 1)
    assert int(top.at(2 * PAGE, 1)) == 0  # the last region, which only the top sees
    assert int(top.at(3 * PAGE, 1)) == 3  # the third from one end is the second from the other


def test_another_capacity_leaves_the_base_alone(driver: SystemDriver) -> None:
    device = CudaDevice(DEVICE, region_bytes=PAGE)
    needs = {name: MemoryNeed(PAGE, PAGE, 3 * PAGE) for name in "ab"}
    device.arrange(pair(6), needs)
    base, top = device.memory_of("a"), device.memory_of("b")
    base.at(PAGE, 3 * PAGE).fill_(7)
    for capacity in (3, 5):
        mapped = device.num_mapped
        device.arrange(pair(capacity), needs)
        assert device.memory_of("a") is base
        assert device.memory_of("b") is top
        assert bool((base.at(PAGE, 3 * PAGE) == 7).all())
        assert device.num_mapped == mapped + 3  # all of the top's
        assert driver.held_bytes == (2 + capacity) * PAGE
        last = top.at(PAGE + (capacity - 3) * PAGE, 1)  # the base's third region
        assert int(last) == 7


def test_random_layouts_hold_no_more_than_they_need(driver: SystemDriver) -> None:
    rng = random.Random(7)
    device = CudaDevice(DEVICE, region_bytes=PAGE)
    needs = {
        name: MemoryNeed(rng.randint(1, 3) * PAGE, 4 * PAGE, rng.randint(0, 6) * PAGE) for name in "abcdef"
    }
    held = 0
    for _ in range(60):
        names = rng.sample("abcdef", rng.randint(0, 6))
        rows = []
        while names:
            base, top = tuple(names[:1]), tuple(names[1 : 1 + rng.randint(0, 2)])
            names = names[len(base + top) :]
            peaks = [needs[name].peak_bytes for name in base + top]
            rows.append(ArenaLayout(base, top, max(peaks) + rng.randint(0, 3) * PAGE))
        driver.most_bytes = 0
        device.arrange(MemoryLayout(tuple(rows)), needs)
        areas = sum(needs[name].area_bytes for row in rows for name in row.names)
        assert driver.held_bytes == areas + sum(row.capacity_bytes for row in rows)
        assert driver.most_bytes <= max(held, driver.held_bytes)
        held = driver.held_bytes
        for row in rows:
            for name in row.names:  # all that a job may need is mapped
                size = needs[name].area_bytes + needs[name].peak_bytes
                device.memory_of(name).at(0, size).fill_(1)
    device.arrange(MemoryLayout(()), needs)
    assert driver.held_bytes == device.reserved_bytes == 0


def test_memory_that_is_not_there_is_refused(driver: SystemDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        CudaDevice(DEVICE, region_bytes=PAGE // 2)
    driver.capacity_bytes = 3 * PAGE
    device = CudaDevice(DEVICE, region_bytes=PAGE)
    with pytest.raises(BudgetError):
        device.arrange(pair(4), {name: MemoryNeed(PAGE, PAGE, 4 * PAGE) for name in "ab"})
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
