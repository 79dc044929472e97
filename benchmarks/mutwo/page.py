"""Refresh docs/mutwo.md and its pictures, in the folder of its name, from a document of results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import NOT_MEASURED, fill, markdown, source

from .cells import PAPER_SIZES, Sizes
from .figures import PICTURES, draw
from .tables import TABLES, Found


def refresh(document: Mapping[str, Any], page: Path, sizes: Sizes = PAPER_SIZES) -> list[Path]:
    """Fill every part of the page and draw its pictures; the files written.

    `ValueError` for a part that nobody can fill.
    """
    found = Found(document, sizes)
    drawn = draw(found, page.with_suffix(""))

    def part(name: str) -> str:
        if name == "source":
            return source(found.runs)
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
