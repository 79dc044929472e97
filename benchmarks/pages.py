"""Pages with generated parts, between ``<!-- MARK: NAME -->`` and ``<!-- end -->``; the rest is kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

NOT_MEASURED = "Not measured."


def fill(page: Path, mark: str, part: Callable[[str], str]) -> None:
    """Put what ``part`` gives for its name into every part of that mark."""
    pattern = re.compile(rf"(<!-- {mark}: ([a-z0-9_ ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    text = page.read_text(encoding="utf-8")
    text = pattern.sub(lambda found: f"{found[1]}{part(found[2])}\n{found[3]}", text)
    page.write_text(text, encoding="utf-8")


def source(runs: Sequence[Mapping[str, Any]], *more: str) -> str:
    """Say where results are from: the devices and versions of their runs, what else there is, the dates."""
    if not runs:
        return NOT_MEASURED
    dates = sorted(run["date"][:10] for run in runs)
    machines = dict.fromkeys(f"{run['device']}, torch {run['torch']}" for run in runs)
    when = (
        f"one run of {dates[0]}." if len(runs) == 1 else f"{len(runs)} runs from {dates[0]} to {dates[-1]}."
    )
    return "; ".join([*machines, *more, when])


def markdown(rows: Sequence[Mapping[str, str]], num_left: int = 1) -> str:
    """Format rows of the same columns, the first ``num_left`` of them to the left, others to the right."""
    columns = list(rows[0])
    rules = ["---" if number < num_left else "---:" for number in range(len(columns))]
    lines = [columns, rules, *([row[column] for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
