"""The thread on which a search asks for trials and reports, so that storages and builders hold up no step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from trainmux.search._source import Later, Source
from trainmux.search._trial import Trial

T = TypeVar("T")

_LOOK_S = 0.05
"""Between two looks at whether the source is stuck, while a call is waited for."""


class Office:
    """Calls a source from one thread, in the order of the requests, and asks for trials ahead of time.

    What a call raises is raised by ``check``, ``take``, or the future that it returned.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainmux-search")
        self.prepare: Callable[[Trial], None] | None = None
        """Done with every trial once it was asked for, by the thread that asks; failures are passed over."""
        self._asked: deque[Future[Trial | Later | None]] = deque()
        self._told: deque[Future[Any]] = deque()
        self.is_exhausted = False
        """No more trials will come."""

    def __enter__(self) -> Office:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Wait for what was requested; after an exception, only for calls that tell results."""
        for future in self._asked:
            future.cancel()
        self._pool.shutdown(wait=True)
        if kind is None:
            self.check()

    def want(self, count: int) -> None:
        """Have ``count`` trials ready or asked for."""
        while not self.is_exhausted and len(self._asked) < count:
            self._asked.append(self._pool.submit(self._ask))

    def _ask(self) -> Trial | Later | None:
        trial = self._source.ask()
        if isinstance(trial, Trial) and self.prepare is not None:
            with suppress(Exception):  # raised again when the trial gets its slot
                self.prepare(trial)
        return trial

    def take(self, count: int, even_if_stuck: bool = True, patience_s: float = math.inf) -> list[Trial]:
        """Return the next trials: ``count``, or fewer where the source has no more now or takes too long."""
        self.want(count)
        end_s = time.monotonic() + patience_s
        found: list[Trial] = []
        while self._asked and len(found) < count:
            self.wait([self._asked[0]], even_if_stuck, end_s - time.monotonic())
            if not self._asked[0].done():
                break
            trial = self._asked.popleft().result()
            if isinstance(trial, Trial):
                found.append(trial)
                self.want(count - len(found))
                continue
            self.is_exhausted |= trial is None
            # Those asked for behind it are most likely answered alike: ask anew next time.
            behind = [future for future in self._asked if not future.cancel()]
            self._asked = deque(
                future for future in behind if not future.done() or isinstance(future.result(), Trial)
            )
            break
        return found

    def give_back(self) -> list[Trial]:
        """Return the trials that were asked for and that nobody took; there will be no more."""
        self.is_exhausted = True
        asked, self._asked = self._asked, deque()
        found = [future.result() for future in asked if not future.cancel() and not future.exception()]
        return [trial for trial in found if isinstance(trial, Trial)]

    def do(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Have ``call(*args)`` done after what was requested before."""
        future = self._pool.submit(call, *args)
        self._told.append(future)
        return future

    def wait(self, calls: Sequence[Future[Any]], even_if_stuck: bool, patience_s: float = math.inf) -> None:
        """Wait for calls: ``patience_s`` seconds at most, and no longer than until the source is stuck."""
        if even_if_stuck and patience_s == math.inf:
            wait(calls)
            return
        end_s = time.monotonic() + patience_s
        while wait(calls, max(0.0, min(_LOOK_S, end_s - time.monotonic()))).not_done:
            if time.monotonic() >= end_s or (self._source.is_stuck() and not even_if_stuck):
                return

    def check(self) -> None:
        """Raise what calls that are done have raised."""
        while self._told and self._told[0].done():
            self._told.popleft().result()
