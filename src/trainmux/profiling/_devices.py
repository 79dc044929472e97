"""Devices by name: what their data sheets say, for planning on a machine one does not have.

Peaks are the vendors' dense figures, without sparsity. The two shares below are what kernels of this project
reach of them, measured once on an H200 (``benchmarks/results/lowering_h200.md``): 24 TFLOP of bf16 matrix
products in 31.6 ms, and updates at 4.0 TB/s. They are applied to every device.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from trainmux.errors import ConfigError
from trainmux.ir import DeviceFacts
from trainmux.runtime import look_at_host

FLOPS_SHARE = 0.77
BANDWIDTH_SHARE = 0.83
NODE_SECONDS = 2e-6
"""Seconds of a kernel besides its work when a graph is replayed: its launch and its tail."""

# Orders of magnitude, for devices of which nothing but the driver's facts is known.
_LANES_PER_MULTIPROCESSOR = 128
_CLOCK_RATE = 1.5e9
_DEVICE_RATE = 1e12
_HALF_SPEEDUP = 8
_PCIE_RATE = 32e9
_CORE_FLOPS = 32e9
_HOST_RATE = 10e9


@dataclass(frozen=True)
class Device:
    """A device and its link to the host.

    ``half_flops`` and ``single_flops`` are operations per second of 16-bit and 32-bit products (the latter as
    tensor cores do them where there is such a mode), ``num_multiprocessors`` what they are spread over,
    ``bandwidth`` and the two ``link`` rates bytes per second; ``duplex_link`` is the rate of each direction
    while both are busy. ``host_bytes`` is this device's share of the host's memory. Refused with
    `ConfigError`: numbers that are not above 0, bytes and multiprocessors that are not whole.
    """

    name: str
    memory_bytes: int
    host_bytes: int
    num_multiprocessors: int
    half_flops: float
    single_flops: float
    bandwidth: float
    link: float
    duplex_link: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "name":
                _check_number(field.name, getattr(self, field.name), is_whole=field.type == "int")
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"device: expected a name, got {self.name!r}; name it in words")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Device:
        """A device of one's own, from a JSON file with its fields; ``ConfigError`` where it has others."""
        names = [field.name for field in fields(cls)]
        try:
            found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"device: expected a JSON file with {', '.join(names)} at {os.fspath(path)}, got {error}; "
                "write one, or name a device"
            ) from error
        if not isinstance(found, dict) or set(found) != set(names):
            got = ", ".join(found) if isinstance(found, dict) else type(found).__name__
            raise ConfigError(
                f"device: expected exactly {', '.join(names)} in {os.fspath(path)}, got {got or 'nothing'}; "
                "add what is missing, drop the rest"
            )
        return cls(**found)

    @property
    def facts(self) -> DeviceFacts:
        return DeviceFacts(self.name, self.memory_bytes, self.host_bytes)


def _check_number(name: str, value: Any, *, is_whole: bool) -> None:
    is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        kind = "whole number" if is_whole else "number"
        raise ConfigError(
            f"device: expected {name} to be a {kind} above 0, got {value!r}; take it from the data sheet"
        )


_GB = 10**9

# A100, V100: the machines of Table C of µ-TWO (PCI-e Gen 4 x16, 32 GB/s; an eighth of 1152 GB and a quarter
# of 384 GB of host memory). The paper calls the link full duplex: each direction is taken to keep its rate.
# H200: the link as measured, 55 GB/s one way, 51 GB/s each way at once; the host's share is a choice of ours.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40gb", 40 * _GB, 144 * _GB, 108, 312e12, 156e12, 1555e9, 32e9, 32e9),
        Device("v100-32gb", 32 * _GB, 96 * _GB, 80, 125e12, 15.7e12, 900e9, 32e9, 32e9),
        Device("h200-141gb", 141 * _GB, 200 * _GB, 132, 989e12, 494e12, 4800e9, 55e9, 51e9),
    )
}


def find_device(name: str) -> Device:
    """A device by name; capitals, spaces and a missing size do not matter (``A100``, ``a100-40gb``)."""
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    found = [device for device in DEVICES.values() if device.name.replace("-", "").startswith(wanted)]
    if not wanted or len(found) != 1:
        raise ConfigError(
            f"device: expected one of {', '.join(DEVICES)}, got {name!r}; or give a Device of your own"
        )
    return found[0]


@functools.cache
def device_present(device: torch.device) -> Device:
    """A device of this machine, for rough times where nothing has been measured.

    Its data sheet where ``DEVICES`` has it, by its own name and memory; else what the driver says of it. Of
    a CPU only the order of magnitude is right: its "link" is a copy within its memory.
    """
    facts = look_at_host()
    host_bytes = facts.memory_bytes or _GB
    if device.type != "cuda":
        flops = facts.num_cpus * _CORE_FLOPS
        rates = (flops, flops, _HOST_RATE, _HOST_RATE, _HOST_RATE / 2)
        return Device("cpu", host_bytes, host_bytes, facts.num_cpus, *rates)
    found = torch.cuda.get_device_properties(device)
    words = re.split(r"[^a-z0-9]+", found.name.lower())
    for known in DEVICES.values():
        # Names of data sheets count in powers of ten and leave some memory out.
        is_as_large = abs(found.total_memory / known.memory_bytes - 1) < 0.1
        if known.name.partition("-")[0] in words and is_as_large:
            return known
    # Clock rates left cudaDeviceProp with CUDA 13, so a torch may have none, or zero.
    clock = 1e3 * getattr(found, "clock_rate", 0) or _CLOCK_RATE
    memory_clock = 1e3 * getattr(found, "memory_clock_rate", 0)
    bandwidth = 2 * memory_clock * getattr(found, "memory_bus_width", 0) / 8 or _DEVICE_RATE
    single = found.multi_processor_count * _LANES_PER_MULTIPROCESSOR * 2 * clock
    rates = (_HALF_SPEEDUP * single, single, bandwidth, _PCIE_RATE, _PCIE_RATE)
    return Device(found.name, found.total_memory, host_bytes, found.multi_processor_count, *rates)
