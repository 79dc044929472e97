"""Devices by name: what their data sheets say, for planning on a machine one does not have.

Peaks are the vendors' dense figures, without sparsity. The two shares below are what kernels of this project
reach of them, measured once on an H200: 24 TFLOP of bf16 matrix products in 31.6 ms, and updates at
4.0 TB/s. They are applied to every device.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from trainmux.errors import ConfigError
from trainmux.ir import DeviceFacts

FLOPS_SHARE = 0.77
BANDWIDTH_SHARE = 0.83
NODE_SECONDS = 2e-6
"""Seconds of a kernel besides its work when a graph is replayed: its launch and its tail."""


@dataclass(frozen=True)
class Device:
    """A device and its link to the host, by which plans for it are worked out.

    ``memory_bytes`` is all the memory it has. ``half_flops`` and ``single_flops`` are operations per
    second of 16-bit and 32-bit products (the latter as tensor cores do them where there is such a mode),
    ``num_multiprocessors`` what they are spread over, ``bandwidth`` and the two ``link`` rates bytes per
    second; ``duplex_link`` is the rate of each direction while both are busy. ``host_bytes`` is this device's
    share of the host's memory. Refused with `ConfigError`: numbers that are not above 0, bytes and
    multiprocessors that are not whole.
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
        """Its name and memory, as records of profiles have them."""
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
    """Speeds of a device of this machine, for estimates where nothing has been measured.

    The entry of ``DEVICES`` with the nearest memory size, scaled to this device's multiprocessors.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return min(DEVICES.values(), key=lambda known: known.memory_bytes)
    facts = torch.cuda.get_device_properties(device)
    nearest = min(DEVICES.values(), key=lambda known: abs(known.memory_bytes - facts.total_memory))
    scale = facts.multi_processor_count / nearest.num_multiprocessors
    return replace(
        nearest,
        name=facts.name,
        num_multiprocessors=facts.multi_processor_count,
        half_flops=scale * nearest.half_flops,
        single_flops=scale * nearest.single_flops,
    )
