"""Kernels' code on disk, by the region that it was compiled from, and the fastest variants of its parts.

Inductor has a cache of its own, but to look into it a region must be traced and hashed as Inductor does it,
which takes longer than loading. What is read here was written by this package into the user's own cache
folder: it is trusted as compiled code is. A key is of everything that decides a kernel's code
(``_inductor.surroundings``), so that code of another version, device or setting is never found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainmux.lowering._inductor import cache_folder
from trainmux.runtime import write_whole

_DIGEST_BYTES = hashlib.sha256().digest_size


def stored_key(region: str, surroundings: str) -> str:
    """The key under which a region's code is stored."""
    return hashlib.sha256(f"{region}\n{surroundings}".encode()).hexdigest()


def is_known(key: str) -> bool:
    """Whether the code of a kernel is on disk."""
    return _path(key, "kernel").exists()


def recall(key: str) -> bytes:
    """The code of a kernel; empty where there is none, or not all of it."""
    return _read(_path(key, "kernel"))


def remember(key: str, code: bytes) -> None:
    """Keep the code of a kernel; a full or read-only disk only costs the next start its time."""
    _write(_path(key, "kernel"), code)


def recall_choices(key: str) -> dict[str, str]:
    """The fastest variants of a kernel's parts, by name, as found when it first ran; empty where unknown."""
    data = _read(_path(key, "choices"))
    return dict(json.loads(data)) if data else {}


def remember_choices(key: str, choices: Mapping[str, str]) -> None:
    """Keep the choices of variants next to the kernel's code."""
    _write(_path(key, "choices"), json.dumps(dict(choices)).encode())


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else b""


def _write(path: Path, content: bytes) -> None:
    with suppress(OSError):
        write_whole(path, hashlib.sha256(content).digest() + content)


def _path(key: str, ending: str) -> Path:
    return cache_folder() / "trainmux" / f"{key}.{ending}"
