"""Refresh the generated parts of a Markdown page, and the figures in the folder of its name.

A generated part lies between ``<!-- zico: NAME -->`` and ``<!-- end -->``; everything else is left as it is.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from benchmarks.pages import fill

from .figures import draw
from .results import Document
from .tables import TABLES


def refresh(document: Document, page: Path) -> list[Path]:
    """Fill every part of ``page`` from ``document`` and draw its figures; the files written.

    `ValueError` for a part that nobody can fill.
    """
    fill(page, "zico", lambda name: part(document, name))
    return [page, *draw(document, page.with_suffix(""))]


def part(document: Document, name: str) -> str:
    """Write one generated part."""
    if name == "jobs":
        return "\n".join(f"- `{case}`: {note}" for case, note in document["cases"].items())
    if name == "source":
        return _source(document)
    if name not in TABLES:
        raise ValueError(f"expected a part among jobs, source, {', '.join(TABLES)}; got {name!r}")
    table = TABLES[name](document)
    return "Not measured." if table.empty else markdown(table)


def markdown(table: pd.DataFrame) -> str:
    """Format a table, its first column to the left and the others to the right."""
    lines = [list(table.columns), ["---", *["---:"] * (len(table.columns) - 1)], *table.astype(str).values]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _source(document: Document) -> str:
    runs = document["runs"]
    if not runs:
        return "Not measured."
    dates = sorted(run["date"][:10] for run in runs)
    environment, settings = runs[-1]["environment"], runs[-1]["settings"]
    versions = sorted({run["environment"]["torch"] for run in runs})
    return (
        f"{environment['device']}, {settings['precision']}, torch {', '.join(versions)}, driver "
        f"{environment['driver']}; {len(runs)} runs from {dates[0]} to {dates[-1]}."
    )
