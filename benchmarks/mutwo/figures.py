"""The paper's figures as SVG files, from a document of results and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.drawing import COLOURS, draw_all

from .cells import ALL, HFTA, Cell
from .tables import GIB, HOURS_PER_MS_OF_10K, PLANNED, Found, convergence_rows, named

_LABELS = {"capuchin": "HFTA-Capuchin", "mutwo": "mutwo", "auto": "auto", HFTA: "HFTA"}


def draw(found: Found, folder: Path) -> dict[str, Path]:
    """Draw every figure that there is data for; the files by name."""
    return draw_all(FIGURES, found, folder, salt="mutwo")


def _timeline(found: Found) -> Figure | None:
    """Figures 3a and 3b: idle times of feature maps, and memory over an iteration by class."""
    sizes = found.sizes
    cell = Cell("timeline", sizes.subjects[0].workload, sizes.timeline_batch, "sgd", 1, ALL, "none")
    row = found.row(cell)
    if row is None:
        return None
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    idle = np.array(row["idle"])
    left.bar(np.arange(len(idle)), idle[:, 1], width=1.0)
    left.set(xlabel="feature map", ylabel="idle, ms", title="3a")
    memory = np.array(row["memory"]) / GIB
    used = [number for number in range(memory.shape[1]) if memory[:, number].any()]
    labels = [row["classes"][number] for number in used]
    right.stackplot(np.arange(len(memory)), *(memory[:, number] for number in used), labels=labels, lw=0)
    right.set(xlabel="operation", ylabel="GiB", title="3b")
    right.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _four_models(found: Found) -> Figure | None:
    """Figure 3c: four fused models against the GPU's memory."""
    bars = []
    for subject in found.sizes.subjects:
        for batch_size in subject.batch_sizes:
            if row := found.step(subject, 4, HFTA, ALL, batch_size=batch_size):
                bars.append((f"{named(subject)}, {batch_size}", row["peak_bytes"] / GIB))
    if not bars:
        return None
    figure = Figure(figsize=(7, 0.8 + 0.25 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in bars], [size for _, size in bars])
    axes.axvline(40e9 / GIB, color="#333333", lw=1, ls="--")
    axes.invert_yaxis()
    axes.set(xlabel="peak of four fused models, GiB; dashed: 40 GB")
    return figure


def _end_to_end(found: Found) -> Figure | None:
    """Figure 7: hours for 10,000 iterations."""
    return _panels(
        found,
        (HFTA, "mutwo", "auto"),
        lambda row, _: HOURS_PER_MS_OF_10K * row["step_ms"],
        "hours, 10,000 iterations",
        only_both=True,
    )


def _speedups(found: Found) -> Figure | None:
    return _panels(
        found, PLANNED, lambda row, hfta: hfta["step_ms"] / row["step_ms"], "times faster than HFTA"
    )


def _breakdown(found: Found, column: str, title: str) -> Figure | None:
    return _panels(found, ("capuchin", "mutwo", "auto"), lambda row, _: row[column], title, only_both=True)


def _latency(found: Found) -> Figure | None:
    """Figure 9a: useful compute, recompute and the rest of an iteration beside HFTA's."""
    bars: list[tuple[str, float, float, float]] = []
    for subject in found.sizes.subjects:
        for members in dict.fromkeys(subject.counts) if subject.both else ():
            for way in (HFTA, "capuchin", "mutwo", "auto"):
                row = found.step(subject, members, way)
                if row and "unwatched" not in row:
                    recompute = row.get("watched_recompute_ms", 0.0)
                    useful = row.get("watched_compute_ms", row["step_ms"]) - recompute
                    rest = max(0.0, row["step_ms"] - useful - recompute)
                    bars.append((f"{members} × {named(subject)}, {_LABELS[way]}", useful, recompute, rest))
    if not bars:
        return None
    figure = Figure(figsize=(7, 0.8 + 0.22 * len(bars)), layout="constrained")
    axes = figure.subplots()
    labels, *parts = zip(*bars, strict=True)
    left = np.zeros(len(bars))
    for name, part in zip(("compute", "recompute", "neither"), parts, strict=True):
        axes.barh(labels, part, left=left, label=name)
        left += np.array(part)
    axes.invert_yaxis()
    axes.set(xlabel="ms an iteration; of HFTA the whole iteration")
    axes.legend(frameon=False)
    return figure


def _convergence(found: Found) -> Figure | None:
    rows = convergence_rows(found)
    if not rows:
        return None
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for row, style in zip(rows, ("-", "--", ":"), strict=False):
        for rate, curve, colour in zip(row["rates"], np.array(row["accuracy"]).T, COLOURS, strict=False):
            axes.plot(row["steps"], 100 * curve, style, color=colour, label=f"{row['way']}, rate {rate:g}")
    axes.set(xlabel="iterations", ylabel="bytes guessed right, %")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _panels(
    found: Found,
    ways: tuple[str, ...],
    value: Callable[[Any, Any], float],
    label: str,
    *,
    only_both: bool = False,
) -> Figure | None:
    """One panel per workload, batch size and budget: a value of each way against the number of models."""
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, subject, batch_size, members, budget in found.compared():
        if only_both and (not subject.both or budget != found.sizes.budget):
            continue
        hfta = found.step(subject, members, HFTA, budget, batch_size=batch_size)
        for way in ways:
            row = found.step(subject, members, way, budget, batch_size=batch_size)
            if row and hfta:
                panel = lines.setdefault(f"{name}, batch {batch_size}, {budget}", {})
                panel.setdefault(way, []).append((members, value(row, hfta)))
    if not lines:
        return None
    columns = min(3, len(lines))
    height = -(-len(lines) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.3 * height), layout="constrained")
    every = figure.subplots(height, columns, squeeze=False).flat
    for axes in list(every)[len(lines) :]:
        axes.remove()
    for axes, (title, panel) in zip(figure.axes, lines.items(), strict=True):
        for way, points in panel.items():
            colour = COLOURS[(*PLANNED, HFTA).index(way)]
            axes.plot(*zip(*points, strict=True), marker="o", ms=4, label=_LABELS[way], color=colour)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(0, 1.15 * max(height for points in panel.values() for _, height in points) or 1)
        axes.set_xticks(sorted({members for points in panel.values() for members, _ in points}))
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False, fontsize=7
    )
    figure.supxlabel("models", fontsize=9)
    figure.supylabel(label, fontsize=9)
    return figure


FIGURES: dict[str, Callable[[Found], Figure | None]] = {
    "figure_3ab": _timeline,
    "figure_3c": _four_models,
    "figure_7": _end_to_end,
    "figure_8": _speedups,
    "figure_9a": _latency,
    "figure_9b": lambda found: _breakdown(found, "recompute_share", "recompute share"),
    "figure_9c": lambda found: _breakdown(found, "swap_overlap", "share of swaps hidden"),
    "figure_9d": lambda found: _panels(
        found,
        ("capuchin", "mutwo", "auto"),
        lambda row, _: max(0.0, row["plain_peak_bytes"] / row["budget_bytes"] - 1),
        "peak over limit",
        only_both=True,
    ),
    "convergence": _convergence,
}
PICTURES = {
    "figure_3": {
        "figure_3ab": "Idle times of feature maps, and memory over an iteration, of BERT",
        "figure_3c": "Peak memory of four fused models",
    },
    "figure_7": {"figure_7": "Hours for 10,000 iterations"},
    "figure_8": {"figure_8": "Speed-up over HFTA against the number of models"},
    "figure_9": {
        "figure_9a": "Compute, recompute and the rest of an iteration",
        "figure_9b": "Share of recomputation in compute time",
        "figure_9c": "Share of swap time that compute hides",
        "figure_9d": "By how much the peak would pass the limit",
    },
    "convergence": {"convergence": "Accuracy of four members, trained in three ways"},
}
"""The pictures of each part of the page, with what they show."""
