"""Measured lifespans of a job in a file: with it, the job needs no profiling iteration (§5.3, note 1).

A file's name is made of the device, the job's fingerprint and the region size. A damaged file, and one of a
job that is cut otherwise, is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._job_state import JobReport
from trainmux.errors import PlanError
from trainmux.ir import file_format, load, save

_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6


@file_format("lifespans", version=4, remedy="profile the job again")
@dataclass(frozen=True)
class StoredLifespans:
    """Durations of a job's segments alone, and how it was cut: for ``step_seconds``, into segments of so many
    kernels and such heights."""

    step_seconds: tuple[float, ...]
    num_kernels: tuple[int, ...]
    heights: tuple[int, ...]
    solo_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.num_kernels) == len(self.heights) == len(self.solo_seconds):
            raise ValueError("must have one count, height and duration for each segment")
        durations = (*self.solo_seconds, *self.step_seconds)
        if not all(_LEAST_SECONDS <= seconds <= _MOST_SECONDS for seconds in durations):
            raise ValueError(f"must have durations of {_LEAST_SECONDS} to {_MOST_SECONDS} seconds")

    def apply(self, demand: JobDemand) -> JobDemand:
        """``demand`` with the measured durations; unchanged where it is cut otherwise."""
        if (_kernels_of(demand), _heights_of(demand)) != (self.num_kernels, self.heights):
            return demand
        return demand.with_solo_seconds(self.solo_seconds)


def _kernels_of(demand: JobDemand) -> tuple[int, ...]:
    return tuple(segment.num_kernels for segment in demand.segments)


def _heights_of(demand: JobDemand) -> tuple[int, ...]:
    return tuple(segment.height_bytes for segment in demand.segments)


class LifespanFolder:
    """Files with lifespans of jobs on one device. The folder is made when something is put there."""

    def __init__(self, folder: str | os.PathLike[str], device: str) -> None:
        self._folder = Path(folder)
        self._device = device

    def get(self, demand: JobDemand) -> StoredLifespans | None:
        """Lifespans of such a job in regions of that size, however it was cut; ``None`` without a readable
        file."""
        try:
            return load(self._path(demand), StoredLifespans)
        except PlanError:
            return None

    def put(self, demand: JobDemand, report: JobReport, step_seconds: Sequence[float]) -> None:
        """Keep what was learned. Where it cannot be written, the job is profiled again next time.

        The first iteration, which ran alone, may have been slower than all others: a segment is not taken to
        last longer alone than next to other jobs.
        """
        pairs = zip(report.solo_seconds, report.shared_seconds, strict=True)
        solo_seconds = tuple(max(min(pair), _LEAST_SECONDS) for pair in pairs)
        with suppress(PlanError, ValueError):
            kept = StoredLifespans(
                tuple(step_seconds), _kernels_of(demand), _heights_of(demand), solo_seconds
            )
            save(self._path(demand), kept)

    def _path(self, demand: JobDemand) -> Path:
        key = json.dumps([self._device, demand.fingerprint, demand.region_bytes])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.lifespans.json"
