"""What was learned of a job, in a file: with it, the job needs no profiling iteration (§5.3, note 1).

The file names what it was measured on: the job's fingerprint and the heights of its segments. For a job that
is cut or placed in another way, or with a damaged file, it is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainmux.colocate._demand import JobDemand
from trainmux.colocate._job import JobReport
from trainmux.errors import PlanError

_KIND = "lifespans"
_VERSION = 1
_FIELDS = ("fingerprint", "region_bytes", "heights", "solo_seconds", "shared_seconds")


@dataclass(frozen=True)
class StoredLifespans:
    """Times of a job's segments, alone and beside others, and what says which job they are of."""

    fingerprint: str
    region_bytes: int
    heights: tuple[int, ...]
    solo_seconds: tuple[float, ...]
    shared_seconds: tuple[float, ...]

    def apply(self, demand: JobDemand) -> JobDemand:
        """``demand`` with the times that were measured.

        Refused with `PlanError`: lifespans of another job, or of the same job cut otherwise.
        """
        heights = tuple(segment.height_bytes for segment in demand.segments)
        for what, expected, got in (
            ("fingerprint", demand.fingerprint, self.fingerprint),
            ("region size", demand.region_bytes, self.region_bytes),
            ("number of segments", len(heights), len(self.heights)),
        ):
            if expected != got:
                raise PlanError(
                    f"expected lifespans of job {demand.name!r} with the {what} {expected!r}, but got "
                    f"{got!r}; profile the job again"
                )
        if heights != self.heights:
            raise PlanError(
                f"expected lifespans of job {demand.name!r} with its heights, but they differ; profile "
                "the job again"
            )
        return demand.with_solo_seconds(self.solo_seconds)


def lifespans_of(demand: JobDemand, report: JobReport) -> StoredLifespans:
    """What a scheduler's report says of a job, to be kept."""
    return StoredLifespans(
        demand.fingerprint,
        demand.region_bytes,
        tuple(segment.height_bytes for segment in demand.segments),
        report.solo_seconds,
        report.shared_seconds,
    )


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
    heights, solo, shared = (content[name] for name in ("heights", "solo_seconds", "shared_seconds"))
    if type(content["fingerprint"]) is not str or type(content["region_bytes"]) is not int:
        refuse("its fingerprint or region size is of another type")
    if not isinstance(heights, list) or not all(type(height) is int for height in heights):
        refuse("its heights are not whole numbers")
    for rows in (solo, shared):
        if not isinstance(rows, list) or len(rows) != len(heights):
            refuse("it has not one time for each segment")
        if not all(type(taken) in (int, float) and math.isfinite(taken) and taken > 0 for taken in rows):
            refuse("its times are not above 0")
    return StoredLifespans(
        content["fingerprint"], content["region_bytes"], tuple(heights), tuple(solo), tuple(shared)
    )


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps([_KIND, _VERSION, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
