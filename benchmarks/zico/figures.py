"""The paper's figures as SVG files, drawn from a results document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing import COLOURS, draw_all

from .cells import HOST_VIEW
from .colocated import ALL_MEMORY, CHANGES
from .tables import GIB, MIB, Document, gains, iterations, pair_frame, rows_of


def draw(document: Document, folder: Path) -> list[Path]:
    """Draw every figure that the document has the data for; the files written."""
    return list(draw_all(FIGURES, document, folder, salt="zico").values())


def _lifespans(document: Document) -> Figure | None:
    """Figure 1: cumulative distribution of the lifespans of a job's tensors, NASNet's in the paper."""
    found = iterations(document)
    if not found:
        return None
    figure, axes = _one(6, 3)
    for name, row in found.get("nasnet", next(iter(found.values())))["lifespans"].items():
        seconds = np.array(row["quantiles_seconds"])
        axes.plot(1e3 * seconds, np.linspace(0, 1, len(seconds)), label=name)
    axes.set(xlabel="lifespan, ms", ylabel="share of tensors", ylim=(0, 1))
    axes.legend(frameon=False)
    return figure


def _curves(document: Document) -> Figure | None:
    """Figure 2: memory over one iteration of each model."""
    found = iterations(document)
    if not found:
        return None
    figure, axes = _one(7, 3)
    for name, record in found.items():
        moments, sizes = np.array(record["curve"]).T
        axes.step(moments / record["seconds"], sizes / record["peak_bytes"], where="post", label=name, lw=1.1)
    axes.set(xlabel="part of the iteration", ylabel="part of the peak", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _host_view(document: Document) -> Figure | None:
    """Figure 3: memory as the host sees it."""
    found = [row for row in rows_of(document, "memory") if row["way"] == HOST_VIEW]
    if not found:
        return None
    figure, axes = _one(7, 2.6)
    for row in found:
        moments, sizes = np.array(row["curve"]).T
        axes.step(1e3 * moments, sizes / MIB, where="post", label=row["jobs"], lw=1.1)
        axes.axvline(1e3 * row["enqueued_seconds"], color="#333333", lw=1, ls="--")
    axes.set(xlabel="ms by the host's clock; dashed: all is enqueued", ylabel="MiB given out")
    axes.legend(frameon=False)
    return figure


def _both_peaks(document: Document) -> Figure | None:
    """Figure 6: what two equal jobs need with all memory, and the smallest budget that they can work in."""
    frame = pair_frame(document)
    found = frame[(frame["way"] == ALL_MEMORY) & frame["is_equal"]][::-1]
    if found.empty:
        return None
    figure, axes = _one(7, 0.8 + 0.26 * len(found))
    rows = np.arange(len(found))
    axes.barh(rows, found["budget_bytes"] / GIB, label="both at their peaks")
    axes.barh(rows, found["smallest_budget_bytes"] / GIB, height=0.4, label="smallest that can work")
    axes.set_yticks(rows, [pair.partition("+")[0] for pair in found["pair"]])
    axes.set(xlabel="GiB for two jobs")
    axes.legend(frameon=False)
    return figure


def _throughput(document: Document, *, equal: bool) -> Figure | None:
    """Figures 5 and 8: work over that of turns, a row per pair and a mark per way."""
    found = gains(document)
    found = found[(found["is_equal"] == equal) & (found.index.str.count(r"\+") == 1)][::-1]
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


def _over_time(document: Document, *, equal: bool) -> Figure | None:
    """Figures 7 and 9: what two jobs hold over time, in the tightest budget that was sampled."""
    panels = []
    for names, ways in _sampled(document).items():
        tight = [way for way in ways if way["way"] not in CHANGES]
        if tight and (len(set(names)) == 1) is equal:
            way = min(tight, key=lambda row: row["budget_bytes"])
            panels.append((names, way["samples"], [way["budget_bytes"]]))
    return _stacked(panels)


def _changes(document: Document) -> Figure | None:
    """Figure 10: a piece of each of three budgets, one after another."""
    panels = []
    for names, sampled in _sampled(document).items():
        ways = sorted(
            (way for way in sampled if way["way"] in CHANGES), key=lambda row: CHANGES.index(row["way"])
        )
        rows: list[list[float]] = []
        for way in ways:
            begin = rows[-1][0] if rows else 0.0
            rows += [[begin + row[0], *row[1:]] for row in way["samples"]]
        if rows:
            panels.append((names, rows, [way["budget_bytes"] for way in ways[:2]]))
    return _stacked(panels)


def _sampled(document: Document) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """By jobs, the stays in budgets of which memory was recorded."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows_of(document, "train"):
        if row.get("samples"):
            found.setdefault(tuple(row["jobs"].split("+")), []).append(row)
    return found


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


def _one(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


FIGURES: dict[str, Callable[[Document], Figure | None]] = {
    "figure_1": _lifespans,
    "figure_2": _curves,
    "figure_3": _host_view,
    "figure_5": lambda document: _throughput(document, equal=True),
    "figure_6": _both_peaks,
    "figure_7": lambda document: _over_time(document, equal=True),
    "figure_8": lambda document: _throughput(document, equal=False),
    "figure_9": lambda document: _over_time(document, equal=False),
    "figure_10": _changes,
}
