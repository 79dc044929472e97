"""Refresh docs/mutwo.md and its pictures, in the folder of its name, from a document of results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import fill, markdown

from .cells import PAPER_SIZES, Sizes
from .figures import PICTURES, draw
from .tables import TABLES, Found

NOT_MEASURED = "Not measured."


def refresh(document: Mapping[str, Any], page: Path, sizes: Sizes = PAPER_SIZES) -> list[Path]:
    """Fill every part of the page and draw its pictures; the files written.

    `ValueError` for a part that nobody can fill.
    """
    found = Found(document, sizes)
    drawn = draw(found, page.with_suffix(""))

    def part(name: str) -> str:
        if name == "source":
            return _source(found)
        if name not in TABLES:
            raise ValueError(f"expected a part among source, {', '.join(TABLES)}; got {name!r}")
        shown = [
            f"![{said}]({page.stem}/{drawn[picture].name})"
            for picture, said in PICTURES.get(name, {}).items()
            if picture in drawn
        ]
        table = TABLES[name](found)
        return "\n\n".join([*shown, *([markdown(table)] if table else [])]) or NOT_MEASURED

    fill(page, "mutwo", part)
    return [page, *drawn.values()]


def _source(found: Found) -> str:
    if not found.runs:
        return NOT_MEASURED
    dates = sorted(run["date"][:10] for run in found.runs)
    machines = dict.fromkeys(f"{run['device']}, torch {run['torch']}" for run in found.runs)
    return f"{'; '.join(machines)}; {len(found.runs)} runs from {dates[0]} to {dates[-1]}."
