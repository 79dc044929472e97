"""Measured times on disk: one JSON file per device, torch and cuDNN, and per version of what is measured.

A file that cannot be read, or that was written by another version of the strategies, is passed over and
written anew. Two processes that measure at once keep each other's answers.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trainmux.errors import PlanError
from trainmux.ir import write_file
from trainmux.runtime import device_name, source_version, user_cache_folder

_VARIABLE = "TRAINMUX_STRATEGY_DIR"

Times = dict[str, dict[str, float | None]]
"""By question: seconds of each candidate; ``None`` for one that did not run."""


class TimesFile:
    """What is known about one device, in a folder: ``TRAINMUX_STRATEGY_DIR``, else the user's cache."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self._header = _header(device)
        name = "-".join(str(self._header[key]) for key in ("device", "torch", "cudnn"))
        self.path = (folder or default_folder()) / f"{re.sub(r'[^A-Za-z0-9.]+', '_', name)}.json"

    def read(self) -> Times:
        """Everything in the file that can be used; nothing where it is missing, broken or stale."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if {key: content[key] for key in self._header} != self._header:
                return {}
            return {str(question): _checked(times) for question, times in content["times"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def add(self, new: Times) -> None:
        """Write ``new`` beside what is there. Where that is not possible, the next start measures again."""
        content = {**self._header, "times": dict(sorted({**self.read(), **new}.items()))}
        with suppress(PlanError):
            write_file(self.path, json.dumps(content, indent=1).encode("ascii"))


def default_folder() -> Path:
    """Where times are kept when nobody names a folder."""
    return user_cache_folder("strategies", _VARIABLE)


def _header(device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "source": _source_version(),
    }


def _checked(times: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, seconds in times.items():
        if seconds is not None and not (isinstance(seconds, float) and seconds > 0):
            raise ValueError(f"expected seconds or null for {name}, got {seconds!r}")
        found[str(name)] = seconds
    return found


def _source_version() -> str:
    """A hash of the strategies and of how they are timed: other code, other times."""
    return source_version("fusion/strategies")[:16]
