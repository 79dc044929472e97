"""Segments as CUDA graphs: captured once each, replayed on their job's stream from then on.

A job's usual step is captured before its first iteration, when nobody else has anything in flight: it is
rehearsed as a whole, with no member active, in the job's own part of the arena. Other steps (a short last
batch, a micro-batch without an update) come while others run. They run kernel by kernel the first time,
which is their rehearsal, and are captured segment by segment the second time: a capture runs nothing.

Graphs of one job never run at the same time, so they share one memory pool for what kernels take beside the
memory that they are given. It is as large as was promised for the job: whoever wants more is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from trainmux.engine._capture_room import CaptureRoom, kernel_settings
from trainmux.errors import BudgetError
from trainmux.runtime import MATRIX_LIBRARIES_BYTES, limited_growth
from trainmux.sizes import exact_bytes

_MAX_SETS = 8
"""Steps of a job whose segments are captured; further ones run kernel by kernel."""

GRAPHS_BYTES = 32 << 20
"""For the graphs of a job themselves, and for what torch's allocator rounds up, unless more was seen."""

Run = Callable[[], None]


class SegmentGraphs:
    """The graphs of one job. To be made, and used, with the job's stream as the current one.

    ``beside_bytes`` are what torch may reserve for it, the matrix libraries' workspaces among them. Once the
    graphs themselves have ``graphs_bytes``, further steps run kernel by kernel. A graph that is no longer
    wanted is kept to the end: with it, torch would free the matrix libraries' workspaces of the stream that
    its neighbours use (pytorch #193402).
    """

    def __init__(
        self,
        device: torch.device,
        *,
        deterministic: bool,
        beside_bytes: int,
        graphs_bytes: int = GRAPHS_BYTES,
    ) -> None:
        self._device = device
        self._graphs_bytes = graphs_bytes
        self._deterministic = deterministic
        self._room = CaptureRoom(device, deterministic=deterministic)
        self._beside_bytes = beside_bytes
        self._sets: list[SegmentSet] = []

    @property
    def pool_bytes(self) -> int:
        """What the graphs' pool has of the device."""
        return self._room.pool_bytes

    @property
    def graph_bytes(self) -> int:
        """What the graphs themselves have."""
        return self._room.graph_bytes

    def keep_to(self, beside_bytes: int) -> None:
        """From now on torch may reserve no more than that for it."""
        self._beside_bytes = beside_bytes

    def empty_caches(self) -> None:
        """Give back what torch keeps of what was there before: it would be beside what the job takes."""
        torch.cuda.current_stream(self._device).synchronize()
        torch.cuda.empty_cache()

    @property
    def num_captures(self) -> int:
        return self._room.num_captures

    def new_set(self, segments: Sequence[Run | None]) -> SegmentSet:
        """A step in segments, ``None`` for those without kernels."""
        has_room = self.graph_bytes < self._graphs_bytes or not self._sets
        made = SegmentSet(self, segments, may_capture=has_room and len(self._sets) < _MAX_SETS)
        if made.may_capture:
            self._sets.append(made)
        return made

    def capture(self, rehearse: Run, runs: Sequence[Run]) -> list[torch.cuda.CUDAGraph]:
        """The graphs of ``runs``; ``rehearse``, which does all of them, is called twice before."""
        with self._limited():
            return self._room.capture_all(rehearse, runs)

    def close(self) -> None:
        """The job goes: let go of its graphs now, whoever may still hold one.

        The stream that they were captured on may be another job's next, and what goes with a graph must not
        be that one's.
        """
        torch.cuda.current_stream(self._device).synchronize()
        for made in self._sets:
            made.close()
        self._sets.clear()
        self._room.drop_kept()

    def run_eagerly(self, run: Run) -> None:
        """Kernel by kernel, in the order of the job's stream, with memory of the graphs' pool."""
        outside, inside = torch.cuda.current_stream(self._device), self._room.stream
        inside.wait_stream(outside)
        with (
            self._limited(),
            torch.cuda.stream(inside),
            self._room.allocating(),
            kernel_settings(deterministic=self._deterministic),
        ):
            run()
        outside.wait_stream(inside)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """While active, torch takes no more for the job than was promised, less what its pool has already.

        Kernels that are chosen by measuring are then chosen among those whose workspace fits. Refused with
        `BudgetError`: a job that cannot do with what was promised.
        """
        left = max(0, self._beside_bytes - MATRIX_LIBRARIES_BYTES - self.pool_bytes)
        try:
            with limited_growth(self._device, left):
                yield
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"expected the job's kernels to take at most {exact_bytes(self._beside_bytes)} beside "
                "what they "
                "are given, but they need more; give the job smaller batches"
            ) from error


class SegmentSet:
    """One step of a job in segments, made by `SegmentGraphs.new_set`."""

    def __init__(self, graphs: SegmentGraphs, segments: Sequence[Run | None], *, may_capture: bool) -> None:
        self._graphs = graphs
        self._segments = tuple(segments)
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}
        self._ran: set[int] = set()
        self.may_capture = may_capture

    def capture_all(self) -> None:
        """Rehearse the whole step and capture its segments; all that they touch must be the job's now."""

        def rehearse() -> None:
            for run in self._segments:
                if run is not None:
                    run()

        runs = {number: run for number, run in enumerate(self._segments) if run is not None}
        graphs = self._graphs.capture(rehearse, list(runs.values()))
        self._captured = dict(zip(runs, graphs, strict=True))

    def replay_seconds(self) -> float:
        """How long all of it takes, once it was captured as a whole: the second of two replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            begin.record()
            for graph in self._captured.values():
                graph.replay()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def close(self) -> None:
        """Let go of the graphs."""
        for graph in self._captured.values():
            graph.reset()
        self._captured.clear()

    def run(self, number: int) -> None:
        """Enqueue one segment."""
        run = self._segments[number]
        if run is None:
            return
        if number not in self._captured:
            if number not in self._ran or not self.may_capture:
                self._ran.add(number)
                self._graphs.run_eagerly(run)
                return
            (self._captured[number],) = self._graphs.capture(_nothing, [run])
        self._captured[number].replay()


def _nothing() -> None:
    """The rehearsal of what was rehearsed."""
