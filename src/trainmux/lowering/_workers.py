"""Regions compiled in processes of their own, side by side.

Inductor is Python and holds the interpreter's lock, so threads compile one after another. A worker
keeps the code on disk; this process then loads it from there. Workers are started with a
module of ours as their program, never with the user's script.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

Job = tuple[bytes, bool, str]
"""A region's payload, whether it combines kernels, and the key to keep its code by."""

MIN_FOR_WORKER = 6
"""Kernels that make up for the start of a process."""

_running: set[subprocess.Popen[bytes]] = set()
"""Workers of this process."""


@contextmanager
def on_cores_left() -> Iterator[None]:
    """Compute on as many threads as workers leave cores: each operator waits for the slowest of its threads.

    64 MLPs on two cores took 15 ms a step, 200 while one worker compiled, and 26 with a thread less.
    """
    if not _running:  # nearly every step: cores are not counted then, which reads a file
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(max(min(before, (os.cpu_count() or 1) - len(_running)), 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """Processes that compile regions into the cache on disk, started as jobs come: one for so many jobs.

    As a context: however it ends, nothing more comes. What no worker could finish, for whatever reason, is
    left to the caller.
    """

    def __init__(self, most: int, *, deterministic: bool, least: int = 0) -> None:
        self._least, self._most = least, most
        self._deterministic = deterministic
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_jobs = 0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for _ in self._threads:
            self._waiting.put(None)

    def add(self, job: Job) -> None:
        """Compile this one as soon as a worker is free."""
        self._waiting.put(job)
        self._num_jobs += 1
        wanted = num_workers(self._num_jobs, self._most, self._least)
        while len(self._threads) < wanted:
            self._threads.append(threading.Thread(target=self._serve, daemon=True))
            self._threads[-1].start()

    def finish(self) -> None:
        """Wait for all jobs. None may be added after that."""
        self.__exit__()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        # A worker that has died leaves what was not sent to it, and closing its pipe fails.
        with suppress(BrokenPipeError), _started(self._deterministic) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            _running.add(worker)
            try:
                while (job := self._waiting.get()) is not None:
                    pickle.dump(job, worker.stdin)
                    worker.stdin.flush()
                    pickle.load(worker.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                pass
            finally:
                _running.discard(worker)
                worker.kill()


def num_workers(num_jobs: int, most: int, least: int = 0) -> int:
    """The number of workers that so many jobs pay for, two at least; ``least`` where that is not worth it."""
    wanted = min(most, num_jobs // MIN_FOR_WORKER)
    return wanted if wanted >= 2 else min(least, most, num_jobs)


def _started(deterministic: bool) -> subprocess.Popen[bytes]:
    package = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    environment = dict(
        os.environ,
        PYTHONPATH=package if not known else os.pathsep.join((known, package)),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        OMP_NUM_THREADS=str(torch.get_num_threads()),  # code for a CPU is made for so many
    )
    return subprocess.Popen(
        # -P: nothing that lies in the current folder is imported.
        [sys.executable, "-P", "-m", "trainmux.lowering._worker", "deterministic" if deterministic else ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # an interrupt is for the trainer alone; a worker ends when its pipe closes
    )
