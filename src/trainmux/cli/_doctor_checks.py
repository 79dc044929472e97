"""What facts about a machine mean for training on it: good, worth knowing, or in the way.

Each check is a function of the facts alone, so that a machine one does not have can be played.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import trainmux as tm
from trainmux.sizes import format_bytes

SUPPORTED_PYTHON = ((3, 11), (3, 13))
SUPPORTED_TORCH = ((2, 11), (2, 14))
"""From the first, up to but without the second; as in pyproject.toml."""

LEAST_FREE_DEVICE_BYTES = 256 << 20
"""Library workspaces take 32 MiB for each stream; below this there is no room for a fleet beside them."""
LEAST_FREE_DISK_BYTES = 1 << 30
OTHERS_BYTES = 64 << 20
"""What a driver keeps for itself on an idle device is below this."""
SHARED_LINK = 0.75
"""With less than this share of its own rate while both are busy, a direction waits for the other."""


class Level(Enum):
    """How good a finding is; a problem means that training cannot work as it would by default."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was found, in plain words; ``remedy`` is what to do about it, if it is not good."""

    section: str
    level: Level
    text: str
    remedy: str = ""


Check = Callable[[tm.MachineFacts], Iterator[Finding]]


@dataclass(frozen=True)
class _Section:
    """Makes the findings of one section."""

    name: str

    def ok(self, text: str) -> Finding:
        return Finding(self.name, Level.OK, text)

    def note(self, text: str, remedy: str) -> Finding:
        return Finding(self.name, Level.NOTE, text, remedy)

    def problem(self, text: str, remedy: str) -> Finding:
        return Finding(self.name, Level.PROBLEM, text, remedy)


def check_versions(facts: tm.MachineFacts) -> Iterator[Finding]:
    """Python and torch must be those that trainmux was written for; the others are told."""
    section = _Section("Versions")
    yield section.ok(f"trainmux {facts.packages.get('trainmux') or tm.__version__} on {facts.system}")
    for name, version, supported in (
        ("Python", facts.python, SUPPORTED_PYTHON),
        ("torch", facts.torch, SUPPORTED_TORCH),
    ):
        first, end = (".".join(map(str, bound)) for bound in supported)
        last = ".".join(map(str, (supported[1][0], supported[1][1] - 1)))
        number = _version_number(version)
        if number is not None and number < supported[0]:
            yield section.problem(
                f"{name} {version} is too old: trainmux needs {first} to {last}",
                f"pip install 'torch>={first},<{end}'"
                if name == "torch"
                else f"use Python {first} or {last}",
            )
        elif number is None or number >= supported[1]:
            yield section.note(
                f"{name} {version} is not among those that trainmux is tested with, {first} to {last}",
                f"pip install 'torch>={first},<{end}'"
                if name == "torch"
                else f"use Python {first} or {last}",
            )
        else:
            yield section.ok(f"{name} {version}")
    cuda = f"CUDA {facts.cuda.built_for}" if facts.cuda.built_for else "no CUDA in this torch"
    cudnn = f"cuDNN {facts.cuda.cudnn}" if facts.cuda.cudnn else "no cuDNN"
    triton = f"Triton {facts.triton}" if facts.triton else "no Triton"
    driver = f"NVIDIA driver {facts.driver.version}" if facts.driver.version else "no NVIDIA driver"
    yield section.ok(f"{cuda}, {cudnn}, {triton}, {driver}")


def check_device(facts: tm.MachineFacts) -> Iterator[Finding]:
    """There is a device that torch can use, with memory that nobody else holds."""
    section = _Section("Device")
    if not facts.cuda.gpus:
        yield _without_device(section, facts)
    for gpu in facts.cuda.gpus:
        free = "" if gpu.free_bytes is None else f", {format_bytes(gpu.free_bytes)} free"
        text = (
            f"cuda:{gpu.index} {gpu.name}, compute {gpu.capability}, {format_bytes(gpu.memory_bytes)}{free}"
        )
        if gpu.free_bytes is not None and gpu.free_bytes < LEAST_FREE_DEVICE_BYTES:
            yield section.problem(
                f"{text}: too little to train", "end what else runs on it, or use another device"
            )
        elif gpu.others_bytes is not None and gpu.others_bytes > OTHERS_BYTES:
            yield section.note(
                f"{text}; others use {format_bytes(gpu.others_bytes)}",
                "leave the device to one process, or give a budget below what is free",
            )
        elif gpu.others_bytes is None:
            yield section.ok(f"{text}; whether others use it is not known")
        else:
            yield section.ok(f"{text}; nobody else uses it")
        if "exclusive" in gpu.compute_mode.lower():
            yield section.note(
                f"cuda:{gpu.index} takes one process at a time (compute mode {gpu.compute_mode})",
                f"nvidia-smi -i {gpu.index} -c DEFAULT lets several processes use it",
            )


def _without_device(section: _Section, facts: tm.MachineFacts) -> Finding:
    """Why there is none. Training works on the CPU, so only a device that should work is a problem."""
    cuda, driver = facts.cuda, facts.driver
    listed = ", ".join(gpu.name for gpu in driver.gpus)
    if listed and not cuda.built_for:
        return section.note(
            f"training runs on the CPU: the driver has {listed}, but this torch was built without CUDA",
            "install a build of torch with CUDA",
        )
    if listed and cuda.visible_devices is not None and cuda.visible_devices.strip() in ("", "-1"):
        return section.note(
            f"training runs on the CPU: CUDA_VISIBLE_DEVICES={cuda.visible_devices!r} hides {listed}",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if listed and "out of memory" in cuda.error.lower():
        return section.problem(
            f"the driver has {listed}, but no memory is left on it", "end what else runs on it"
        )
    if listed:
        return section.problem(
            f"the driver has {listed}, but torch cannot use it: {_clause(cuda.error)}",
            f"update the driver to one for CUDA {cuda.built_for}, or install a torch for this driver",
        )
    if driver.version:
        return section.note(
            f"training runs on the CPU: NVIDIA driver {driver.version} has no device here "
            f"({_clause(driver.error)}; torch: {_clause(cuda.error)})",
            "give this machine or container a device, for docker with --gpus all",
        )
    return section.note(
        f"training runs on the CPU: there is no GPU ({_clause(cuda.error)})",
        "for a GPU's plans without a GPU: trainmux plan bert_base_mlm --device a100-40gb",
    )


def check_host(facts: tm.MachineFacts) -> Iterator[Finding]:
    """Swaps go to pinned memory of the host: how much there may be."""
    section = _Section("Host")
    host = facts.host
    cores = f"{host.num_cpus} core{'s' if host.num_cpus != 1 else ''}"
    memory = (
        "memory not known" if host.memory_bytes is None else f"{format_bytes(host.memory_bytes)} of memory"
    )
    available = "" if host.available_bytes is None else f", {format_bytes(host.available_bytes)} available"
    limit = (
        ""
        if host.limit_bytes is None
        else f", limited to {format_bytes(host.limit_bytes)} by a control group"
    )
    yield section.ok(f"{cores}, {memory}{available}{limit}")
    locked = "unlimited" if host.locked_limit_bytes is None else format_bytes(host.locked_limit_bytes)
    told = f"ulimit -l is {locked}, which does not bind CUDA"
    if host.pinnable_bytes is None:
        yield section.note(
            f"how much memory may be pinned is not known ({told})",
            "give plans a device of your own (tm.Device) with host_bytes to limit their swaps",
        )
        return
    text = f"{format_bytes(host.pinnable_bytes)} may be pinned for swaps ({told})"
    largest = max((gpu.memory_bytes for gpu in facts.cuda.gpus), default=0)
    if host.pinnable_bytes < largest:
        yield section.note(
            f"{text}: less than the device has, so plans for small budgets recompute more",
            "give this machine, container or job more memory",
        )
    else:
        yield section.ok(text)


def check_compilers(facts: tm.MachineFacts) -> Iterator[Finding]:
    """Without a compiler training works, on slower kernels."""
    section = _Section("Compilers")
    on_gpu = bool(facts.cuda.gpus)
    if on_gpu and facts.region_error:
        yield section.note(
            f"steps stay on ATen's slower kernels: {_clause(facts.region_error)}",
            "install the Triton that belongs to this torch (pip install triton)",
        )
    elif on_gpu and not facts.c_compiler:
        yield section.note(
            "Triton is there, but no C compiler, with which it builds what starts a kernel",
            "install gcc or clang",
        )
    elif on_gpu:
        yield section.ok(f"Triton compiles for {facts.device}, with {facts.c_compiler}")
    if facts.cpp_error:
        yield section.note(
            f'lowering="inductor" does not work on the CPU: {_clause(facts.cpp_error)}',
            "install g++ or clang++",
        )
    else:
        yield section.ok("C++ compiles for the CPU")


def check_rates(facts: tm.MachineFacts) -> Iterator[Finding]:
    """What was measured; swaps hide behind compute only as far as the link carries them."""
    section = _Section("Bandwidth")
    rates = facts.rates
    if rates is None:
        if facts.rates_error:
            yield section.note(
                f"nothing could be measured: {_clause(facts.rates_error)}",
                "free memory on the device and the host, and run this again",
            )
        return
    if not facts.cuda.gpus:
        yield section.ok(f"host memory {rate(rates.memory)} (read and written by a copy); there is no link")
        return
    yield section.ok(f"device memory {rate(rates.memory)} (read and written by a copy)")
    link = rates.link
    text = (
        f"link to the host: out {rate(link.out)}, in {rate(link.into)}; both at once: "
        f"out {rate(link.out_duplex)}, in {rate(link.into_duplex)}"
    )
    if min(link.out_duplex / link.out, link.into_duplex / link.into) < SHARED_LINK:
        yield section.note(
            f"{text}: the directions slow each other down",
            "have the device in a slot of its own, and other traffic away from it, if swaps matter",
        )
    else:
        yield section.ok(text)


def check_capture(facts: tm.MachineFacts) -> Iterator[Finding]:
    """Steps are captured as CUDA graphs, in memory whose size was simulated by torch's default rules."""
    section = _Section("CUDA graphs")
    cuda = facts.cuda
    if not cuda.gpus:
        return
    for what, error in (("CUDA graphs", cuda.graphs_error), ("memory pools (MemPool)", cuda.pool_error)):
        if error:
            yield section.problem(
                f"{what} cannot be used: {_clause(error)}",
                'update the driver and torch; until then train with engine="reference"',
            )
        else:
            yield section.ok(f"{what} work")
    if cuda.allocator_settings:
        names = " ".join(name for name, _ in cuda.allocator_settings)
        told = ", ".join(f"{name}={value}" for name, value in cuda.allocator_settings)
        yield section.note(
            f"the allocator does not follow its default rules ({told}): memory is not predicted",
            f"unset {names}",
        )
    elif cuda.allocator != "native":
        yield section.note(
            f"the allocator is {cuda.allocator}, not torch's native one: memory is not predicted",
            "leave the allocator of torch as it is",
        )
    else:
        yield section.ok("the allocator follows its default rules")
    if cuda.is_mps_running:
        yield section.note(
            "MPS is running: other processes may compute on the device at the same time",
            "stop it for measurements: echo quit | nvidia-cuda-mps-control",
        )
    elif cuda.has_mps:
        yield section.ok("MPS can be started (trainmux bench does so by itself)")
    else:
        yield section.ok("MPS is not installed; only one way of trainmux bench needs it")


# What each optional package is for, and whether this version has a use for it.
_EXTRAS = {
    "rich": ("the command line", "cli"),
    "typer": ("the command line", "cli"),
    "scikit-learn": ("trainmux demo", "cli"),
    "transformers": ("the Hugging Face workloads", "hf"),
    "scipy": ("tests", "dev"),
    "torchvision": ("", ""),
    "plotly": ("", "viz"),
    "optuna": ("", "optuna"),
    "ray": ("", "ray"),
    "tensorboard": ("", "log"),
}


def check_extras(facts: tm.MachineFacts) -> Iterator[Finding]:
    """Packages that are not needed to train."""
    section = _Section("Extras")
    present = [f"{name} {facts.packages[name]}" for name in _EXTRAS if facts.packages.get(name)]
    if present:
        yield section.ok(", ".join(present))
    missing = [name for name in _EXTRAS if not facts.packages.get(name)]
    for name in missing:
        use, extra = _EXTRAS[name]
        if use:
            yield section.note(f"{name} is missing: {use}", f"pip install 'trainmux[{extra}]'")
    unused = [name for name in missing if not _EXTRAS[name][0]]
    if unused:
        yield section.ok(f"not installed, and not needed: {', '.join(unused)}")


def check_caches(facts: tm.MachineFacts) -> Iterator[Finding]:
    """What is kept between runs; where it cannot be, every start takes as long as the first."""
    section = _Section("Caches")
    for cache in facts.caches:
        folder = cache.folder
        most = "" if folder.is_whole else "more than "
        files = f"{most}{folder.num_files:,} file{'s' if folder.num_files != 1 else ''}"
        held = f"{files}, {most}{format_bytes(folder.size_bytes)}" if folder.exists else "nothing yet"
        text = f"{cache.keeps}: {held}, in {folder.path or 'no folder'}"
        remedy = f"set {cache.variable} to a folder on a disk with room that can be written to"
        if folder.write_error and cache.needed and not folder.exists:
            yield section.problem(f"{text}, which cannot be made: {_clause(folder.write_error)}", remedy)
        elif folder.write_error:
            yield section.note(f"{text}, which cannot be written to: {_clause(folder.write_error)}", remedy)
        elif folder.free_bytes is not None and folder.free_bytes < LEAST_FREE_DISK_BYTES:
            yield section.note(f"{text}, on a disk with only {format_bytes(folder.free_bytes)} left", remedy)
        else:
            yield section.ok(text)


CHECKS: tuple[Check, ...] = (
    check_versions,
    check_device,
    check_host,
    check_compilers,
    check_rates,
    check_capture,
    check_extras,
    check_caches,
)


def check(facts: tm.MachineFacts) -> tuple[Finding, ...]:
    """The findings of all checks, section by section."""
    return tuple(finding for one in CHECKS for finding in one(facts))


def rate(bytes_per_second: float) -> str:
    """``55.1e9`` is "55.1 GB/s"."""
    return f"{bytes_per_second / 1e9:,.1f} GB/s"


def _version_number(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def _clause(message: str) -> str:
    """A message of somebody else's, to stand within a sentence of ours."""
    return message.strip().rstrip(".") or "no reason given"
