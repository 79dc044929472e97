"""What a measurement was made with: versions, device, and the state of the source."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import trainmux

from .job import BenchError

PACKAGE = Path(trainmux.__file__).resolve().parent
PROBE_SECONDS = 120


def describe(device: str) -> dict[str, Any]:
    """Versions, device and source; asks the device, so that this process has a context on it afterwards."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None,
        "driver": None,
        "device": f"CPU, {platform.machine()}",
        "device_memory_bytes": None,
        "packages": {
            name: _installed(name) for name in ("trainmux", "transformers", "torchvision", "triton")
        },
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        **source_state(),
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(torch.device(device))
        found |= {
            "device": properties.name,
            "device_memory_bytes": properties.total_memory,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver_version(),
        }
    return found


def probe(device: str) -> dict[str, Any]:
    """The same from a process of its own, so that this one never holds memory on a GPU."""
    if torch.device(device).type != "cuda":
        return describe(device)
    command = [sys.executable, "-m", "benchmarks.bench.environment", device]
    try:
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(
            f"expected an answer from the device {device}, got none in {PROBE_SECONDS} s"
        ) from error
    if done.returncode != 0:
        raise BenchError(f"expected to reach the device {device}, got: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child_environment() -> dict[str, str]:
    """This process's variables, with the trainmux that runs here first on the path."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def source_state() -> dict[str, Any]:
    """Commit and whether the package differs from it, where git knows; and a digest of the source."""
    known = _git("ls-files", "--error-unmatch", "__init__.py") is not None
    changes = _git("status", "--porcelain", "--", ".") if known else None
    return {
        "commit": _git("rev-parse", "HEAD") if known else None,
        "dirty": None if changes is None else bool(changes),
        "source_sha256": _source_digest(),
    }


def _git(*arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _driver_version() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
