"""One process per member, all at once on one GPU, under NVIDIA's Multi-Process Service (MPS)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from threading import BrokenBarrierError
from time import perf_counter
from typing import Any

import torch

from .timing import seconds_of, summary, used_bytes
from .ways import Setup, prepare_eager

CONTROL = "nvidia-cuda-mps-control"
NUM_WARMUPS = 5
MIN_STEPS_PER_BLOCK = 5
SYNCHRONIZE_SECONDS = 0.05
"""A process waits for the device about this often, so that it counts steps that were done, not queued."""
STOP_SECONDS = 20
_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def mps_daemon(folder: Path) -> Iterator[None]:
    """Have processes that are started meanwhile share the device by MPS, through pipes in ``folder``.

    ``RuntimeError`` on a machine without MPS. ``folder`` is short: a socket's path may not be long.
    """
    if shutil.which(CONTROL) is None:
        raise RuntimeError(f"no MPS daemon: {CONTROL} is not on the PATH")
    before = {name: os.environ.get(name) for name in _VARIABLES}
    for name, sub in zip(_VARIABLES, ("mps", "mps_log"), strict=True):
        (folder / sub).mkdir(exist_ok=True)
        os.environ[name] = str(folder / sub)
    # The daemon keeps the streams that it is given: a pipe would never close.
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        started = subprocess.run([CONTROL, "-d"], timeout=STOP_SECONDS, **streams)
        if started.returncode != 0:
            raise RuntimeError(f"no MPS daemon: {CONTROL} -d ended with status {started.returncode}")
        yield
    finally:
        with suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run([CONTROL], input="quit -t 5\n", text=True, timeout=STOP_SECONDS, **streams)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def measure_processes(setups: Any, width: int, num_blocks: int, block_seconds: float) -> dict[str, Any]:
    """Train ``width`` models in as many processes, which begin each block together.

    ``setups(index)`` makes, in a process, the setup of one model and its batches. The time per member and
    step is the time over all steps of all processes.
    """
    context = get_context("spawn")
    shared = context.Barrier(width), context.Array("d", width)
    with ProcessPoolExecutor(width, mp_context=context, initializer=_share, initargs=shared) as pool:
        futures = [pool.submit(_train, setups, index, num_blocks, block_seconds) for index in range(width)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        # A process that failed has the reason; the others found the barrier broken.
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        shares = [future.result() for future in futures]
    rates = [sum(share["rates"][block] for share in shares) for block in range(num_blocks)]
    return {
        **summary([width / rate for rate in rates], width),
        "build_s": max(share["build_s"] for share in shares),
        "reserved_bytes": sum(share["reserved_bytes"] for share in shares),
        "device_bytes": shares[0]["device_bytes"],
        "first_losses": [share["first_loss"] for share in shares],
        "last_losses": [share["last_loss"] for share in shares],
        "notes": ["memory is the sum over the processes"],
    }


# In the processes. A barrier can only be handed over when a process starts.
_barrier: Any = None
_step_seconds: Any = None


def _share(barrier: Any, step_seconds: Any) -> None:
    global _barrier, _step_seconds
    _barrier, _step_seconds = barrier, step_seconds


def _train(setups: Any, index: int, num_blocks: int, block_seconds: float) -> dict[str, Any]:
    try:
        return _train_one(setups, index, num_blocks, block_seconds)
    except BaseException:
        _barrier.abort()  # the others would wait for ever
        raise


def _train_one(setups: Any, index: int, num_blocks: int, block_seconds: float) -> dict[str, Any]:
    device: torch.device = setups.device
    before = used_bytes(device) if index == 0 else 0  # before any other process has a context
    _barrier.wait()
    setup, batches = setups(index)
    assert isinstance(setup, Setup)
    begin = perf_counter()
    step, _ = prepare_eager(setup)
    first_loss = step(batches[0]).item()
    build_s = perf_counter() - begin

    def run(num_steps: int) -> float:
        def work() -> None:
            for number in range(num_steps):
                step(batches[number % len(batches)])

        return seconds_of(work, device)

    run(NUM_WARMUPS)
    _barrier.wait()
    _step_seconds[index] = max(run(2) / 2, 1e-9)  # while all others train, too
    _barrier.wait()
    seconds = max(block_seconds, MIN_STEPS_PER_BLOCK * max(_step_seconds))
    steps_at_once = max(1, round(SYNCHRONIZE_SECONDS / _step_seconds[index]))
    rates = []
    for _ in range(num_blocks):
        _barrier.wait()
        block_begin, num_steps = perf_counter(), 0
        while (elapsed := perf_counter() - block_begin) < seconds:
            run(steps_at_once)
            num_steps += steps_at_once
        rates.append(num_steps / elapsed)
    held = used_bytes(device) - before
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    _barrier.wait()  # nobody leaves while another still counts memory
    last_loss = step(batches[0]).item()
    return {
        "rates": rates,
        "build_s": build_s,
        "device_bytes": held,
        "reserved_bytes": reserved,
        "first_loss": first_loss,
        "last_loss": last_loss,
    }
