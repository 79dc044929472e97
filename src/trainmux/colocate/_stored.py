"""Measured lifespans of a job in a file: with it, the job needs no profiling iteration (§5.3, note 1).

The file names what it was measured on: the device, the job's fingerprint and the heights of its segments. For
a job that is cut or placed in another way, or with a damaged file, it is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._job_state import MAX_IN_FLIGHT_LIMIT, JobReport
from trainmux.errors import PlanError
from trainmux.ir import file_format, load, save

_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6


@file_format("lifespans", version=3, remedy="profile the job again")
@dataclass(frozen=True)
class StoredLifespans:
    """Times of a job's segments, alone and beside others, and what says which job they are of.

    ``step_seconds`` are the times that it was cut for. ``in_flight_limit`` is what a sweep found.
    """

    device: str
    fingerprint: str
    region_bytes: int
    step_seconds: tuple[float, ...]
    num_kernels: tuple[int, ...]
    heights: tuple[int, ...]
    solo_seconds: tuple[float, ...]
    shared_seconds: tuple[float, ...]
    in_flight_limit: int

    def __post_init__(self) -> None:
        rows = (self.num_kernels, self.heights, self.solo_seconds, self.shared_seconds)
        if len(set(map(len, rows))) > 1:
            raise ValueError("must have one count, height and pair of times for each segment")
        times = (*self.solo_seconds, *self.shared_seconds, *self.step_seconds)
        if not all(_LEAST_SECONDS <= seconds <= _MOST_SECONDS for seconds in times):
            raise ValueError(f"must have times of {_LEAST_SECONDS} to {_MOST_SECONDS} seconds")
        if not 1 <= self.in_flight_limit <= MAX_IN_FLIGHT_LIMIT:
            raise ValueError(f"must have a limit of 1 to {MAX_IN_FLIGHT_LIMIT} segments in flight")

    def apply(self, demand: JobDemand) -> JobDemand:
        """``demand`` with the times that were measured.

        Refused with `PlanError`: lifespans of another job, or of the same job cut otherwise.
        """
        cuts = tuple(segment.num_kernels for segment in demand.segments)
        heights = tuple(segment.height_bytes for segment in demand.segments)
        for what, expected, got in (
            ("fingerprint", demand.fingerprint, self.fingerprint),
            ("region size", demand.region_bytes, self.region_bytes),
            ("number of segments", len(cuts), len(self.num_kernels)),
        ):
            if expected != got:
                raise PlanError(
                    f"expected lifespans of job {demand.name!r} with the {what} {expected!r}, but got "
                    f"{got!r}; profile the job again"
                )
        if (cuts, heights) != (self.num_kernels, self.heights):
            raise PlanError(
                f"expected lifespans of job {demand.name!r} with its cuts and heights, but they differ; "
                "profile the job again"
            )
        return replace(demand.with_solo_seconds(self.solo_seconds), in_flight_limit=self.in_flight_limit)


def lifespans_of(
    demand: JobDemand, report: JobReport, *, device: str, step_seconds: Sequence[float] = ()
) -> StoredLifespans:
    """The lifespans in a scheduler's report of a job on ``device``.

    Its first iteration, which ran alone, may have been slower than all others: a segment is not taken to last
    longer alone than beside others.
    """
    pairs = zip(report.solo_seconds, report.shared_seconds, strict=True)
    return StoredLifespans(
        device,
        demand.fingerprint,
        demand.region_bytes,
        tuple(step_seconds),
        tuple(segment.num_kernels for segment in demand.segments),
        tuple(segment.height_bytes for segment in demand.segments),
        tuple(max(min(alone, beside), _LEAST_SECONDS) for alone, beside in pairs),
        tuple(max(taken, _LEAST_SECONDS) for taken in report.shared_seconds),
        report.in_flight_limit,
    )


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
        """Keep what was learned. Where it cannot be written, the job is profiled again next time."""
        with suppress(PlanError, ValueError):
            kept = lifespans_of(demand, report, device=self._device, step_seconds=step_seconds)
            save(self._path(demand), kept)

    def _path(self, demand: JobDemand) -> Path:
        num_lanes = 1 if demand.micro_batches is None else demand.micro_batches.num_lanes
        key = json.dumps([self._device, demand.fingerprint, demand.region_bytes, num_lanes])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.lifespans.json"
