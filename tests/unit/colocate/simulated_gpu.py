"""A simulated GPU: streams, waits, and jobs that slow each other down.

It drives the scheduler as a device does, over a clock of its own. Segments of a job run in order and behind
those they were enqueued after. Jobs that run at once share the device by their compute demands: as long as
these add up to at most one, nobody is slowed; beyond, all are slowed alike. ``interference`` is a further
cost of running at once; with enough of it, sharing loses.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._layout import MemoryLayout
from trainmux.colocate._scheduler import Enqueue, Idle, Remap, ScroogeScheduler
from trainmux.errors import PlanError


@dataclass(frozen=True)
class Executed:
    """A segment that ran, and what the arenas looked like when it was enqueued."""

    ref: SegmentRef
    after: tuple[SegmentRef, ...]
    enqueued_at: float
    started_at: float
    ended_at: float
    layout: MemoryLayout


@dataclass(frozen=True)
class Run:
    """Everything that ran, in the order in which it ended, and how long nothing ran though a job had work."""

    executed: tuple[Executed, ...]
    ended_at: float
    idle_seconds: float
    remaps: tuple[tuple[float, Remap], ...]


@dataclass(frozen=True)
class Contention:
    """How much of the device each job keeps busy by itself, and what running at once costs beyond that."""

    compute_demands: Mapping[str, float]
    interference: float = 0.0

    def slowdown(self, running: Sequence[str]) -> float:
        """By what everything that is running is slowed."""
        if len(running) < 2:
            return 1.0
        total = sum(self.compute_demands[name] for name in running)
        return max(1.0, total) * (1 + self.interference)


class SimulatedGpu:
    """Runs a scheduler's segments. ``seconds_of`` gives each one's time with nothing beside it."""

    def __init__(
        self,
        scheduler: ScroogeScheduler,
        seconds_of: Callable[[SegmentRef], float],
        contention: Contention,
    ) -> None:
        self._scheduler = scheduler
        self._seconds_of = seconds_of
        self._contention = contention
        self._streams: dict[str, deque[tuple[Enqueue, float, MemoryLayout]]] = {}
        self._running: dict[str, tuple[float, float]] = {}
        """By job: seconds of work left, and when it started."""
        self._pending: set[SegmentRef] = set()
        """Enqueued and not complete."""
        self._executed: list[Executed] = []
        self._remaps: list[tuple[float, Remap]] = []
        self._commands: list[tuple[float, int, Callable[[float], None]]] = []
        self._idle_seconds = 0.0
        self.now = 0.0

    def at(self, time: float, command: Callable[[float], None]) -> None:
        """Call ``command`` when the clock reaches ``time``: to add a job, remove one or set a budget."""
        heapq.heappush(self._commands, (time, len(self._commands), command))

    def run(self) -> Run:
        """Run until every job has ended.

        Refused with `PlanError`: a deadlock, that is work left while nothing runs and nothing will.
        """
        while True:
            while self._commands and self._commands[0][0] <= self.now:
                heapq.heappop(self._commands)[2](self.now)
            wake_at = self._take_actions()
            self._start_heads()
            moments = [time for time in (wake_at,) if time is not None]
            if self._commands:
                moments.append(self._commands[0][0])
            if not self._running:
                if not moments:
                    break
                if not self._scheduler.is_done:
                    self._idle_seconds += max(0.0, min(moments) - self.now)
                self.now = max(self.now, min(moments))
                continue
            self._advance(min(moments, default=None))
        if not self._scheduler.is_done or self._pending:
            raise PlanError(
                f"expected every job to end, but at {self.now} s nothing runs and {len(self._pending)} "
                "segments wait; this is a deadlock: the scheduler must keep every state safe"
            )
        return Run(tuple(self._executed), self.now, self._idle_seconds, tuple(self._remaps))

    def _take_actions(self) -> float | None:
        while True:
            action = self._scheduler.next_action(self.now)
            if isinstance(action, Idle):
                return action.wake_at
            if isinstance(action, Remap):
                self._remaps.append((self.now, action))
                continue
            stream = self._streams.setdefault(action.ref.job, deque())
            stream.append((action, self.now, self._scheduler.layout))
            self._pending.add(action.ref)

    def _start_heads(self) -> None:
        for name, stream in self._streams.items():
            if stream and name not in self._running:
                action = stream[0][0]
                if self._pending.isdisjoint(action.after):
                    self._running[name] = (self._seconds_of(action.ref), self.now)

    def _advance(self, until: float | None) -> None:
        """Let what is running go on, to the first end of a segment or to ``until``."""
        slowdown = self._contention.slowdown(list(self._running))
        first = min(self._running, key=lambda name: self._running[name][0])
        least = self._running[first][0]
        elapsed = least * slowdown
        if until is not None and until < self.now + elapsed:
            elapsed = max(0.0, until - self.now)
            done, first = elapsed / slowdown, ""
        else:
            done = least
        self.now += elapsed
        for name, (left, started_at) in self._running.items():
            self._running[name] = (left - done, started_at)
        if first:
            _, started_at = self._running.pop(first)
            action, enqueued_at, layout = self._streams[first].popleft()
            self._pending.remove(action.ref)
            self._executed.append(
                Executed(action.ref, action.after, enqueued_at, started_at, self.now, layout)
            )
            self._scheduler.complete(action.ref, started_at, self.now)
