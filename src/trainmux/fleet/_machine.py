"""Facts about this machine for training: versions, devices, memory, compilers, bandwidths, caches.

Whether they are good or bad is for those who show them to say.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from trainmux.fleet._plan_cache import PlanCache
from trainmux.lowering import cache_folder, compiler_missing
from trainmux.profiling import LinkRates, ProfileCache, probe_link
from trainmux.runtime import (
    CudaFacts,
    DriverFacts,
    FolderFacts,
    HostFacts,
    ask_driver,
    look_at_cuda,
    look_at_folder,
    look_at_host,
    probe_memory,
)

PACKAGES = (
    *("trainmux", "torch", "numpy", "safetensors", "rich", "typer", "scikit-learn", "transformers"),
    *("scipy", "torchvision", "optuna", "ray", "plotly", "tensorboard"),
)
_COMPILER_CACHE = "compiler"
_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TRITON = ("triton", "pytorch-triton")
_C_COMPILERS = ("cc", "gcc", "clang")
_PROBE_BYTES = 256 << 20
_CPU_PROBE_BYTES = 64 << 20
_LEAST_PROBE_BYTES = 1 << 20
_SHARE_OF_FREE = 8
"""A measurement takes at most this part of what is free: the link's holds four buffers at once."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second, measured: over the link, and read and written within the device's own memory."""

    link: LinkRates
    memory: float
    num_bytes: int


@dataclass(frozen=True)
class CacheFacts:
    """One thing that is kept on disk between runs.

    ``variable`` names the variable that moves its folder. ``needed`` is whether there must be such a folder;
    without the others only time is lost.
    """

    keeps: str
    variable: str
    needed: bool
    folder: FolderFacts


@dataclass(frozen=True)
class MachineFacts:
    """Everything that was found out; ``packages`` has an empty version for what is not installed.

    ``rates`` is ``None`` where nothing was measured, and ``rates_error`` says why, if that was not wanted.
    ``region_error`` says why regions cannot be compiled for ``device``, ``c_compiler`` is the path of what
    Triton builds its launchers with.
    """

    python: str
    system: str
    torch: str
    triton: str
    packages: dict[str, str]
    device: str
    host: HostFacts
    driver: DriverFacts
    cuda: CudaFacts
    region_error: str
    cpp_error: str
    c_compiler: str
    caches: tuple[CacheFacts, ...]
    rates: Rates | None
    rates_error: str
    seconds: float


def inspect_machine(*, measures: bool = True) -> MachineFacts:
    """Look at this machine; with ``measures``, also at how fast memory and link are. Takes a few seconds.

    Nothing that is broken raises: it is found in the facts.
    """
    begin = time.perf_counter()
    driver = ask_driver()  # before torch uses the device, so that what is in use is others'
    cuda = look_at_cuda(driver)
    host = look_at_host()
    device = torch.device("cuda", 0) if cuda.gpus else torch.device("cpu")
    packages = {name: _version(name) for name in PACKAGES}
    rates, rates_error = _measure(device, host, cuda) if measures else (None, "")
    return MachineFacts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch.__version__,
        triton=next(filter(None, map(_version, _TRITON)), ""),
        packages=packages,
        device=str(device),
        host=host,
        driver=driver,
        cuda=cuda,
        region_error=compiler_missing(device),
        cpp_error=compiler_missing(torch.device("cpu")),
        c_compiler=next(filter(None, map(shutil.which, _C_COMPILERS)), "") or "",
        caches=_caches(),
        rates=rates,
        rates_error=rates_error,
        seconds=time.perf_counter() - begin,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _measure(device: torch.device, host: HostFacts, cuda: CudaFacts) -> tuple[Rates | None, str]:
    free = [host.pinnable_bytes, *(gpu.free_bytes for gpu in cuda.gpus[:1])]
    most = _PROBE_BYTES if device.type == "cuda" else _CPU_PROBE_BYTES
    num_bytes = min([most, *(size // _SHARE_OF_FREE for size in free if size is not None)])
    if num_bytes < _LEAST_PROBE_BYTES:
        return None, "too little memory is free to measure anything"
    try:
        return Rates(probe_link(device, num_bytes), probe_memory(device, num_bytes), num_bytes), ""
    except RuntimeError as error:  # out of memory, no pinned memory, a device that gave up
        return None, str(error).partition("\n")[0]


def _caches() -> tuple[CacheFacts, ...]:
    def at(keeps: str, variable: str, find: Callable[[], Path], pattern: str) -> CacheFacts:
        return CacheFacts(keeps, variable, keeps == _COMPILER_CACHE, _folder(find, pattern))

    return (
        at("profiles", "TRAINMUX_PROFILE_DIR", lambda: ProfileCache().folder, "*"),
        at("plans", "TRAINMUX_PLAN_DIR", lambda: PlanCache().folder, "*"),
        at("programs", _INDUCTOR_VARIABLE, lambda: cache_folder() / "trainmux", "*.step"),
        at("kernels", _INDUCTOR_VARIABLE, lambda: cache_folder() / "trainmux", "*.kernel"),
        at(_COMPILER_CACHE, _INDUCTOR_VARIABLE, cache_folder, "**/*"),
    )


def _folder(find: Callable[[], Path], pattern: str) -> FolderFacts:
    """Finding a folder can fail: Inductor makes its own, and a user without a home has no cache."""
    try:
        return look_at_folder(find(), pattern)
    except (OSError, RuntimeError) as error:
        path = str(getattr(error, "filename", "") or "")
        return FolderFacts(path, False, 0, 0, True, None, getattr(error, "strerror", "") or str(error))
