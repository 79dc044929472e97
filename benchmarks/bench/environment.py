"""See ``benchmarks.environment``."""

from benchmarks.environment import describe

__all__ = ["describe"]
