"""The one timer of device work."""

from __future__ import annotations

import torch


class CudaTimer:
    """Measures the device's time between two points of a stream; may be used again and again.

    With ``in_graphs`` a captured graph records both points anew with every replay.
    """

    def __init__(self, *, in_graphs: bool = False) -> None:
        self._begin = torch.cuda.Event(enable_timing=True, external=in_graphs)
        self._end = torch.cuda.Event(enable_timing=True, external=in_graphs)

    def start(self, stream: torch.cuda.Stream | None = None) -> None:
        """Mark the beginning, on the current stream if none is given."""
        self._begin.record(stream)

    def stop(self, stream: torch.cuda.Stream | None = None) -> None:
        """Mark the end, on the current stream if none is given."""
        self._end.record(stream)

    def seconds(self) -> float:
        """Wait for the end; the seconds since the beginning."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def seconds_after(self, other: CudaTimer) -> tuple[float, float]:
        """Seconds from the beginning of ``other`` to this one's beginning and end, both of which are past."""
        begin, end = (other._begin.elapsed_time(event) for event in (self._begin, self._end))
        return float(begin) / 1e3, float(end) / 1e3
