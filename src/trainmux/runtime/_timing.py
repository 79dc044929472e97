"""The one timer of device work."""

from __future__ import annotations

import torch


class CudaTimer:
    """Measures the device's time between two points of a stream; may be used again and again."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

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
