"""The three lanes of a program: streams on a CUDA device, the order of the instructions elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainmux.ir import Lane


class HostLanes:
    """All lanes are the caller's own thread: what is issued has ended, so there is nothing to wait for."""

    @contextmanager
    def part(self, awaited: frozenset[int]) -> Iterator[None]:
        """Around one part of a program."""
        yield

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """What is enqueued inside runs on ``lane``."""
        yield

    def issued(self, lane: Lane, position: int) -> None:
        """The instruction at ``position`` has been enqueued."""

    def wait(self, lane: Lane, position: int) -> None:
        """Hold ``lane`` until the instruction at ``position`` has ended."""


class StreamLanes:
    """A stream for each lane, events between them: eagerly or in a capture.

    The compute lane is the stream that is current when a part begins; the two others begin behind it and are
    joined to it at the part's end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sides = {Lane.OUT: torch.cuda.Stream(device), Lane.IN: torch.cuda.Stream(device)}
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        self._awaited: frozenset[int] = frozenset()
        self._ended: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def part(self, awaited: frozenset[int]) -> Iterator[None]:
        """Around one part of a program; ``awaited`` are the positions that some lane will wait for."""
        main = torch.cuda.current_stream(self._device)
        self._streams = {Lane.COMPUTE: main, **self._sides}
        self._awaited = awaited
        self._ended = {}
        for side in self._sides.values():
            side.wait_stream(main)
        try:
            yield
        finally:
            for side in self._sides.values():
                main.wait_stream(side)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """What is enqueued inside runs on ``lane``."""
        if lane is Lane.COMPUTE:
            yield
            return
        with torch.cuda.stream(self._streams[lane]):
            yield

    def issued(self, lane: Lane, position: int) -> None:
        """The instruction at ``position`` has been enqueued."""
        if position in self._awaited:
            event = torch.cuda.Event()
            event.record(self._streams[lane])
            self._ended[position] = event

    def wait(self, lane: Lane, position: int) -> None:
        """Hold ``lane`` until the instruction at ``position`` has ended."""
        self._streams[lane].wait_event(self._ended[position])


Lanes = HostLanes | StreamLanes
