"""The figures of Zico as a page: Markdown, with the pictures beside it as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .markdown import plain
from .record import write_text
from .zico_figures import figures
from .zico_results import Figure, Results

HOW = """\
Every figure says on what it was produced. Work is counted in *solo seconds* per second: an iteration counts
as much as it takes alone, as a graph; "Temporal" takes turns, both jobs as graphs, and is 1. The paper ran
TensorFlow 1.13 on a V100 (32 GB) and an RTX 2080 Ti (11 GB): its numbers stand beside ours, they are not the
same experiment."""


def write_page(document: Mapping[str, Any], page: Path) -> list[Path]:
    """Write the page and its pictures, in a folder named like it; the files that were written."""
    results = Results(document)
    folder = page.with_suffix("")
    written = []
    parts = [
        "# Zico's figures",
        f"Generated; do not edit. Measured by\n\n```sh\n{document['command']}\n```",
        HOW,
        _jobs(document),
    ]
    for figure in figures(results):
        for name, picture in figure.pictures.items():
            write_text(folder / f"{name}.svg", picture)
            written.append(folder / f"{name}.svg")
        parts.append(_section(figure, folder.name))
    parts += _lost(document)
    parts.append(_machine(document))
    write_text(page, "\n\n".join(parts) + "\n")
    return [page, *written]


def _section(figure: Figure, folder: str) -> str:
    lines = [f"## {figure.name}: {figure.title}", f"Paper: {figure.claim}"]
    if figure.left_out:
        return "\n\n".join([*lines, f"Left out: {plain(figure.left_out)}."])
    lines.append(f"Produced on: {plain(figure.produced_on)}.")
    lines += [f"![{figure.name}]({folder}/{name}.svg)" for name in figure.pictures]
    if figure.table:
        lines.append(_table(figure.table))
    lines += [plain(note) for note in figure.notes]
    return "\n\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _jobs(document: Mapping[str, Any]) -> str:
    lines = [f"- `{name}`: {note}" for name, note in document["cases"].items()]
    return "The jobs, all with plain SGD:\n\n" + "\n".join(lines)


def _lost(document: Mapping[str, Any]) -> list[str]:
    parts = []
    if document["failed"]:
        lines = [
            f"- {'+'.join(row['names'])}, {row['way']}: {plain(row['error'])}" for row in document["failed"]
        ]
        parts.append("## What failed\n\n" + "\n".join(lines))
    if document["left_out"]:
        lines = [f"- {what}" for what in document["left_out"]]
        parts.append("## What the limit of time left out\n\n" + "\n".join(lines))
    return parts


def _machine(document: Mapping[str, Any]) -> str:
    known = document["environment"]
    facts = [f"{name} {known[name]}" for name in ("torch", "cuda", "driver", "python") if known.get(name)]
    return f"{known['device']}, {', '.join(facts)}, {document['date']}, {document['seconds']:.0f} s in all."
