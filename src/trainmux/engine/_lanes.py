"""The three lanes of a program: streams on a CUDA device, the order of the instructions elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from trainmux.ir import Lane, Span
from trainmux.runtime import CudaTimer, StreamOwner, borrow_stream, warm_matrix_libraries


class HostLanes:
    """All lanes are the caller's own thread: what is issued has ended, so there is nothing to wait for."""

    def __init__(self, num_branches: int = 1) -> None:
        self.num_branches = num_branches

    def part(self, awaited: frozenset[int]) -> AbstractContextManager[Any]:
        """Around one part of a program; ``awaited`` are the positions that some lane will wait for."""
        return nullcontext()

    def on(self, lane: Lane, position: int) -> AbstractContextManager[Any]:
        """Enqueue the instruction at ``position`` on ``lane``."""
        return nullcontext()

    def branch(self, number: int) -> AbstractContextManager[Any]:
        """Enqueue on one branch of the compute lane."""
        return nullcontext()

    def together(self) -> AbstractContextManager[Any]:
        """Enqueue after all branches of the compute lane; they continue after it."""
        return nullcontext()

    def issued(self, lane: Lane, position: int) -> None:
        """Note that the instruction at ``position`` has been enqueued."""

    def wait(self, lane: Lane, position: int) -> None:
        """Hold ``lane`` until the instruction at ``position`` has ended."""


class StreamLanes(HostLanes):
    """A stream for each lane, events between them: eagerly or in a capture.

    The compute lane is the stream that is current when a part begins; the two others begin behind it and are
    joined to it at the part's end. They are lent: a new one of torch's might be the compute lane's own, and
    copies would then stand in the way of kernels.

    With ``num_branches`` the compute lane has so many streams. An instruction on it has ended when it has on
    all of them, and what it waits for all of them wait for. They are those of ``like``, lanes with as many
    that do not run meanwhile: the matrix libraries have workspaces for each.
    """

    def __init__(self, device: torch.device, num_branches: int = 1, like: StreamLanes | None = None) -> None:
        super().__init__(num_branches)
        self.device = device
        self._lent: _LentStreams = _LentStreams(device, num_branches - 1) if like is None else like._lent
        self.branches = self._lent.streams
        self._owners = {lane: StreamOwner() for lane in (Lane.OUT, Lane.IN)}
        self._sides = {lane: borrow_stream(device, owner) for lane, owner in self._owners.items()}
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        self._awaited: frozenset[int] = frozenset()
        self._ended: dict[int, list[torch.cuda.Event]] = {}

    @contextmanager
    def part(self, awaited: frozenset[int]) -> Iterator[None]:
        main = torch.cuda.current_stream(self.device)
        self._streams = {Lane.COMPUTE: main, **self._sides}
        self._awaited = awaited
        self._ended = {}
        for side in (*self._sides.values(), *self.branches):
            side.wait_stream(main)
        try:
            yield
        finally:
            for side in (*self._sides.values(), *self.branches):
                main.wait_stream(side)

    def on(self, lane: Lane, position: int) -> AbstractContextManager[Any]:
        return nullcontext() if lane is Lane.COMPUTE else torch.cuda.stream(self._streams[lane])

    def branch(self, number: int) -> AbstractContextManager[Any]:
        return nullcontext() if number == 0 else torch.cuda.stream(self.branches[number - 1])

    @contextmanager
    def together(self) -> Iterator[None]:
        main = self._streams[Lane.COMPUTE]
        for branch in self.branches:
            main.wait_stream(branch)
        yield
        for branch in self.branches:
            branch.wait_stream(main)

    def _streams_of(self, lane: Lane) -> list[torch.cuda.Stream]:
        more = self.branches if lane is Lane.COMPUTE else []
        return [self._streams[lane], *more]

    def issued(self, lane: Lane, position: int) -> None:
        if position in self._awaited:
            self._ended[position] = [stream.record_event() for stream in self._streams_of(lane)]

    def wait(self, lane: Lane, position: int) -> None:
        for stream in self._streams_of(lane):
            for event in self._ended[position]:
                stream.wait_event(event)


class _LentStreams:
    """Streams for branches, theirs as long as anybody has this; with workspaces for the matrix libraries."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._owners = [StreamOwner() for _ in range(count)]
        self.streams = [borrow_stream(device, owner, uses_matrices=True) for owner in self._owners]
        for stream in self.streams:
            with torch.cuda.stream(stream):
                warm_matrix_libraries(device)


class WatchedHostLanes(HostLanes):
    """Lanes of the host that record when each instruction ran."""

    def __init__(self, num_branches: int = 1) -> None:
        super().__init__(num_branches)
        self._spans: list[Span] = []
        self._begin = self._end = 0.0

    @contextmanager
    def part(self, awaited: frozenset[int]) -> Iterator[None]:
        self._spans = []
        self._begin = time.perf_counter()
        yield
        self._end = time.perf_counter()

    @contextmanager
    def on(self, lane: Lane, position: int) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        self._spans.append(Span(lane, position, begin - self._begin, end - self._begin))

    def read(self) -> tuple[list[Span], float]:
        """The spans of the last part, and the seconds that it took in all."""
        return self._spans, self._end - self._begin


class WatchedStreamLanes(StreamLanes):
    """Streams with a timer for each instruction, which a captured graph sets anew with every replay.

    Of the compute lane only the first branch is timed.
    """

    def __init__(self, device: torch.device, num_branches: int = 1, like: StreamLanes | None = None) -> None:
        super().__init__(device, num_branches, like)
        self._timers: list[tuple[Lane, int, CudaTimer]] = []
        self._whole: CudaTimer | None = None
        self._read: tuple[list[Span], float] | None = None

    @contextmanager
    def part(self, awaited: frozenset[int]) -> Iterator[None]:
        self._timers = []
        self._read = None
        main = torch.cuda.current_stream(self.device)
        whole = CudaTimer(in_graphs=True)
        whole.start(main)
        with super().part(awaited):
            yield
        whole.stop(main)
        self._whole = whole

    @contextmanager
    def on(self, lane: Lane, position: int) -> Iterator[None]:
        timer = CudaTimer(in_graphs=True)
        timer.start(self._streams[lane])
        with super().on(lane, position):
            yield
        timer.stop(self._streams[lane])
        self._timers.append((lane, position, timer))

    def read(self) -> tuple[list[Span], float]:
        """The spans of the last part that ran, and the seconds that it took in all; waits for it."""
        if self._read is None:
            torch.cuda.synchronize(self.device)
            whole = self._whole
            assert whole is not None
            spans = [Span(lane, at, *timer.seconds_after(whole)) for lane, at, timer in self._timers]
            self._read = (spans, whole.seconds())
        return self._read


WatchedLanes = WatchedHostLanes | WatchedStreamLanes


def watched_lanes(lanes: HostLanes) -> WatchedLanes:
    """Lanes like these, with a clock. Branches are the same streams: others need workspaces of their own."""
    if isinstance(lanes, StreamLanes):
        return WatchedStreamLanes(lanes.device, lanes.num_branches, lanes)
    return WatchedHostLanes(lanes.num_branches)
