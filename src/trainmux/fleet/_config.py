"""Settings of a fleet, checked once."""

from __future__ import annotations

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
_ENGINES = ("auto", "reference", "cuda_graphs")
_LOWERINGS = ("auto", "aten", "inductor")
_DATA = ("shared", "per_member")


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

    def held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of ``dtype`` is held and fed."""
        held = _PRECISIONS[self.precision][1]
        return held if held is not None and dtype.is_floating_point else dtype


def make_config(
    device: Any,
    precision: Any,
    data: Any,
    accumulate: Any,
    deterministic: Any,
    engine: Any,
    lowering: Any,
    width: Any,
    branches: Any,
) -> FleetConfig:
    """Check the settings; ``ConfigError`` names the one that is off."""
    _require("precision", precision, tuple(_PRECISIONS))
    _require("data", data, _DATA)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate: expected a whole number of at least 1, got {accumulate!r}")
    if not isinstance(deterministic, bool):
        raise ConfigError(f"deterministic: expected True or False, got {deterministic!r}")
    _require("engine", engine, _ENGINES)
    for name, number in (("width", width), ("branches", branches)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigError(f"{name}: expected None or a whole number of at least 1, got {number!r}")
    found = _device(device)
    if engine == "cuda_graphs" and found.type != "cuda":
        raise ConfigError(
            f"engine: expected 'auto' or 'reference' on device {str(found)!r}, got 'cuda_graphs'; it needs "
            "device='cuda'"
        )
    return FleetConfig(
        found,
        precision,
        data,
        accumulate,
        deterministic,
        engine,
        _lowering(lowering, found, engine=engine, deterministic=deterministic),
        width,
        branches,
        torch.get_default_dtype(),
        _default_device(found),
    )


def _default_device(own: torch.device) -> torch.device | None:
    found = torch.get_default_device()
    return found if found.type == own.type != "cpu" else None


def _lowering(wanted: Any, device: torch.device, *, engine: str, deterministic: bool) -> str:
    """Resolve "auto": "aten" without a compiler or as an oracle, "inductor" where runs must repeat."""
    _require("lowering", wanted, _LOWERINGS)
    missing = compiler_missing(device) if wanted != "aten" else ""
    if wanted == "inductor" and missing:
        raise ConfigError(
            f"lowering: expected 'auto' or 'aten' where {missing}, got 'inductor'; install a compiler"
        )
    if wanted != "auto":
        return str(wanted)
    if device.type != "cuda" or missing or engine == "reference":
        return "aten"
    # When compiled kernels take over depends on the clock, and with it the last bits.
    return "inductor" if deterministic else "auto"


def _require(setting: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{setting}: expected one of {allowed}, got {value!r}")


def _device(device: Any) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected 'cpu' or 'cuda[:index]', got {device!r}") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected 'cpu' or 'cuda[:index]', got {device!r}")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device: expected one that this machine has, got {device!r} without a CUDA device; use 'cpu'"
            )
        index: int | None = found.index  # torch's stubs leave the None out
        if index is None:
            index = torch.cuda.current_device()
        found = torch.device("cuda", index)
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device: expected one of {torch.cuda.device_count()} CUDA devices, got {device!r}"
            )
    return found
