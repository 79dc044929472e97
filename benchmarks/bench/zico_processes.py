"""Each job of a pair in a process of its own, on one device: by the driver's turns, or under MPS.

The paper's MPS baseline is also run with more memory than the device has, by unified memory. That is left
out: a program that asks for more managed memory than is free on the card can hang the GPU, not only itself;
and without it a process that finds no memory fails. Processes are measured where both have room.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .job import BenchError
from .ways.processes import mps_daemon
from .zico_jobs import BenchJob, Failure, PairNames, ZicoOptions, train_for, wait_for

EAGER, GRAPHS = "eager", "graphs"
KINDS = (EAGER, GRAPHS)
OVERSUBSCRIBED = (
    "MPS with more memory than the card has is left out: it takes managed memory beyond what is free, which "
    "can hang the GPU; without it, a process that finds no memory fails"
)

_START_SECONDS = 300.0
_END_SECONDS = 60.0

Rates = tuple[float, float]


def process_way(kind: str, *, has_mps: bool) -> str:
    """The name of such a way."""
    return f"{'MPS' if has_mps else 'two processes'}, {kind}"


def measure_in_processes(
    names: PairNames, options: ZicoOptions, *, has_mps: bool, kinds: Sequence[str] = KINDS
) -> tuple[dict[str, Rates], list[Failure]]:
    """Iterations per second of both jobs at once, by way; and what failed, with the reason."""
    rates: dict[str, Rates] = {}
    failures: list[Failure] = []
    ways = {kind: process_way(kind, has_mps=has_mps) for kind in kinds}
    try:
        if has_mps and options.where.type != "cuda":
            raise BenchError("MPS needs a CUDA device")
        with (
            TemporaryDirectory(prefix="tmb-", ignore_cleanup_errors=True) as folder,
            mps_daemon(Path(folder)) if has_mps else nullcontext(),
            _workers(names, options) as pipes,
        ):
            for kind, way in ways.items():
                try:
                    rates[way] = _together(pipes, kind, options.seconds)
                except BenchError as error:
                    failures.append(Failure.of(names, way, error))
    except Exception as error:
        seen = {*rates, *(failure.way for failure in failures)}
        failures += [Failure.of(names, way, error) for way in ways.values() if way not in seen]
    return rates, failures


@contextmanager
def _workers(names: PairNames, options: ZicoOptions) -> Any:
    """Two processes, each with the other end of a pipe; they are ended by their pipes, or killed."""
    context = get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for index, name in enumerate(names):
            ours, theirs = context.Pipe()
            seed = int(index == 1 and names[0] == names[1])
            process = context.Process(target=_serve, args=(theirs, name, seed, options))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        until = time.monotonic() + _END_SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _together(pipes: Sequence[Connection], kind: str, seconds: float) -> Rates:
    """Both build what they train, then both train at once."""
    for pipe in pipes:
        pipe.send(kind)
    problems = [answer for answer in (_answer(pipe, _START_SECONDS) for pipe in pipes) if answer is not None]
    if problems:
        for pipe in pipes:
            pipe.send(0.0)
            _answer(pipe, _END_SECONDS)
        raise BenchError(str(problems[0]))
    for pipe in pipes:
        pipe.send(seconds)
    answers = [_answer(pipe, seconds + _END_SECONDS) for pipe in pipes]
    broken = [answer for answer in answers if isinstance(answer, str)]
    if broken:
        raise BenchError(broken[0])
    first, second = (num / taken for num, taken in answers)
    return first, second


def _answer(pipe: Connection, seconds: float) -> Any:
    """What a process says; `EOFError` where it has ended, `TimeoutError` where it says nothing in time."""
    if not pipe.poll(seconds):
        raise TimeoutError(f"expected an answer from a process within {seconds:g} s, got none")
    return pipe.recv()


# In the processes.


def _serve(pipe: Connection, name: str, seed: int, options: ZicoOptions) -> None:
    """For each kind that is asked for: build and warm up, say so or what went wrong, train, say how much.

    Ends when the pipe does.
    """
    job: BenchJob | None = None
    while True:
        try:
            kind = pipe.recv()
        except EOFError:
            return
        step: Any = None
        try:
            torch.backends.cudnn.benchmark = kind == EAGER  # a fleet finds its own algorithms
            job = job or BenchJob(name, seed, options)
            step = job.eager_step() if kind == EAGER else job.step
            for number in range(3):
                step(number)
            wait_for(options.where)
            pipe.send(None)
        except Exception as error:
            pipe.send(f"{name}: {type(error).__name__}: {error}"[:500])
        try:
            seconds = pipe.recv()
        except EOFError:
            return
        try:
            result: Any = train_for(step, seconds, options.where) if seconds else None
        except Exception as error:
            result = f"{name}: {type(error).__name__}: {error}"[:500]
        pipe.send(result)
