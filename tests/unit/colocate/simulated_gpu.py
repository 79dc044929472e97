"""A simulated GPU: streams, waits, and jobs that slow each other down.

It drives the scheduler as a device does, over a clock of its own. Segments of a job run in order and behind
those they were enqueued after. Jobs that run at once share the device by their compute demands: as long as
these add up to at most one, nobody is slowed; beyond, all are slowed alike.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._layout import MemoryLayout
from trainmux.colocate._scheduler import Enqueue, Idle, Remap, ScroogeScheduler
from trainmux.errors import PlanError


@dataclass(frozen=True)
class Executed:
    """A segment that ran, and the layout of memory when it was enqueued."""

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

    def iterations(self, name: str) -> list[tuple[float, float]]:
        """When each iteration of a job started and ended."""
        found: dict[int, list[float]] = {}
        for row in self.executed:
            if row.ref.job == name:
                found.setdefault(row.ref.iteration, []).extend((row.started_at, row.ended_at))
        return [(min(times), max(times)) for _, times in sorted(found.items())]


class SimulatedGpu:
    """Runs a scheduler's segments. ``seconds_of`` gives the duration of each one alone on the device,
    ``compute_demands`` the part of the device that each job keeps busy then."""

    def __init__(
        self,
        scheduler: ScroogeScheduler,
        seconds_of: Callable[[SegmentRef], float],
        compute_demands: Mapping[str, float],
    ) -> None:
        self._scheduler = scheduler
        self._seconds_of = seconds_of
        self._compute_demands = compute_demands
        self._streams: dict[str, deque[tuple[Enqueue, float, MemoryLayout]]] = {}
        self._running: dict[str, tuple[float, float]] = {}
        """By job: seconds of work left, and when it started."""
        self._pending: set[SegmentRef] = set()
        """Enqueued and not complete."""
        self._enqueued: set[SegmentRef] = set()
        self._executed: list[Executed] = []
        self._remaps: list[tuple[float, Remap]] = []
        self._commands: list[tuple[float, int, Callable[[], object]]] = []
        self._idle_seconds = 0.0
        self.now = 0.0

    def at(self, time: float, command: Callable[[], object]) -> None:
        """Call ``command`` when the clock reaches ``time``: to add a job, remove one or set a budget."""
        heapq.heappush(self._commands, (time, len(self._commands), command))

    def run(self) -> Run:
        """Run until every job has ended.

        Refused with `PlanError`: a deadlock, that is work left while nothing runs and nothing will.
        """
        while True:
            while self._commands and self._commands[0][0] <= self.now:
                heapq.heappop(self._commands)[2]()
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
            raise PlanError(f"deadlock: at {self.now} s nothing runs, {len(self._pending)} segments wait")
        return Run(tuple(self._executed), self.now, self._idle_seconds, tuple(self._remaps))

    def _take_actions(self) -> float | None:
        while True:
            action = self._scheduler.next_action(self.now)
            if isinstance(action, Idle):
                return action.wake_at
            if isinstance(action, Remap):
                self._remaps.append((self.now, action))
                continue
            assert self._enqueued.issuperset(action.after), "a segment waits for one that comes later"
            stream = self._streams.setdefault(action.ref.job, deque())
            stream.append((action, self.now, self._scheduler.layout))
            self._pending.add(action.ref)
            self._enqueued.add(action.ref)

    def _start_heads(self) -> None:
        for name, stream in self._streams.items():
            if stream and name not in self._running:
                action = stream[0][0]
                if self._pending.isdisjoint(action.after):
                    self._running[name] = (self._seconds_of(action.ref), self.now)

    def _advance(self, until: float | None) -> None:
        """Let what is running go on, to the first end of a segment or to ``until``."""
        slowdown = max(1.0, sum(self._compute_demands[name] for name in self._running))
        first = min(self._running, key=lambda name: self._running[name][0])
        done = self._running[first][0]
        elapsed = done * slowdown
        if until is not None and until < self.now + elapsed:
            elapsed = max(0.0, until - self.now)
            done, first = elapsed / slowdown, ""
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
