"""Which kernels were compiled before, so that no process is started to compile what lies on disk.

A mark is an empty file beside Inductor's own cache. A mark without its kernel, because somebody cleaned
up, costs time and nothing else: the kernel is then compiled where it is needed.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import torch

from trainmux.lowering._inductor import cache_folder


def was_compiled(key: str, *, deterministic: bool) -> bool:
    """Whether a kernel was compiled on this machine, with this torch, for a device like the present one."""
    return _mark(key, deterministic).exists()


def remember(key: str, *, deterministic: bool) -> None:
    """A kernel lies in the cache on disk now."""
    mark = _mark(key, deterministic)
    with suppress(OSError):  # a full or read-only disk: the next start takes longer
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(key: str, deterministic: bool) -> Path:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    text = "\n".join((key, str(deterministic), torch.__version__, device))
    return cache_folder() / "trainmux" / hashlib.sha256(text.encode()).hexdigest()
