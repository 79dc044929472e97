"""A member's graph and a width become a fused graph."""

from trainmux.fusion import rules
from trainmux.fusion._families import CONVOLUTION_STRATEGIES, STRATEGY_FAMILIES
from trainmux.fusion._fuse import FusedGraph, fuse
from trainmux.fusion.strategies import (
    FIXED,
    MEASURED,
    OperatorTimes,
    Partition,
    library_calls,
    partition_time,
    times_for,
)

__all__ = [
    "CONVOLUTION_STRATEGIES",
    "FIXED",
    "MEASURED",
    "STRATEGY_FAMILIES",
    "FusedGraph",
    "OperatorTimes",
    "Partition",
    "fuse",
    "library_calls",
    "partition_time",
    "rules",
    "times_for",
]
