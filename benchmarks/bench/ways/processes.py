"""See ``benchmarks.mps``."""

from benchmarks.mps import CONTROL, mps_daemon

__all__ = ["CONTROL", "mps_daemon"]
