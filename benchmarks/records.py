"""Files of results: one current file per benchmark and device, whose rows say which run measured them."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FORMAT = 1
_INNERMOST_LIST = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")
KEYS = {
    "step": ("workload", "batch_size", "width", "way"),
    "plans": ("workload", "batch_size", "width", "share", "policy"),
    "zoo": ("model", "width"),
    "adapters": ("size", "adapters", "batch_size", "length", "ranks", "way"),
    "search": ("model", "way", "trials", "min_epochs", "max_epochs", "slots", "seed"),
    "studies": ("storage", "slots", "epochs", "batch_size"),
    "storages": ("storage", "workers"),
    "chaos": ("storage", "trials", "kills", "outages", "seed"),
    "mutwo": ("experiment", "workload", "batch_size", "optimizer", "members", "budget", "way"),
    "zico": ("experiment", "jobs", "way"),
    "refill": ("model", "members", "vary", "steps_per_life"),
    "overhead": ("workload", "width", "budget"),
}
"""By benchmark: what names a row. A row measured anew replaces the one of the same name."""


def name_of(benchmark: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What names a row of a benchmark."""
    return tuple(row.get(name) for name in KEYS[benchmark])


class Results:
    """A file that is written after every row. An existing one keeps what is not measured anew."""

    def __init__(self, path: Path, benchmark: str, environment: Mapping[str, Any]) -> None:
        self._path, self._benchmark = path, benchmark
        document = read(path, benchmark) if path.exists() else {"runs": [], "rows": []}
        self.rows: list[dict[str, Any]] = document["rows"]
        self._runs: list[dict[str, Any]] = document["runs"]
        words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        self._runs.append(
            {
                "command": shlex.join(["python", "-m", "benchmarks", *words]),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                **environment,
            }
        )
        device = self._runs[0]["device"]
        if environment["device"] != device:
            raise SystemExit(
                f"{path} has results of {device}, not of {environment['device']}: name another file"
            )

    def add(self, row: dict[str, Any]) -> None:
        name = name_of(self._benchmark, row)
        kept = [old for old in self.rows if name_of(self._benchmark, old) != name]
        self.rows[:] = [*kept, {**row, "run": len(self._runs) - 1}]
        self._write()

    def take(self, other: Mapping[str, Any]) -> None:
        """Add the rows of another document that this one lacks, with the runs that measured them."""
        known = {name_of(self._benchmark, row) for row in self.rows}
        first = len(self._runs)
        self._runs += other["runs"]
        for row in other["rows"]:
            if name_of(self._benchmark, row) not in known:
                self.rows.append({**row, "run": first + row["run"]})
        self._write()

    def _write(self) -> None:
        """Write the rows, and the runs that still have some."""
        used = sorted({row["run"] for row in self.rows})
        document = {
            "format": FORMAT,
            "benchmark": self._benchmark,
            "runs": [self._runs[number] for number in used],
            "rows": [{**row, "run": used.index(row["run"])} for row in self.rows],
        }
        write_text(self._path, json_text(document))


def json_text(document: Mapping[str, Any]) -> str:
    """Format a document, with lists of plain values on one line each."""
    text = json.dumps(document, indent=1)
    return _INNERMOST_LIST.sub(lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]", text) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file beside the old one first: whoever reads it never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read(path: Path, benchmark: str | None = None) -> dict[str, Any]:
    """Read a file of results; exits with a message where it is something else."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = document["benchmark"], document["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"expected results of python -m benchmarks in {path}, got {error!r}") from None
    if found != (benchmark or found[0], FORMAT):
        raise SystemExit(f"expected results of {benchmark} in format {FORMAT} in {path}, got {found}")
    return document
