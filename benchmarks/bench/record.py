"""Records of measurements: what they hold, how they are written, read and merged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .job import BenchError, Measurement, Memory, Timing

FORMAT = 1


@dataclass(frozen=True)
class Row:
    """What the ways are compared on."""

    device: str
    workload: str
    batch_size: int
    width: int


@dataclass(frozen=True)
class Record:
    """One way on one workload, with all that is needed to repeat it.

    Exactly one of ``measurement`` and ``error`` is there. ``detail`` is the end of a traceback or log;
    ``notes`` are about the record, those of the measurement about how it was made.
    """

    workload: str
    batch_size: int
    width: int
    way: str
    command: str
    date: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    measurement: Measurement | None = None
    error: str | None = None
    detail: str | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def row(self) -> Row:
        return Row(str(self.environment.get("device")), self.workload, self.batch_size, self.width)

    @property
    def median_ms(self) -> float | None:
        """Milliseconds per member and step; ``None`` where the way failed."""
        return None if self.measurement is None else self.measurement.timing.median_ms


def merge(runs: Iterable[Sequence[Record]]) -> list[Record]:
    """All records in order; of those with the same device, workload, sizes and way, the last one alone."""
    kept: dict[tuple[Row, str], Record] = {}
    for records in runs:
        for record in records:
            kept[record.row, record.way] = record
    return list(kept.values())


def write_records(path: Path, records: Sequence[Record]) -> None:
    write_json(path, [asdict(record) for record in records])


def read_records(path: Path) -> list[Record]:
    """What ``write_records`` wrote; ``BenchError`` names a file that is something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return [_from_json(entry) for entry in document]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BenchError(
            f"expected a result of 'trainmux bench step' in {path}, got something else "
            f"({type(error).__name__}: {error}); measure again, or name another file"
        ) from error


def write_json(path: Path, document: Any) -> None:
    """Beside its name first and then renamed: whoever reads, or is interrupted, never has half a file."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def measurement_from_json(document: Mapping[str, Any]) -> Measurement:
    timing = dict(document["timing"])
    timing["block_ms"] = tuple(timing["block_ms"])
    memory = document["memory"]
    return Measurement(
        num_parameters=document["num_parameters"],
        timing=Timing(**timing),
        memory=None if memory is None else Memory(**memory),
        first_losses=tuple(document["first_losses"]),
        last_losses=tuple(document["last_losses"]),
        notes=tuple(document["notes"]),
    )


def _from_json(entry: Mapping[str, Any]) -> Record:
    if entry["format"] != FORMAT:
        raise ValueError(f"format {entry['format']} instead of {FORMAT}")
    values = dict(entry)
    for name in ("warnings", "notes"):
        values[name] = tuple(values[name])
    if values["measurement"] is not None:
        values["measurement"] = measurement_from_json(values["measurement"])
    return Record(**values)
