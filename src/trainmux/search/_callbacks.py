"""Hooks into a search: their base class, and the thread on which they are called."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING

from trainmux.fleet import EpochRecord
from trainmux.search._trial import Trial

if TYPE_CHECKING:
    from trainmux.search._results import Results


class SearchCallback:
    """Base of what listens to a search: every hook does nothing.

    Hooks are called in order from a thread of their own, beside training; a trial may be further by then than
    what the hook is about. An exception in a hook ends the search, after a sync.
    """

    def on_search_start(self, is_resumed: bool) -> None:
        """Once, before anything is trained; ``is_resumed`` where trials of an earlier call may go on."""

    def on_trial_start(self, trial: Trial) -> None:
        """When a trial has got a slot; it goes on after ``trial.resumed_epoch``."""

    def on_trial_epoch(self, trial: Trial, record: EpochRecord) -> None:
        """After each epoch of a trial."""

    def on_trial_end(self, trial: Trial) -> None:
        """When a trial is finished; ``trial.state`` tells how. One that cannot be built never started."""

    def on_trial_given_back(self, trial: Trial) -> None:
        """When the search ends with a trial unfinished, which may or may not have started."""

    def on_search_end(self, results: Results) -> None:
        """Once, when the search has ended as it should; not after an exception."""

    def on_exception(self, error: BaseException) -> None:
        """Once, when an exception ends the search: after all other hooks."""


class Listeners:
    """Calls the hooks of callbacks, on one thread, in the order in which they are requested.

    A context: at its end the hooks that were requested have been called. What a hook raises is raised by
    ``check`` and, unless there is an exception already, at the end.
    """

    def __init__(self, callbacks: Sequence[SearchCallback]) -> None:
        self._callbacks = callbacks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainmux-hooks")
        self._told: deque[Future[None]] = deque()

    def __enter__(self) -> Listeners:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.tell("on_exception", error)
        self._pool.shutdown(wait=True)
        if error is None:
            self.check()

    def tell(self, hook: str, *args: object) -> None:
        """Have a hook of every callback called."""
        for callback in self._callbacks:
            self._told.append(self._pool.submit(getattr(callback, hook), *args))

    def wait(self) -> None:
        """Wait until all hooks so far have been called; raises what they raised."""
        while self._told:
            self._told.popleft().result()

    def check(self) -> None:
        """Raise what hooks that were called have raised."""
        while self._told and self._told[0].done():
            self._told.popleft().result()
