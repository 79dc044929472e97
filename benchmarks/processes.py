"""Work in processes of its own: one by one, so that each fails alone, or all at once, also under MPS."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import BrokenBarrierError
from time import monotonic
from typing import Any, TypeVar

MAX_DETAIL_CHARACTERS = 2000
_MPS_CONTROL = "nvidia-cuda-mps-control"
_MPS_STOP_SECONDS = 20
_starting = threading.Lock()
Key = TypeVar("Key")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Add variables for processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- one process -----------------------------------------------------------------------------------------


def isolated(
    function: Callable[..., dict[str, Any]],
    *arguments: Any,
    limit_s: float = 600.0,
    variables: Mapping[str, str] | None = None,
    method: str = "spawn",
) -> dict[str, Any]:
    """Give what ``function`` returns, or ``error`` and ``detail`` where it raised, died or took too long.

    ``function`` belongs to a module; ``variables`` are added to the environment of its process. On a CPU,
    which has no state to leave behind, call `guarded` instead: that saves starting processes. With ``method``
    "forkserver" what that server has loaded need not be imported again; ``variables`` must be left out then.
    """
    with closing(_Process(_call, (function, arguments), limit_s, variables, method)) as process:
        return process.answer() or {}


def all_isolated(
    function: Callable[..., dict[str, Any]],
    jobs: Iterable[tuple[Key, tuple[Any, ...], float]],
    num_at_once: int,
    method: str = "spawn",
) -> Generator[tuple[Key, dict[str, Any]], None, None]:
    """Give each job's key and what `isolated` says of it, as they end; several run at the same time.

    A job is a key, arguments and the seconds that it may take. One is taken from ``jobs`` when there is room
    for it. No process outlives this generator, whatever ends it.
    """
    left, running = iter(jobs), dict[Key, _Process]()
    try:
        while True:
            while len(running) < num_at_once and (job := next(left, None)) is not None:
                key, arguments, limit_s = job
                running[key] = _Process(_call, (function, arguments), limit_s, method=method)
            if not running:
                return
            first_end = min(process.end for process in running.values())
            wait([process.answers for process in running.values()], max(0.0, first_end - monotonic()))
            for key in [key for key, process in running.items() if process.has_answer]:
                answer = running[key].answer() or {}
                running.pop(key).close()
                yield key, answer
    finally:
        for process in running.values():
            process.close()


def streamed(
    function: Callable[..., Iterator[dict[str, Any]]],
    *arguments: Any,
    limit_s: float = 600.0,
    variables: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Give every dict that the generator ``function`` yields in a process of its own, as soon as it does.

    ``error`` and ``detail`` come last where it raised, died or took too long in all.
    """
    with closing(_Process(_stream, (function, arguments), limit_s, variables)) as process:
        yield from iter(process.answer, None)


def in_turns(
    function: Callable[..., Iterator[dict[str, Any]]],
    jobs: Sequence[tuple[tuple[Any, ...], Mapping[str, str]]],
    limit_s: float = 600.0,
) -> Generator[list[dict[str, Any]], None, None]:
    """Give the dicts of each job, in order, as `streamed` does; all begin now, and go on one after another.

    A job is arguments and variables. ``function`` gets a semaphore besides, yields a dict, and acquires it
    before it goes on. Either part may take ``limit_s``; what takes longer to begin ends before any goes on.
    """
    with ExitStack() as stack:
        running = []
        for arguments, variables in jobs:
            # No event: its ``set`` would wait for ever for a process that was killed while it waited.
            turn = get_context("spawn").Semaphore(0)
            process = _Process(_stream, (function, (*arguments, turn)), limit_s, variables)
            running.append((stack.enter_context(closing(process)), turn))
        begun = []
        for process, _ in running:
            begun.append(process.answer() or {})
            if "error" in begun[-1]:
                process.close()
        for (process, turn), first in zip(running, begun, strict=True):
            process.end = monotonic() + limit_s
            turn.release()
            rest = [] if "error" in first else iter(process.answer, None)
            found = [first, *rest]
            process.close()
            yield found


class _Process:
    """Runs ``target`` in a process until ``close``, and has what it sends: dicts, then ``None``."""

    def __init__(
        self,
        target: Callable[..., None],
        work: tuple[Any, ...],
        limit_s: float,
        variables: Mapping[str, str] | None = None,
        method: str = "spawn",
    ) -> None:
        context: Any = get_context(method)
        self.answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=target, args=(theirs, *work))
        with _starting, _environment(variables or {}):
            self._process.start()
        theirs.close()
        self.end, self._limit_s, self._has_failed = monotonic() + limit_s, limit_s, False

    @property
    def has_answer(self) -> bool:
        """Whether `answer` returns at once."""
        return self.answers.poll() or monotonic() >= self.end

    def answer(self) -> dict[str, Any] | None:
        """Wait for the next dict; after the last, and after an ``error`` made here, ``None``."""
        if self._has_failed:
            return None
        try:
            if self.answers.poll(max(0.0, self.end - monotonic())):
                answer: dict[str, Any] | None = self.answers.recv()
                return answer
            error = f"no result within {self._limit_s:g} s"
        except EOFError:
            self._process.join()
            error = f"the process ended with status {self._process.exitcode} and no result"
        self._has_failed = True
        return {"error": error}

    def close(self) -> None:
        """End it, and what it started."""
        if self.answers.closed:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.answers.close()


def guarded(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Give what ``function`` returns, or the error that it raised, and the warnings of trainmux."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            result = function(*arguments)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            detail = traceback.format_exc()[-MAX_DETAIL_CHARACTERS:]
            result = {"error": f"{type(error).__name__}: {lines[0][:300]}", "detail": detail}
    told = dict.fromkeys(str(each.message).splitlines()[0] for each in caught if "trainmux" in each.filename)
    return {**result, "warnings": list(told)} if told else result


def guarded_rows(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give every dict of ``rows``, with warnings of trainmux; last, what `guarded` says of an error."""
    while (found := guarded(lambda: {"row": next(rows, None)})).get("row", {}) is not None:
        yield {**(found.pop("row", None) or {}), **found}


def _stream(
    answers: Connection, function: Callable[..., Iterator[dict[str, Any]]], arguments: tuple[Any, ...]
) -> None:
    _lead_group()
    for row in guarded_rows(function(*arguments)):
        answers.send(row)
    answers.send(None)


def _call(answers: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    _lead_group()
    answers.send(guarded(function, *arguments))


def _lead_group() -> None:
    """Have what this process starts end with it, and all of them when the parent is gone."""
    os.setpgid(0, 0)
    parent = parent_process()

    def end() -> None:
        wait([parent.sentinel] if parent else [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


# ---- several at once -------------------------------------------------------------------------------------


class Together:
    """What processes that work at the same time share: a barrier, and a number of each."""

    def __init__(self, barrier: Any, numbers: Any, limit_s: float | None) -> None:
        self.numbers = numbers
        self._barrier, self._limit_s = barrier, limit_s

    def wait(self) -> None:
        """Wait until all have come here; ``BrokenBarrierError`` where another one failed."""
        self._barrier.wait(self._limit_s)

    def give_up(self) -> None:
        self._barrier.abort()


def run_together(
    work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], limit_s: float | None = None
) -> list[Any]:
    """Call ``work(together, *job)`` for every job at once, in a process each; what they return.

    Raises what one of them raised. A process waits for the others for at most ``limit_s``.
    """
    context = get_context("spawn")
    shared = context.Barrier(len(jobs)), context.Array("d", len(jobs)), limit_s
    with ProcessPoolExecutor(len(jobs), mp_context=context, initializer=_share, initargs=shared) as pool:
        futures = [pool.submit(_work, work, job) for job in jobs]
        errors = [error for future in futures if (error := future.exception()) is not None]
        # A process that failed has the reason; the others found the barrier broken.
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


# A barrier can only be handed over when a process starts.
_together: Together | None = None


def _share(barrier: Any, numbers: Any, limit_s: float | None) -> None:
    global _together
    _together = Together(barrier, numbers, limit_s)


def _work(work: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    assert _together is not None
    try:
        return work(_together, *job)
    except BaseException:
        _together.give_up()  # the others would wait for ever
        raise


@contextmanager
def mps_daemon() -> Iterator[None]:
    """Have processes that are started meanwhile share the device by MPS (the Multi-Process Service).

    ``RuntimeError`` on a machine without it.
    """
    if shutil.which(_MPS_CONTROL) is None:
        raise RuntimeError(f"no MPS daemon: {_MPS_CONTROL} is not on the PATH")
    # The daemon keeps the streams that it is given: a pipe would never close.
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # A short path: that of a socket may not be long.
    with TemporaryDirectory(prefix="tmb-", ignore_cleanup_errors=True) as folder:
        variables = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/mps",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/mps_log",
        }
        for path in variables.values():
            Path(path).mkdir()
        with _environment(variables):
            try:
                started = subprocess.run([_MPS_CONTROL, "-d"], timeout=_MPS_STOP_SECONDS, **streams)
                if started.returncode != 0:
                    raise RuntimeError(
                        f"no MPS daemon: {_MPS_CONTROL} ended with status {started.returncode}"
                    )
                yield
            finally:
                with suppress(subprocess.TimeoutExpired, OSError):
                    subprocess.run(
                        [_MPS_CONTROL], input="quit -t 5\n", text=True, timeout=_MPS_STOP_SECONDS, **streams
                    )
