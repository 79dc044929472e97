"""Words for the page of `planning.py`: how much width matters, and what other scripts found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def growth_in_words(results: dict[str, Any]) -> str:
    """By how much a step with nothing decided grows from all members fused to each alone."""
    found = []
    for name, workload in results["workloads"].items():
        plain: dict[tuple[int, ...], float] = {}
        for budget in workload.get("budgets", ()):
            for row in budget["policies"].values():
                if "step_ms" in row and not row["num_swaps"] and not row["num_recomputes"]:
                    plain[tuple(row["widths"])] = row["step_ms"]
        fused, alone = plain.get((results["num_members"],)), plain.get((1,) * results["num_members"])
        if fused is not None and alone is not None:
            found.append(f"{name} {100 * (alone / fused - 1):.0f}%")
    if not found:
        return ""
    return f" From all\nmembers fused to each alone a step grows by so much: {', '.join(found)}."


def beside(folder: Path) -> Iterator[str]:
    """Sections about the results of `planning_gap.py`, `planning_growth.py` and `planning_many.py` there."""
    for name, section in (("gap", _gap), ("growth", _growth), ("many", _many)):
        path = folder / f"planning_{name}.json"
        if path.exists():
            results = json.loads(path.read_text(encoding="utf-8"))
            yield ""
            yield from section(results)
            yield ""
            yield f"`{results['command']}`, {results['date'][:10]}."


def _gap(results: dict[str, Any]) -> Iterator[str]:
    yield "## How far from the optimum"
    yield ""
    yield f"{results['num_graphs']} random steps of one sub-array each. The optimum is over all swaps and"
    yield "recomputations of feature maps in the plain order, by mixed integer programming; a cell is the"
    yield "predicted time over the optimum's. `auto` also swaps static tensors and so goes below it."
    yield ""
    yield "| policy | median | mean | worst | within 0.1% of the optimum, or below | found nothing |"
    yield "|---|---|---|---|---|---|"
    for policy, row in results["summary"].items():
        times = [f"{row[key]:.3f}" if row[key] is not None else "-" for key in ("median", "mean", "worst")]
        yield f"| {policy} | {' | '.join(times)} | {row['optimal']} | {row['found_nothing']} |"


def _growth(results: dict[str, Any]) -> Iterator[str]:
    yield "## How the time to schedule grows"
    yield ""
    yield "A pair by mutwo; processor seconds. An exponent of 2 is quadratic."
    yield ""
    rows = {name: row for name, row in results.items() if isinstance(row, dict)}
    sizes = next(iter(rows.values()))["sizes"]
    yield f"| growing | {' | '.join(str(size) for size in sizes)} | exponent |"
    yield f"|---|{'---|' * (len(sizes) + 1)}"
    for name, row in rows.items():
        seconds = " | ".join(f"{second:.2f}" for second in row["cpu_seconds"])
        yield f"| {name} | {seconds} | {row['exponent']:.2f} |"


def _many(results: dict[str, Any]) -> Iterator[str]:
    yield f"## {results['num_members']} members"
    yield ""
    yield f"BERTs, the profile of eight scaled to other widths; {results['max_partitions']} partitions;"
    yield f"{results['machine']}. A budget is static memory plus a share of what complete fusion needs beyond"
    yield "that; below 0 it is less than static memory."
    yield ""
    yield "| policy | share | step in ms | seconds to plan |"
    yield "|---|---|---|---|"
    for case in results["cases"]:
        step = f"{case['step_ms']:.1f}" if "step_ms" in case else "-"
        yield f"| {case['policy']} | {case['share']:.2f} | {step} | {case['scheduling_seconds']:.1f} |"
