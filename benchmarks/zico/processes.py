"""The two jobs of a pair in separate processes on one device: time-sliced by the driver, or under MPS.

The paper also runs MPS with more memory than the device has, by unified memory. That is left out: asking for
more managed memory than is free can hang the GPU, and without it a process that finds no memory fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import BrokenBarrierError
from typing import Any

import torch

from benchmarks.mps import mps_daemon

from .cases import PairNames
from .jobs import BenchJob, MeasurementError, ZicoOptions, train_for, wait_for

KINDS = ("eager", "graphs")
_START_SECONDS = 300.0
_END_SECONDS = 60.0


def train_in_processes(
    names: PairNames, options: ZicoOptions, *, has_mps: bool = False
) -> Iterator[dict[str, Any]]:
    """Train both at once, in plain torch and then as graphs. MPS needs a CUDA device and its daemon."""
    if has_mps and options.where.type != "cuda":
        raise MeasurementError("MPS needs a CUDA device")
    context = get_context("spawn")
    seeds = (0, int(names[0] == names[1]))
    with (
        TemporaryDirectory(prefix="tmb-", ignore_cleanup_errors=True) as folder,
        mps_daemon(Path(folder)) if has_mps else nullcontext(),
        context.Pool(2, _set_barrier, (context.Barrier(2),)) as pool,
    ):
        for kind in KINDS:
            jobs = [(name, seed, kind, options) for name, seed in zip(names, seeds, strict=True)]
            limit = _START_SECONDS + options.seconds + _END_SECONDS
            found = pool.starmap_async(_train, jobs, chunksize=1).get(limit)
            problems = [answer for answer in found if isinstance(answer, str)]
            if problems:
                raise MeasurementError(next((text for text in problems if text), "a process gave up waiting"))
            yield {
                "way": f"{'MPS' if has_mps else 'two processes'}, {kind}",
                "iterations_per_second": [num / taken for num, taken in found],
            }
        pool.close()
        pool.join()


# In the processes. A barrier can only be handed over when a process starts.

_barrier: Any = None


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _train(name: str, seed: int, kind: str, options: ZicoOptions) -> Any:
    """Build, warm up, wait for the other, train; steps and seconds, or an error ("" if the other has it)."""
    try:
        torch.backends.cudnn.benchmark = kind == "eager"  # a fleet chooses its own algorithms
        job = BenchJob(name, seed, options)
        step = job.eager_step() if kind == "eager" else job.step
        for number in range(3):
            step(number)
        wait_for(options.where)
        _barrier.wait(_START_SECONDS)
        return train_for(step, options.seconds, options.where)
    except BrokenBarrierError:
        return ""
    except Exception as error:
        _barrier.abort()
        return f"{name}: {type(error).__name__}: {error}"
