"""One process per member, all at once on one GPU, under NVIDIA's Multi-Process Service (MPS)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import BrokenBarrierError
from time import monotonic, perf_counter, sleep
from typing import Any

import torch

from ..batches import NUM_BATCHES
from ..job import BenchError, Job, Measurement, Memory
from ..measure import check_losses, count_parameters, free_memory, make_setup, memory_since
from ..timing import Blocks, seconds_of, summarize
from . import eager

CONTROL = "nvidia-cuda-mps-control"
NUM_WARMUPS = 5
SYNCHRONIZE_SECONDS = 0.05
"""A process waits for the device about this often, so that it counts steps that were done, not queued."""
MIN_STEPS_PER_BLOCK = 5
STOP_SECONDS = 20
_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@dataclass(frozen=True)
class _Share:
    """What one process found: steps and seconds of each block, and what a measurement wants to know."""

    num_parameters: int
    num_steps: tuple[int, ...]
    seconds: tuple[float, ...]
    first_loss: float
    last_loss: float
    build_s: float
    start_to_first_step_s: float
    memory: Memory | None


def measure(job: Job) -> Measurement:
    """Start the daemon, train the members beside each other, stop the daemon."""
    with mps_daemon(Path(job.folder)):
        return measure_processes(job)


def measure_processes(job: Job) -> Measurement:
    """``job.width`` processes that start each block together and train for the same time.

    Time per member and step is the time over all steps of all processes.
    """
    context = get_context("spawn")
    barrier = context.Barrier(job.width)
    slowest = context.Array("d", job.width)
    with ProcessPoolExecutor(
        job.width, mp_context=context, initializer=_share, initargs=(barrier, slowest)
    ) as pool:
        futures = [pool.submit(_train, job, index) for index in range(job.width)]
        shares: list[_Share] = []
        waiting: list[BrokenBarrierError] = []
        for future in futures:
            try:
                shares.append(future.result())
            except BrokenBarrierError as error:  # another process failed, and has the reason
                waiting.append(error)
        if waiting:
            raise waiting[0]
    return _together(shares)


def stop_daemon(folder: Path) -> None:
    """End the daemon that was started with ``folder``, if it is still there."""
    if not (folder / "mps").exists():
        return
    pid = 0
    with suppress(OSError, ValueError):
        pid = int((folder / "mps" / f"{CONTROL}.pid").read_text(encoding="utf-8"))
    with suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            [CONTROL],
            input="quit -t 5\n",
            env=_environment(folder),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=STOP_SECONDS,
        )
    until = monotonic() + STOP_SECONDS
    while _is_daemon(pid) and monotonic() < until:
        sleep(0.1)
    if _is_daemon(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def mps_daemon(folder: Path) -> Iterator[None]:
    """Have processes that are started meanwhile share the device by MPS; its pipes lie in ``folder``.

    Refused with `BenchError`: a machine without MPS. Short names: a socket's path may not be long.
    """
    if shutil.which(CONTROL) is None:
        raise BenchError(f"no MPS daemon: {CONTROL} is not on the PATH")
    environment = _environment(folder)
    for name in ("mps", "mps_log"):
        (folder / name).mkdir(exist_ok=True)
    started = subprocess.run(
        [CONTROL, "-d"],
        env=environment,
        stdout=subprocess.DEVNULL,  # the daemon keeps what it is given: a pipe would never close
        stderr=subprocess.DEVNULL,
        timeout=STOP_SECONDS,
    )
    if started.returncode != 0:
        raise BenchError(f"no MPS daemon: {CONTROL} -d ended with status {started.returncode}")
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update({name: environment[name] for name in _VARIABLES})
    try:
        yield
    finally:
        stop_daemon(folder)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _environment(folder: Path) -> dict[str, str]:
    pipes, logs = _VARIABLES
    return {**os.environ, pipes: str(folder / "mps"), logs: str(folder / "mps_log")}


def _is_daemon(pid: int) -> bool:
    """Whether that process is there and is the daemon, not one that was given its number since."""
    try:
        # The kernel keeps no more than fifteen characters of a name.
        return CONTROL.startswith(Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip())
    except OSError:
        return False


# In the processes. A barrier can only be handed over when a process starts.

_barrier: Any = None
_slowest: Any = None


def _share(barrier: Any, slowest: Any) -> None:
    global _barrier, _slowest
    _barrier, _slowest = barrier, slowest


def _train(job: Job, index: int) -> _Share:
    try:
        return _train_one(job, index)
    except BaseException:
        _barrier.abort()  # the others would wait for ever
        raise


def _train_one(job: Job, index: int) -> _Share:
    start = perf_counter()
    device = torch.device(job.device)
    torch.backends.cudnn.benchmark = True
    # The first process reads the free memory before any other has a context.
    free_bytes = free_memory(device) if index == 0 else 0
    _barrier.wait()
    setup, batches = make_setup(job, 1, device, first=index)
    num_parameters = count_parameters(setup.models[0])
    begin = perf_counter()
    step = eager.prepare(setup).step
    first_loss = step(batches[0]).item()
    end = perf_counter()

    position = 0

    def run(num_steps: int) -> float:
        def work() -> None:
            nonlocal position
            for _ in range(num_steps):
                step(batches[position % NUM_BATCHES])
                position += 1

        return seconds_of(work, device)

    run(NUM_WARMUPS)
    # How long a step takes beside all the others decides how long a block must be.
    _barrier.wait()
    _slowest[index] = max(run(2) / 2, 1e-9)
    _barrier.wait()
    block_seconds = max(job.block_seconds, MIN_STEPS_PER_BLOCK * max(_slowest))
    steps_at_once = max(1, round(SYNCHRONIZE_SECONDS / _slowest[index]))
    counts, seconds = [], []
    for _ in range(job.num_blocks):
        _barrier.wait()
        block_begin, num_steps = perf_counter(), 0
        while (elapsed := perf_counter() - block_begin) < block_seconds:
            run(steps_at_once)
            num_steps += steps_at_once
        counts.append(num_steps)
        seconds.append(elapsed)
    memory = memory_since(free_bytes, device)
    _barrier.wait()  # nobody leaves while another still counts memory
    last_loss = step(batches[0]).item()
    return _Share(
        num_parameters=num_parameters,
        num_steps=tuple(counts),
        seconds=tuple(seconds),
        first_loss=first_loss,
        last_loss=last_loss,
        build_s=end - begin,
        start_to_first_step_s=end - start,
        memory=memory,
    )


def _together(shares: list[_Share]) -> Measurement:
    first = tuple(share.first_loss for share in shares)
    last = tuple(share.last_loss for share in shares)
    check_losses(first, last)
    num_blocks = len(shares[0].seconds)
    # Steps per second of all processes; its inverse is the time per member and step.
    rates = [
        sum(share.num_steps[block] / share.seconds[block] for share in shares) for block in range(num_blocks)
    ]
    blocks = Blocks(
        step_seconds=tuple(len(shares) / rate for rate in rates),
        steps_per_block=min(min(share.num_steps) for share in shares),
        num_warmup_steps=NUM_WARMUPS + 2,
    )
    memories = [share.memory for share in shares if share.memory is not None]
    return Measurement(
        num_parameters=shares[0].num_parameters,
        timing=summarize(
            blocks,
            len(shares),
            build_s=max(share.build_s for share in shares),
            start_to_first_step_s=max(share.start_to_first_step_s for share in shares),
        ),
        memory=Memory(
            max_reserved_bytes=sum(memory.max_reserved_bytes for memory in memories),
            max_allocated_bytes=sum(memory.max_allocated_bytes for memory in memories),
            device_delta_bytes=memories[0].device_delta_bytes,
        )
        if memories
        else None,
        first_losses=first,
        last_losses=last,
        notes=("memory is the sum over the processes, steps per block are those of the slowest one",),
    )
