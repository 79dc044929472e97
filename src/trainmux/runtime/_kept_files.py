"""What is kept on disk from one start to the next: where, how it is written, of which source and device."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
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


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, its folder too if need be; nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def device_name(device: torch.device) -> str:
    """What is kept of one device and not used on another is told apart by it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@functools.cache
def source_version(*folders: str) -> str:
    """A hash of the source in these folders of the package: what other code made is told apart by it."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in folders:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
