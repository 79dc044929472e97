"""All that runs jobs on a CUDA device, on a CPU: virtual memory by the system's mappings, graphs on paper.

A region is a piece of shared memory that is mapped under the addresses of two jobs, as on the device; what is
not mapped cannot be touched. A graph runs what it was captured from. Only streams are missing: what is
enqueued has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colocation_cases import (
    SMALL_CUTS,
    assert_same_state,
    batches_of,
    cycled,
    mse,
    small_fleet,
    smallest_budget,
    state_of,
    sum_of_peaks,
    tiny_batches,
    tiny_model,
    tiny_optimizer,
)
from torch import Tensor

import trainmux as tm
from trainmux.colocate import (
    EVERY_KERNEL,
    _colocation,
    _cuda_device,
    _fused_work,
    _segment_graphs,
    _virtual_memory,
)
from trainmux.colocate._cuda_device import CudaDevice

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's shared memory files")

PAGE = mmap.PAGESIZE
DEVICE = torch.device("cpu", 0)
_FIXED = 0x10
_NO_RESERVE = 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


class SystemDriver:
    """The driver's functions by those of the operating system."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._sizes: dict[int, int] = {}

    def cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:  # noqa: N802
        handle._obj.value = file = os.memfd_create("region")
        os.ftruncate(file, size)
        self._sizes[file] = size
        self.held_bytes += size
        return 0

    def cuMemRelease(self, handle: int) -> int:  # noqa: N802
        os.close(handle)
        self.held_bytes -= self._sizes.pop(handle)
        return 0

    def cuMemAddressReserve(self, address: Any, size: int, *rest: int) -> int:  # noqa: N802
        address._obj.value = _LIBC.mmap(None, size, 0, _NOTHING, -1, 0)
        return 0

    def cuMemAddressFree(self, address: int, size: int) -> int:  # noqa: N802
        return int(_LIBC.munmap(address, size))

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:  # noqa: N802
        found = _LIBC.mmap(
            address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, handle, 0
        )
        return int(found != address)

    def cuMemSetAccess(self, *arguments: Any) -> int:  # noqa: N802
        return 0

    def cuMemUnmap(self, address: int, size: int) -> int:  # noqa: N802
        return int(_LIBC.mmap(address, size, 0, _NOTHING | _FIXED, -1, 0) != address)


Run = Callable[[], None]


class PaperGraph:
    def __init__(self, run: Run) -> None:
        self.replay = run

    def reset(self) -> None:
        self.replay = _gone


def _gone() -> None:
    raise AssertionError("a graph was replayed after its job had gone")


class PaperRoom:
    num_captures = 0
    stream = SimpleNamespace(wait_stream=lambda other: None)
    allocating = contextlib.nullcontext

    def __init__(self, device: Any, *, deterministic: bool) -> None:
        pass

    def capture_all(
        self, rehearse: Callable[[], None], runs: Sequence[Callable[[], None]]
    ) -> list[PaperGraph]:
        rehearse()
        rehearse()
        self.num_captures += len(runs)
        return [PaperGraph(run) for run in runs]

    def drop_kept(self) -> None:
        pass


class PaperEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: PaperEvent) -> float:
        return (other._at - self._at) * 1e3


def _stream(*arguments: Any) -> Any:
    nothing = lambda *rest: None  # noqa: E731
    return SimpleNamespace(wait_event=nothing, wait_stream=nothing, synchronize=nothing)


def _tensor(addresses: _virtual_memory.VirtualRange) -> Tensor:
    memory = (ctypes.c_uint8 * addresses.size_bytes).from_address(addresses.address)
    memory.owner = addresses
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> SystemDriver:
    system = SystemDriver()
    monkeypatch.setattr(_virtual_memory, "_driver", lambda: system)
    monkeypatch.setattr(_virtual_memory.VirtualRange, "tensor", _tensor)
    for module in (_cuda_device, _fused_work):
        monkeypatch.setattr(module, "granularity_bytes", lambda device: PAGE)
    monkeypatch.setattr(_cuda_device, "borrow_stream", _stream)
    monkeypatch.setattr(_fused_work, "runs_as_graphs", lambda device: True)
    monkeypatch.setattr(_segment_graphs, "CaptureRoom", PaperRoom)
    monkeypatch.setattr(
        _colocation,
        "_make_device",
        lambda where, region_bytes, *, poisons: CudaDevice(DEVICE, region_bytes=PAGE, poisons=poisons),
    )
    monkeypatch.setattr(_colocation, "_region_bytes", lambda wanted, where: PAGE)
    for name, fake in {
        "Event": PaperEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": _stream,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda device=None: 0,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 40),
        "get_per_process_memory_fraction": lambda device: 1.0,
        "set_per_process_memory_fraction": lambda fraction, device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return system


def test_jobs_that_share_regions_are_as_alone(driver: SystemDriver, tmp_path: Path) -> None:
    names = ("residual", "transformer_with_dropout")
    fleets = {name: small_fleet(name) for name in names}
    expected = {}
    for name, fleet in fleets.items():
        fleet.save(tmp_path / name)
        losses = torch.stack([fleet.step(batch).clone() for batch in cycled(batches_of(name), 2)])
        expected[name] = (losses, state_of(fleet))
    for tightness in (1.0, 0.5):
        for name, fleet in fleets.items():
            fleet.restore(tmp_path / name)
        jobs = [tm.Job(name, fleet=fleets[name], loader=batches_of(name), steps=2) for name in names]
        colocation = tm.colocate(jobs, "4GiB", tracking_bytes=SMALL_CUTS, poisons=True)
        least, most = smallest_budget(colocation), sum_of_peaks(colocation)
        assert most - least >= 4 * PAGE  # there is something to share
        colocation.set_budget(round(tightness * least + (1 - tightness) * most))
        result = colocation.run()
        assert [repr(job.error) for job in result.jobs.values() if job.error] == []
        for name in names:
            assert torch.equal(result[name].losses, expected[name][0]), (name, tightness)
            assert_same_state(state_of(fleets[name]), expected[name][1], f"{name} at {tightness}")
        assert driver.held_bytes == 0  # all jobs have left


# ---- jobs with some pages of feature maps ---------------------------------------------------------------


def page_fleet(seed: int, **options: Any) -> tm.Fleet:
    model = tiny_model(seed, hidden=128)
    member = tm.Member(model, tiny_optimizer(model), name=f"m{seed}")
    return tm.Fleet([member], mse, page_batches(seed)[0], deterministic=True, **options)


def page_batches(seed: int, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    return tiny_batches(seed, num_batches=3, size=size)


def trained(fleet: tm.Fleet, batches: Sequence[Any], steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    losses = torch.stack([fleet.step(batch).clone() for batch in cycled(batches, steps)])
    return losses, state_of(fleet)


def captures_of(colocation: tm.Colocation) -> dict[str, int]:
    return {name: tenant._work.num_captures for name, tenant in colocation._inside.items()}  # type: ignore[union-attr]


def test_regions_are_exchanged_under_running_jobs(driver: SystemDriver) -> None:
    budgets: list[int] = []
    seen: list[tuple[int, int, int]] = []
    captured: list[dict[str, int]] = []

    def squeeze(event: tm.JobStep) -> None:
        if event.job == "0" and event.step in (3, 6):
            event.colocation.set_budget(budgets[0] if event.step == 3 else budgets[1])
        device: Any = event.colocation._device
        beside = sum(one.need.local_bytes - one.need.area_bytes for one in device._tenancies.values())
        seen.append((event.colocation.budget_bytes, device.reserved_bytes, driver.held_bytes + beside))
        captured.append(captures_of(event.colocation))

    fleets = [page_fleet(seed) for seed in (0, 1)]
    jobs = [tm.Job(str(n), fleet=fleet, loader=page_batches(n), steps=9) for n, fleet in enumerate(fleets)]
    colocation = tm.colocate(jobs, "4GiB", tracking_bytes=EVERY_KERNEL, callbacks=[squeeze], poisons=True)
    budgets += [smallest_budget(colocation) + PAGE, sum_of_peaks(colocation)]
    assert budgets[1] - budgets[0] >= 4 * PAGE
    colocation.set_budget(budgets[1])
    result = colocation.run()
    assert result.failed == ()
    assert {budget for budget, _, _ in seen} == set(budgets)
    assert all(held == reserved <= budget for budget, reserved, held in seen)
    both = [row for row in captured if len(row) == 2]
    assert all(row == both[0] for row in both)
    for number, fleet in enumerate(fleets):
        losses, state = trained(page_fleet(number), page_batches(number), 9)
        assert torch.equal(result[str(number)].losses, losses)
        assert_same_state(state_of(fleet), state, str(number))


def test_other_steps_run_once_and_are_captured_then() -> None:
    def batches(seed: int) -> list[Any]:
        long, short = page_batches(seed), page_batches(seed, size=24)
        return [long[0], long[1], short[0], long[2]]

    captured: dict[str, list[int]] = {"0": [], "1": []}

    def count(event: tm.JobStep) -> None:
        """At each job's own steps: how far the other one has come is the system's business."""
        captured[event.job].append(captures_of(event.colocation)[event.job])

    fleets = [page_fleet(seed, accumulate=2) for seed in (0, 1)]
    jobs = [tm.Job(str(n), fleet=fleet, loader=batches(n), steps=12) for n, fleet in enumerate(fleets)]
    colocation = tm.colocate(
        jobs,
        "4GiB",
        tracking_bytes=EVERY_KERNEL,
        callbacks=[count],
        poisons=True,
    )
    colocation.set_budget(smallest_budget(colocation) + PAGE)
    result = colocation.run()
    assert result.failed == ()
    for number, fleet in enumerate(fleets):
        losses, state = trained(page_fleet(number, accumulate=2), batches(number), 12)
        assert torch.equal(result[str(number)].losses, losses)
        assert_same_state(state_of(fleet), state, str(number))
    for row in captured.values():
        assert row[-1] > row[0]
        assert row[-1] == row[len(row) * 3 // 4]


def test_jobs_come_and_go(driver: SystemDriver) -> None:
    held: list[int] = []

    def turn_over(event: tm.JobStep) -> None:
        others = [row for row in event.colocation.usage() if row.name != "stays" and row.state != "done"]
        if event.job != "stays" or others or len(held) == 4:
            return
        held.append(driver.held_bytes)
        if len(held) == 4:
            event.colocation.remove("stays")
        else:
            guest = tm.Job(f"guest {len(held)}", fleet=guest_fleet, loader=page_batches(1), steps=2)
            event.colocation.add(guest)

    stays_fleet, guest_fleet = page_fleet(0), page_fleet(1)
    stays = tm.Job("stays", fleet=stays_fleet, loader=page_batches(0), steps=10**6)
    result = tm.colocate([stays], "4GiB", callbacks=[turn_over], poisons=True).run()
    assert result.failed == ()
    assert held[1] == held[-1]
    assert driver.held_bytes == 0
    losses, state = trained(page_fleet(1), page_batches(1), 2)  # its loader begins anew with each job
    assert torch.equal(result["guest 1"].losses, losses)
    assert result["guest 3"].num_steps == 2
    steps = result["stays"].num_steps
    losses, state = trained(page_fleet(0), page_batches(0), steps)
    assert torch.equal(result["stays"].losses, losses)
    assert_same_state(state_of(stays_fleet), state, "stays")
