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

from trainmux.ir import replace_file
from trainmux.lowering._inductor import cache_folder
from trainmux.runtime import private_folder

_DIGEST_BYTES = hashlib.sha256().digest_size


def stored_key(region: str, surroundings: str) -> str:
    """The key that the code of a region is stored under."""
    return hashlib.sha256(f"{region}\n{surroundings}".encode()).hexdigest()


def is_known(key: str) -> bool:
    """Whether the code of a kernel lies on disk."""
    try:
        return _path(key, "kernel").exists()
    except OSError:
        return False


def recall(key: str, kind: str = "kernel") -> bytes:
    """The code of a kernel, or another ``kind`` of file for it; empty where not all of it is there."""
    try:
        data = _path(key, kind).read_bytes()
    except OSError:
        return b""
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else b""


def remember(key: str, content: bytes, kind: str = "kernel") -> None:
    """Keep the code of a kernel; a full or read-only disk only costs the next start its time."""
    data = hashlib.sha256(content).digest() + content
    with suppress(OSError):
        replace_file(_path(key, kind), lambda file: file.write(data), is_durable=False)


def recall_choices(key: str) -> dict[str, str]:
    """The variants of a kernel's parts that were the quickest when it first ran; empty if unknown."""
    data = recall(key, "choices")
    return dict(json.loads(data)) if data else {}


def remember_choices(key: str, choices: Mapping[str, str]) -> None:
    """Keep choices in a file next to the kernel's code."""
    remember(key, json.dumps(dict(choices)).encode(), "choices")


def _path(key: str, kind: str) -> Path:
    return private_folder(cache_folder() / "trainmux") / f"{key}.{kind}"
