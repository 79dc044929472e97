"""Segments as CUDA graphs: each captured once, then replayed on its job's stream.

A job's usual step is captured before its first iteration, when nothing else is in flight: it is rehearsed as
a whole, with no member active, in the job's own part of the arena. Other steps (a short last batch, a
micro-batch without an update) come while other jobs run. The first time they run kernel by kernel, which is
their rehearsal; the second time they are captured segment by segment, and a capture runs nothing.

Graphs of one job never run at the same time, so they share one memory pool for their kernels' scratch. The
pool is limited to what was promised to the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from trainmux.engine import CaptureRoom, kernel_settings, limited_growth
from trainmux.errors import BudgetError
from trainmux.runtime import MATRIX_LIBRARIES_BYTES, CudaTimer
from trainmux.sizes import exact_bytes

GRAPHS_BYTES = 32 << 20
"""Allowance for a job's graphs themselves and the rounding of torch's allocator."""

Run = Callable[[], None]


class SegmentGraphs:
    """The graphs of one job, to be made and used with the job's stream as the current one.

    Torch may reserve ``scratch_bytes`` for it, the matrix libraries' workspaces included. Once the graphs
    themselves take ``graphs_bytes``, further steps run kernel by kernel. An unused graph is kept to the end:
    with it, torch would free the matrix libraries' workspaces of the stream that other graphs use (pytorch
    #193402).
    """

    def __init__(
        self,
        device: torch.device,
        *,
        deterministic: bool,
        scratch_bytes: int,
        graphs_bytes: int = GRAPHS_BYTES,
    ) -> None:
        self._device = device
        self._graphs_bytes = graphs_bytes
        self._deterministic = deterministic
        self.room = CaptureRoom(device, deterministic=deterministic)
        self.scratch_bytes = scratch_bytes
        self._captured: list[torch.cuda.CUDAGraph] = []

    @property
    def has_room(self) -> bool:
        """Whether the graphs themselves may take more memory."""
        return self.room.graph_bytes < self._graphs_bytes

    def capture(self, rehearse: Run, runs: Sequence[Run]) -> list[torch.cuda.CUDAGraph]:
        """Capture ``runs``; ``rehearse``, which does all of them, is called twice before."""
        with self._limited():
            captured = self.room.capture_all(rehearse, runs)
        self._captured += captured
        return captured

    def close(self) -> None:
        """Free the job's graphs now, even if they are still referenced.

        Another job may get their stream next, and freeing a graph must not take that job's workspaces.
        """
        torch.cuda.current_stream(self._device).synchronize()
        for graph in self._captured:
            graph.reset()
        self._captured.clear()
        self.room.drop_kept()

    def run_eagerly(self, run: Run) -> None:
        """Run kernel by kernel, in the order of the job's stream, with memory of the graphs' pool."""
        outside, inside = torch.cuda.current_stream(self._device), self.room.stream
        inside.wait_stream(outside)
        with (
            self._limited(),
            torch.cuda.stream(inside),
            self.room.allocating(),
            kernel_settings(deterministic=self._deterministic),
        ):
            run()
        outside.wait_stream(inside)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Limit torch to the scratch that was promised, less what the pool has already.

        Kernels chosen by measurement are then chosen among those whose workspace fits. Refused with
        `BudgetError`: a job that needs more than was promised.
        """
        left = max(0, self.scratch_bytes - MATRIX_LIBRARIES_BYTES - self.room.pool_bytes)
        try:
            with limited_growth(self._device, left):
                yield
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"expected the job's kernels to take at most {exact_bytes(self.scratch_bytes)} of scratch, "
                "but they need more; give the job smaller batches"
            ) from error


class SegmentSet:
    """One step of a job in segments, ``None`` for segments without kernels."""

    def __init__(self, graphs: SegmentGraphs, segments: Sequence[Run | None]) -> None:
        self._graphs = graphs
        self._segments = tuple(segments)
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}
        self._ran: set[int] = set()

    def capture_all(self) -> None:
        """Rehearse the whole step and capture its segments; the job must own all memory that they touch."""
        runs = {number: run for number, run in enumerate(self._segments) if run is not None}

        def rehearse() -> None:
            for run in runs.values():
                run()

        graphs = self._graphs.capture(rehearse, list(runs.values()))
        self._captured = dict(zip(runs, graphs, strict=True))

    def replay_seconds(self) -> float:
        """The duration of the second of two replays of the whole step."""
        timer = CudaTimer()
        for _ in range(2):
            timer.start()
            for graph in self._captured.values():
                graph.replay()
            timer.stop()
        return timer.seconds()

    def run(self, number: int) -> None:
        """Enqueue one segment."""
        run = self._segments[number]
        if run is None:
            return
        if number not in self._captured:
            if number not in self._ran or not self._graphs.has_room:
                self._ran.add(number)
                self._graphs.run_eagerly(run)
                return
            (self._captured[number],) = self._graphs.capture(lambda: None, [run])  # its rehearsal was above
        self._captured[number].replay()
