"""Virtual memory of a CUDA device, through the driver's own functions (`libcuda`, by ctypes).

A `VirtualRange` is a range of addresses that never changes, a `PhysicalBlock` is memory without an address. A
block may be mapped into several ranges at once: each sees the others' writes. A captured graph keeps
addresses, so the blocks under them may be exchanged between two replays.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import BudgetError, ConfigError

_LIBRARY = "libcuda.so.1"
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _MemoryLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _MemoryLocation),
        ("windows", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _MemoryLocation), ("flags", ctypes.c_int))


_SIZE, _ADDRESS, _HANDLE, _FLAGS = ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_ulonglong
_PROPERTIES = ctypes.POINTER(_AllocationProperties)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_SIZE), _PROPERTIES, ctypes.c_int),
    "cuMemCreate": (ctypes.POINTER(_HANDLE), _SIZE, _PROPERTIES, _FLAGS),
    "cuMemRelease": (_HANDLE,),
    "cuMemAddressReserve": (ctypes.POINTER(_ADDRESS), _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _HANDLE, _FLAGS),
    "cuMemSetAccess": (_ADDRESS, _SIZE, ctypes.POINTER(_Access), _SIZE),
    "cuMemUnmap": (_ADDRESS, _SIZE),
}


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"expected NVIDIA's driver library {_LIBRARY} with virtual memory (CUDA 10.2 or later), got "
            f"{error}; install a driver, or co-locate on the CPU"
        ) from error
    return library


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; raise its errors."""
    code = getattr(_driver(), name)(*arguments)
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(text))
    reason = (text.value or b"unknown").decode()
    if code == _OUT_OF_MEMORY:
        raise BudgetError(
            f"expected enough free memory on the device, but {name} returned {reason}; other programs may "
            "hold it: lower the budget"
        )
    raise ConfigError(
        f"expected the CUDA driver to carry out {name}, but got {reason} ({code}); update the driver, or "
        "co-locate on the CPU"
    )


def _properties(index: int) -> _AllocationProperties:
    found = _AllocationProperties()
    found.type = _PINNED
    found.location = _MemoryLocation(_ON_DEVICE, index)
    return found


@functools.cache
def granularity_bytes(device: torch.device) -> int:
    """The unit of sizes and offsets of blocks."""
    torch.cuda.synchronize(device)  # the driver is ready, and has a context, once torch has used the device
    found = _SIZE()
    properties = _properties(device.index)
    _call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), _MINIMUM)
    return int(found.value)


class PhysicalBlock:
    """``size_bytes`` of a device's memory, without an address.

    The memory is free again once the block is released and mapped nowhere. `BudgetError` where the device has
    no more.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        handle = _HANDLE()
        properties = _properties(device.index)
        _call("cuMemCreate", ctypes.byref(handle), size_bytes, ctypes.byref(properties), 0)
        self.handle = int(handle.value)
        self._release = weakref.finalize(self, _driver().cuMemRelease, self.handle)
        self._release.atexit = False  # the driver frees it with the process

    def release(self) -> None:
        """Free the block; a second call does nothing."""
        self._release()


class VirtualRange:
    """A range of addresses that lives as long as a tensor over it; blocks are mapped and unmapped
    meanwhile."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self.device = device
        address = _ADDRESS()
        _call("cuMemAddressReserve", ctypes.byref(address), size_bytes, 0, 0, 0)
        self.address = int(address.value)
        self._mapped: dict[int, PhysicalBlock] = {}
        # Not a method, which would keep the range alive.
        free = weakref.finalize(self, _free_range, _driver(), self.address, size_bytes, self._mapped)
        free.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Lets torch make a tensor over the range, which keeps the range alive."""
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def block_at(self, offset: int) -> PhysicalBlock | None:
        """The block that is mapped at ``offset``."""
        return self._mapped.get(offset)

    @property
    def mapped_offsets(self) -> tuple[int, ...]:
        """The offsets of mapped blocks."""
        return tuple(self._mapped)

    def map(self, rows: Sequence[tuple[int, PhysicalBlock]]) -> None:
        """Map blocks at offsets where nothing is mapped."""
        for offset, block in rows:
            _call("cuMemMap", self.address + offset, block.size_bytes, 0, block.handle, 0)
            self._mapped[offset] = block
            access = _Access(_MemoryLocation(_ON_DEVICE, self.device.index), _READ_AND_WRITE)
            _call("cuMemSetAccess", self.address + offset, block.size_bytes, ctypes.byref(access), 1)

    def unmap(self, offset: int) -> None:
        """Unmap the block at ``offset``. Nothing in flight on the device may use it."""
        block = self._mapped.pop(offset)
        _call("cuMemUnmap", self.address + offset, block.size_bytes)

    def tensor(self) -> Tensor:
        """All its bytes as one tensor; the first block must be mapped. Unmapped bytes must not be touched."""
        return torch.as_tensor(self, device=self.device)


def _free_range(driver: ctypes.CDLL, address: int, size_bytes: int, mapped: dict[int, PhysicalBlock]) -> None:
    """Unmap and free; errors are ignored, as nobody uses the addresses any more."""
    for offset, block in mapped.items():
        driver.cuMemUnmap(address + offset, block.size_bytes)
    mapped.clear()
    driver.cuMemAddressFree(address, size_bytes)
