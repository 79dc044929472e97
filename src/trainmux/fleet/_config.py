"""Settings of a fleet, checked once."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainmux.engine import CudaGraphEngine, ReferenceEngine
from trainmux.errors import ConfigError
from trainmux.lowering import compiler_missing
from trainmux.tracing import TraceSettings

_PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    # name: (autocast dtype, dtype that floating tensors are held in; None keeps their own)
    "fp32": (None, None),
    "bf16": (torch.bfloat16, None),
    "fp64": (None, torch.float64),
}
_CHOICES = {
    "precision": tuple(_PRECISIONS),
    "data": ("shared", "per_member"),
    "engine": ("auto", "reference", "cuda_graphs"),
    "lowering": ("auto", "aten", "inductor"),
}


@dataclass(frozen=True)
class FleetConfig:
    """Settings of a fleet, apart from its members."""

    device: torch.device
    precision: str
    data: str
    accumulate: int
    deterministic: bool
    engine: str
    lowering: str = "aten"
    width: int | None = None
    branches: int | None = None
    default_dtype: torch.dtype = torch.float32
    """Torch's when the fleet was made: of tensors that user code makes, whenever it is traced."""
    default_device: torch.device | None = None
    """Torch's when the fleet was made, where it is of the fleet's own kind; ``None`` is the CPU."""

    @property
    def trace_settings(self) -> TraceSettings:
        autocast, held = _PRECISIONS[self.precision]
        return TraceSettings(self.device, autocast, held, self.deterministic, self.default_device)

    def make_engine(self) -> ReferenceEngine | CudaGraphEngine:
        """The engine for one group: graphs on a CUDA device unless told otherwise."""
        if self.device.type == "cuda" and self.engine != "reference":
            return CudaGraphEngine(self.device, deterministic=self.deterministic)
        return ReferenceEngine(deterministic=self.deterministic)

    @property
    def compiles_plans(self) -> bool:
        """Whether steps whose memory is placed in advance, in a plan or beside other jobs, are compiled."""
        return self.lowering == "inductor" or (self.lowering == "auto" and self.device.type == "cuda")

    def held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of ``dtype`` is held and fed."""
        held = _PRECISIONS[self.precision][1]
        return held if held is not None and dtype.is_floating_point else dtype


def make_config(device: Any, **settings: Any) -> FleetConfig:
    """Check the settings; ``ConfigError`` names the one that is off."""
    for name, allowed in _CHOICES.items():
        require_choice(name, settings[name], allowed)
    for name in ("accumulate", "width", "branches"):
        if name == "accumulate" or settings[name] is not None:
            settings[name] = whole_number(name, settings[name])
    if not isinstance(settings["deterministic"], bool):
        raise ConfigError(f"deterministic: expected True or False, got {settings['deterministic']!r}")
    found = checked_device(device)
    if settings["engine"] == "cuda_graphs" and found.type != "cuda":
        raise ConfigError(
            f"engine: expected 'auto' or 'reference' on device {str(found)!r}, got 'cuda_graphs'; it needs "
            "device='cuda'"
        )
    settings["lowering"] = _lowering(found, settings)
    dtype, default_device = torch.get_default_dtype(), torch.get_default_device()
    is_own = default_device.type == found.type != "cpu"
    return FleetConfig(
        found, default_dtype=dtype, default_device=default_device if is_own else None, **settings
    )


def require_choice(setting: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a setting that is none of the texts allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{setting}: expected one of {allowed}, got {value!r}")


def whole_number(setting: str, value: Any) -> int:
    """Return a count of at least 1; refuses anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ConfigError(f"{setting}: expected a whole number of at least 1, got {value!r}")
    return number


def _lowering(device: torch.device, settings: Mapping[str, Any]) -> str:
    """Resolve "auto": "aten" without a compiler or as an oracle; as it is where it may change on the way."""
    wanted = settings["lowering"]
    missing = compiler_missing(device) if wanted != "aten" else ""
    if wanted == "inductor" and missing:
        raise ConfigError(
            f"lowering: expected 'auto' or 'aten' where {missing}, got 'inductor'; install a compiler"
        )
    if wanted != "auto":
        return str(wanted)
    if missing or settings["engine"] == "reference":
        return "aten"
    if not settings["deterministic"]:
        return "auto"
    # When compiled kernels take over depends on the clock, and with it the last bits.
    return "inductor" if device.type == "cuda" else "aten"


def checked_device(device: Any) -> torch.device:
    """A device that this machine has; refuses others."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected 'cpu' or 'cuda[:index]', got {device!r}") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected 'cpu' or 'cuda[:index]', got {device!r}")
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device: expected one that this machine has, got {device!r} without a CUDA device; use 'cpu'"
        )
    index: int | None = found.index  # torch's stubs leave the None out
    found = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if found.index >= torch.cuda.device_count():
        raise ConfigError(f"device: expected one of {torch.cuda.device_count()} CUDA devices, got {device!r}")
    return found
