"""Records → the page of benchmarks. The same records give the same page, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from .record import Record
from .tables import Grid, build_times, compare, failures, peak_memory, row_name, times_and_speedups
from .ways.table import VARIANT_SEPARATOR, WAYS

HOW = """\
Every number is the time of one training step (forward, backward, AdamW update) of one member, in bf16
autocast, on batches that are on the device already. Each way ran in a process of its own. After warming up,
steps were timed in blocks, by CUDA events on a GPU; a cell is the median over the blocks of a block's mean,
and from the smallest to the largest block. The width is the number of members trained at once, the batch
size that of each member. `trainmux bench step` measures; the JSON files have every block and setting."""


_VERSIONS = (
    ("torch", "torch"),
    ("CUDA", "cuda"),
    ("cuDNN", "cudnn"),
    ("driver", "driver"),
    ("Python", "python"),
)


def page(records: Sequence[Record], command: str, plot: str | None) -> str:
    """The whole page; ``command`` made it, ``plot`` is the picture's address seen from the page."""
    parts = [
        "# Benchmarks: time per training step",
        f"Generated; do not edit. Made from measured records by\n\n```sh\n{command}\n```",
        HOW,
        _ways(records),
        _workloads(records),
    ]
    if plot is not None:
        parts.append(f"![Speed of each way, by workload]({plot})")
    for device in dict.fromkeys(record.row.device for record in records):
        of_device = [record for record in records if record.row.device == device]
        comparison = compare(of_device)
        parts.append(f"## {device}")
        parts.append(_machine(of_device))
        grids = [*times_and_speedups(comparison), build_times(comparison)]
        if any(record.measurement and record.measurement.memory for record in of_device):
            grids.append(peak_memory(comparison))
        parts += [f"### {grid.title}\n\n{_table(grid)}" for grid in grids]
        lost = failures(of_device)
        if lost:
            parts.append("### What failed\n\n" + "\n".join(f"- {plain(line)}" for line in lost))
        notes = _notes(of_device)
        if notes:
            parts.append("### Notes\n\n" + "\n".join(f"- {plain(note)}" for note in notes))
        parts.append(_runs(of_device))
    return "\n\n".join(parts) + "\n"


def _ways(records: Sequence[Record]) -> str:
    used = dict.fromkeys(record.way.partition(VARIANT_SEPARATOR)[0] for record in records)
    lines = [f"- `{way.name}`: {way.description}" for way in WAYS.values() if way.name in used]
    variants = {
        record.way: record.settings.get("fleet", {}) for record in records if VARIANT_SEPARATOR in record.way
    }
    lines += [f"- `{label}`: with `Fleet(..., **{arguments})`" for label, arguments in variants.items()]
    return "The ways:\n\n" + "\n".join(lines)


def _machine(records: Sequence[Record]) -> str:
    """Versions, machine and dates; where they differ between records, all that occur."""
    facts: list[tuple[str, Callable[[Mapping[str, Any]], Any]]] = [
        *((label, itemgetter(name)) for label, name in _VERSIONS),
        *((name, partial(_package, name)) for name in ("transformers", "torchvision", "triton")),
        ("", itemgetter("system")),
        ("cores:", itemgetter("num_cores")),
        ("CPU threads in torch:", itemgetter("num_threads")),
    ]
    known = []
    for label, look in facts:
        values = dict.fromkeys(str(look(record.environment)) for record in records)
        text = " or ".join(value for value in values if value != "None")
        known += [f"{label} {text}".strip()] if text else []
    dates = sorted(record.date for record in records)
    return f"{', '.join(known)}. Measured from {dates[0]} to {dates[-1]}."


def _package(name: str, environment: Mapping[str, Any]) -> Any:
    return environment["packages"].get(name)


def _workloads(records: Sequence[Record]) -> str:
    sizes = {record.workload: record.measurement.num_parameters for record in records if record.measurement}
    lines = [f"- `{name}`: {num_parameters:,} parameters" for name, num_parameters in sizes.items()]
    return "The workloads, each member:\n\n" + "\n".join(lines)


def _runs(records: Sequence[Record]) -> str:
    """The commands behind the numbers, with the source that they ran."""
    counts = Counter((record.command, _source(record)) for record in records)
    lines = [
        f"- {count} of the records, {source}:\n  `{command}`" for (command, source), count in counts.items()
    ]
    return "### Runs\n\n" + "\n".join(lines)


def _source(record: Record) -> str:
    commit, digest = record.environment.get("commit"), record.environment.get("source_sha256")
    changed = " with changes" if record.environment.get("dirty") else ""
    known = f"commit {commit[:12]}{changed}" if commit else "commit unknown"
    return f"{known}, source digest {str(digest)[:12]}"


def _notes(records: Sequence[Record]) -> list[str]:
    """What was done differently, and what trainmux warned about, each with where."""
    found: dict[str, list[str]] = {}
    for record in records:
        made = () if record.measurement is None else record.measurement.notes
        own = tuple(text for text in record.warnings if text.startswith("TrainmuxWarning"))
        for text in (*made, *record.notes, *own):
            found.setdefault(f"{record.way}: {text}", []).append(row_name(record.row))
    return [f"{text}: {', '.join(rows)}" for text, rows in found.items()]


def _table(grid: Grid) -> str:
    lines = [grid.headings, ("---", *["---:"] * (len(grid.headings) - 1)), *grid.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(text: str) -> str:
    """Text of others, such as an error, that must not be read as markup."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
