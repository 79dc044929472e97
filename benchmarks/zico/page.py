"""Refresh the generated parts of docs/zico.md, and the pictures in the folder of its name.

A generated part lies between ``<!-- zico: NAME -->`` and ``<!-- end -->``; everything else is left as it is.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.drawing import draw_all
from benchmarks.pages import NOT_MEASURED, fill, markdown, source

from .figures import FIGURES
from .tables import TABLES, Document, notes

CAPTIONS = {
    "figure_1": "Lifespans of NASNet's tensors",
    "figure_2": "Memory over one iteration",
    "figure_3": "Memory as the host sees it",
    "figure_5": "Two jobs of the same model",
    "figure_6": "What two jobs of the same model need",
    "figure_7": "Memory over time, two jobs of the same model",
    "figure_8": "Two jobs of different models",
    "figure_9": "Memory over time, two jobs of different models",
    "figure_10": "A budget that changes",
}


def refresh(document: Document, page: Path) -> list[Path]:
    """Fill every part of ``page`` from ``document`` and draw its figures; the files written.

    `ValueError` for a part that nobody can fill.
    """
    drawn = draw_all(FIGURES, document, page.with_suffix(""), salt="zico")

    def part(name: str) -> str:
        if name in FIGURES:
            return f"![{CAPTIONS[name]}]({page.stem}/{drawn[name].name})" if name in drawn else NOT_MEASURED
        if name == "jobs":
            return "\n".join(notes(document)) or NOT_MEASURED
        if name == "source":
            precisions = {row["precision"] for row in document["rows"] if "precision" in row}
            return source(document["runs"], ", ".join(sorted(precisions)))
        if name not in TABLES:
            raise ValueError(
                f"expected a part among jobs, source, {', '.join([*FIGURES, *TABLES])}; got {name!r}"
            )
        table = TABLES[name](document)
        return NOT_MEASURED if table.empty else markdown(table.astype(str).to_dict("records"))

    fill(page, "zico", part)
    return [page, *drawn.values()]
