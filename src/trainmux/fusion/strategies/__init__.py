"""Operators that can be fused in several ways: the ways, and how the fastest is found."""

from trainmux.fusion.strategies._clock import CudaClock, HostClock, clock_for
from trainmux.fusion.strategies._family import FIXED, MEASURED, Choice, Family, Way, question_of
from trainmux.fusion.strategies._skeleton import LibraryCall, Partition, library_calls, partition_time
from trainmux.fusion.strategies._store import TimesFile
from trainmux.fusion.strategies._times import OperatorTimes, random_like, text_of, times_for

__all__ = [
    "FIXED",
    "MEASURED",
    "Choice",
    "CudaClock",
    "Family",
    "HostClock",
    "LibraryCall",
    "OperatorTimes",
    "Partition",
    "TimesFile",
    "Way",
    "clock_for",
    "library_calls",
    "partition_time",
    "question_of",
    "random_like",
    "text_of",
    "times_for",
]
