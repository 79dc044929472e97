"""A function called in a process of its own, with a fresh device: when it fails, it fails alone."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

MAX_DETAIL_CHARACTERS = 2000
_starting = threading.Lock()


def isolated(
    function: Callable[..., dict[str, Any]],
    *arguments: Any,
    limit_s: float = 600.0,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Give what ``function`` returns, or ``error`` and ``detail`` where it raised, died or took too long.

    ``function`` belongs to a module; ``variables`` are added to the environment of its process. On a CPU,
    which has no state to leave behind, call `guarded` instead: that saves starting processes.
    """
    context = get_context("spawn")
    answers, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(theirs, function, arguments))
    with _starting:  # a process inherits this one's environment
        before = dict(os.environ)
        os.environ.update(variables or {})
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
    theirs.close()
    try:
        if not answers.poll(limit_s):
            return {"error": f"no result within {limit_s:g} s"}
        result: dict[str, Any] = answers.recv()
        return result
    except EOFError:
        process.join()
        return {"error": f"the process ended with status {process.exitcode} and no result"}
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


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


def _call(answers: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)  # what it starts in turn is ended with it
    answers.send(guarded(function, *arguments))
