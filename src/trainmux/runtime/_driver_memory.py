"""Memory that a process holds on a device outside torch's allocator, as another process sees it.

That is code of kernels, handles of libraries and CUDA graphs. The driver knows the bytes of each process. Of
those, an empty CUDA context is nobody's: what it takes is seen once, in a process that makes nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys

import torch

_LIBRARY = "libnvidia-ml.so.1"
_MAX_PROCESSES = 256
_CHILD = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), int(sys.argv[1]))
failed = failed or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
print(failed, flush=True)
sys.stdin.read()
"""


class _ProcessInfo(ctypes.Structure):
    """``nvmlProcessInfo_t`` of NVML's third version."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def bytes_outside_torch(device: torch.device) -> int | None:
    """Bytes of this process on a CUDA device, without torch's own memory and without an empty context.

    ``None`` where the driver does not tell, as in a container with process numbers of its own.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    held, empty = _process_bytes(index, os.getpid()), _empty_context_bytes(index)
    if held is None or empty is None:
        return None
    return max(0, held - empty - torch.cuda.memory_reserved(device))


class _MemoryInfo(ctypes.Structure):
    """``nvmlMemory_t`` of NVML."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total_bytes", "free_bytes", "used_bytes")]


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes of a CUDA device that are in use, by whomever, and all it has; asks the driver, not the device.

    ``None`` for other devices, and where the driver does not tell.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    library, handle, found = _library(), _handle(index), _MemoryInfo()
    if library is None or handle is None or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)):
        return None
    return int(found.used_bytes), int(found.total_bytes)


@functools.cache
def _empty_context_bytes(index: int) -> int | None:
    """Bytes of a process that has nothing but a context on the device."""
    command = [sys.executable, "-I", "-c", _CHILD, str(index)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as child:
        is_ready = child.stdout is not None and child.stdout.readline().strip() == "0"
        return _process_bytes(index, child.pid) if is_ready else None


def _process_bytes(index: int, pid: int) -> int | None:
    """Bytes of a process on the device, by the driver's library."""
    library, handle = _library(), _handle(index)
    if library is None or handle is None:
        return None
    count = ctypes.c_uint(_MAX_PROCESSES)
    found = (_ProcessInfo * _MAX_PROCESSES)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found):
        return None
    known = [info.used_bytes for info in found[: count.value] if info.pid == pid]
    not_told = ctypes.c_ulonglong(-1).value
    return int(known[0]) if known and known[0] != not_told else None


@functools.cache
def _handle(index: int) -> ctypes.c_void_p | None:
    """NVML's name for a device."""
    library = _library()
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    handle = ctypes.c_void_p()
    if library is None or not uuid:
        return None
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
        return None
    return handle


@functools.cache
def _library() -> ctypes.CDLL | None:
    """NVML, ready for use; ``None`` where there is none, or one that lacks what is needed."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        _ = library.nvmlDeviceGetComputeRunningProcesses_v3
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None
