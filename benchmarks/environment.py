"""The machine, the versions and the source that a measurement was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import trainmux

PACKAGES = ("trainmux", "transformers", "torchvision", "timm", "triton")


def describe(device: str) -> dict[str, Any]:
    """Give device, versions and commit. Afterwards this process has a context on the device."""
    found: dict[str, Any] = {
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _installed(name) for name in PACKAGES},
        "num_threads": torch.get_num_threads(),
        "commit": _output("git", "rev-parse", "HEAD"),
        "has_changes": bool(_output("git", "status", "--porcelain", "--", ".")),
    }
    if torch.device(device).type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"),
        }
    return {name: value for name, value in found.items() if value is not None}


def choose_device(name: str) -> str:
    """``auto`` is the GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; ``None`` where it is missing or fails."""
    folder = Path(trainmux.__file__).resolve().parent
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
