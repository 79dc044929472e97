"""Facts about a CUDA machine: its driver, its devices, and whether what a step needs works on them.

The driver is asked first, in a process of its own: memory that it counts as used then is used by others. A
driver without a device, a device that torch cannot use and a torch without CUDA are answers, not errors.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from trainmux.runtime._capturing import allocating_from, capturing
from trainmux.runtime._timing import CudaTimer

_SMI = "nvidia-smi"
_SMI_SECONDS = 5.0
_SMI_FIELDS = ("uuid", "name", "memory.total", "memory.used", "compute_mode", "driver_version")
_MPS_CONTROL = "nvidia-cuda-mps-control"
_MPS_FOLDER = "/tmp/nvidia-mps"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NUM_COPIES = 5


@dataclass(frozen=True)
class ListedGpu:
    """A device as the driver lists it, before this process used it; ``None`` for what it does not tell."""

    uuid: str
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    compute_mode: str


@dataclass(frozen=True)
class DriverFacts:
    """The driver's version (empty where there is none), its devices, and why it could not be asked."""

    version: str
    gpus: tuple[ListedGpu, ...]
    error: str


@dataclass(frozen=True)
class GpuFacts:
    """A device that torch can use; ``others_bytes`` is used by other processes, ``None`` where unknown."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    free_bytes: int | None
    others_bytes: int | None
    compute_mode: str


@dataclass(frozen=True)
class CudaFacts:
    """CUDA as torch sees it.

    ``error`` says why torch can use no device, empty if it can. ``graphs_error`` and ``pool_error`` say why a
    step cannot be captured as a graph, or in a memory pool of its own, on the first device.
    ``allocator_settings`` are the variables, with values, that change the allocator's rules.
    """

    built_for: str
    cudnn: str
    error: str
    gpus: tuple[GpuFacts, ...]
    graphs_error: str
    pool_error: str
    allocator: str
    allocator_settings: tuple[tuple[str, str], ...]
    visible_devices: str | None
    has_mps: bool
    is_mps_running: bool


def ask_driver(root: Path = Path("/")) -> DriverFacts:
    """Facts from the driver's own tool; the kernel module's version if the tool is missing."""
    version = _module_version(root / "proc/driver/nvidia/version")
    tool = shutil.which(_SMI)
    if tool is None:
        return DriverFacts(version, (), f"{_SMI} is not on the PATH" if version else "there is no driver")
    command = [tool, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return DriverFacts(version, (), f"{_SMI} gave no answer in {_SMI_SECONDS:g} s")
    except OSError as error:
        return DriverFacts(version, (), f"{_SMI} does not run: {error.strerror or error}")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == len(_SMI_FIELDS)]
    if done.returncode != 0 or not rows:
        said = _first_line(done.stdout) or _first_line(done.stderr) or f"{_SMI} listed no device"
        return DriverFacts(version, (), said)
    gpus = tuple(ListedGpu(row[0], row[1], _mebibytes(row[2]), _mebibytes(row[3]), row[4]) for row in rows)
    return DriverFacts(rows[0][5] or version, gpus, "")


def look_at_cuda(driver: DriverFacts) -> CudaFacts:
    """Facts about the devices as torch sees them; begins to use the first one."""
    error = _why_not(_use_a_device)
    gpus = () if error else tuple(_gpu(index, driver) for index in range(torch.cuda.device_count()))
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER)
    return CudaFacts(
        built_for=torch.version.cuda or "",
        cudnn=_cudnn_version(),
        error=error,
        gpus=gpus,
        graphs_error="" if error else _why_not(_capture_and_replay),
        pool_error="" if error else _why_not(_capture_into_a_pool),
        allocator="" if error else torch.cuda.get_allocator_backend(),
        allocator_settings=tuple((n, os.environ[n]) for n in _ALLOCATOR_VARIABLES if os.environ.get(n)),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        has_mps=shutil.which(_MPS_CONTROL) is not None,
        is_mps_running=(folder / "control").exists(),
    )


def probe_memory(device: torch.device, num_bytes: int) -> float:
    """Bytes per second read and written by a copy within the memory of ``device``."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = [_timed(lambda: target.copy_(source), device) for _ in range(1 + _NUM_COPIES)]
    return 2 * num_bytes / statistics.median(seconds[1:])


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    with torch.cuda.device(device):
        timer = CudaTimer()
        timer.start()
        work()
        timer.stop()
        return timer.seconds()


def _why_not(attempt: Callable[[], None]) -> str:
    """The first line of what went wrong; empty if nothing did. A broken installation can fail in any way."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            attempt()
        except Exception as error:
            return _first_line(str(error)) or type(error).__name__
    return ""


def _use_a_device() -> None:
    if not torch.backends.cuda.is_built():
        raise RuntimeError("this torch was built without CUDA")
    torch.cuda.init()
    if torch.cuda.device_count() == 0:
        raise RuntimeError("torch sees no CUDA device")
    if torch.ones(2, device="cuda").sum().item() != 2:
        raise RuntimeError("a sum on the device came out wrong")


def _capture_into_a_pool() -> None:
    pool = torch.cuda.MemPool()
    with allocating_from(pool, torch.device("cuda", torch.cuda.current_device())):
        torch.empty(1024, device="cuda")
    _capture_and_replay(pool)


def _capture_and_replay(pool: torch.cuda.MemPool | None = None) -> None:
    number = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with capturing(graph, torch.cuda.Stream(), pool):
        number.add_(number + 1)
    for _ in range(2):
        graph.replay()
    if number.tolist() != [3.0] * 16:
        raise RuntimeError("a replayed graph computed something else than its kernels do")


def _gpu(index: int, driver: DriverFacts) -> GpuFacts:
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    listed = next((gpu for gpu in driver.gpus if uuid and gpu.uuid.endswith(uuid)), None)
    others = None if listed is None else listed.used_bytes
    if index == 0:
        free: int | None = torch.cuda.mem_get_info(index)[0]
    else:  # asking torch would begin to use the device
        free = None if others is None else properties.total_memory - others
    return GpuFacts(
        index=index,
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        free_bytes=free,
        others_bytes=others,
        compute_mode="" if listed is None else listed.compute_mode,
    )


def _cudnn_version() -> str:
    number = None
    with suppress(RuntimeError):  # its library does not fit the one that torch was built with
        number = torch.backends.cudnn.version()
    if number is None:
        return ""
    major = 10_000 if number >= 90_000 else 1_000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def _module_version(path: Path) -> str:
    with suppress(OSError):
        words = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), "")
    return ""


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
