"""A CUDA device on a CPU: virtual memory by the system's mappings, graphs on paper, pools that are counted.

A region is a piece of shared memory that is mapped under the addresses of two jobs, as on the device; what is
not mapped cannot be touched. A graph runs what it was captured from. A pool has reserved the most bytes of
tensors that were made in it and lived at one time. Only streams are missing: what is enqueued has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trainmux.colocate import (
    _admitted,
    _colocation,
    _cuda_device,
    _eager,
    _fused_work,
    _segment_graphs,
    _virtual_memory,
)
from trainmux.colocate._cuda_device import CudaDevice

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


def _stream(*arguments: Any, **options: Any) -> Any:
    nothing = lambda *rest: None  # noqa: E731
    return SimpleNamespace(cuda_stream=1, wait_event=nothing, wait_stream=nothing, synchronize=nothing)


def _tensor(addresses: _virtual_memory.VirtualRange) -> Tensor:
    memory = (ctypes.c_uint8 * addresses.size_bytes).from_address(addresses.address)
    memory.owner = addresses
    return torch.frombuffer(memory, dtype=torch.uint8)


class PaperPool:
    """A memory pool that only counts."""

    def __init__(self, allocator: PaperAllocator) -> None:
        self.reserved_bytes = 0
        self.live: list[tuple[StorageWeakRef, int]] = []
        allocator.pools.add(self)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, int]]:
        return [{"total_size": self.reserved_bytes}]


class PaperAllocator:
    """Pools, and the bound on what they may reserve in all."""

    total_bytes = 1 << 40

    def __init__(self) -> None:
        self.pools: weakref.WeakSet[PaperPool] = weakref.WeakSet()
        self.fraction = 1.0

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self.pools)

    def set_fraction(self, fraction: float, device: Any = None) -> None:
        self.fraction = fraction

    @contextlib.contextmanager
    def use(self, pool: PaperPool, device: Any = None) -> Iterator[None]:
        with _Counting(self, pool):
            yield


class _Counting(TorchDispatchMode):
    """Counts the storages that operators make to a pool; raises where it may not have as much."""

    def __init__(self, allocator: PaperAllocator, pool: PaperPool) -> None:
        super().__init__()
        self._allocator, self._pool = allocator, pool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        pool = self._pool
        pool.live = [(storage, size) for storage, size in pool.live if not storage.expired()]
        known = {storage.cdata for storage, _ in pool.live} | given
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                pool.live.append((StorageWeakRef(storage), storage.nbytes()))
        wanted = max(pool.reserved_bytes, sum(size for _, size in pool.live))
        more = wanted - pool.reserved_bytes
        if (
            more
            and self._allocator.reserved_bytes + more > self._allocator.fraction * PaperAllocator.total_bytes
        ):
            raise torch.OutOfMemoryError("the pool may not have as much")
        pool.reserved_bytes = wanted
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[SystemDriver, PaperAllocator]:
    """Have co-location on a CPU go the way that it goes on a CUDA device.

    But jobs keep what they asked for: it is much more than arenas here, and nothing would be tight.
    """
    monkeypatch.setattr(_fused_work, "_SPARE_BYTES", 1 << 40)
    allocator = PaperAllocator()
    system = SystemDriver()
    monkeypatch.setattr(_virtual_memory, "_driver", lambda: system)
    monkeypatch.setattr(_virtual_memory.VirtualRange, "tensor", _tensor)
    for module in (_cuda_device, _eager, _fused_work):
        monkeypatch.setattr(module, "granularity_bytes", lambda device: PAGE)
    for module in (_cuda_device, _eager):
        monkeypatch.setattr(module, "borrow_stream", _stream)
    monkeypatch.setattr(_eager, "return_stream", lambda device, owner: None)
    monkeypatch.setattr(_eager, "borrowed_stream", lambda device: contextlib.nullcontext(_stream()))
    for module in (_fused_work, _admitted):
        monkeypatch.setattr(module, "runs_as_graphs", lambda device: True)
    monkeypatch.setattr(_segment_graphs, "CaptureRoom", PaperRoom)
    monkeypatch.setattr(
        _colocation,
        "make_device",
        lambda where, region_bytes, *, poisons: CudaDevice(
            DEVICE, region_bytes=region_bytes, poisons=poisons
        ),
    )
    # Such small jobs would have one region each; every co-location goes over to smaller ones.
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
        "MemPool": lambda: PaperPool(allocator),
        "use_mem_pool": allocator.use,
        "memory_reserved": lambda device=None: allocator.reserved_bytes,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=PaperAllocator.total_bytes),
        "get_per_process_memory_fraction": lambda device: allocator.fraction,
        "set_per_process_memory_fraction": allocator.set_fraction,
        "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return system, allocator
