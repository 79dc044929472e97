"""The code of kernels on disk, found by the region they were compiled from.

Inductor has a cache of its own, but to look into it a region must be traced and hashed as Inductor does it,
which takes longer than loading. What is read here was written by this package into the user's own cache
folder: it is trusted as compiled code is. A key is of everything that decides a kernel's code
(``_inductor.surroundings``), so that code of another version, device or setting is never found.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from trainmux.lowering._inductor import cache_folder
from trainmux.runtime import write_whole

_DIGEST_BYTES = hashlib.sha256().digest_size


def stored_key(region: str, surroundings: str) -> str:
    """What the code of a region is stored under."""
    return hashlib.sha256(f"{region}\n{surroundings}".encode()).hexdigest()


def is_known(key: str) -> bool:
    """Whether the code of a kernel lies on disk."""
    return _path(key).exists()


def recall(key: str) -> bytes:
    """The code of a kernel; empty where there is none, or not all of it."""
    try:
        data = _path(key).read_bytes()
    except OSError:
        return b""
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else b""


def remember(key: str, code: bytes) -> None:
    """Keep the code of a kernel; a full or read-only disk only costs the next start its time."""
    with suppress(OSError):
        write_whole(_path(key), hashlib.sha256(code).digest() + code)


def _path(key: str) -> Path:
    return cache_folder() / "trainmux" / f"{key}.kernel"
