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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

Job = tuple[bytes, bool, str]
"""A region's payload, whether it combines kernels, and the key to keep its code by."""


def compile_in_workers(jobs: Sequence[Job], *, num_workers: int, deterministic: bool) -> int:
    """Compile all regions into the cache on disk; returns how many a worker finished.

    What no worker could finish, for whatever reason, is left to the caller.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    finished = [0] * num_workers

    def serve(index: int) -> None:
        # A worker that has died leaves what was not sent to it, and closing its pipe fails.
        with suppress(BrokenPipeError), _started(deterministic) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                while True:
                    pickle.dump(waiting.get_nowait(), worker.stdin)
                    worker.stdin.flush()
                    finished[index] += pickle.load(worker.stdout) == ""
            except (queue.Empty, EOFError, BrokenPipeError, pickle.UnpicklingError):
                pass
            finally:
                worker.kill()

    threads = [threading.Thread(target=serve, args=(index,), daemon=True) for index in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(finished)


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
