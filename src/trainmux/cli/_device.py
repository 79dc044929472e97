"""The devices that a command can be asked to use."""

from __future__ import annotations

from enum import StrEnum


class DeviceChoice(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
