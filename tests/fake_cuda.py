"""A CUDA device without a GPU.

`FakeDevice` has two streams that run when they like, and events between them. A stream is a queue of
operations. The simulation picks at random which queue goes on next, and runs nothing sooner than it must
where the host waits.

`install` has co-location run on a CPU as it does on a CUDA device. A region is a piece of shared memory that
is mapped under the addresses of two jobs; unmapped addresses cannot be touched. A graph runs what it was
captured from. Streams are missing: everything that is enqueued has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainmux.colocate import _colocation, _cuda_device, _fused_work, _segment_graphs, _virtual_memory
from trainmux.colocate._cuda_device import CudaDevice


class FakeDevice:
    """Two queues. An operation returns false as long as it cannot run."""

    def __init__(self, seed: int = 0) -> None:
        self.compute: deque[Callable[[], bool]] = deque()
        self.copies: deque[Callable[[], bool]] = deque()
        self._random = random.Random(seed)

    def advance(self) -> bool:
        """Run one operation; false where there is none that can run."""
        queues = [queue for queue in (self.compute, self.copies) if queue]
        self._random.shuffle(queues)
        for queue in queues:
            if queue[0]():
                queue.popleft()
                return True
        return False

    def wander(self) -> None:
        """A few operations, or none: the host does not know."""
        for _ in range(self._random.choice([0, 0, 1, 3, 10])):
            self.advance()

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self.advance(), "the host waits for something that never comes"

    def finish(self) -> None:
        self.run_until(lambda: not self.compute and not self.copies)


class FakeEvent:
    """An event of a `FakeDevice`; without a stream it is recorded on the compute stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._num_recorded = 0
        self._num_reached = 0
        self.num_waits = 0

    def query(self) -> bool:
        return self._num_reached == self._num_recorded

    def synchronize(self) -> None:
        self.num_waits += 1
        self._device.run_until(self.query)

    def record(self, stream: Any = None) -> None:
        self._num_recorded += 1
        number = self._num_recorded

        def reach() -> bool:
            self._num_reached = number
            return True

        (self._device.compute if stream is None else stream).append(reach)

    def wait(self, stream: deque[Callable[[], bool]]) -> None:
        """``stream`` goes on when what is recorded so far has been reached."""
        number = self._num_recorded
        stream.append(lambda: self._num_reached >= number)


# ---- co-location ---------------------------------------------------------------------------------------

PAGE = mmap.PAGESIZE
DEVICE = torch.device("cpu", 0)
_FIXED = 0x10
_NO_RESERVE = 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


class SystemDriver:
    """The driver's functions by those of the operating system."""

    def __init__(self) -> None:
        self.held_bytes = self.most_bytes = 0
        self.capacity_bytes = 1 << 40
        self._sizes: dict[int, int] = {}

    def cuGetErrorName(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
        return 0

    def cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:  # noqa: N802
        if self.held_bytes + size > self.capacity_bytes:
            return 2
        handle._obj.value = file = os.memfd_create("region")
        os.ftruncate(file, size)
        self._sizes[file] = size
        self.held_bytes += size
        self.most_bytes = max(self.most_bytes, self.held_bytes)
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
        access = mmap.PROT_READ | mmap.PROT_WRITE
        return int(_LIBC.mmap(address, size, access, mmap.MAP_SHARED | _FIXED, handle, 0) != address)

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
    pool_bytes = graph_bytes = 0
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
    def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: PaperEvent) -> float:
        return (other._at - self._at) * 1e3


def _stream(*arguments: Any, **options: Any) -> Any:
    nothing = lambda *rest: None  # noqa: E731
    return SimpleNamespace(cuda_stream=1, wait_event=nothing, wait_stream=nothing, synchronize=nothing)


def _tensor(addresses: _virtual_memory.VirtualRange) -> Tensor:
    memory = (ctypes.c_uint8 * addresses.size_bytes).from_address(addresses.address)
    memory.owner = addresses
    return torch.frombuffer(memory, dtype=torch.uint8)


def install(monkeypatch: pytest.MonkeyPatch) -> SystemDriver:
    """Have co-location on a CPU go the way that it goes on a CUDA device.

    But jobs keep what they asked for: it is much more than arenas here, and nothing would be tight.
    """
    system = SystemDriver()
    monkeypatch.setattr(_fused_work, "_SPARE_BYTES", 1 << 40)
    monkeypatch.setattr(_virtual_memory, "_driver", lambda: system)
    monkeypatch.setattr(_virtual_memory.VirtualRange, "tensor", _tensor)
    for module in (_cuda_device, _fused_work):
        monkeypatch.setattr(module, "granularity_bytes", lambda device: PAGE)
    monkeypatch.setattr(_cuda_device, "borrow_stream", _stream)
    monkeypatch.setattr(_fused_work, "runs_as_graphs", lambda device: True)
    monkeypatch.setattr(_segment_graphs, "CaptureRoom", PaperRoom)
    monkeypatch.setattr(
        _colocation,
        "make_device",
        lambda where, region_bytes, *, poisons: CudaDevice(
            DEVICE, region_bytes=region_bytes, poisons=poisons
        ),
    )
    # Such small jobs would have one region each; every co-location switches to smaller ones.
    monkeypatch.setattr(_colocation, "smallest_region_bytes", lambda where: 16 * PAGE)
    monkeypatch.setattr(_colocation, "region_bytes_on", lambda where, peaks: PAGE)
    for name, fake in {
        "Event": PaperEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": _stream,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (
            system.capacity_bytes - system.held_bytes,
            system.capacity_bytes,
        ),
        "memory_reserved": lambda device=None: 0,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 40),
        "get_per_process_memory_fraction": lambda device: 1.0,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return system
