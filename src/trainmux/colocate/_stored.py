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
from dataclasses import dataclass, replace
from pathlib import Path

from trainmux.colocate._demand import JobDemand, Segment
from trainmux.errors import PlanError
from trainmux.ir import file_format, load, save

_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6


@file_format("lifespans", version=5, remedy="profile the job again")
@dataclass(frozen=True)
class StoredLifespans:
    """The segments of a job with their durations alone, and the ``step_seconds`` that it was cut for."""

    step_seconds: tuple[float, ...]
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        durations = [*self.step_seconds, *(segment.solo_seconds for segment in self.segments)]
        if not all(_LEAST_SECONDS <= seconds <= _MOST_SECONDS for seconds in durations):
            raise ValueError(f"must have durations of {_LEAST_SECONDS} to {_MOST_SECONDS} seconds")

    def apply(self, demand: JobDemand) -> JobDemand:
        """``demand`` with the measured durations; unchanged where it is cut otherwise."""
        if _cuts(self.segments) != _cuts(demand.segments):
            return demand
        return replace(demand, segments=self.segments, is_measured=True)


def _cuts(segments: Sequence[Segment]) -> list[tuple[int, int, int]]:
    return [(segment.num_kernels, segment.height_bytes, segment.hold_bytes) for segment in segments]


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

    def put(
        self,
        demand: JobDemand,
        solo_seconds: Sequence[float],
        shared_seconds: Sequence[float],
        step_seconds: Sequence[float],
    ) -> None:
        """Keep the durations of segments. Where they cannot be written, the job is profiled again next time.

        The first iteration, which ran alone, may have been slower than all others: a segment is not taken to
        last longer alone than next to other jobs.
        """
        rows = zip(demand.segments, solo_seconds, shared_seconds, strict=True)
        segments = (replace(row, solo_seconds=max(min(pair), _LEAST_SECONDS)) for row, *pair in rows)
        with suppress(PlanError, ValueError):
            save(self._path(demand), StoredLifespans(tuple(step_seconds), tuple(segments)))

    def _path(self, demand: JobDemand) -> Path:
        key = json.dumps([self._device, demand.fingerprint, demand.region_bytes])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.lifespans.json"
