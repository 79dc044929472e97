"""Facts about the host: memory, how much of it may be pinned, folders and the space on their disks."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_MAX_FILES = 20_000
"""Files that are looked at in one folder: a compiler's cache can hold hundreds of thousands."""
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 control groups write "no limit" as the largest number of whole pages."""


@dataclass(frozen=True)
class HostFacts:
    """The host's processors and memory; ``None`` for what could not be read, or has no limit.

    ``available_bytes`` is what can be had without swapping. ``limit_bytes`` is the control group's limit (a
    container's, a job's), ``limit_left_bytes`` what is left of it. ``locked_limit_bytes`` is ``ulimit -l``,
    which binds what a process locks by itself, not what a CUDA driver pins for it.
    """

    num_cpus: int
    memory_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    limit_left_bytes: int | None
    locked_limit_bytes: int | None

    @property
    def pinnable_bytes(self) -> int | None:
        """Bytes that may be pinned now; pinned memory cannot be swapped out and counts against the limit."""
        known = [size for size in (self.available_bytes, self.limit_left_bytes) if size is not None]
        return min(known) if known else None


@dataclass(frozen=True)
class FolderFacts:
    """A folder that something is kept in, whether or not it exists yet.

    ``is_whole`` is false where it holds more files than were counted. ``free_bytes`` is the room on its disk,
    ``None`` where that is not known. ``write_error`` says why nothing can be written, empty if it can.
    """

    path: str
    exists: bool
    num_files: int
    size_bytes: int
    is_whole: bool
    free_bytes: int | None
    write_error: str


def look_at_host(root: Path = Path("/")) -> HostFacts:
    """The facts of the host whose file system begins at ``root``."""
    memory = _meminfo(root / "proc/meminfo")
    limit, left = _control_group(root)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        limit_bytes=limit,
        limit_left_bytes=left,
        locked_limit_bytes=None if locked == resource.RLIM_INFINITY else locked,
    )


def look_at_folder(path: Path, pattern: str = "**/*") -> FolderFacts:
    """Facts about a folder and its files that match ``pattern``; writes a file there and removes it."""
    exists = path.is_dir()
    files = list(islice(_files(path, pattern), _MAX_FILES + 1))
    counted = files[:_MAX_FILES]
    ground = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(ground).free
    return FolderFacts(
        path=str(path),
        exists=exists,
        num_files=len(counted),
        size_bytes=sum(_size(file) for file in counted),
        is_whole=len(counted) == len(files),
        free_bytes=free,
        write_error=_write_error(path) if exists else _creation_error(ground),
    )


def _files(path: Path, pattern: str) -> Iterator[Path]:
    with suppress(OSError):  # a folder that goes away meanwhile, or that may not be read
        for found in path.glob(pattern):
            if found.is_file():
                yield found


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0


def _write_error(folder: Path) -> str:
    """Rights alone do not tell of a disk that is full: a page is written."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _creation_error(ground: Path) -> str:
    """Why a folder could not be made below ``ground``, the nearest that exists."""
    if not ground.is_dir():
        return f"{ground} is not a folder"
    return "" if os.access(ground, os.W_OK | os.X_OK) else f"{ground} may not be written to"


def _meminfo(path: Path) -> dict[str, int]:
    found = {}
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words:
                found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _control_group(root: Path) -> tuple[int | None, int | None]:
    """The tightest memory limit of this process's control groups, and the least that is left of any."""
    limits, left = [], []
    for folder, limit_name, use_name in _memory_groups(root):
        limit = _number(folder / limit_name)
        if limit is None or limit >= _NO_LIMIT_BYTES:
            continue
        limits.append(limit)
        use = _number(folder / use_name)
        if use is not None:
            left.append(max(0, limit - max(0, use - _reclaimable(folder))))
    return min(limits, default=None), min(left, default=None)


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """This process's memory control groups, the innermost first; in a container the path may not exist."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = [*line.split(":", 2), "", ""][:3]
            if number == "0":
                top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                top = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            inner = Path(path.lstrip("/"))
            for folder in (inner, *inner.parents):
                yield top / folder, *names


def _reclaimable(group: Path) -> int:
    """Pages of files that nobody reads any more: counted as used, given back as soon as somebody asks."""
    found = {}
    with suppress(OSError):
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, number = line.partition(" ")
            found[name] = int(number) if number.isdigit() else 0
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        return int(path.read_text(encoding="ascii"))
    return None
