"""Files kept between starts: their folders, and the source and device they belong to."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

import torch


def user_cache_folder(name: str, variable: str) -> Path:
    """The folder that the environment's ``variable`` names, else one of ours in the user's cache."""
    given = os.environ.get(variable)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "trainmux" / name


def private_folder(folder: Path) -> Path:
    """``folder``, made if need be, for files that are trusted as code is: only this user may open it.

    ``PermissionError`` where it is another user's, or where others could have written to it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, "expected a folder that only this user can write to; remove it", str(folder)
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def device_name(device: torch.device) -> str:
    """A name that tells files of one device from those of another."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@functools.cache
def source_version(*folders: str) -> str:
    """A hash of the source in these folders of the package, to tell files that other code made apart."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in folders:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
