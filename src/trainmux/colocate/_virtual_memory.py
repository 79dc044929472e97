"""Virtual memory of a CUDA device, by the driver's own functions (`libcuda`, through ctypes).

Addresses and bytes are two things here. A `VirtualRange` is a row of addresses that never changes, a
`PhysicalBlock` is memory without an address. A block may be mapped into several ranges at once: each sees
what the others write. A captured graph keeps addresses, so the blocks under them may be exchanged between
two of its replays.
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


class _Location(ctypes.Structure):
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
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


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
    """Call a function of the driver; what it refuses is raised."""
    code = getattr(_driver(), name)(*arguments)
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(text))
    reason = (text.value or b"unknown").decode()
    if code == _OUT_OF_MEMORY:
        raise BudgetError(
            f"expected the device to have the memory that was asked for, but {name} says {reason}; other "
            "programs may hold it: lower the budget"
        )
    raise ConfigError(
        f"expected the CUDA driver to carry out {name}, but got {reason} ({code}); update the driver, or "
        "co-locate on the CPU"
    )


def _properties(index: int) -> _AllocationProperties:
    found = _AllocationProperties()
    found.type = _PINNED
    found.location = _Location(_ON_DEVICE, index)
    return found


@functools.cache
def granularity_bytes(device: torch.device) -> int:
    """What sizes and offsets of blocks must be multiples of."""
    torch.cuda.synchronize(device)  # the driver is ready, and has a context, once torch has used the device
    found = _SIZE()
    properties = _properties(device.index)
    _call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), _MINIMUM)
    return int(found.value)


class PhysicalBlock:
    """``size_bytes`` of a device's memory, without an address.

    The memory is the device's again when it was released and is mapped nowhere. `BudgetError` where the
    device has no more.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        handle = _HANDLE()
        properties = _properties(device.index)
        _call("cuMemCreate", ctypes.byref(handle), size_bytes, ctypes.byref(properties), 0)
        self.handle = int(handle.value)
        self._release = weakref.finalize(self, _driver().cuMemRelease, self.handle)
        self._release.atexit = False  # with the process, its memory goes by itself

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        self._release()


class VirtualRange:
    """A row of addresses, for as long as a tensor over it lives; blocks are mapped and unmapped meanwhile."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self.device = device
        address = _ADDRESS()
        _call("cuMemAddressReserve", ctypes.byref(address), size_bytes, 0, 0, 0)
        self.address = int(address.value)
        self._mapped: dict[int, PhysicalBlock] = {}
        # Not a method: the range itself must be free to go.
        free = weakref.finalize(self, _free_range, _driver(), self.address, size_bytes, self._mapped)
        free.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """By this, torch makes a tensor over the range that keeps it alive."""
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
        """Where blocks begin."""
        return tuple(self._mapped)

    def map(self, rows: Sequence[tuple[int, PhysicalBlock]]) -> None:
        """Map blocks at offsets where nothing is mapped."""
        for offset, block in rows:
            _call("cuMemMap", self.address + offset, block.size_bytes, 0, block.handle, 0)
            self._mapped[offset] = block
            access = _Access(_Location(_ON_DEVICE, self.device.index), _READ_AND_WRITE)
            _call("cuMemSetAccess", self.address + offset, block.size_bytes, ctypes.byref(access), 1)

    def unmap(self, offset: int) -> None:
        """Take away the block at ``offset``. Nothing that is in flight on the device may use it."""
        block = self._mapped.pop(offset)
        _call("cuMemUnmap", self.address + offset, block.size_bytes)

    def tensor(self) -> Tensor:
        """All its bytes as one tensor; the first block must be mapped. Bytes without a block must be left
        alone."""
        return torch.as_tensor(self, device=self.device)


def _free_range(driver: ctypes.CDLL, address: int, size_bytes: int, mapped: dict[int, PhysicalBlock]) -> None:
    """Nobody has the addresses any more, so there is nobody to tell of an error."""
    for offset, block in mapped.items():
        driver.cuMemUnmap(address + offset, block.size_bytes)
    mapped.clear()
    driver.cuMemAddressFree(address, size_bytes)
