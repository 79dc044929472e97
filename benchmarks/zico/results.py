"""The results file: records of pairs and jobs, each with the run that measured it.

``runs`` lists the runs with command, date, environment and settings; every record names its run by ``run``,
a position in that list. ``pairs`` are records of two jobs (see `pair.py`), ``memory`` records of one job by
name, ``cases`` says what the names stand for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records import json_text, write_text

from .colocated import ALL_MEMORY, CHANGES
from .pair import TEMPORAL

FORMAT = 3
_COLUMNS = (
    *("pair", "is_equal", "way", "first_rate", "work", "excess"),
    *("budget_bytes", "smallest_budget_bytes"),
)

Document = dict[str, Any]


def empty() -> Document:
    return {"format": FORMAT, "runs": [], "cases": {}, "pairs": [], "memory": {}}


def read(path: Path) -> Document:
    """Read a results file; `ValueError` for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected results of the zico benchmark in {path}; got: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(
            f"expected results of the zico benchmark in format {FORMAT} in {path}; got another document"
        )
    return document


def write(document: Mapping[str, Any], path: Path) -> None:
    write_text(path, json_text(document))


def put_pair(document: Document, record: Mapping[str, Any]) -> None:
    """Add a pair's record, in place of an earlier one of the same names."""
    names = [pair["names"] for pair in document["pairs"]]
    if record["names"] in names:
        document["pairs"][names.index(record["names"])] = record
    else:
        document["pairs"].append(record)


def pair_frame(document: Document) -> pd.DataFrame:
    """A row for each way of each pair.

    ``work`` counts solo seconds per second: an iteration counts as much as it takes alone, as a graph.
    ``gain`` is work over that of turns, ``excess`` what both jobs need at their peaks over the budget.
    ``is_tight`` marks budgets below that, other than Figure 10's.
    """
    rows = []
    for pair in document["pairs"]:
        whole = sum(pair["local_bytes"]) + sum(pair["peak_bytes"])
        for way in pair["ways"]:
            rates = way["iterations_per_second"]
            work = sum(rate * solo / 1e3 for rate, solo in zip(rates, pair["solo_ms"], strict=True))
            excess = whole / way["budget_bytes"] if "budget_bytes" in way else None
            row = {"pair": "+".join(pair["names"]), "is_equal": len(set(pair["names"])) == 1}
            rows.append({**row, "first_rate": rates[0], "work": work, "excess": excess, **way})
    frame = pd.DataFrame(rows)
    frame = frame.reindex(columns=list(dict.fromkeys([*_COLUMNS, *frame.columns])))
    in_turns = frame[frame["way"] == TEMPORAL].set_index("pair")["work"]
    frame["gain"] = frame["work"] / frame["pair"].map(in_turns)
    frame["is_tight"] = frame["budget_bytes"].notna() & ~frame["way"].isin([ALL_MEMORY, *CHANGES])
    frame["is_smallest"] = frame["is_tight"] & (frame["budget_bytes"] <= frame["smallest_budget_bytes"])
    return frame
