"""What was learned of a job, in a file: with it, the job needs no profiling iteration (§5.3, note 1).

The file names what it was measured on: the device, the job's fingerprint and the heights of its segments. For
a job that is cut or placed in another way, or with a damaged file, it is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._job_state import MAX_IN_FLIGHT_LIMIT, JobReport
from trainmux.errors import PlanError

_KIND = "lifespans"
_VERSION = 2
_FIELDS = (
    "device",
    "fingerprint",
    "region_bytes",
    "step_seconds",
    "num_kernels",
    "heights",
    "solo_seconds",
    "shared_seconds",
    "in_flight_limit",
)

_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6


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
    """What a scheduler's report says of a job on ``device``, to be kept.

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
        """What was learned of such a job in regions of that size, however it was cut; ``None`` where nothing
        was, or nothing that can be read."""
        try:
            return load_lifespans(self._path(demand))
        except PlanError:
            return None

    def put(self, demand: JobDemand, report: JobReport, step_seconds: Sequence[float]) -> None:
        """Keep what was learned. Where it cannot be written, the job is profiled again next time."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            kept = lifespans_of(demand, report, device=self._device, step_seconds=step_seconds)
            save_lifespans(self._path(demand), kept)
        except (OSError, PlanError):
            return

    def _path(self, demand: JobDemand) -> Path:
        num_lanes = 1 if demand.micro_batches is None else demand.micro_batches.num_lanes
        key = json.dumps([self._device, demand.fingerprint, demand.region_bytes, num_lanes])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.{_KIND}.json"


def save_lifespans(path: str | os.PathLike[str], lifespans: StoredLifespans) -> None:
    """Write ``lifespans`` to a file, whole or not at all; `PlanError` where it cannot be written."""
    content = {name: getattr(lifespans, name) for name in _FIELDS}
    document = {
        "trainmux": _KIND,
        "version": _VERSION,
        "sha256": _checksum(content),
        _KIND: content,
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            with open(temporary, "x", encoding="ascii") as file:
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise PlanError(
            f"expected to write lifespans to {target}, but got: {error.strerror or error}; name a file in a "
            "folder that exists and can be written to"
        ) from error


def load_lifespans(path: str | os.PathLike[str]) -> StoredLifespans:
    """The lifespans in a file that `save_lifespans` wrote; `PlanError` for anything else."""

    def refuse(got: str) -> NoReturn:
        raise PlanError(
            f"expected lifespans in {os.fspath(path)}, but {got}; profile the job again"
        ) from None

    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        refuse(f"got: {error.strerror or error}")
    except (ValueError, RecursionError):
        refuse("got text that is truncated or edited")
    if not isinstance(document, dict) or document.get("trainmux") != _KIND:
        refuse("got a document of another kind")
    if document.get("version") != _VERSION:
        refuse(f"got format version {document.get('version')!r:.40}, and this trainmux reads {_VERSION}")
    content = document.get(_KIND)
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        refuse(f"got fields other than {', '.join(_FIELDS)}")
    if document.get("sha256") != _checksum(content):
        refuse("got one that was edited since it was written: its checksum does not fit")
    return _decode(content, refuse)


def _decode(content: dict[str, Any], refuse: Any) -> StoredLifespans:
    whole = [content[name] for name in ("num_kernels", "heights")]
    times = [content[name] for name in ("solo_seconds", "shared_seconds", "step_seconds")]
    if any(type(content[name]) is not str for name in ("device", "fingerprint")):
        refuse("its device or fingerprint is no text")
    if type(content["region_bytes"]) is not int or type(content["in_flight_limit"]) is not int:
        refuse("its region size or limit is no whole number")
    if not 1 <= content["in_flight_limit"] <= MAX_IN_FLIGHT_LIMIT:
        refuse("its limit is out of range")
    if not all(isinstance(rows, list) for rows in (*whole, *times)):
        refuse("it has single values where there should be rows")
    if len({len(rows) for rows in (*whole, *times[:2])}) > 1:
        refuse("it has not one time for each segment")
    if not all(type(value) is int for rows in whole for value in rows):
        refuse("its kernels and heights are not whole numbers")
    for taken in itertools.chain(*times):
        if type(taken) not in (int, float) or not _LEAST_SECONDS <= taken <= _MOST_SECONDS:
            refuse("its times are out of range")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    return StoredLifespans(**values)


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps([_KIND, _VERSION, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
