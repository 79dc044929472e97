"""The paper's figures as SVG files, drawn from a results document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing import COLOURS, draw_all

from .cases import CHANGING, SAMPLED
from .colocated import CHANGES
from .results import Document
from .tables import MIB, gains


def draw(document: Document, folder: Path) -> list[Path]:
    """Draw every figure that the document has the data for; the files written."""
    return list(draw_all(FIGURES, document, folder, salt="zico").values())


def _lifespans(document: Document) -> Figure | None:
    """Figure 1: cumulative distribution of the lifespans of NASNet's tensors."""
    if "nasnet" not in document["memory"]:
        return None
    figure, axes = _one(6, 3)
    for name, row in document["memory"]["nasnet"]["lifespans"].items():
        seconds = np.array(row["quantiles_seconds"])
        axes.plot(1e3 * seconds, np.linspace(0, 1, len(seconds)), label=name)
    axes.set(xlabel="lifespan, ms", ylabel="share of tensors", ylim=(0, 1))
    axes.legend(frameon=False)
    return figure


def _curves(document: Document) -> Figure | None:
    """Figure 2: memory over one iteration of each model."""
    if not document["memory"]:
        return None
    figure, axes = _one(7, 3)
    for name, record in document["memory"].items():
        moments, sizes = np.array(record["curve"]).T
        axes.step(moments / record["seconds"], sizes / record["peak_bytes"], where="post", label=name, lw=1.1)
    axes.set(xlabel="part of the iteration", ylabel="part of the peak", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _throughput(document: Document, *, equal: bool) -> Figure | None:
    """Figures 5 and 8: work over that of turns, a row per pair and a mark per way."""
    found = gains(document)
    found = found[found["is_equal"] == equal][::-1]
    if found.empty:
        return None
    figure, axes = _one(7, 0.8 + 0.26 * len(found))
    marks = (
        ("unlimited", "two streams, no limit", "o"),
        ("all", "co-located, all memory", "s"),
        ("middle", "co-located, peaks exceed the budget 1.3×", "D"),
        ("lowest", "co-located, smallest budget run", "v"),
        ("paper", "Zico in the paper", "x"),
    )
    rows = np.arange(len(found))
    for (column, label, marker), colour in zip(marks, (*COLOURS[:4], "#333333"), strict=True):
        if found[column].notna().any():
            axes.scatter(found[column], rows, marker=marker, s=26, label=label, color=colour, zorder=3)
    axes.axvline(1, color="#333333", lw=1, ls="--")
    axes.set_yticks(rows, found.index)
    axes.set(xlabel="work per second, turns (Temporal) = 1", ylim=(-0.6, len(found) - 0.4))
    axes.grid(axis="y", color="#e5e5e5")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def _over_time(document: Document, pairs: Sequence[tuple[str, str]]) -> Figure | None:
    """Figures 7 and 9: what two jobs hold over time, in the tightest budget that was sampled."""
    panels = []
    for pair in _pairs(document, pairs):
        sampled = [way for way in pair["ways"] if way.get("samples") and way["way"] not in CHANGES]
        if sampled:
            way = min(sampled, key=lambda row: row["budget_bytes"])
            panels.append((pair["names"], way["samples"], [way["budget_bytes"]]))
    return _stacked(panels)


def _changes(document: Document) -> Figure | None:
    """Figure 10: a piece of each of three budgets, one after another."""
    panels = []
    for pair in _pairs(document, CHANGING):
        ways = [way for way in pair["ways"] if way["way"] in CHANGES and way.get("samples")]
        rows: list[list[float]] = []
        for way in ways:
            begin = rows[-1][0] if rows else 0.0
            rows += [[begin + row[0], *row[1:]] for row in way["samples"]]
        if rows:
            panels.append((pair["names"], rows, [way["budget_bytes"] for way in ways[:2]]))
    return _stacked(panels)


def _stacked(panels: Sequence[tuple[Sequence[str], Any, Sequence[float]]]) -> Figure | None:
    if not panels:
        return None
    figure = Figure(figsize=(7, 2.3 * len(panels)), layout="constrained")
    for axes, (names, rows, budgets) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        moments, *held = np.array(rows).T
        axes.stackplot(1e3 * moments, *(sizes / MIB for sizes in held), step="post", lw=0, rasterized=True)
        for size in budgets:
            axes.axhline(size / MIB, color="#333333", lw=1, ls="--")
        top = max(*budgets, max(map(sum, zip(*held, strict=True)))) / MIB
        labels = [f"{name}, {place}" for name, place in zip(names, ("first", "second"), strict=True)]
        axes.set(xlabel="ms", ylabel="MiB", xlim=(0, 1e3 * moments[-1]), ylim=(0, 1.05 * top))
        axes.legend(
            [*(labels if names[0] == names[1] else names), "budget"],
            frameon=False,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
        axes.set_title("+".join(names), loc="left", fontsize=9)
    return figure


def _pairs(document: Document, names: Sequence[tuple[str, str]]) -> list[Mapping[str, Any]]:
    found = {tuple(pair["names"]): pair for pair in document["pairs"]}
    return [found[pair] for pair in names if pair in found]


def _one(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


FIGURES: dict[str, Callable[[Document], Figure | None]] = {
    "figure_1": _lifespans,
    "figure_2": _curves,
    "figure_5": lambda document: _throughput(document, equal=True),
    "figure_7": lambda document: _over_time(document, SAMPLED[1:]),
    "figure_8": lambda document: _throughput(document, equal=False),
    "figure_9": lambda document: _over_time(document, SAMPLED[:1]),
    "figure_10": _changes,
}
