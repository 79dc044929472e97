"""A CUDA device without a GPU: two streams that run when they like, and events between them.

A stream is a queue of operations. The simulation picks at random which queue goes on next, and runs nothing
sooner than it must where the host waits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any


class FakeDevice:
    """Two queues. An operation returns false as long as it cannot run."""

    def __init__(self, seed: int = 0) -> None:
        self.compute: deque[Callable[[], bool]] = deque()
        self.copies: deque[Callable[[], bool]] = deque()
        self._random = random.Random(seed)

    def advance(self) -> bool:
        """Run one operation; false where there is none that can run."""
        queues = [queue for queue in (self.compute, self.copies) if queue]
        self._random.shuffle(queues)
        for queue in queues:
            if queue[0]():
                queue.popleft()
                return True
        return False

    def wander(self) -> None:
        """A few operations, or none: the host does not know."""
        for _ in range(self._random.choice([0, 0, 1, 3, 10])):
            self.advance()

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self.advance(), "the host waits for something that never comes"

    def finish(self) -> None:
        self.run_until(lambda: not self.compute and not self.copies)


class FakeEvent:
    """An event of a `FakeDevice`; without a stream it is recorded on the compute stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._num_recorded = 0
        self._num_reached = 0
        self.num_waits = 0

    def query(self) -> bool:
        return self._num_reached == self._num_recorded

    def synchronize(self) -> None:
        self.num_waits += 1
        self._device.run_until(self.query)

    def record(self, stream: Any = None) -> None:
        self._num_recorded += 1
        number = self._num_recorded

        def reach() -> bool:
            self._num_reached = number
            return True

        (self._device.compute if stream is None else stream).append(reach)

    def wait(self, stream: deque[Callable[[], bool]]) -> None:
        """``stream`` goes on when what is recorded so far has been reached."""
        number = self._num_recorded
        stream.append(lambda: self._num_reached >= number)
